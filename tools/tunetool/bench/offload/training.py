"""The ranks that train in one place: started once, asked for single steps, and gone afterwards."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.launch.asked_ranks import AskedRanks
from tunetool.launch.local import RankFailed
from tunetool.measure.aio import Probe

_PROGRAM = Path(__file__).with_name("rank.py")
OPS = ("async_io", "cpu_adam")
"""That DeepSpeed needs to offload; ``utils`` is taken where it is built."""
_START_PATIENCE = 600.0
_PATIENCE, _STARTS, _SLOWEST = 300.0, 3.0, 20e6
"""Seconds for an order; what adds to them: the time that a start took, and bytes at the slowest speed."""
_END_PATIENCE = 30.0


@dataclass
class Training:
    """A context manager: none of its processes outlives it. ``moved_bytes``: of one step of all ranks."""

    what: str
    ranks: int
    installed: Probe
    environment: Mapping[str, str]
    moved_bytes: int = 0
    tick: Callable[[], None] = lambda: None
    raw: dict[str, str | bytes] = field(default_factory=dict)
    _start_seconds: float = 0.0
    _ranks: AskedRanks | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *what: object) -> None:
        self._held.close()

    def start(
        self,
        config: Mapping[str, Any],
        model: str,
        tokens: int,
        seed: int = 0,
        blocks: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> dict[str, Any]:
        """Start the ranks and build their engines; returns the facts of rank 0. Raises ``RankFailed``.

        ``config``: the ds_config; ``blocks``: the ``aio`` blocks between which steps can choose, by name.
        """
        began = time.monotonic()
        environment = training_environment(self.environment, self.ranks)
        ranks = self._ranks = self._held.enter_context(AskedRanks(_PROGRAM, self.ranks, environment))
        ranks.ask({"do": "hello"}, _START_PATIENCE, self.tick)
        order = {
            "do": "start",
            "config": dict(config),
            "model": model,
            "tokens": tokens,
            "seed": seed,
            "blocks": dict(blocks or {}),
            "ops": self.files(),
        }
        facts = self._ask(order, _START_PATIENCE)[0]
        self._start_seconds = time.monotonic() - began
        return facts

    def step(self, block: str) -> list[dict[str, Any]]:
        """Each rank's answer to a step. Raises ``RankFailed``."""
        return self._ask({"do": "step", "block": block})

    def rung(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Each rank's answer to a transfer by the handle alone. Raises ``RankFailed``."""
        return self._ask({**order, "do": "rung"})

    def end(self) -> None:
        """In order."""
        if self._ranks is not None:
            self._ranks.dismiss(_END_PATIENCE)
        self._held.close()

    def files(self) -> dict[str, list[str]]:
        """The compiled files of each op, what it needs first."""
        ops = [*OPS, *(["utils"] if self.installed.has("utils") else [])]
        return {op: [str(self.installed.find(part)) for part in self.installed.parts(op)] for op in ops}

    def _ask(self, order: Mapping[str, Any], least: float = _PATIENCE) -> list[dict[str, Any]]:
        assert self._ranks is not None  # noqa: S101  (started)
        patience = least + _STARTS * self._start_seconds + self.moved_bytes / _SLOWEST
        try:
            return self._ranks.ask(order, patience, self.tick)
        except RankFailed as error:
            self.raw[f"{self.what}.txt"] = error.raw
            error.message = f"{self.what}: {error.message}"
            raise


def training_environment(environment: Mapping[str, str], ranks: int) -> dict[str, str]:
    """What the ranks are started with."""
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    path = environment.get("PATH", os.defpath)
    return {
        "OMP_NUM_THREADS": str(threads),
        # On some virtual machines the processor reports AMX, but its instructions crash.
        "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
        "PYTHONWARNINGS": "ignore",
        **environment,
        # DeepSpeed looks for ninja on PATH even when nothing is to be compiled.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{path}",
    }


def losses_of(answers: Sequence[Mapping[str, Any]]) -> float:
    """Mean loss over the ranks."""
    return sum(float(each["loss"]) for each in answers) / len(answers)
