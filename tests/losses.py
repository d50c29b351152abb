"""A job whose nodes fail, for the table of loss: in network namespaces (tests/finetune) and on virtual nodes (tests/lab)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from waiting import PATIENCE

PROGRAM = Path(__file__).with_name("finetune") / "rank_on_node.py"
COUNT = 2**20
PART = 4 * COUNT
"""Bytes of a rank's tensor."""
TWO = ("node1", "node2")
Call = tuple[str, dict[str, Any]]


class Nodes(Protocol):
    """Nodes that are reached by their names, also from each other."""

    def start(self, node: str, argv: Sequence[str], *, env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a program there, which prints into a pipe."""


@dataclass
class Job:
    """Ranks on ``nodes``, each named once for each of its ranks. The next node keeps the replicas of one."""

    nodes: Nodes
    rank: Sequence[str]
    """The command of a rank, but for its order."""
    scratch: str
    bulk: str
    ssh: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of ``finetune/rank_on_node.py``."""
    patience: float = PATIENCE

    def start(self, nodes: Sequence[str], *calls: Call) -> list[subprocess.Popen[str]]:
        names = [*dict.fromkeys(nodes)]
        peers = dict(zip(names, [*names[1:], names[0]], strict=True))
        order = {"world": len(nodes), "master": nodes[0], "ssh": self.ssh, "do": calls, "count": COUNT}
        order |= {"scratch": self.scratch, "bulk": self.bulk, **self.options}
        started = []
        for rank, node in enumerate(nodes):
            argv = [*self.rank, json.dumps({**order, "rank": rank, "peer": peers[node]})]
            env = {**self.env, "LOCAL_RANK": str(nodes[:rank].count(node))}
            started.append(self.nodes.start(node, argv, env=env))
        return started

    def run(self, nodes: Sequence[str], *calls: Call) -> list[str]:
        """What each rank printed."""
        ranks = self.start(nodes, *calls)
        try:
            outputs = [rank.communicate(timeout=self.patience)[0] for rank in ranks]
        finally:
            # One that hangs would still save while the next test runs.
            for rank in ranks:
                rank.kill()
        assert [rank.returncode for rank in ranks] == [0] * len(ranks), outputs
        return outputs

    def resume(self, what: str, nodes: Sequence[str]) -> list[dict[str, Any]]:
        """What each rank resumed from; printed as a row of the table of loss."""
        outputs = self.run(nodes, ("resume", {}))
        ranks = [next(json.loads(line) for line in output.splitlines() if line.startswith("{")) for output in outputs]
        for key in ("step", "skipped"):
            assert len({json.dumps(rank.get(key)) for rank in ranks}) == 1, ranks
        seconds = max(rank.get("seconds", 0.0) for rank in ranks)
        print(f"| {what} | {ranks[0].get('step')} | {seconds:.2f} s | {ranks[0].get('bytes', 0) / 1e6:.2f} MB |")
        return ranks


def save(step: int, seed: int | None = None, **options: Any) -> Call:
    return "save", {"step": step, "seed": step if seed is None else seed, **options}


def replicate(step: int, ranks: Sequence[int] = range(4), **options: Any) -> Call:
    return "replicate", {"step": step, "ranks": [*ranks], **options}


def values(ranks: Sequence[dict[str, Any]]) -> list[Any]:
    """The save whose values each rank loaded."""
    return [rank["values"] for rank in ranks]
