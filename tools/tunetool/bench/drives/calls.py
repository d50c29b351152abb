"""fio's command lines over files in several directories, and over ranges of several drives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tunetool.measure import Direction
from tunetool.measure.fio import DATA_FILE, Fio, Job, arguments, in_places

JOBS_A_DRIVE = 2
"""Files of each drive, each written and read by one thread with 32 requests of 1 MiB in flight."""


def file_job(direction: Direction, file_bytes: int, seconds: float | None, engine: str) -> Job:
    """What is done in each directory."""
    return Job(direction, JOBS_A_DRIVE, file_bytes, seconds, engine=engine)


def files(fio: Fio, job: Job, directories: Sequence[Path]) -> list[str]:
    """``job`` in each of the directories at the same time."""
    return in_places(arguments(fio, job), [(f"drive-{number}", path) for number, path in enumerate(directories, 1)])


def paths(directories: Sequence[Path]) -> list[Path]:
    """The files of ``files``."""
    return [directory / DATA_FILE.format(number=number) for directory in directories for number in range(JOBS_A_DRIVE)]
