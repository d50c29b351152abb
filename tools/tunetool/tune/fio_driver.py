"""fio instead of DeepSpeed's handle, where torch cannot start: it sends the same requests.

A thread of the handle is a job with its own queue over its part of the file. ``single_submit`` is a batch of
one, no ``overlap_events`` is a batch that is waited for as a whole (csrc/aio/common/deepspeed_aio_common.cpp).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure import Direction, tester
from tunetool.measure.aio.spec import FILE, SMALLEST
from tunetool.measure.evidence import incomplete
from tunetool.measure.fio import Fio, FioFailed, Outcome, execute, shares
from tunetool.measure.sequential import free_bytes
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_size
from tunetool.tune.pool import PASS_SECONDS, largest, unit_of
from tunetool.tune.samples import Move
from tunetool.tune.search import SettingFailed
from tunetool.tune.settings import DEFAULTS, AioSettings

_SLOWEST = 5e6
_CEILING_SECONDS = 2.0
"""Of a figure whose limit is asked for, by which the samples of that are sized."""


def arguments(fio: Fio, settings: AioSettings, direction: Direction, io_bytes: int) -> list[str]:
    """fio's arguments to move the file once, as the handle would."""
    part = io_bytes // settings.intra_op_parallelism
    depth = settings.queue_depth
    argv = [
        fio.path,
        f"--name=tune-{direction}",
        "--thread=1",
        f"--numjobs={settings.intra_op_parallelism}",
        "--group_reporting=1",
        f"--rw={direction}",
        f"--bs={min(settings.block_size, part)}",
        f"--filename={FILE}",
        f"--size={part}",
        f"--offset_increment={part}",
        "--direct=1",
        "--ioengine=libaio",
        f"--iodepth={depth}",
        f"--iodepth_batch_submit={1 if settings.single_submit else depth}",
        "--zero_buffers=0",
        "--randrepeat=0",
        "--output-format=json",
    ]
    if settings.overlap_events:
        argv += ["--iodepth_batch_complete_min=1", f"--iodepth_batch_complete_max={depth}"]
    else:
        argv += [f"--iodepth_batch_complete_min={depth}", "--iodepth_low=1"]
    if direction == "write":
        argv.append("--end_fsync=1")
    return argv


@dataclass
class FioDriver:
    """Takes samples, each by one fio process."""

    fio: Fio
    directory: Path
    space: Sequence[AioSettings]
    environment: Mapping[str, str]
    io_bytes: int = 0
    """Bytes of a transfer; 0: as many as take ``PASS_SECONDS``."""
    tick: Callable[[], None] = lambda: None
    messages: str = ""
    _pace: float = _SLOWEST

    @property
    def engine(self) -> str:
        """The engine, with its version."""
        return f"fio {self.fio.version} (libaio, as aio_handle asks)"

    @property
    def end_seconds(self) -> float:
        """About how long ``without_storage`` takes for both directions."""
        return 2 * tester.seconds(_CEILING_SECONDS)

    def open(self) -> None:
        """Lay the file out and estimate the speed. Raises ``CannotJudge``."""
        unit = unit_of(self.space)
        given = self.io_bytes
        most = largest(free_bytes(self.directory), memory_total(), 1, unit)
        self.io_bytes = given or min(most, -(-SMALLEST // unit) * unit)
        if self.io_bytes > free_bytes(self.directory):
            raise CannotJudge(
                f"`{self.directory.parent}` has too little space: {format_size(free_bytes(self.directory))} free, "
                f"{format_size(self.io_bytes)} needed",
                "free some space, or move less",
            )
        self._lay_out()
        if not given:
            wanted = min(most, int(self._pace * PASS_SECONDS) // unit * unit)
            if wanted > self.io_bytes:
                self.io_bytes = wanted
                self._lay_out()

    def move(self, settings: AioSettings, direction: Direction) -> Move:
        """One sample by ``settings``. Raises ``SettingFailed`` for settings that cannot be used here."""
        try:
            outcome = self._run(settings, direction)
        except FioFailed as error:
            self.messages = error.raw or self.messages
            if settings == DEFAULTS:
                raise
            raise SettingFailed(error.message) from None
        return Move(outcome.claimed_bytes, outcome.seconds, outcome.cores)

    def prove(self, settings: AioSettings) -> None:
        """Write once and check that the file is complete; the content of fio's files is not known."""
        self._run(settings, "write")
        self._stored()

    def without_storage(self, settings: AioSettings, direction: Direction) -> list[float]:
        """See ``samples.Driver``: by fio's own engine for that."""
        argv = arguments(self.fio, settings, direction, self.io_bytes)
        load = tester.Load(self.fio, argv, direction, _CEILING_SECONDS, self.directory, self.environment)
        try:
            return [outcome.bandwidth for outcome in load.sample_ceiling(self.tick)]
        except FioFailed as error:
            self.messages = error.raw or self.messages
            return []

    def _lay_out(self) -> None:
        self._run(DEFAULTS, "write")
        self._stored()
        outcome = self._run(DEFAULTS, "write")
        self._pace = max(_SLOWEST, outcome.bandwidth)

    def _stored(self) -> None:
        wrong = incomplete(self.directory, [FILE], self.io_bytes)
        if wrong:
            raise CannotJudge(f"fio reported success, but {wrong[0]}")

    def _run(self, settings: AioSettings, direction: Direction) -> Outcome:
        argv = arguments(self.fio, settings, direction, self.io_bytes)
        longest = 60 + 3 * self.io_bytes / max(_SLOWEST, self._pace / 20)
        stdout, stderr = execute(self.fio, argv, self.directory, self.environment, longest, self.tick)
        (outcome,) = shares(self.fio, direction, stdout, stderr).values()
        if outcome.claimed_bytes != self.io_bytes:
            raise FioFailed(f"fio moved {outcome.claimed_bytes} of {self.io_bytes} bytes", raw=stdout + stderr)
        return outcome
