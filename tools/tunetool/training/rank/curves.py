"""Curves of a rank while it trains: its node, its process, its GPU and its steps, as CSV and TensorBoard events.

Nothing here may end a run: a curve that cannot be continued ends, and ``about.json`` beside it has the reason.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import sys
import threading
import time
from pathlib import Path

from tunetool.checkpoint.workers import Workers
from tunetool.training.rank import gpu_reading, kernel_counters
from tunetool.training.rank.curve_files import ABOUT, EVENTS, FOLDER, CurveFile, Events, NoTensorBoard

_UNITS = {**kernel_counters.UNITS, **gpu_reading.UNITS}
_NAME = re.compile(r"^[a-z][a-z0-9_.]*$")
_ABOUT_BYTES = 4096
"""Size of ``about.json``, which is padded with blanks so that the reason of an end also fits on a full disk."""
_PATIENCE = 5.0
"""Seconds to wait for the thread to end, since NVML may hang with its GPU."""


class Curves:
    """A context manager that writes the curves of one rank.

    ``directory``: the rank's directory (``.../rank-<RANK>``), which gets ``series/`` and ``tensorboard/``.
    ``interval``: seconds between two samples; None writes no curves. ``device``: where the rank computes, such as
    ``cpu``, ``cuda`` or ``cuda:1``. ``started``: wall clock of second 0 of all curves of the run. ``root``: root
    directory of a recorded machine. The rank with local rank 0 also samples its node.
    """

    def __init__(
        self,
        directory: Path,
        interval: float | None,
        rank: int,
        local_rank: int,
        device: str,
        started: float | None = None,
        root: str = "/",
    ) -> None:
        if interval is not None and interval <= 0:
            raise ValueError(f"an interval of {interval} s")
        self._directory, self._every = directory, interval
        self._interval = interval  # None once nothing is written any more
        self._rank, self._local_rank, self._device, self._root = rank, local_rank, device, root
        self._began = time.time() if started is None else started
        self._files: dict[str, CurveFile] = {}
        self._events: Events | None = None
        self._gpu: gpu_reading.Gpu | None = None
        self.left_out: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        self.samples = 0
        self.cpu_seconds = 0.0
        """CPU time of the sampling thread."""
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._sampling: Workers | None = None
        self._last: tuple[float, dict[str, float]] = (0.0, {})

    def __enter__(self) -> Curves:
        if self._interval is None:
            return self
        try:
            (self._directory / FOLDER).mkdir(parents=True, exist_ok=True)
            self._tell()
        except OSError as error:
            self._end("all", f"`{self._directory}` cannot be written: {error.strerror}")
            self._interval = None
            return self
        try:
            self._events = Events(self._directory / EVENTS)
        except NoTensorBoard as error:
            self.left_out["tensorboard"] = str(error)
        except OSError as error:
            self._end("tensorboard", str(error.strerror))
        try:
            self._gpu = gpu_reading.open_gpu(self._device, self._local_rank, os.environ)
        except gpu_reading.NoGpu as error:
            self.left_out["gpu"] = str(error)
        self._last = (time.monotonic(), self._counters())
        self._tell()
        interval = self._interval
        self._sampling = Workers([lambda: self._sample_on(interval)], "curves", daemon=True)
        self._sampling.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._sampling is None:
            return
        self._stop.set()
        if not self._sampling.wait(_PATIENCE):
            self._end("all", f"the sampling thread did not end within {_PATIENCE:.0f} s")
            return
        with self._lock:
            # A later figure must not be written to a file descriptor that is reused by then.
            self._interval = None
            for file in self._files.values():
                file.close()
            if self._events is not None:
                self._events.close()
        if self._gpu is not None:
            self._gpu.close()
        with contextlib.suppress(OSError):
            self._tell()

    def scalar(self, name: str, value: float, step: int, unit: str = "1", at: float | None = None) -> None:
        """Add a figure of a step, such as ``loss``, ``learning_rate``, ``step_time`` (unit ``s``); the TensorBoard tag
        is train/NAME.

        ``at``: its wall clock, by default now. Raises ``ValueError`` for a name that is not valid as a file name, but
        never for an error of the disk.
        """
        if not _NAME.match(name):
            raise ValueError(f"`{name}` is not a name of a curve")
        self._put(name, value, step, time.time() if at is None else at, unit=unit)

    def _sample_on(self, interval: float) -> None:
        due = time.monotonic()
        began = time.thread_time()
        try:
            while True:
                due += interval
                # A late sample delays the next ones: catching up would only measure the sampler itself.
                due = max(due, time.monotonic())
                stopped = self._stop.wait(due - time.monotonic())
                # The last interval counts unless it is so short that its rates would be noise.
                if not stopped or not self.samples or time.monotonic() > due - interval / 2:
                    self._sample()
                self.cpu_seconds = time.thread_time() - began
                if stopped:
                    return
        except Exception as error:
            self._end("all", f"{type(error).__name__}: {error}")

    def _sample(self) -> None:
        at, counters = time.monotonic(), self._counters()
        before, old = self._last
        figures = kernel_counters.rates(old, counters, at - before)
        self._last = (at, counters)
        figures.update(kernel_counters.process_gauges(self._root))
        if self._local_rank == 0:
            figures.update(kernel_counters.node_gauges(self._root))
        if self._gpu is not None:
            figures.update(self._gpu.read())
        self.samples += 1
        now = time.time()
        for name, value in figures.items():
            self._put(name, value, self.samples, now)

    def _counters(self) -> dict[str, float]:
        counters = kernel_counters.process_counters(self._root)
        return {**counters, **kernel_counters.node_counters(self._root)} if self._local_rank == 0 else counters

    def _put(self, name: str, value: float, step: int, now: float, unit: str | None = None) -> None:
        with self._lock:
            if self._interval is None:
                return
            try:
                if name not in self.ended:
                    if name not in self._files:
                        path = self._directory / FOLDER / f"{name}.csv"
                        self._files[name] = CurveFile(path, unit or _UNITS[name], stepped=unit is not None)
                    self._files[name].add(now - self._began, value, step)
            except OSError as error:
                self._end(name, str(error.strerror))
            try:
                if self._events is not None and "tensorboard" not in self.ended:
                    tag = f"train/{name}" if unit is not None else name.replace(".", "/")
                    self._events.scalar(tag, value, step, now)
            except OSError as error:
                self._end("tensorboard", str(error.strerror))

    def _end(self, name: str, reason: str) -> None:
        self.ended[name] = reason
        sys.stderr.write(f"rank {self._rank}: curve `{name}` ends, the run continues: {reason}\n")
        with contextlib.suppress(OSError):
            self._tell()

    def _tell(self) -> None:
        about = {
            "host": socket.gethostname(),
            "rank": self._rank,
            "interval": self._every,
            "left_out": self.left_out,
            "ended": self.ended,
            "samples": self.samples,
            "cpu_seconds": round(self.cpu_seconds, 6),
        }
        path = self._directory / FOLDER / ABOUT
        text = (json.dumps(about, indent=1) + "\n").ljust(_ABOUT_BYTES).encode()
        # In place, not by rename: on a full disk only the blocks that the file has already can be written.
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.pwrite(handle, text, 0)
        finally:
            os.close(handle)
