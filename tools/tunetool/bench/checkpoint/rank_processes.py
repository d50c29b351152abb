"""The ranks of a benchmark: started once with the state in their memory, and again after an engine ended them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.bench.checkpoint.request import Request
from tunetool.launch.asked_ranks import AskedRanks, OrderFailed
from tunetool.launch.local import RankFailed

_PROGRAM = Path(__file__).with_name("child.py")
_START_PATIENCE = 300.0
_PATIENCE, _STARTS, _SLOWEST = 120.0, 3.0, 20e6
"""Seconds that an order may take; what adds to them: starts of a process with torch, as some engines need one, by what
the ranks took to start, and the slowest bytes per second."""
_END_PATIENCE = 30.0


@dataclass
class RankProcesses:
    """The ranks, as a context manager: none of them outlives it."""

    request: Request
    state_bytes: int
    environment: Mapping[str, str]
    tick: Callable[[], None] = lambda: None
    raw: dict[str, str | bytes] = field(default_factory=dict)
    rank_facts: dict[str, Any] = field(default_factory=dict)
    """What rank 0 answered at its start: device, GPU, torch."""
    starts: int = 0
    start_seconds: float = 0.0
    """What the ranks took to start, torch's import and all: minutes on a slow machine."""
    calibrated: int = 0
    """The start for which the training loop was made."""
    _ranks: AskedRanks | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> RankProcesses:
        return self

    def __exit__(self, *what: object) -> None:
        self._held.close()

    @property
    def patience(self) -> float:
        """Seconds for one order."""
        return _PATIENCE + _STARTS * self.start_seconds + self.state_bytes / _SLOWEST

    def start(self) -> None:
        """Start the ranks and make their states. Raises ``RankFailed``."""
        self._held.close()
        self.starts += 1
        began = time.monotonic()
        ranks = self._ranks = self._held.enter_context(AskedRanks(_PROGRAM, self.request.ranks, self.environment))
        ranks.ask({"do": "hello"}, _START_PATIENCE, self.tick)
        self.start_seconds = time.monotonic() - began
        wish = {
            "do": "start",
            "model": self.request.model,
            "state_bytes": self.request.state_bytes,
            "tensors": self.request.tensors,
            "device": self.request.device,
            "seed": self.request.seed,
        }
        self.rank_facts = self.ask(wish)[0]

    def ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each rank's answer. Raises ``RankFailed``, after which the ranks are as ``sound`` says."""
        assert self._ranks is not None  # noqa: S101  (started)
        try:
            return self._ranks.ask(order, self.patience, self.tick)
        except RankFailed as error:
            name = f"{order.get('engine', order.get('do'))}-{self.starts}.txt"
            self.raw[name] = error.raw
            raise

    def usable_after(self, error: RankFailed) -> bool:
        """Whether the ranks can go on: an exception of one that has no others leaves nobody in a collective."""
        return isinstance(error, OrderFailed) and error.together and self.request.ranks == 1

    def stop(self) -> None:
        """At once."""
        self._held.close()

    def end(self) -> None:
        """In order."""
        if self._ranks is not None:
            self._ranks.dismiss(_END_PATIENCE)
        self._held.close()
