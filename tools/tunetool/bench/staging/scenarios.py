"""The scenarios (one GPU, one node, many nodes): which can run here, and why others cannot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.bench.staging.published import SCENARIOS, Scenario
from tunetool.errors import UsageProblem


@dataclass(frozen=True)
class Planned:
    """One scenario: how many nodes and ranks on each."""

    name: Scenario
    nodes: int
    ranks_per_node: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all nodes."""
        return self.nodes * self.ranks_per_node


@dataclass(frozen=True)
class LeftOut:
    """A scenario that cannot run here."""

    name: Scenario
    reason: str


def parse(text: str) -> list[Scenario]:
    """From ``single,node,nodes``, in their own order. Raises ``UsageProblem``."""
    wanted = [each.strip() for each in text.split(",") if each.strip()]
    for each in wanted:
        if each not in SCENARIOS:
            raise UsageProblem(f"`{each}` is not a scenario", f"`--scenarios` takes {', '.join(SCENARIOS)}")
    if not wanted:
        raise UsageProblem("`--scenarios` is empty", f"it takes {', '.join(SCENARIOS)}")
    return [name for name in SCENARIOS if name in wanted]


def scale(
    wanted: Sequence[Scenario], hosts: int, ranks_per_node: int, on_gpu: bool
) -> tuple[list[Planned], list[LeftOut]]:
    """The scenarios that run on ``hosts`` nodes with ``ranks_per_node`` ranks each, and those left out."""
    planned: list[Planned] = []
    left_out: list[LeftOut] = []
    unit = "GPU" if on_gpu else "rank"
    for name in wanted:
        if name == "single":
            planned.append(Planned(name, 1, 1))
        elif name == "node" and ranks_per_node < 2:
            left_out.append(LeftOut(name, f"one {unit} to a node, as in `single`: `--ranks-per-node` asks for more"))
        elif name == "node":
            planned.append(Planned(name, 1, ranks_per_node))
        elif hosts < 2:
            left_out.append(LeftOut(name, "only one machine: add more nodes with `-i INVENTORY`"))
        else:
            planned.append(Planned(name, hosts, ranks_per_node))
    return planned, left_out


def only_largest(planned: Sequence[Planned]) -> tuple[list[Planned], list[LeftOut]]:
    """Of a short call: the scenario with the most ranks, which is how a job is run, and why the others are not."""
    why = "a short call has the largest scenario alone: `--thorough`, or `--scenarios`, for more"
    return list(planned[-1:]), [LeftOut(each.name, why) for each in planned[:-1]]
