"""cuFile and kvikio, in a process that may die or hang. Self-contained: any Python from 3.10 that has cuda-bindings.

``measure/child_server.py`` hands it the orders. kvikio moves the bytes; ``cuda.bindings.cufile`` opens the driver,
reads the settings and the counters. Both use one libcufile, whose counters are those of this process.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import sys
import time
from collections.abc import Callable
from typing import Any

PAGE = 4096
STEP = 64 * 2**20
STATS_BYTES = 2**16
"""More than any release's CUfileStatsLevel3_t."""


def probe() -> dict[str, Any]:
    """What this interpreter has."""
    answer: dict[str, Any] = {"python": sys.executable, "kvikio": None, "gpu": None}
    for name in ("kvikio-cu13", "kvikio-cu12"):
        try:
            answer["kvikio"] = answer["kvikio"] or importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        answer["bindings"] = importlib.metadata.version("cuda-bindings")
        from cuda.bindings import cufile

        answer["libcufile"] = cufile.get_version()
    except Exception as error:
        answer["bindings_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    try:
        from cuda.bindings import driver

        call(driver.cuInit(0))
        name = call(driver.cuDeviceGetName(128, call(driver.cuDeviceGet(0))))
        answer["gpu"] = name.decode().split("\0")[0].strip()
    except Exception as error:
        answer["gpu_error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    return answer


def call(result: Any) -> Any:
    """What a function of CUDA's driver returned. Raises ``RuntimeError`` for anything but success."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status.name}")
    return values[0] if values else None


def failure(error: Exception) -> dict[str, Any]:
    """An error of libcufile's, with its number."""
    return {"status": getattr(error, "status", None), "message": str(error)}


def settings(directory: str) -> dict[str, Any]:
    """Open the driver and read back the settings that it took from cufile.json."""
    from cuda.bindings import cufile

    # libcufile writes its log into the current directory.
    os.chdir(directory)
    refused = None
    try:
        cufile.driver_open()
    except Exception as error:  # a ValueError too: the bindings know no negative status, which old releases give
        refused = failure(error)
    values: dict[str, Any] = {}
    for kind, ask in (
        ("BoolConfigParameter", cufile.get_parameter_bool),
        ("SizeTConfigParameter", cufile.get_parameter_size_t),
        ("StringConfigParameter", lambda each: cufile.get_parameter_string(each, 256)),
    ):
        for each in getattr(cufile, kind):
            try:
                values[each.name] = ask(each)
            except Exception:  # noqa: S112  (a parameter that this library has not)
                continue
    return {"refused": refused, "values": values}


class Memory:
    """A buffer on the GPU, as anything that takes CUDA arrays takes it."""

    def __init__(self, size: int) -> None:
        from cuda.bindings import driver

        self.driver, self.size = driver, size
        call(driver.cuInit(0))
        context = call(driver.cuDevicePrimaryCtxRetain(call(driver.cuDeviceGet(0))))
        call(driver.cuCtxSetCurrent(context))
        self.address = int(call(driver.cuMemAlloc(size)))
        self.host = bytearray(os.urandom(min(STEP, size)))
        self.host_address = ctypes.addressof((ctypes.c_char * len(self.host)).from_buffer(self.host))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3}

    def fill(self) -> None:
        """Fill the buffer so that no two pages are alike: each begins with its number."""
        for start in range(0, self.size, STEP):
            length = min(STEP, self.size - start)
            for offset in range(0, length, PAGE):
                self.host[offset + 8 : offset + 16] = ((start + offset) // PAGE).to_bytes(8, "little")
            call(self.driver.cuMemcpyHtoD(self.address + start, self.host_address, length))

    def stamp(self, mark: int) -> None:
        """Each page differs from what an earlier sample left in the file, which could be mistaken for this one's."""
        call(self.driver.cuMemsetD2D32(self.address, PAGE, mark, 1, self.size // PAGE))
        self.settle()

    def clear(self) -> None:
        call(self.driver.cuMemsetD8(self.address, 0, self.size))
        self.settle()

    def settle(self) -> None:
        call(self.driver.cuCtxSynchronize())

    def digest(self) -> str:
        sha256 = hashlib.sha256()
        for start in range(0, self.size, STEP):
            length = min(STEP, self.size - start)
            call(self.driver.cuMemcpyDtoH(self.host_address, self.address + start, length))
            sha256.update(memoryview(self.host)[:length])
        return sha256.hexdigest()


class Mover:
    """One file, one buffer of its size, one way between them."""

    def __init__(self, order: dict[str, Any]) -> None:
        import kvikio
        import kvikio.defaults

        self.path, self.size = order["file"], int(order["io_bytes"])
        direct = order["way"] == "cufile"
        modes = kvikio.CompatMode
        kvikio.defaults.set(
            {
                "compat_mode": modes.OFF if direct else modes.ON,
                "num_threads": order["threads"],
                "task_size": order["task_bytes"],
                "auto_direct_io_read": True,
                "auto_direct_io_write": True,
            }
        )
        self.memory = Memory(self.size)
        self.memory.fill()
        self.file = kvikio.CuFile(self.path, "w+")

    def move(self, order: dict[str, Any]) -> dict[str, Any]:
        """Whole passes over the file until ``seconds`` are over, at least one; or exactly ``loops``."""
        write, seconds, loops = order["direction"] == "write", order.get("seconds"), order.get("loops")
        if write:
            self.memory.stamp(order["stamp"])
        once = self.file.pwrite if write else self.file.pread
        passes: list[float] = []
        start = time.perf_counter()
        while not passes or (len(passes) < loops if loops else time.perf_counter() - start < (seconds or 0.0)):
            began = time.perf_counter()
            moved = once(self.memory).get()
            if moved != self.size:
                raise RuntimeError(f"kvikio moved {moved} of {self.size} bytes")
            passes.append(time.perf_counter() - began)
        ended = time.perf_counter() - start
        if write:
            os.fsync(self.file.fileno())
        durable = time.perf_counter() - start
        return {"bytes": self.size * len(passes), "seconds": ended, "durable_seconds": durable, "passes": passes}

    def clear(self) -> dict[str, Any]:
        self.memory.clear()
        return {}

    def digest(self) -> dict[str, Any]:
        return {"sha256": self.memory.digest()}


def register(path: str) -> dict[str, Any]:
    """Whether cuFile takes a file there at all: kvikio's message hides the number."""
    from cuda.bindings import cufile

    handle = os.open(path, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        description = cufile.Descr()
        description.type = cufile.FileHandleType.OPAQUE_FD
        description.handle.fd = handle
        # The bindings do not clear this pointer, and libcufile follows it.
        description.fs_ops = 0
        cufile.handle_deregister(cufile.handle_register(description.ptr))
    except cufile.cuFileError as error:
        return {"refused": failure(error)}
    finally:
        os.close(handle)
    return {"refused": None}


def count(first: bool) -> dict[str, Any]:
    """cuFile's counters of this process, as the library writes them down."""
    from cuda.bindings import cufile

    if first:
        cufile.set_stats_level(3)
        cufile.stats_start()
    buffer = ctypes.create_string_buffer(STATS_BYTES)
    cufile.get_stats_l3(ctypes.addressof(buffer))
    return {"version": cufile.get_version(), "stats": buffer.raw[:8192].hex()}


ASKED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "probe": lambda order: probe(),
    "settings": lambda order: settings(order["directory"]),
    "register": lambda order: register(order["file"]),
    "count": lambda order: count(order["first"]),
}
"""Orders that need nothing to be open."""


class Orders:
    """Takes the orders, and keeps what is open between them."""

    def __init__(self) -> None:
        self.mover: Mover | None = None

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["do"] in ASKED:
            return ASKED[order["do"]](order)
        if order["do"] == "open":
            self.mover = Mover(order)
            return {}
        if self.mover is None:
            raise ValueError("nothing is open")
        if order["do"] == "move":
            return self.mover.move(order)
        return self.mover.clear() if order["do"] == "clear" else self.mover.digest()


answer = Orders().answer
