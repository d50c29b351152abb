"""The processes that load a model: one for each GPU, started anew for each engine and round, so that its first load is
that of a fresh process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tunetool.measure import rundir
from tunetool.measure.worker import Worker, ask_all, child_command

_CHILD = Path(__file__).with_name("child.py")
_START_PATIENCE = 600.0
_PATIENCE, _SLOWEST = 120.0, 20e6
"""Seconds that a load may take, and the slowest bytes per second, which add to them."""


class Ranks:
    """``count`` processes of ``child.py``, which load at the same time, and the directory where they meet; a context
    manager, which ends and removes them.

    Raises ``Failed`` where one of them ends, says nothing or reports an error.
    """

    def __init__(
        self, what: str, count: int, device: str, environment: Mapping[str, str], tick: Callable[[], None]
    ) -> None:
        self._what, self._count, self._device, self._tick = what, count, device, tick
        # As launchers set it: loaders divide the cores by it.
        shared = {"LOCAL_WORLD_SIZE": str(count)} if count > 1 else {}
        self._environment = {**environment, **shared}
        self._held = ExitStack()
        self._workers: list[Worker] = []

    def __enter__(self) -> Ranks:
        with ExitStack() as started:
            self._meet = started.enter_context(rundir.temporary()) / "meet"
            command = child_command(Path(sys.executable), _CHILD)
            for rank in range(self._count):
                what = self._what if self._count == 1 else f"{self._what}, rank {rank}"
                self._workers.append(started.enter_context(Worker(command, what, self._environment, self._tick)))
            self._held = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()

    def start(self) -> dict[str, Any]:
        """Import torch and set up the devices; facts about the first. The ranks meet by a file."""
        orders = [
            {"do": "start", "device": self._device, "rank": rank, "world": self._count, "meet": str(self._meet)}
            for rank in range(self._count)
        ]
        return self._ask(orders, _START_PATIENCE)[0]

    def load(
        self, engine: str, model: Path, size: int, options: Mapping[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        """Each rank's answer to an order to load ``size`` bytes."""
        order = {"do": "load", "engine": engine, "directory": str(model), "options": options or {}}
        return self._ask([order] * self._count, _PATIENCE + size / _SLOWEST)

    def copy_pinned(self) -> float:
        """Bytes per second of copies from pinned memory to the GPU."""
        return float(self._ask([{"do": "pinned"}], _PATIENCE)[0]["speed"])

    def _ask(self, orders: list[dict[str, Any]], patience: float) -> list[dict[str, Any]]:
        return ask_all(self._workers, orders, patience, self._tick)
