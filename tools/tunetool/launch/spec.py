"""The specification and the verdict of a node's guard: JSON files in the launcher's directory on the node."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tunetool.node.common.files import replace_file

SPEC, VERDICT = "spec.json", "verdict.json"
RUN = "TUNETOOL_RUN"
"""Environment variable of every rank and its child processes; it names their run."""


@dataclass(frozen=True)
class Failure:
    """The first failure of a run. ``rank``: None if no rank failed; ``exit``: exit status of the rank, negative for a
    signal; ``raw``: its output."""

    message: str
    host: str
    hint: str | None = None
    rank: int | None = None
    exit: int | None = None
    raw: str = ""


@dataclass(frozen=True)
class Verdict:
    """How the run ended on one node. ``failure``: that of the whole run, or None. ``kept``: files in /dev/shm that look
    like this run's and that another process uses."""

    node: int
    host: str
    failure: Failure | None = None
    kept: Sequence[str] = ()


@dataclass(frozen=True)
class NodeSpec:
    """One node's part of a run. ``run`` is a secret word that marks the run's processes.

    ``out`` is what ranks know as ``TUNETOOL_OUT``. ``master``: the address and port at which the ranks meet; None
    if there is only this node. ``line_port``: port of the guards, at the same address. ``towards``: another node's
    address, by which this one knows its interface; by default where they meet. ``engine``: torchrun, or who else starts
    the ranks.
    """

    run: str
    directory: str
    out: str
    hosts: Sequence[str]
    node: int
    ranks_per_host: int
    program: Sequence[str]
    python: str
    environment: Mapping[str, str] = field(default_factory=dict)
    master: tuple[str, int] | None = None
    line_port: int = 0
    towards: str = ""
    engine: Literal["torchrun", "other"] = "torchrun"
    timeout: float = 3600.0
    stall: float = 300.0

    @property
    def host(self) -> str:
        """The name of this node."""
        return self.hosts[self.node]

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        return range(self.node * self.ranks_per_host, (self.node + 1) * self.ranks_per_host)

    @property
    def world(self) -> int:
        """The ranks of all nodes."""
        return len(self.hosts) * self.ranks_per_host


def write(document: NodeSpec | Verdict, directory: Path, name: str) -> None:
    """Write the file atomically, readable for this user only, since environments hold secrets."""
    replace_file(str(directory / name), json.dumps(asdict(document)), mode=0o600, sync=False)


def read_spec(directory: Path) -> NodeSpec:
    """What ``write`` wrote."""
    document = json.loads((directory / SPEC).read_text())
    master = document.pop("master")
    return NodeSpec(**document, master=None if master is None else (str(master[0]), int(master[1])))


def read_verdict(text: str) -> Verdict:
    """What ``write`` wrote. Raises ``ValueError``."""
    try:
        return verdict_of(json.loads(text))
    except (KeyError, TypeError, AttributeError):
        raise ValueError("not a verdict") from None


def verdict_of(document: Mapping[str, Any]) -> Verdict:
    """The same, parsed already."""
    failure = document["failure"]
    return Verdict(**{**document, "failure": None if failure is None else Failure(**failure)})
