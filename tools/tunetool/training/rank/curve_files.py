"""Curves as files: written by a rank while it runs, read back, and kept beside the record.

``<name>.csv``: the first line names the columns with the unit of the values (``seconds,value (B/s)``, and ``,step``
where points belong to steps); each further line is one point, with seconds since the start of the run first.

``Events`` writes the same points for TensorBoard, with the record writer of the package `tensorboard`, without
TensorFlow or torch. The package's ``EventFileWriter`` is not used: on a full disk its thread dies with a traceback and
its queue may block.
"""

from __future__ import annotations

import json
import math
import os
import re
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.record import CheckResult, Series
from tunetool.regular_files import read_bytes

FOLDER, EVENTS, ABOUT = "series", "tensorboard", "about.json"
_RANK = re.compile(r"^rank-(\d+)$")
_HEADER = re.compile(r"^seconds,value \((?P<unit>[^)]*)\)(?P<step>,step)?$")


@dataclass(frozen=True)
class Curve:
    """A curve read back. ``steps`` is empty where its points belong to no step."""

    name: str
    unit: str
    seconds: Sequence[float]
    values: Sequence[float]
    steps: Sequence[int]


class CurveFile:
    """A file of one curve that is being written: each point is in the file when ``add`` returns. Raises ``OSError``."""

    def __init__(self, path: Path, unit: str, stepped: bool) -> None:
        self._stepped = stepped
        self._file = WholeRecords(path)
        try:
            self._file.write(f"seconds,value ({unit}){',step' if stepped else ''}\n".encode())
        except OSError:
            self._file.close()
            raise

    def add(self, seconds: float, value: float, step: int) -> None:
        """Append one point."""
        tail = f",{step}" if self._stepped else ""
        self._file.write(f"{seconds:.3f},{value:.10g}{tail}\n".encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_curve(path: Path) -> Curve | None:
    """The curve in the file; None where it is no curve. An incomplete last line of a killed rank is ignored."""
    try:
        text = read_bytes(path).decode()
    except (OSError, UnicodeDecodeError):
        return None
    lines = text.split("\n")[:-1]
    header = _HEADER.match(lines[0]) if lines else None
    if header is None:
        return None
    rows = [line.split(",") for line in lines[1:]]
    try:
        return Curve(
            name=path.name.removesuffix(".csv"),
            unit=header["unit"],
            seconds=[float(row[0]) for row in rows],
            values=[float(row[1]) for row in rows],
            steps=[int(row[2]) for row in rows] if header["step"] else [],
        )
    except (ValueError, IndexError):
        return None


@dataclass(frozen=True)
class Gathered:
    """The curves of a run. ``raw`` is for ``record.write``, which puts the files beside record.json."""

    series: list[Series] = field(default_factory=list)
    checks: list[CheckResult] = field(default_factory=list)
    """A `skip` with the reason for each missing curve."""
    raw: dict[str, str | bytes] = field(default_factory=dict)


def gather(results: Path, prefix: str = "") -> Gathered:
    """Collect the curves that the ranks wrote under ``results``/rank-*.

    ``prefix`` (such as ``1x8-z2/``) keeps the runs of one record apart: in file names, in TensorBoard and in the
    names of checks and series.
    """
    gathered = Gathered()
    reasons: dict[tuple[str, str], list[int]] = {}
    for rank, directory in ranks_in(results):
        for path in sorted((directory / FOLDER).glob("*.csv")):
            curve = read_curve(path)
            if curve is None or not curve.values:
                continue
            file = f"{FOLDER}/{prefix}rank-{rank}/{path.name}"
            gathered.raw[file] = path.read_text()
            gathered.series.append(Series(name=prefix + curve.name, unit=curve.unit, rank=rank, file=file))
        for path in sorted((directory / EVENTS).glob("events.out.tfevents.*")):
            gathered.raw[f"{EVENTS}/{prefix}rank-{rank}/{path.name}"] = path.read_bytes()
        about = read_about(directory)
        if about:
            gathered.raw[f"{FOLDER}/{prefix}rank-{rank}/{ABOUT}"] = json.dumps(about, indent=2) + "\n"
        for key in ("left_out", "ended"):
            for name, reason in about.get(key, {}).items():
                reasons.setdefault((str(name), str(reason)), []).append(rank)
    gathered.checks.extend(
        CheckResult(id=f"curves.{prefix}{name}", status="skip", expected="a curve", found=f"{_ranks(ranks)}: {reason}")
        for (name, reason), ranks in sorted(reasons.items())
    )
    return gathered


def opening_line(run_dir: Path) -> str | None:
    """The command that shows the curves kept in ``run_dir``; None where no event files were written."""
    directory = run_dir / EVENTS
    return f"tensorboard --logdir {directory}" if directory.is_dir() else None


def read_about(directory: Path) -> dict[str, Any]:
    """A rank's ``about.json``: host, interval, left_out, ended, samples, cpu_seconds; empty where it is missing."""
    try:
        about = json.loads((directory / FOLDER / ABOUT).read_text())
    except (OSError, ValueError):
        return {}
    return about if isinstance(about, dict) else {}


def ranks_in(results: Path) -> list[tuple[int, Path]]:
    """Ranks and their folders in ``results``, sorted by rank."""
    folders = [(int(match[1]), path) for path in results.glob("rank-*") if (match := _RANK.match(path.name))]
    return sorted(folders)


def finite(curve: Curve) -> list[tuple[float, float]]:
    """The points (seconds, value) with a finite value; a loss may be NaN."""
    return [(x, y) for x, y in zip(curve.seconds, curve.values, strict=True) if math.isfinite(y)]


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


class NoTensorBoard(Exception):
    """Events cannot be written or read; the text has the reason."""


class WholeRecords:
    """A file that grows by whole records: a record that does not fit is removed again and ``OSError`` is raised."""

    def __init__(self, path: Path) -> None:
        self._handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._size = 0

    def write(self, data: bytes) -> None:
        """Append all of ``data``, or nothing. Raises ``OSError``."""
        try:
            done = 0
            while done < len(data):
                done += os.write(self._handle, data[done:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            os.lseek(self._handle, self._size, os.SEEK_SET)
            raise
        self._size += len(data)

    def flush(self) -> None:
        """Do nothing, since nothing is buffered; the record writer calls it."""

    def close(self) -> None:
        """Close the file."""
        os.close(self._handle)


class Events:
    """One event file in ``directory``. Raises ``NoTensorBoard`` without the package, ``OSError`` from the disk."""

    def __init__(self, directory: Path) -> None:
        try:
            # The proto alone takes 40 ms to import; the writer brings numpy, which a rank has anyway.
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise NoTensorBoard("TensorBoard is not installed (`pip install tensorboard`)") from None
        self._event: Any = Event
        directory.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.0"
        self._writer: Any = RecordWriter(WholeRecords(directory / name))
        self._writer.write(Event(wall_time=time.time(), file_version="brain.Event:2").SerializeToString())

    def scalar(self, tag: str, value: float, step: int, wall_time: float) -> None:
        """Append one point. Raises ``OSError``."""
        event = self._event(wall_time=wall_time, step=step)
        event.summary.value.add(tag=tag, simple_value=value)
        self._writer.write(event.SerializeToString())

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


def read_scalars(directory: Path) -> tuple[float, dict[str, list[tuple[int, float, float]]]]:
    """The time when the first event file in ``directory`` was opened, and the points (step, wall clock, value) by tag.

    Raises ``NoTensorBoard`` without the package. Without files the result is (0, {}).
    """
    try:
        from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader
    except ImportError:
        raise NoTensorBoard("TensorBoard is not installed (`pip install tensorboard`)") from None
    began = 0.0
    points: dict[str, list[tuple[int, float, float]]] = {}
    for path in sorted(directory.rglob("events.out.tfevents.*")):
        for event in LegacyEventFileLoader(str(path)).Load():
            began = began or event.wall_time
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    point = (event.step, event.wall_time, value.simple_value)
                    points.setdefault(value.tag, []).append(point)
    return began, points
