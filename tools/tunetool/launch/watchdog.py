"""Finds ranks that hang, by their beats and stacks, and the one to blame.

DeepSpeed and torch compile an op where a rank first uses it, and meanwhile no rank beats: see ``Compilers``.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunetool.launch.rank import BEAT, BEATS

_FRAME = re.compile(r'^  File "(?P<file>[^"]*)", line (?P<line>\d+|\?\?\?) in (?P<function>.*)$')
_WAITING = ("torch/distributed/", "deepspeed/comm/")
"""Functions in which a rank waits for others, which are then to blame."""


@dataclass(frozen=True)
class Beat:
    """``count`` beats of a rank, the last ``age`` seconds ago."""

    count: int
    age: float


def read_beats(node_directory: Path) -> dict[int, Beat]:
    """The beats of this node's ranks. A rank that has not started has none."""
    by_rank = {}
    now = time.monotonic_ns()
    for path in (node_directory / BEATS).glob("*"):
        try:
            count, last = BEAT.unpack(path.read_bytes())
            rank = int(path.name)
        except (OSError, ValueError, struct.error):
            continue
        if count:
            by_rank[rank] = Beat(count, max(0, now - last) / 1e9)
    return by_rank


@dataclass(frozen=True)
class Stuck:
    """Position of a rank: ``line`` as text; ``waiting``: whether it waits for other ranks."""

    line: str
    waiting: bool


def innermost(dumped: str) -> Stuck | None:
    """Position of the main thread of a rank in the last stack that faulthandler wrote; None if there is none."""
    threads: list[list[re.Match[str]]] = []
    marked: list[re.Match[str]] | None = None
    for line in dumped.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            threads.append([])
            # The signal goes to the main thread, which is then the current one; else it is the last of the list.
            marked = threads[-1] if line.startswith("Current") else marked
        elif threads and (frame := _FRAME.match(line)):
            threads[-1].append(frame)
    frames = next((frames for frames in (marked, threads[-1] if threads else None) if frames), None)
    if frames is None:
        return None
    waiting = any(part in frame["file"] for frame in frames for part in _WAITING)
    # In a wait, the calling line matters; every line above it is torch's own.
    shown = (
        next((frame for frame in frames if "site-packages/" not in frame["file"]), frames[0]) if waiting else frames[0]
    )
    return Stuck(f"{shown['file']}:{shown['line']} in {shown['function']}", waiting)


def to_blame(world: int, beats: Mapping[int, Beat], stuck: Mapping[int, Stuck]) -> int:
    """The rank that is behind: the one with the fewest beats, and among equals one that does not wait for others."""

    def order(rank: int) -> tuple[int, bool, int]:
        count = beats[rank].count if rank in beats else 0
        return count, rank in stuck and stuck[rank].waiting, rank

    return min(range(world), key=order)


_GCC = ("c++", "g++", "cc", "gcc", "cc1plus", "lto", "as", "ld")
COMPILERS = frozenset({*_GCC, "clang", "clang++", "nvcc", "cudafe++", "cicc", "ptxas", "fatbinary", "nvlink"})
"""What GCC, Clang and nvcc start, without digits at the end: `cc1` and `clang-16` are `cc` and `clang`."""


class Compilers:
    """The compilers of one run on this node. Call ``look`` repeatedly while its processes run.

    What counts is that a compiler computes: one that waits for ever is no progress.
    """

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._ticks: dict[int, int] = {}
        self._computed: float | None = None

    def look(self, pids: Iterable[int]) -> None:
        """Note whether a compiler among these processes of the run has computed since the last call."""
        ticks = {pid: used for pid in pids if (used := self._used(pid)) is not None}
        if any(used > self._ticks.get(pid, 0) for pid, used in ticks.items()):
            self._computed = time.monotonic()
        self._ticks = ticks

    def age(self) -> float | None:
        """Seconds since a compiler was last seen to have computed; None: there was none."""
        return None if self._computed is None else time.monotonic() - self._computed

    def _used(self, pid: int) -> int | None:
        """The processor time of a compiler in the kernel's ticks; None for another process, or one that is gone."""
        try:
            text = (self._proc / str(pid) / "stat").read_text(errors="replace")
        except OSError:
            return None
        # PID (NAME) STATE ...; a name may have brackets and spaces, and ends after 15 characters.
        head, _, rest = text.rpartition(")")
        name = head.partition("(")[2].rstrip("-.0123456789")
        fields = rest.split()
        return int(fields[11]) + int(fields[12]) if name in COMPILERS else None
