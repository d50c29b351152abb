"""cuFile's counters, level 3, from the bytes that libcufile fills. Pure.

Read here and not by cuda-bindings' own classes: those know one layout, and libcufile 1.19 changed it in the middle
(``cufile.h`` of both), so that bindings newer than the library would read every count from a wrong place.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.measure.direction import Direction

FIRST = (1, 15)
"""The first libcufile whose counters a program can read."""
_VECTORS = (1, 19)
"""The first whose basic counters go on with those of vector I/O."""
_BASIC, _BASIC_WITH_VECTORS, _HISTOGRAMS, _GPUS, _GPU = 512, 624, 512, 16, 248
_COUNTS = {"read": 16, "write": 16 + 13 * 8}
"""Where a GPU's counts of a direction begin, after its UUID."""


@dataclass(frozen=True)
class Counts:
    """What went one way, all GPUs together. Requests are cuFile's."""

    bytes: int = 0
    requests: int = 0
    p2pdma: int = 0
    nvidia_fs: int = 0
    posix: int = 0
    unaligned: int = 0
    rerouted: int = 0
    """Went through the memory of another GPU or of the host (dynamic routing)."""
    errors: int = 0

    @property
    def direct(self) -> int:
        """Requests that drives and GPU served between them."""
        return self.p2pdma + self.nvidia_fs

    @property
    def bounced_bytes(self) -> int:
        """Bytes that went through memory of the host; requests are of one size here."""
        return self.bytes * self.posix // self.requests if self.requests else 0

    def since(self, before: Counts) -> Counts:
        """What was added after ``before``."""
        return Counts(*(after - was for after, was in zip(_tuple(self), _tuple(before), strict=True)))


def _tuple(counts: Counts) -> Sequence[int]:
    return [getattr(counts, name) for name in Counts.__dataclass_fields__]


def version_of(number: int) -> tuple[int, int]:
    """``cuFileGetVersion`` answers 1150 for 1.15."""
    return number // 1000, number % 1000 // 10


def parse(raw: bytes, version: tuple[int, int], direction: Direction) -> Counts:
    """The counts of ``direction`` in a CUfileStatsLevel3_t of libcufile ``version``. Raises ``ValueError``."""
    start = (_BASIC_WITH_VECTORS if version >= _VECTORS else _BASIC) + _HISTOGRAMS
    (gpus,) = struct.unpack_from("<I", raw, start)
    if gpus > _GPUS:
        raise ValueError(f"cuFile's counters name {gpus} GPUs: their layout is another one")
    totals = [0] * len(Counts.__dataclass_fields__)
    for index in range(gpus):
        fields = struct.unpack_from("<10Q", raw, start + 8 + index * _GPU + _COUNTS[direction])
        errors = struct.unpack_from("<Q", raw, start + 8 + index * _GPU + _COUNTS[direction] + _ERRORS[direction])[0]
        moved, _, _, _, requests, p2pdma, nvidia_fs, posix, unaligned, rerouted = fields
        for position, value in enumerate((moved, requests, p2pdma, nvidia_fs, posix, unaligned, rerouted, errors)):
            totals[position] += value
    return Counts(*totals)


_ERRORS = {"read": 12 * 8, "write": 10 * 8}
"""Offset of the errors after the first count; reads have two more counts in between."""
