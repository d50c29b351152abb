"""Samples of one size that lie one after another in files: how many there are, and which file holds which."""

from __future__ import annotations

import bisect
import itertools
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tunetool.errors import UsageProblem


class Where(NamedTuple):
    """The bytes of one sample: from ``offset`` on in the file ``path``."""

    path: str
    offset: int


class SampleFiles:
    """The samples of ``sample_bytes`` bytes in ``paths``, numbered through in that order.

    Raises ``UsageProblem`` for a file that is not there, is no regular file, or whose size is no whole number of
    samples; with ``ignore_rest``, what comes after the last whole sample of a file is left out.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]], sample_bytes: int, *, ignore_rest: bool) -> None:
        if sample_bytes < 1:
            raise UsageProblem(f"`sample_bytes={sample_bytes}`: a sample has at least one byte", "give its size")
        self.sample_bytes = sample_bytes
        self.paths = [str(Path(path).absolute()) for path in paths]
        self.devices: list[int] = []
        """Of each file, the number of the file system (``st_dev``)."""
        counts = []
        for path in self.paths:
            status = _status(path)
            count, rest = divmod(status.st_size, sample_bytes)
            if rest and not ignore_rest:
                raise UsageProblem(
                    f"`{path}` is {status.st_size} bytes long: {count} samples of {sample_bytes} bytes and {rest} more",
                    "check the size of a sample; `ignore_rest=True` leaves the end of a file out",
                )
            counts.append(count)
            self.devices.append(status.st_dev)
        self._ends = [*itertools.accumulate(counts)]
        if not len(self):
            raise UsageProblem(
                f"{len(self.paths)} files have no sample of {sample_bytes} bytes", "check the files and that size"
            )

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def where(self, number: int) -> Where:
        """Where sample ``number`` lies; negative ones count from the end. Raises ``IndexError``."""
        count = len(self)
        if not -count <= number < count:
            raise IndexError(f"sample {number} of {count}")
        number %= count
        file = bisect.bisect_right(self._ends, number)
        first = self._ends[file - 1] if file else 0
        return Where(self.paths[file], (number - first) * self.sample_bytes)


def _status(path: str) -> os.stat_result:
    try:
        status = Path(path).stat()
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name the files that hold samples") from None
    if not stat.S_ISREG(status.st_mode):
        raise UsageProblem(f"`{path}` is not a regular file", "name the files themselves, not their directory")
    return status
