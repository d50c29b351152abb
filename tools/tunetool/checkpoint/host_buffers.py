"""Host buffers between tensors and files, and the ways in which bytes get into them, of which ``filling`` chooses.

Buffers are allocated once and kept for the next save, since pinning memory takes longer than writing it: the pool of
this process grows to the needs of its largest save. ``release_buffers`` returns the memory to the system.

Bytes of a GPU are copied by their addresses, for states of thousands of tensors. A copy by torch makes three tensors
first, and with 16 threads each of these steps waits for the interpreter's lock. The driver's own call only queues the
copy, and keeps the lock meanwhile: to get it back could take longer than the call. Compiled code gets it back once for
many copies.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import mmap
import threading
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch

from tunetool.checkpoint.os_errors import SystemRefused
from tunetool.checkpoint.raw_bytes import pages
from tunetool.checkpoint.workers import Workers

_FEWER = "check `ulimit -l` and the available memory; reduce `buffer_bytes` or `threads`"

_MEMMOVE = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_memmove = ctypes.CFUNCTYPE(*_MEMMOVE)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
"""Releases the interpreter's lock meanwhile."""
_memmove_at_once = ctypes.PYFUNCTYPE(*_MEMMOVE)(ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0)
"""Keeps the interpreter's lock: for so few bytes that getting it back from another thread would take longer."""
_AT_ONCE = 64 << 10
"""Bytes; copying them takes a few microseconds."""


def within_host(target: int, source: int, count: int) -> None:
    """Copy bytes from one address of the host's memory to another."""
    (_memmove_at_once if count <= _AT_ONCE else _memmove)(target, source, count)


def use_gpu(gpu: torch.device | None) -> None:
    """Set the current GPU of a new thread, which would otherwise use the first GPU and take memory of other ranks."""
    if gpu is not None:
        torch.cuda.set_device(gpu)


class Buffer:
    """A host buffer of ``size`` bytes, page-aligned; ``tensor`` (uint8) and ``view`` show the same memory."""

    def __init__(self, size: int, pinned: bool) -> None:
        try:
            self.memory = pages(size)
        except OSError as error:
            message = f"a host buffer of {size} bytes: {error.strerror}"
            raise SystemRefused.with_number(error.errno, message, _FEWER) from error
        self.size = size
        self.pinned = pinned
        if hasattr(self.memory, "madvise") and hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE)
        self.tensor = torch.frombuffer(self.memory, dtype=torch.uint8)
        self.view = memoryview(self.memory)
        self.address = int(self.tensor.data_ptr())
        if pinned:
            # Touch the pages here first: the driver would do it one page at a time.
            ctypes.memset(self.address, 0, size)
            status = int(torch.cuda.cudart().cudaHostRegister(self.address, size, 1))
            if status:
                raise SystemRefused(
                    f"`cudaHostRegister` of {size} bytes failed with CUDA error {status}",
                    _FEWER,
                )

    def free(self) -> None:
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.pinned = False


def _add_new(count: int, size: int, gpu: torch.device | None, buffers: list[Buffer]) -> None:
    """Add ``count`` new buffers to ``buffers``; several threads allocate them. Raises the first error of any thread
    after all threads have ended; what they made until then is in ``buffers``.

    Not with an executor: an async save may begin while the interpreter ends, which waits for the save, but from then on
    executors take no work.
    """
    number_of_threads = min(8, count)
    errors: list[BaseException] = []

    def add(number: int) -> None:
        try:
            use_gpu(gpu)
            for _ in range(number, count, number_of_threads):
                if errors:
                    return
                buffers.append(Buffer(size, pinned=gpu is not None))
        except BaseException as error:
            errors.append(error)

    workers = Workers([functools.partial(add, number) for number in range(number_of_threads)], "tunetool-pin")
    try:
        workers.start()
        workers.wait()
    except BaseException as error:
        errors.append(error)
        workers.wait()
    if errors:
        raise errors[0]


class Pool:
    """Idle buffers of this process, by size and whether they are pinned."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, bool], list[Buffer]] = {}
        self._lock = threading.Lock()

    def idle_bytes(self, size: int, pinned: bool) -> int:
        with self._lock:
            return size * len(self._idle.get((size, pinned), ()))

    def take(self, count: int, size: int, gpu: torch.device | None) -> list[Buffer]:
        """``count`` buffers of ``size`` bytes, pinned if ``gpu`` is given. Several threads allocate the missing
        ones."""
        pinned = gpu is not None
        with self._lock:
            idle = self._idle.setdefault((size, pinned), [])
            buffers = [idle.pop() for _ in range(min(count, len(idle)))]
        try:
            _add_new(count - len(buffers), size, gpu, buffers)
        except BaseException:
            # Pinned memory that nobody holds any more would be unmapped while the driver still knows it.
            self.give_back(buffers)
            raise
        return buffers

    def take_idle(self, count: int, size: int, *, pinned: bool) -> list[Buffer]:
        """``count`` idle buffers of ``size`` bytes; none if there are fewer."""
        with self._lock:
            idle = self._idle.get((size, pinned), [])
            return [idle.pop() for _ in range(count)] if len(idle) >= count else []

    def one(self, size: int, pinned: bool) -> Buffer:
        """One buffer, allocated by this thread if none is idle; a pinned one, under its current GPU."""
        with self._lock:
            idle = self._idle.get((size, pinned))
            if idle:
                return idle.pop()
        return Buffer(size, pinned)

    def give_back(self, buffers: list[Buffer]) -> None:
        with self._lock:
            for buffer in buffers:
                self._idle.setdefault((buffer.size, buffer.pinned), []).append(buffer)

    def release(self) -> None:
        """Return the idle buffers to the system."""
        with self._lock:
            for buffers in self._idle.values():
                for buffer in buffers:
                    buffer.free()
            self._idle.clear()


POOL = Pool()


def release_buffers() -> None:
    """Return the host buffers that saves and loads have kept to the system."""
    POOL.release()


dispatch_keys: Callable[[torch.Tensor], Any] | None = getattr(torch._C, "_dispatch_keys", None)
_plain_kinds: dict[int, bool] = {}
"""By the dispatch keys of a ``torch.Tensor``, which say all that ``_is_plain_kind`` asks for."""


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor consists of nothing but elements in its own memory. Other tensors are saved by ``torch.save``.

    Raises ``ValueError`` if the memory does not hold all elements (FSDP frees the memory of parameters).
    """
    if dispatch_keys is None or type(tensor) is not torch.Tensor:
        plain = _is_plain_kind(tensor)
    else:
        keys = dispatch_keys(tensor).raw_repr()
        known = _plain_kinds.get(keys)
        plain = _plain_kinds.setdefault(keys, _is_plain_kind(tensor)) if known is None else known
    if not plain:
        return False
    count = tensor.numel()
    if not count:
        return True
    storage = tensor.untyped_storage()
    last = tensor.storage_offset() + (
        count - 1
        if tensor.is_contiguous()
        else sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    )
    needed, held = (last + 1) * tensor.element_size(), storage.nbytes()
    if held < needed or not storage.data_ptr():
        raise ValueError(f"its elements take {needed} bytes, and its memory holds {held}")
    return True


def _is_plain_kind(tensor: torch.Tensor) -> bool:
    return not (
        tensor.layout != torch.strided
        or tensor.is_quantized
        or tensor.is_nested
        or tensor.device.type == "meta"
        # Such a class manages its elements itself: quantized, fake, a wrapper around other tensors ...
        or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
        or tensor._is_zerotensor()
        or torch._is_functional_tensor(tensor)
    )


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor as uint8, shape (bytes,), not copied; any dtype, 0-d and empty ones too."""
    count = tensor.numel() * tensor.element_size()
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size(), (count,), (1,))


def is_flat(tensor: torch.Tensor) -> bool:
    """Whether the memory holds exactly the elements in C order."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def views(tensor: torch.Tensor, limit: int) -> Iterator[torch.Tensor]:
    """Views that together hold the elements of the tensor in C order. A tensor whose memory has another order is cut
    into views of about ``limit`` bytes, so that reordering needs little memory."""
    size = tensor.numel() * tensor.element_size()
    if is_flat(tensor) or size <= limit or tensor.dim() == 0:
        yield tensor
        return
    row = size // tensor.shape[0]
    if row > limit:
        for part in tensor:
            yield from views(part, limit)
    else:
        yield from tensor.split(limit // row)


class Source:
    """The raw bytes, in C order, of a plain tensor that torch must copy: it has another order, or no address here."""

    __slots__ = ("_parts", "_tensor", "device")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self.device = tensor, tensor.device
        self._parts: list[tuple[int, torch.Tensor]] = []
        """Views in the order of their elements, and where the bytes of each begin."""

    def copy(self, start: int, count: int, buffer: Buffer, at: int) -> None:
        """Copy ``count`` bytes from ``start`` to the offset ``at`` of the buffer; from a GPU, on the current stream."""
        for begin, view in self._in_parts(buffer.size):
            first, last = max(start, begin), min(start + count, begin + view.numel() * view.element_size())
            if first >= last:
                continue
            ordered = view if is_flat(view) else view.resolve_conj().resolve_neg().contiguous()
            raw, place = as_bytes(ordered)[first - begin : last - begin], at + first - start
            if raw.is_cpu:
                _memmove(buffer.address + place, raw.data_ptr(), len(raw))
            else:
                buffer.tensor[place : place + len(raw)].copy_(raw, non_blocking=buffer.pinned)

    def _in_parts(self, limit: int) -> list[tuple[int, torch.Tensor]]:
        parts = self._parts
        if not parts:
            each = list(views(self._tensor, limit))
            ends = itertools.accumulate(view.numel() * view.element_size() for view in each)
            parts = self._parts = [*zip((0, *ends), each, strict=False)]
        return parts


_Function = Callable[[int, int, int, int], int]


@cache
def _driver() -> tuple[_Function, _Function, _Function] | None:
    """``cuMemcpyDtoHAsync``, ``cuMemcpyHtoDAsync`` and ``cuMemcpyDtoDAsync``; None without NVIDIA's driver."""
    try:
        library = ctypes.PyDLL("libcuda.so.1")
        found: list[Any] = [library.cuMemcpyDtoHAsync_v2, library.cuMemcpyHtoDAsync_v2, library.cuMemcpyDtoDAsync_v2]
    except (OSError, AttributeError):
        return None
    for function in found:
        function.restype = ctypes.c_int
        function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    return found[0], found[1], found[2]


def to_host(address: int, gpu_address: int, count: int, stream: int) -> bool:
    """Start a copy of ``count`` bytes to pinned memory on the CUDA ``stream``, of the device that the thread uses.

    False if nothing was started: torch must copy then, and raises the error if there is one.
    """
    driver = _driver()
    return driver is not None and driver[0](address, gpu_address, count, stream) == 0


def to_gpu(gpu_address: int, address: int, count: int, stream: int) -> bool:
    """As ``to_host``, from pinned memory."""
    driver = _driver()
    return driver is not None and driver[1](gpu_address, address, count, stream) == 0


def within_gpu(target: int, source: int, count: int, stream: int) -> bool:
    """As ``to_host``, from one address of the GPU to another."""
    driver = _driver()
    return driver is not None and driver[2](target, source, count, stream) == 0
