"""Runs one part after another: decides which errors stop the chain and which only a part, and gives the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.reference.nodes import Gate
from tunetool.errors import TunetoolError, UsageProblem
from tunetool.measure.session import reason
from tunetool.record import Measurement, Part, Record, Status, Verdict

Outcome = tuple[Record | None, Path | None]
"""A part's record and its path; none for a dry run."""


@dataclass(frozen=True)
class Step:
    """A part to run. ``headline`` selects the figures that the record over all parts repeats."""

    name: str
    run: Callable[[], Outcome]
    headline: Callable[[Record], Sequence[Measurement]] = lambda _: ()


@dataclass
class Chain:
    """Results of the parts that have been run."""

    parts: list[Part] = field(default_factory=list)
    headlines: list[Measurement] = field(default_factory=list)

    def run(self, steps: Sequence[Step], gate: Gate, say: Callable[[str], None]) -> None:
        """Run all parts that ``gate`` lets through. A part that cannot run stops no other.

        Raises ``UsageProblem`` if the first part finds that the call is wrong: nothing was done before it.
        """
        for number, step in enumerate(steps):
            why = gate.before(step.name, self.parts)
            if why is not None:
                self.parts.append(Part(name=step.name, status="skip", reasons=[why]))
                continue
            say(f"{step.name}: part {number + 1} of {len(steps)}")
            before = len(self.parts)
            try:
                record, path = step.run()
            except TunetoolError as error:
                if isinstance(error, UsageProblem) and not self.parts:
                    raise
                self._failed(step, error)
            except OSError as error:
                self._failed(step, error)
            except BaseException as error:
                # Ctrl-C, or a fault of the chain, ends it.
                self._failed(step, error)
                raise
            else:
                self._done(step, record, path)
                if record is not None:
                    gate.after(step.name, record)
            if len(self.parts) > before:
                last = self.parts[-1]
                why = f" ({path_of(last)})" if last.run else f": {'; '.join(last.reasons)}" if last.reasons else ""
                say(f"{last.name}: {last.status.upper()}{why}")

    def _failed(self, step: Step, error: BaseException) -> None:
        self.parts.append(Part(name=step.name, status="error", reasons=[reason(error)]))

    def _done(self, step: Step, record: Record | None, path: Path | None) -> None:
        if record is None or path is None:
            return  # a dry run
        verdict = record.verdict
        status: Status = verdict.status if verdict else "error"
        reasons = verdict.reasons if verdict else ["its record has no verdict"]
        self.parts.append(
            Part(name=step.name, record_id=record.id, run=path.parent.name, status=status, reasons=reasons)
        )
        self.headlines += step.headline(record)

    def verdicts(self) -> list[tuple[str, Verdict]]:
        """Headline figures of the parts that ran."""
        return [
            (part.name, Verdict(status=part.status, reasons=part.reasons))
            for part in self.parts
            if part.status != "skip"
        ]


def path_of(part: Part) -> str:
    """The part's directory, as an argument of `tunetool report show`."""
    return part.run or "no record"
