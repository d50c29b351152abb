"""The compilers of a run: DeepSpeed and torch compile an op where a rank first uses it, and meanwhile no rank beats.

What counts is that a compiler computes: one that waits for ever is no progress.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

_GCC = ("c++", "g++", "cc", "gcc", "cc1plus", "lto", "as", "ld")
NAMES = frozenset({*_GCC, "clang", "clang++", "nvcc", "cudafe++", "cicc", "ptxas", "fatbinary", "nvlink"})
"""What GCC, Clang and nvcc start, without digits at the end: `cc1` and `clang-16` are `cc` and `clang`."""


class Compilers:
    """The compilers of one run on this node. Call ``look`` repeatedly while its processes run."""

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
        return int(fields[11]) + int(fields[12]) if name in NAMES else None
