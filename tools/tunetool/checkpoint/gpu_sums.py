"""Checksums of GPU memory, made on the GPU: the sums of the blocks of thousands of tensors in a few milliseconds.

The code for the GPU, gpu_sums.ptx, is compiled for it by the driver, which keeps the result; no compiler is needed.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tunetool.checkpoint.checksums import SUM_BYTES, Saved, Turns, Verified, block_bytes, number_of_blocks
from tunetool.checkpoint.host_buffers import as_bytes

if TYPE_CHECKING:
    from tunetool.checkpoint.columns import Numbers

_CODE = Path(__file__).with_name("gpu_sums.ptx")
_THREADS = 128
_THREADS_OF_A_BLOCK = 4
_loading = threading.Lock()


@cache
def _driver() -> Any:
    """NVIDIA's driver; None without it."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        library.cuLaunchKernel.argtypes = [
            ctypes.c_void_p,
            *[ctypes.c_uint] * 7,
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_void_p,
        ]
    except (OSError, AttributeError):
        return None
    return library


@cache
def _function(device: int) -> Any:
    """The code, loaded for a GPU, which must be the current one; None if its driver does not take it."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    driver = _driver()
    if driver is None or driver.cuModuleLoadData(ctypes.byref(module), _CODE.read_bytes() + b"\0"):
        return None
    if driver.cuModuleGetFunction(ctypes.byref(function), module, b"sum_blocks"):
        return None
    return function


class GpuSums:
    """Sums of ranges of one GPU's memory, by address and length, each of at least ``checksums.SHORTEST_OF_GPU`` bytes.

    They are made on ``stream``: until its work is done, the memory must stay as it is.
    """

    def __init__(self, device: torch.device, addresses: Numbers, lengths: Numbers) -> None:
        """Raises ``RuntimeError`` if this GPU or its driver cannot make them, also for want of memory."""
        self.stream: Any = torch.cuda.Stream(device)
        # Lengths repeat.
        distinct, which = np.unique(lengths, return_inverse=True)
        shapes = np.array([(number_of_blocks(each), block_bytes(each)) for each in distinct.tolist()], np.int64)
        counts, sizes = shapes[which.reshape(-1)].T
        self._ends = np.append(0, np.cumsum(counts))
        total = int(self._ends[-1])
        table = np.column_stack([addresses, lengths, self._ends[:-1], sizes])
        with torch.cuda.device(device), torch.cuda.stream(self.stream):
            with _loading:
                function = _function(torch.cuda.current_device())
            if function is None:
                raise RuntimeError("the driver does not take the code")
            # Held until the stream's work is done: the allocator would give the memory to others.
            self._table = torch.from_numpy(table.astype(np.int64)).to(device)
            self._on_gpu = torch.empty(total, dtype=torch.int64, device=device)
            self._on_host = torch.empty(total, dtype=torch.int64, pin_memory=True)
            arguments = (
                ctypes.c_uint64(self._table.data_ptr()),
                ctypes.c_uint32(len(lengths)),
                ctypes.c_uint64(total),
                ctypes.c_uint64(self._on_gpu.data_ptr()),
            )
            pointers = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(each) for each in arguments))
            grid = -(-total * _THREADS_OF_A_BLOCK // _THREADS)
            status = _driver().cuLaunchKernel(
                function, grid, 1, 1, _THREADS, 1, 1, 0, self.stream.cuda_stream, pointers, None
            )
            if status:
                raise RuntimeError(f"cuLaunchKernel failed with {status}")
            self._on_host.copy_(self._on_gpu, non_blocking=True)
            self._done = self.stream.record_event(torch.cuda.Event(blocking=True))

    def sums(self, first: int, last: int) -> bytes:
        """The sums of the blocks of the ranges from ``first`` to the one before ``last``, little-endian; waits for
        them."""
        self._done.synchronize()
        content: bytes = self._on_host.numpy()[self._ends[first] : self._ends[last]].astype("<i8").tobytes()
        return content

    def all(self) -> list[bytes]:
        """The same of each range."""
        content, ends = self.sums(0, len(self._ends) - 1), (SUM_BYTES * self._ends).tolist()
        return [content[start:stop] for start, stop in itertools.pairwise(ends)]


def verify(device: torch.device, tensors: Sequence[tuple[Saved, torch.Tensor]]) -> None:
    """Compare GPU tensors, which are contiguous, with the sums that they were saved with. Raises ``CannotJudge``."""
    try:
        ranges = np.array([(tensor.data_ptr(), saved.length) for saved, tensor in tensors], np.int64)
        made = GpuSums(device, *ranges.T)
    except RuntimeError:
        for saved, tensor in tensors:
            content = as_bytes(tensor.detach()).cpu().numpy()
            Verified(saved, Turns()).feed(0, memoryview(content))
        return
    for (saved, _), sums in zip(tensors, made.all(), strict=True):
        saved.compare_all(sums)
