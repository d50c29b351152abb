"""A rung on several volumes: on each, or on the first alone; its figures and checks say on which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from tunetool.measure.figures import of_volume
from tunetool.measure.ladder.rung import Context, Result, Rung
from tunetool.measure.sequential import Plan
from tunetool.node.audit.manifest_checks import together
from tunetool.node.common.check_result import Check
from tunetool.record import as_result


@dataclass(frozen=True)
class OnVolumes(Rung):
    """``rung`` on each of ``names``, one after the other."""

    rung: Rung
    names: Sequence[str]
    needs_direct_io: ClassVar[bool] = False

    @property
    def name(self) -> str:
        """For people."""
        return self.rung.name

    def announcement(self, shape: Plan) -> Sequence[str]:
        """That of the rung, and where."""
        where = f"{'each of ' if len(self.names) > 1 else ''}`{'`, `'.join(self.names)}`"
        return [f"{line}; on {where}" for line in self.rung.announcement(shape)]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return len(self.names) * self.rung.seconds(shape, drives)

    def covers(self) -> Sequence[str]:
        """On each of them."""
        return [f"{figure}.{name}" for figure in self.rung.covers() for name in self.names]

    def has_a_say(self, context: Context) -> bool:
        """As the rung."""
        return self.rung.has_a_say(context)

    def run(self, context: Context) -> Result:
        """Raises what the rung raises."""
        result = Result()
        checks: list[tuple[str, Check]] = []
        for name in self.names:
            one = self.rung.run(context.of_volume(name))
            result.measurements += [of_volume(each, name) for each in one.measurements]
            result.unproven.update({f"{each}.{name}": why for each, why in one.unproven.items()})
            result.skipped.update({f"{each}.{name}": why for each, why in one.skipped.items()})
            result.errors += one.errors
            checks += [
                (name, Check(each.id, each.status, each.expected, each.found, each.remedy)) for each in one.checks
            ]
        for identity in dict.fromkeys(each.id for _, each in checks):
            result.checks.append(as_result(together([pair for pair in checks if pair[1].id == identity])))
        return result
