"""TensorBoard event files, written with the record writer of the package `tensorboard`, without TensorFlow or torch.

The package's ``EventFileWriter`` is not used: on a full disk its thread dies with a traceback and its queue may block.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any


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
