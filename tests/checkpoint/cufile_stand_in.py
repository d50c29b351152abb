"""A stand-in for kvikio and cuFile's counters: GPU memory is host memory here, and the kernel's read fills it."""

from __future__ import annotations

import ctypes
import os
import struct
import sys
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from tunetool.measure.gds import child

DEFAULTS = {"num_threads": 1, "auto_direct_io_read": False, "gds_threshold": 1 << 20, "compat_mode": "AUTO"}


class Reading:
    """One read, as kvikio's IOFuture."""

    def __init__(self, future: Future[int]) -> None:
        self._future = future

    def get(self) -> int:
        return self._future.result()


class Settings:
    """What ``kvikio.defaults.set`` returns."""

    def __init__(self, kept: dict[str, Any], changes: Mapping[str, Any]) -> None:
        self._kept, self._before = kept, {name: kept[name] for name in changes}
        kept.update(changes)

    def __exit__(self, *_: object) -> None:
        self._kept.update(self._before)


class Opened:
    """An open file, which is closed once nothing refers to it; its reads do not keep it."""

    def __init__(self, of: StandIn, path: str, way: str) -> None:
        self._of, self._path, self._way = of, path, way
        self._handle = os.open(path, os.O_RDONLY)

    def pread(self, memory: Any, size: int, offset: int) -> Reading:
        """As kvikio's."""
        return self._of.begin(self._path, self._way, self._handle, (memory.data_ptr(), size, offset))

    def __del__(self) -> None:
        os.close(self._handle)


class StandIn:
    """kvikio over a cuFile that takes files and moves their bytes directly, unless it is told otherwise."""

    def __init__(self) -> None:
        self.settings: dict[str, Any] = dict(DEFAULTS)
        self.takes_files = self.goes_directly = self.counts = True
        self.delay: Any = None
        """Reads wait for this event."""
        self.requests: list[tuple[str, int, int]] = []
        self._bytes = {"direct": 0, "posix": 0}
        self._asked = {"direct": 0, "posix": 0}
        self._pool = ThreadPoolExecutor(2)

    def put_in_place(self, patch: pytest.MonkeyPatch) -> None:
        def set_them(*changes: Any) -> Settings:
            return Settings(self.settings, changes[0] if len(changes) == 1 else {changes[0]: changes[1]})

        defaults = SimpleNamespace(set=set_them)
        modes = SimpleNamespace(OFF="OFF", ON="ON", AUTO="AUTO")
        patch.setitem(sys.modules, "kvikio", SimpleNamespace(defaults=defaults, CompatMode=modes, CuFile=self._opened))
        patch.setitem(sys.modules, "kvikio.defaults", defaults)
        patch.setattr(child, "count", self._count)

    def _opened(self, path: str, flags: str) -> Any:
        assert flags == "r"
        mode = self.settings["compat_mode"]
        if mode == "OFF" and not self.takes_files:
            raise RuntimeError("cuFile error:\n  file descriptor is not registered")
        way = "posix" if not self.takes_files or not self.goes_directly else "direct"

        return Opened(self, path, way)

    def begin(self, path: str, way: str, handle: int, target: tuple[int, int, int]) -> Reading:
        """A read of the open file ``handle``; ``target``: address, size, offset."""
        self.requests.append((path, *target[1:]))
        return Reading(self._pool.submit(self._read, handle, way, *target))

    def _read(self, handle: int, way: str, address: int, size: int, offset: int) -> int:
        if self.delay is not None:
            self.delay.wait()
        content = os.pread(handle, size, offset)
        ctypes.memmove(address, content, len(content))
        if self.takes_files:
            self._bytes[way] += len(content)
            self._asked[way] += 1
        return len(content)

    def _count(self, first: bool) -> dict[str, Any]:
        """cuFile's counters of level 3 for one GPU, as libcufile 1.15 lays them out."""
        if not self.counts:
            raise ImportError("No module named 'cuda'")
        raw = bytearray(2048)
        struct.pack_into("<I", raw, 1024, 1)
        requests = self._asked["direct"] + self._asked["posix"]
        counts = [sum(self._bytes.values()), 0, 0, 0, requests, 0, self._asked["direct"], self._asked["posix"], 0, 0]
        struct.pack_into("<10Q", raw, 1024 + 8 + 16, *counts)
        return {"version": 1150, "stats": raw.hex()}
