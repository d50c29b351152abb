"""DeepSpeed's handle in processes that start once and get the settings with each sample."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

from tunetool.measure import Direction, tester
from tunetool.measure.aio.driver import START_SECONDS, memlock, read_back, sector_bytes
from tunetool.measure.aio.ops import Probe, need
from tunetool.measure.aio.spec import (
    SMALLEST,
    Spec,
    check_limits,
    check_shape,
    largest_io_bytes,
    script,
)
from tunetool.measure.evidence import incomplete
from tunetool.measure.sequential import free_bytes
from tunetool.measure.worker import Failed, Worker, ask_all, child_command
from tunetool.node.common.files import read_int
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.memory import memory_total
from tunetool.tune.samples import Move
from tunetool.tune.search import SettingFailed
from tunetool.tune.settings import DEFAULTS, AioSettings

PASS_SECONDS = 0.06
"""Target seconds of one transfer: long enough to time, short enough for hundreds."""
SAMPLE_SECONDS = 0.04
"""Seconds of a sample; it is as many transfers as fit, at least one."""
RESTARTS = 3
"""How often settings may end a process before the search gives up."""
_SLOWEST = 5e6
"""Bytes per second below which a sample counts as stuck."""
_HOLE = "hole.data"
"""The name of a file that has a size and no blocks."""


def unit_of(space: Sequence[AioSettings]) -> int:
    """Bytes of which a transfer must be a multiple, so that every parallelism of ``space`` moves it exactly."""
    return lcm(2**20, *(2**20 * settings.intra_op_parallelism for settings in space))


def largest(free: int, memory: int, processes: int, unit: int) -> int:
    """Largest size in bytes of one process's file."""
    return largest_io_bytes(free // processes, memory // processes) // unit * unit


def aio_shortage(settings: AioSettings, processes: int, root: str = "") -> str | None:
    """Why the kernel would refuse the requests of all processes, at which the op aborts; None if it takes them."""
    left = aio_left(root)
    # Each thread has its own queue, and the handle one more.
    needed = processes * (settings.intra_op_parallelism + 1) * settings.queue_depth
    if left is None or settings.use_gds or needed <= left:
        return None
    return f"needs {needed} asynchronous requests, fs.aio-max-nr leaves {left}: `sysctl fs.aio-max-nr=1048576`"


def aio_left(root: str = "") -> int | None:
    """Asynchronous requests that the kernel still grants, to all processes together."""
    most, used = (read_int(f"{root}/proc/sys/fs/{name}") for name in ("aio-max-nr", "aio-nr"))
    return None if most is None or used is None else most - used


@dataclass
class Pool:
    """Worker processes, as a context manager: none of them outlives it."""

    spec: Spec
    """Directory, device, pinning, interpreter; size and settings are filled in here."""
    processes: int
    space: Sequence[AioSettings]
    installed: Probe
    stack: BlockStack
    environment: Mapping[str, str]
    io_bytes: int = 0
    """Bytes of a transfer; 0: as many as take ``PASS_SECONDS``."""
    tick: Callable[[], None] = lambda: None
    messages: str = ""
    _children: list[Worker] = field(default_factory=list)
    _held: ExitStack = field(default_factory=ExitStack)
    _used: AioSettings | None = None
    _stamp: int = 0
    _restarts: int = 0
    _pace: float = _SLOWEST
    _keep: int = 0
    _no_gds: str = ""

    @property
    def engine(self) -> str:
        """The name and version of what moves the data."""
        several = f"{self.processes} x " if self.processes > 1 else ""
        return f"{several}aio_handle (deepspeed {self.installed.deepspeed}, torch {self.installed.torch})"

    @property
    def end_seconds(self) -> float:
        """About how long ``without_storage`` takes for both directions."""
        return 2 * tester.SAMPLES * PASS_SECONDS

    def __enter__(self) -> Pool:
        need(self.installed, "async_io")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def open(self) -> None:
        """Start, estimate the speed, and lay the files out. Raises ``Failed`` if it cannot be measured."""
        unit = unit_of(self.space)
        self._keep = (aio_left() or 0) // (2 * self.processes)
        given = self.io_bytes
        most = largest(free_bytes(self.spec.directory), memory_total(), self.processes, unit)
        self.io_bytes = given or min(most, -(-SMALLEST // unit) * unit)
        self._check()
        self._start()
        self._lay_out()
        if not given:
            wanted = min(most, int(self._pace * PASS_SECONDS / self.processes) // unit * unit)
            if wanted > self.io_bytes:
                self.io_bytes = wanted
                self._check()
                self._open_all()
                self._lay_out()

    def move(self, settings: AioSettings, direction: Direction) -> Move:
        """One sample by ``settings``. Raises ``SettingFailed`` for settings that cannot be used here."""
        if settings.use_gds and self._no_gds:
            raise SettingFailed(self._no_gds)
        try:
            return self._move(settings, direction, SAMPLE_SECONDS)
        except Failed as error:
            self.messages = error.raw or self.messages
            if settings == DEFAULTS:
                raise
            if settings.use_gds:
                # Whether cuFile takes this file system does not depend on the other settings.
                self._no_gds = error.message
            self._restarts += 1
            if self._restarts > RESTARTS:
                raise Failed(
                    f"settings ended DeepSpeed's process {self._restarts} times, at last `{settings}`: {error.message}",
                    "leave them out with `--space`",
                    raw=error.raw,
                ) from None
            self._end()
            self._start()
            raise SettingFailed(error.message) from None

    def prove(self, settings: AioSettings) -> None:
        """Write and read once with ``settings``, and compare the files. Raises ``Failed``."""
        self._move(settings, "write", None)
        self._stored()
        expected = [answer["sha256"] for answer in self._all({"do": "digest"}, self._longest(100e6))]
        for number, sha256 in enumerate(expected):
            installed = read_back(self._spec(number).file, self.io_bytes, self.tick)
            if installed["bytes"] != self.io_bytes or installed["sha256"] != sha256:
                raise Failed(
                    f"`{settings}` reported success, but the file does not hold what was written to it",
                    "look for I/O errors: `dmesg | tail`",
                )
        self._all({"do": "clear"}, START_SECONDS)
        self._move(settings, "read", None)
        if [answer["sha256"] for answer in self._all({"do": "digest"}, self._longest(100e6))] != expected:
            raise Failed(f"`{settings}` read something else than what the file holds")

    def without_storage(self, settings: AioSettings, direction: Direction) -> list[float]:
        """See ``samples.Driver``: reads of files without a block, for which the kernel clears memory and asks no drive.

        A write is the same requests the other way round, and no file can be written for nothing: the figure of the
        reads is that of both directions. Afterwards the buffers hold zeros. After a failure no process is left, and
        there are no figures.
        """
        if settings.use_gds or not self._children:
            return []
        files = [self._spec(number).directory / _HOLE for number in range(self.processes)]
        try:
            for file in files:
                file.touch()
                os.truncate(file, self.io_bytes)
            if any(file.stat().st_blocks for file in files):
                return []
            moves = [self._move(settings, "read", SAMPLE_SECONDS, files) for _ in range(tester.SAMPLES)]
            return [move.bandwidth for move in moves]
        except (Failed, OSError) as error:
            # The answers of the others to this order would be taken for those to the next one.
            self._end()
            self.messages = (error.raw if isinstance(error, Failed) else str(error)) or self.messages
            return []
        finally:
            for file in files:
                # The directory is removed with all that it holds.
                with suppress(OSError):
                    file.unlink()

    # -- the processes

    def _check(self) -> None:
        sector = sector_bytes(self.stack)
        for settings in self.space:
            check_shape(self._spec(0, settings), sector)
        file_limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
        spec = self._spec(0)
        needed = replace(spec, io_bytes=spec.io_bytes * self.processes)
        limit = None if file_limit == resource.RLIM_INFINITY else file_limit * self.processes
        check_limits(needed, free_bytes(self.spec.directory) + self._stored_bytes(), self._memlock(), limit)

    def _memlock(self) -> int | None:
        # The limit holds for each process separately.
        limit = memlock()
        return None if limit is None else limit * self.processes

    def _stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.spec.directory.glob("*/aio.data"))

    def _start(self) -> None:
        what = "the process that runs DeepSpeed's `aio_handle`"
        for _ in range(self.processes):
            child = Worker(child_command(self.spec.python, script("child.py")), what, self.environment, self.tick)
            self._children.append(self._held.enter_context(child))
        self._open_all()

    def _end(self) -> None:
        if self._children:
            self.messages = self._children[0].messages() or self.messages
        self._held.close()
        self._children.clear()
        self._used = None

    def _open_all(self) -> None:
        first = self._first()
        orders = []
        for number in range(self.processes):
            spec = self._spec(number, first)
            spec.directory.mkdir(exist_ok=True)
            orders.append({"do": "open", "file": str(spec.file), "io_bytes": self.io_bytes, **self._order(first)})
        for facts in self._each(orders, START_SECONDS):
            if facts["address"] % 4096:
                raise Failed(f"`aio_handle` got memory at {facts['address']:#x}, which is not aligned to 4096 bytes")
        self._used = first

    def _first(self) -> AioSettings:
        # DeepSpeed's own, whatever the source; GPUDirect comes in with the settings that use it.
        return DEFAULTS

    def _order(self, settings: AioSettings) -> dict[str, Any]:
        device = "gds" if settings.use_gds else self.spec.device
        op = "gds" if settings.use_gds else "async_io"
        return {
            "device": device,
            "files": [str(self.installed.find(part)) for part in self.installed.parts(op)],
            "block_bytes": settings.block_size,
            "queue_depth": settings.queue_depth,
            "single_submit": settings.single_submit,
            "overlap_events": settings.overlap_events,
            "intra_op_parallelism": settings.intra_op_parallelism,
            "pinned_by": self.spec.pinned_by,
            "shared_memory": self.installed.needs_pin_memory,
            "keep": self._keep if self.installed.needs_pin_memory else 0,
        }

    def _spec(self, number: int, settings: AioSettings = DEFAULTS) -> Spec:
        return replace(
            self.spec,
            directory=self.spec.directory / f"process-{number}",
            io_bytes=self.io_bytes,
            block_bytes=settings.block_size,
            queue_depth=settings.queue_depth,
            intra_op_parallelism=settings.intra_op_parallelism,
        )

    def _lay_out(self) -> None:
        self._move(DEFAULTS, "write", None)
        self._stored()
        # Everything is warm now: this transfer shows the speed.
        move = self._move(DEFAULTS, "write", None)
        self._pace = max(_SLOWEST, move.claimed_bytes / move.seconds)

    def _stored(self) -> None:
        for number in range(self.processes):
            spec = self._spec(number)
            wrong = incomplete(spec.directory, [spec.file.name], self.io_bytes)
            if wrong:
                raise Failed(f"`aio_handle` reported success, but {wrong[0]}", raw=self._children[number].messages())

    def _move(
        self, settings: AioSettings, direction: Direction, seconds: float | None, files: Sequence[Path] = ()
    ) -> Move:
        """``files``: others than the processes have open, one for each."""
        longest = self._longest(_SLOWEST)
        if settings != self._used:
            self._used = None
            self._all({"do": "use", **self._order(settings)}, START_SECONDS)
            self._used = settings
        self._stamp += 1
        order = {"do": "move", "direction": direction, "stamp": self._stamp, "seconds": seconds}
        order["loops"] = None if seconds else 1
        orders = [{**order, "file": str(file)} for file in files] or [order] * self.processes
        answers = self._each(orders, longest)
        # They start within a millisecond of each other: the slowest one determines the time of all.
        return Move(
            sum(int(answer["bytes"]) for answer in answers),
            max(answer["durable_seconds"] for answer in answers),
            sum(answer["cpu_seconds"] / answer["seconds"] for answer in answers),
        )

    def _longest(self, slowest: float) -> float:
        seen = max(slowest, self._pace / 20)
        return 10 + 3 * self.processes * self.io_bytes / seen

    def _all(self, order: Mapping[str, Any], timeout: float) -> list[dict[str, Any]]:
        return self._each([order] * self.processes, timeout)

    def _each(self, orders: Sequence[Mapping[str, Any]], timeout: float) -> list[dict[str, Any]]:
        return ask_all(self._children, orders, timeout, self.tick)
