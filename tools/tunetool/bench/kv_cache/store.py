"""Stores of blocks, and what reads and writes them: a program of ``measure/child_server.py``.

``direct`` is one slab with a slot for each block, past the page cache; ``gds`` the same by cuFile, to GPU memory.
``files-direct`` and ``page-cache`` have a file for each block, laid out and named as LMCache's disk backend does;
``lmcache`` is that backend itself, and ``vllm`` the file system's tier of vLLM's own offload. Blocks go to page-locked
memory and, where there is a GPU, on from there to it. Every block that comes is summed, after the clock has stopped.
Standard library, and what an engine itself needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import mmap
import os
import random
import struct
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  (in a session of its own, where no Ctrl-C comes)
from pathlib import Path
from typing import Any

ENGINES = ("direct", "files-direct", "page-cache", "gds", "lmcache", "vllm")
PAGE = 4096
SLAB, FILES = "kv.slab", "blocks"
_STAMP = struct.Struct("<QQ")
_REPEATS = 3

try:
    _sum: Callable[[Any], int] = importlib.import_module("xxhash").xxh3_64_intdigest
except ImportError:  # another Python than tunetool's
    _sum = zlib.crc32


class LeftOutError(Exception):
    """The engine cannot run here. As text: why."""


class Memory:
    """Memory for ``count`` blocks of the host, locked where that is allowed, and of the GPU, if one is to be used."""

    def __init__(self, count: int, block: int, device: str) -> None:
        self._block, self.gpu, self.stream = block, None, None
        pages = mmap.mmap(-1, count * block, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError, AttributeError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        for offset in range(0, len(pages), PAGE):
            pages[offset] = 1
        self.whole = memoryview(pages)
        address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        if device != "cuda":
            is_locked = ctypes.CDLL(None).mlock(ctypes.c_void_p(address), ctypes.c_size_t(len(pages))) == 0
            self.kind = "locked" if is_locked else "not locked"
            return
        self._torch = importlib.import_module("torch")
        self.gpu = self._torch.empty(count * block, dtype=self._torch.uint8, device="cuda")
        self.stream = self._torch.cuda.Stream()
        if int(self._torch.cuda.cudart().cudaHostRegister(address, len(pages), 0)):
            raise OSError("cudaHostRegister does not lock the memory")
        self._host, self.kind = self._torch.frombuffer(self.whole, dtype=self._torch.uint8), "pinned, then GPU"

    def view(self, number: int) -> memoryview:
        """A block of the host's memory."""
        return self.whole[number * self._block : (number + 1) * self._block]

    def on_gpu(self, number: int) -> Any:
        """A block of the GPU's."""
        assert self.gpu is not None  # noqa: S101  (asked for where there is a GPU)
        return self.gpu[number * self._block : (number + 1) * self._block]

    def to_gpu(self, number: int, source: Any = None) -> None:
        """Begin to copy a block to the GPU, if there is one; ``source``: where it is, if not in this memory."""
        if self.gpu is not None:
            with self._torch.cuda.stream(self.stream):
                start = self._host[number * self._block : (number + 1) * self._block] if source is None else source
                self.on_gpu(number).copy_(start, non_blocking=True)

    def clear(self, number: int) -> None:
        """Begin to clear a block of the GPU, if there is one."""
        if self.gpu is not None:
            with self._torch.cuda.stream(self.stream):
                self.on_gpu(number).zero_()

    def settle(self) -> None:
        """Return when all copies have ended."""
        if self.stream is not None:
            self.stream.synchronize()

    def back(self, number: int) -> memoryview:
        """What the GPU has of a block, or the host where there is none."""
        if self.gpu is not None:
            self._host[number * self._block : (number + 1) * self._block].copy_(self.on_gpu(number))
        return self.view(number)


class Store:
    """What all engines share: threads, and which thread does what."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        self._block, self._threads, self._memory = int(order["block"]), int(order["threads"]), memory
        self._pool = ThreadPoolExecutor(self._threads)
        self.facts: dict[str, Any] = {}

    def each(self, items: Sequence[Any], work: Callable[[int, Any], None]) -> None:
        """Do ``work`` for every item and its number, by all threads."""
        left = iter(list(enumerate(items)))  # that of a list may be shared

        def loop() -> None:
            for number, item in left:
                work(number, item)

        for done in [self._pool.submit(loop) for _ in range(min(self._threads, len(items)))]:
            done.result()

    def read_all(self, reads: Sequence[Sequence[int]]) -> None:
        """Bring blocks, each a slot and its block, to memory, by their numbers."""
        self.each(reads, self._read_one)
        self._memory.settle()

    def buffer(self, number: int) -> memoryview:
        """Where the content of a write is put before it begins."""
        return self._memory.view(number)

    def write_all(self, writes: Sequence[Sequence[int]]) -> None:
        """Write the buffers; each write is a slot, its block and the one that goes, -1 for none."""
        self.each(writes, self._write_one)

    def got(self, number: int) -> memoryview:
        """What was read."""
        return self._memory.back(number)

    def done(self) -> None:
        """What was read is not needed any more."""

    def sync(self, writes: Sequence[Sequence[int]]) -> None:
        """Return when what was written is on the drives."""
        raise NotImplementedError

    def _read_one(self, number: int, read: Sequence[int]) -> None:
        self.read(self._memory.view(number), *read)
        self._memory.to_gpu(number)

    def _write_one(self, number: int, write: Sequence[int]) -> None:
        self.write(self._memory.view(number), *write)

    def read(self, memory: memoryview, slot: int, block: int) -> None:
        """One block."""
        raise NotImplementedError

    def write(self, memory: memoryview, slot: int, block: int, evicted: int) -> None:
        """One block."""
        raise NotImplementedError


class Slab(Store):
    """One file, in which block after block has its slot; its space is there from the beginning."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(order, memory)
        self._path = f"{order['directory']}/{SLAB}"
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (os.O_DIRECT if order["direct"] else 0)
        self._file = os.open(self._path, flags, 0o600)
        os.posix_fallocate(self._file, 0, int(order["slots"]) * self._block)

    def read(self, memory: memoryview, slot: int, block: int) -> None:
        _move(os.preadv, self._file, memory, slot * self._block)

    def write(self, memory: memoryview, slot: int, block: int, evicted: int) -> None:
        _move(os.pwritev, self._file, memory, slot * self._block)

    def sync(self, writes: Sequence[Sequence[int]]) -> None:
        os.fsync(self._file)


class CuFile(Slab):
    """The slab by cuFile, between the drives and the GPU."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        if memory.gpu is None:
            raise LeftOutError("it needs a GPU")
        try:
            kvikio = importlib.import_module("kvikio")
        except ImportError:
            raise LeftOutError("not installed: pip install kvikio-cu12") from None
        super().__init__(order, memory)
        with contextlib.suppress(Exception):  # names of settings differ between versions
            kvikio.defaults.set({"num_threads": self._threads})
            self.facts["compat_mode"] = str(kvikio.defaults.get("compat_mode"))
        self._cufile = kvikio.CuFile(self._path, "r+")

    def read_all(self, reads: Sequence[Sequence[int]]) -> None:
        self._wait([(self._cufile.pread, number, read[0]) for number, read in enumerate(reads)])

    def write_all(self, writes: Sequence[Sequence[int]]) -> None:
        self._wait([(self._cufile.pwrite, number, write[0]) for number, write in enumerate(writes)])

    def _wait(self, calls: Sequence[Any]) -> None:
        begun = [call(self._memory.on_gpu(number), self._block, slot * self._block) for call, number, slot in calls]
        if any(each.get() != self._block for each in begun):
            raise OSError("cuFile moved a part of a block")


class Files(Store):
    """A file for each block in one directory, named by what LMCache calls a key."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        super().__init__(order, memory)
        self._directory = f"{order['directory']}/{FILES}"
        Path(self._directory).mkdir()
        self._flags = os.O_CLOEXEC | (os.O_DIRECT if order["direct"] else 0)

    def _path(self, block: int) -> str:
        return f"{self._directory}/kv@1@0@{block:x}@bfloat16.pt"

    def read(self, memory: memoryview, slot: int, block: int) -> None:
        file = os.open(self._path(block), os.O_RDONLY | self._flags)
        try:
            _move(os.preadv, file, memory, 0)
        finally:
            os.close(file)

    def write(self, memory: memoryview, slot: int, block: int, evicted: int) -> None:
        if evicted >= 0:
            os.unlink(self._path(evicted))  # noqa: PTH108  (a path for each of a million)
        file = os.open(self._path(block), os.O_WRONLY | os.O_CREAT | self._flags, 0o600)
        try:
            _move(os.pwritev, file, memory, 0)
        finally:
            os.close(file)

    def sync(self, writes: Sequence[Sequence[int]]) -> None:
        for path in [*(self._path(write[1]) for write in writes), self._directory]:
            with contextlib.suppress(FileNotFoundError):  # evicted already
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
                try:
                    os.fsync(file)
                finally:
                    os.close(file)


class LmCache(Files):
    """LMCache's own disk backend (``LocalDiskBackend``), over the same memory; it is told what to evict."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        try:
            torch, config, keys, cpu, disk, allocators = (
                importlib.import_module(name)
                for name in (
                    "torch",
                    "lmcache.v1.config",
                    "lmcache.utils",
                    "lmcache.v1.storage_backend.local_cpu_backend",
                    "lmcache.v1.storage_backend.local_disk_backend",
                    "lmcache.v1.memory_allocators.tensor_memory_allocator",
                )
            )
        except ImportError as error:
            raise LeftOutError(f"its Python cannot import it ({error}): pip install lmcache") from None
        super().__init__(order, memory)
        settings = config.LMCacheEngineConfig.from_defaults(
            local_cpu=False,
            local_disk=self._directory,
            # More than any disk: LMCache still counts what it was told to remove, and must evict nothing itself.
            max_local_disk_size=2**30,
            extra_config={"use_odirect": False, "disk_io_threads": self._threads},
        )
        self._pooled = allocators.TensorMemoryAllocator(torch.frombuffer(memory.whole, dtype=torch.uint8), PAGE)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._host = cpu.LocalCPUBackend(settings, dst_device="cpu", memory_allocator=self._pooled)
        self._disk = disk.LocalDiskBackend(settings, self._loop, self._host, dst_device="cpu")
        self._type, self._shape = torch.bfloat16, torch.Size([self._block // 2])
        self._key: Callable[[int], Any] = lambda block: keys.CacheEngineKey("kv", 1, 0, block, torch.bfloat16)
        self._objects: list[Any] = []

    def read_all(self, reads: Sequence[Sequence[int]]) -> None:
        self._objects = self._disk.batched_get_blocking([self._key(block) for _, block in reads])
        if any(each is None for each in self._objects):
            raise OSError("LMCache does not find a block that it was given")
        for number, each in enumerate(self._objects):
            self._memory.to_gpu(number, each.raw_data)
        self._memory.settle()

    def got(self, number: int) -> memoryview:
        if self._memory.gpu is not None:
            self._objects[number].raw_data.copy_(self._memory.on_gpu(number))
        return memoryview(self._objects[number].byte_array).cast("B")

    def done(self) -> None:
        for each in self._objects:
            each.ref_count_down()
        self._objects = []

    def buffer(self, number: int) -> memoryview:
        self._objects.append(self._host.allocate(self._shape, self._type, busy_loop=False))
        return memoryview(self._objects[number].byte_array).cast("B")

    def write_all(self, writes: Sequence[Sequence[int]]) -> None:
        left = threading.Semaphore(0)
        for number, (_, block, evicted) in enumerate(writes):
            if evicted >= 0:
                self._disk.remove(self._key(evicted))
            self._disk.submit_put_task(self._key(block), self._objects[number], lambda _: left.release())
        for _ in writes:
            if not left.acquire(timeout=120):
                raise OSError("LMCache did not write a block within 120 s")
        self.done()

    def _path(self, block: int) -> str:
        return str(self._disk._key_to_path(self._key(block)))


class Vllm(Files):
    """vLLM's own offload to a file system (``tiering.fs``), which has a job of one thread for what a request reads or
    writes, and evicts nothing itself."""

    def __init__(self, order: Mapping[str, Any], memory: Memory) -> None:
        try:
            self._io = importlib.import_module("vllm.v1.kv_offload.tiering.fs.io")
        except ImportError as error:
            raise LeftOutError(f"its Python cannot import it ({error}): pip install 'vllm>=0.25'") from None
        super().__init__(order, memory)
        self._is_direct = bool(order["direct"])

    def _path(self, block: int) -> str:
        name = f"{block:016x}"
        return f"{self._directory}/{name[-3:]}/{name[-5:-3]}_g0/{name}.bin"

    def read_all(self, reads: Sequence[Sequence[int]]) -> None:
        self._io.batch_load_block(*self._of([block for _, block in reads]))
        for number in range(len(reads)):
            self._memory.to_gpu(number)
        self._memory.settle()

    def write_all(self, writes: Sequence[Sequence[int]]) -> None:
        for _, _, evicted in writes:
            if evicted >= 0:
                os.unlink(self._path(evicted))  # noqa: PTH108  (as above)
        self._io.batch_store_block(*self._of([block for _, block, _ in writes]))

    def _of(self, blocks: Sequence[int]) -> tuple[list[str], memoryview, list[int], int, bool]:
        starts = [number * self._block for number in range(len(blocks))]
        return [self._path(block) for block in blocks], self._memory.whole, starts, self._block, self._is_direct


_MADE = {"direct": Slab, "files-direct": Files, "page-cache": Files, "gds": CuFile, "lmcache": LmCache, "vllm": Vllm}


def _move(call: Callable[..., int], file: int, memory: memoryview, start: int) -> None:
    done = 0
    while done < len(memory):
        count = call(file, [memory[done:]], start + done)
        if not count:
            raise OSError("a block ends too early")
        done += count


class Replay:
    """A store, the content of its blocks, and the clock."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._block, self._count = int(order["block"]), int(order["memory"])
        self.memory = Memory(self._count, self._block, order["device"])
        self.store: Store = _MADE[order["engine"]](order, self.memory)
        self._content = random.Random(order["seed"]).randbytes(self._block)  # noqa: S311  (contents, no secret)
        self._sums: dict[int, tuple[int, int]] = {}
        """By slot, its block and the sum of that."""

    def write(self, writes: Sequence[Sequence[int]]) -> float:
        """Seconds; making the contents is not in them."""
        seconds = 0.0
        for start in range(0, len(writes), self._count):
            part = writes[start : start + self._count]
            for number, (slot, block, _) in enumerate(part):
                memory = self.store.buffer(number)
                memory[:] = self._content
                for page in range(self._block // PAGE):
                    _STAMP.pack_into(memory, page * PAGE, block, page)
                self._sums[slot] = (block, _sum(memory))
                if isinstance(self.store, CuFile):
                    self.memory.to_gpu(number)
            self.memory.settle()
            began = time.perf_counter()
            self.store.write_all(part)
            seconds += time.perf_counter() - began
        return seconds

    def read(self, reads: Sequence[Sequence[int]]) -> tuple[float, int]:
        """Seconds, and how many blocks are not the wanted ones."""
        began = time.perf_counter()
        self.store.read_all(reads)
        seconds = time.perf_counter() - began
        wrong: list[int] = []

        def look(number: int, read: Sequence[int]) -> None:
            memory = self.store.got(number)
            if self._sums.get(read[0]) != (read[1], _sum(memory)):
                wrong.append(read[1])
            # What is not read the next time must not look as if it were.
            memory[:PAGE] = memory[-PAGE:] = bytes(PAGE)
            self.memory.clear(number)

        self.store.each(reads, look)
        self.memory.settle()
        self.store.done()
        return seconds, len(wrong)

    def steps(self, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Requests, one after the other."""
        reading, writing, wrong = [], 0.0, 0
        for step in steps:
            seconds, bad = self.read(step["reads"]) if step["reads"] else (0.0, 0)
            reading.append(seconds)
            wrong += bad
            writing += self.write(step["writes"])
        self.store.sync([write for step in steps for write in step["writes"]])
        return {"reading": reading, "writing": writing, "wrong": wrong}


def prefill(order: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens per second of all matrix products of a model for ``tokens`` at once: more than any engine reaches."""
    torch = importlib.import_module("torch")
    tokens, seconds = order["tokens"], 0.0
    for rows, columns, count in order["matrices"]:
        given = torch.randn(tokens, columns, dtype=torch.bfloat16, device="cuda")
        weights = torch.randn(columns, rows, dtype=torch.bfloat16, device="cuda")
        given @ weights
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_REPEATS):
            given @ weights
        torch.cuda.synchronize()
        seconds += count * (time.perf_counter() - began) / _REPEATS
    return {"rate": tokens / seconds, "gpu": torch.cuda.get_device_name()}


_opened: list[Replay] = []


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "prefill":
        return prefill(order)
    if order["do"] == "open":
        try:
            _opened.append(Replay(order))
        except LeftOutError as why:
            return {"left_out": str(why)}
        return {"memory": _opened[0].memory.kind, "facts": _opened[0].store.facts}
    (replay,) = _opened
    if order["do"] == "write":
        replay.write(order["writes"])
        replay.store.sync(order["writes"])
        return {}
    if order["do"] == "read":
        done = [replay.read(reads) for reads in order["prefixes"]]
        return {"reading": [seconds for seconds, _ in done], "wrong": sum(wrong for _, wrong in done)}
    return replay.steps(order["steps"])
