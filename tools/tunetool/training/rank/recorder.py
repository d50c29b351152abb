"""The recorder of a rank's times, bytes and losses. Every trainer fills one, so that their figures are comparable."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import ExitCode, TunetoolError
from tunetool.launch import rank as launched
from tunetool.measure.process_reads import Read, reads
from tunetool.node.common.files import replace_file
from tunetool.training.workload import ERROR, RESULT, RankResult

_LIBRARIES = ("torch", "deepspeed", "transformers", "peft", "lightning", "llamafactory")
Scalars = Callable[[str, float, int, str, float | None], None]
"""Receives a point of a curve: name, value, step, unit, and wall clock (None: now)."""


@dataclass
class Recorder:
    """One rank's figures, from its first line of Python on."""

    rank: int
    local_rank: int
    world: int
    launched: float | None = None
    """Wall clock of the launcher at the start; the clocks of two nodes may differ."""
    device: str = "cpu"
    model_bytes: int = 0
    parameters: int = 0
    trainable: int = 0
    tokens: int = 0
    images: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    precision: str = ""
    skipped_steps: list[int] = field(default_factory=list)
    scalars: Scalars = lambda _name, _value, _step, _unit, _at: None
    beat: Callable[[], None] = lambda: None
    """Called at each step as a heartbeat for the watchdog."""
    _began: float = field(default_factory=time.monotonic)
    libraries: dict[str, str] | None = None
    """Versions of the libraries, set by a trainer that runs in its own environment."""
    _steps: list[tuple[float | None, float | None, float, float]] = field(default_factory=list)
    _read: dict[str, Read] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.launched is not None:
            self.seconds["rendezvous"] = max(0.0, time.time() - self.launched)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to the phase; code on a GPU must synchronize inside the block."""
        began = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - began
        self.beat()

    @contextlib.contextmanager
    def reading(self, what: str) -> Iterator[None]:
        """Count the bytes that this process reads in the block as ``model`` or ``data``."""
        before = reads()
        yield
        self.count(what, reads().since(before))

    def count(self, what: str, read: Read) -> None:
        """Add bytes that this or another process read for ``what``."""
        self._read[what] = self._read.get(what, Read()).plus(read)

    def step(
        self,
        waited: float | None,
        loaded: float | None,
        took: float,
        loss: float,
        rate: float,
        tokens: int,
        images: int,
        at: float | None = None,
        skipped: bool = False,
    ) -> None:
        """Add one step: ``waited`` seconds for its batch, ``loaded`` seconds to prepare the batch, ``took`` seconds.

        None: unknown to the trainer; an unknown wait is part of ``took``. ``at``: wall clock of the step's end, where
        the step is added later. ``skipped``: it made no update.
        """
        number = len(self._steps)
        if skipped:
            self.skipped_steps.append(number)
        if number == 0 and waited is not None:
            self.seconds["first_batch"] = waited
        self._steps.append((waited, loaded, took, rate))
        self.losses.append(loss)
        self.tokens += tokens
        self.images += images
        for name, value, unit in (
            ("loss", loss, "1"),
            ("learning_rate", rate, "1"),
            ("step_time", took, "s"),
            ("data_time", waited, "s"),
        ):
            if value is not None:
                self.scalars(name, value, number, unit, at)
        self.beat()

    def result(self) -> RankResult:
        """All figures as the rank's result; the time end to end is until now."""
        self.seconds["end_to_end"] = self.seconds.get("rendezvous", 0.0) + time.monotonic() - self._began
        return RankResult(
            rank=self.rank,
            host=socket.gethostname(),
            local_rank=self.local_rank,
            device=self.device,
            seconds=dict(self.seconds),
            data_seconds=[each[0] for each in self._steps if each[0] is not None],
            load_seconds=[each[1] for each in self._steps if each[1] is not None],
            step_seconds=[each[2] for each in self._steps],
            losses=list(self.losses),
            learning_rates=[each[3] for each in self._steps],
            tokens=self.tokens,
            images=self.images,
            model_bytes=self.model_bytes,
            read_bytes={name: {"storage": read.storage, "logical": read.logical} for name, read in self._read.items()},
            parameters=self.parameters,
            trainable=self.trainable,
            versions=versions() if self.libraries is None else self.libraries,
            notes=[*self.notes, *skipped_note(self.precision, self.skipped_steps, len(self._steps))],
            precision=self.precision,
            skipped_steps=list(self.skipped_steps),
        )


def versions() -> dict[str, str]:
    """Versions of the libraries that are installed here."""
    installed = {}
    for name in _LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    return installed


def skipped_note(precision: str, skipped: Sequence[int], steps: int) -> list[str]:
    """The steps without an update, in one line; empty where there were none."""
    if not skipped:
        return []
    listed = ", ".join(map(str, skipped[:8])) + (" ..." if len(skipped) > 8 else "")
    who = "loss scaling" if precision == "fp16" else "DeepSpeed"
    return [
        f"{who} skipped the update of {len(skipped)} of {steps} steps (step {listed}): their gradients overflowed in "
        f"{precision}"
    ]


def keep_result(directory: Path, result: RankResult) -> None:
    """Write the result to the rank's directory by rename, since a launcher may fetch it at any time."""
    # A loss may be no number: that is the record's to judge, so it must arrive.
    _keep(directory / RESULT, json.dumps(result.document()))


def keep_error(directory: Path, error: TunetoolError) -> None:
    """Write the reason why a rank fails to its directory, for the process that started it."""
    document = {"message": error.message, "hint": error.hint, "usage": error.exit_code == ExitCode.USAGE}
    _keep(directory / ERROR, json.dumps(document))


def leave_answer(work: Callable[[], Any], name: str) -> int:
    """Do a rank's work. The dataclass that it returns goes to the file ``name`` in the rank's directory, as JSON.

    Returns the exit status: 0, or tunetool's own with the reason in the directory and on stderr.
    """
    directory = launched.out()
    try:
        answer = work()
    except TunetoolError as error:
        keep_error(directory, error)
        sys.stderr.write(f"error: {error.message}\n")
        return int(error.exit_code)
    (directory / name).write_text(json.dumps(asdict(answer)))
    return 0


def _keep(file: Path, text: str) -> None:
    replace_file(str(file), text, sync=False)
