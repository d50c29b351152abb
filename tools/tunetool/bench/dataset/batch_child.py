"""Reads batches of samples of tokens into a GPU (or into host memory) by one engine, for the benchmark; in a process
that is fresh for each pass.

The orders are those of ``token_child.py``. The same program over a file in memory is its ceiling.
"""

from __future__ import annotations

import hashlib
import os
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.dataset.engines import GPU_DIRECT
from tunetool.bench.dataset.token_child import checked_numbers, counted, draw_numbers
from tunetool.checkpoint.memory_file_system import is_in_memory
from tunetool.loading.gpu_direct import AHEAD, BouncingBytes, GpuDirectDataset

_BATCH_BYTES, _MOST_SAMPLES = 32 << 20, 256
"""A batch has as many samples as fit into so many bytes, and at most so many."""
_DIRECT = "GPUDirect Storage"
_CEILING_SECONDS, _CEILING_BYTES = 0.5, 256 << 20


class Reader(AbstractContextManager["Reader"]):
    """Hands out batches of samples of one file."""

    how: Mapping[str, Any] = {}
    goes_past_the_page_cache = False
    """Whatever the cache holds."""

    def batches(self, order: Iterable[Sequence[int]]) -> Iterator[Any]:
        """A tensor of bytes for each entry, shape (samples, bytes)."""
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give back what is held."""


class ByDataset(Reader):
    """``tunetool.loading.GpuDirectDataset``."""

    def __init__(self, file: str, size: int, order: Mapping[str, Any]) -> None:
        with warnings.catch_warnings():
            # What it says is in the record.
            warnings.simplefilter("ignore", BouncingBytes)
            self._dataset = GpuDirectDataset(
                file, size, device=order["device"], threads=order["threads"], ignore_rest=True
            )
        way = "host memory" if self._dataset.bounce or order["device"] == "cpu" else _DIRECT
        self.goes_past_the_page_cache = self._dataset.engine == "kvikio"
        self.how = {"way": way, "reader": self._dataset.engine, "bounce": self._dataset.bounce or ""}

    def batches(self, order: Iterable[Sequence[int]]) -> Iterator[Any]:
        """See the base."""
        return self._dataset.batches(order)

    def close(self) -> None:
        """See the base."""
        self._dataset.close()


class ByKvikio(Reader):
    """kvikio alone: each sample of a batch by ``pread``, and as many batches ahead."""

    def __init__(self, file: str, size: int, order: Mapping[str, Any]) -> None:
        import kvikio  # noqa: PLC0415  GPU nodes alone have it
        import kvikio.defaults  # noqa: PLC0415

        # Past the page cache only where it is to be cold; kvikio's default is one thread.
        kvikio.defaults.set({"num_threads": order["threads"], "auto_direct_io_read": order["state"] == "cold"})
        self._file, self._size, self._device = kvikio.CuFile(file, "r"), size, order["device"]
        posix = kvikio.defaults.is_compat_mode_preferred()
        self.how = {"way": "host memory" if posix else "cuFile", "kvikio": kvikio.__version__}

    def batches(self, order: Iterable[Sequence[int]]) -> Iterator[Any]:
        """See the base."""
        coming: deque[tuple[Any, list[Any]]] = deque()
        for numbers in order:
            memory = torch.empty((len(numbers), self._size), dtype=torch.uint8, device=self._device)
            futures = [
                self._file.pread(row, self._size, number * self._size)
                for row, number in zip(memory.unbind(0), numbers, strict=True)
            ]
            coming.append((memory, futures))
            if len(coming) > AHEAD:
                yield self._finished(*coming.popleft())
        while coming:
            yield self._finished(*coming.popleft())

    def _finished(self, memory: Any, futures: list[Any]) -> Any:
        if any(each.get() != self._size for each in futures):
            raise OSError("kvikio read a sample in part")
        return memory

    def close(self) -> None:
        """See the base."""
        self._file.close()


def reader(file: str, size: int, order: Mapping[str, Any]) -> Reader:
    """The engine of this order, over ``file``."""
    return (ByDataset if order["engine"] == GPU_DIRECT else ByKvikio)(file, size, order)


def in_batches(numbers: Sequence[int], size: int) -> list[Sequence[int]]:
    """The order of the samples, a batch at a time."""
    count = max(1, min(_MOST_SAMPLES, _BATCH_BYTES // size))
    return [numbers[first : first + count] for first in range(0, len(numbers), count)]


def until(deadline: float, order: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Batches until the time is over, at least one."""
    for number, each in enumerate(order):
        if number and time.perf_counter() > deadline:
            return
        yield each


def hand_out(engine: Reader, order: Sequence[Sequence[int]], seconds: float, device: str) -> int:
    """How many samples were handed out; they are on the device then."""
    done = 0
    # Each batch is let go of before the next is asked for, as in a training loop.
    for batch in engine.batches(until(time.perf_counter() + seconds, order)):
        done += len(batch)
        del batch
    finish(device)
    return done


def finish(device: str) -> None:
    """Wait for the GPU."""
    if device == "cuda":
        torch.cuda.synchronize()


class _Here:
    """The order of this process."""

    order: Mapping[str, Any] = {}
    numbers: Sequence[int] = ()
    engine: Reader


def samples_without_storage(order: Mapping[str, Any]) -> float:
    """Samples per second of the same program over a file in memory."""
    size = order["sample_bytes"]
    count = max(1, min(order["count"], _CEILING_BYTES // size))
    handle = os.memfd_create("tunetool-ceiling")
    try:
        with open(handle, "wb", closefd=False, buffering=0) as stream:
            for _ in range(count):
                stream.write(bytes(size))
        with reader(f"/proc/self/fd/{handle}", size, order) as engine:
            drawn = in_batches([number % count for number in _Here.numbers], size)
            # Buffers are pinned and threads started by then, as in the pass.
            hand_out(engine, drawn[:AHEAD], 0.0, order["device"])
            started = time.perf_counter()
            done = 0
            while time.perf_counter() - started < _CEILING_SECONDS:
                left = _CEILING_SECONDS - (time.perf_counter() - started)
                done += hand_out(engine, drawn, left, order["device"])
            return done / (time.perf_counter() - started)
    finally:
        os.close(handle)


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["device"] == "cuda":
        if not torch.cuda.is_available():
            return {"left_out": "torch sees no GPU"}
        torch.zeros(1, device="cuda")
    # libcufile writes its log into the current directory; that of the run is gone at the end.
    os.chdir(Path(order["file"]).parents[1])
    _Here.order = order
    _Here.numbers = draw_numbers(order["count"], "shuffled", order["seed"])
    _Here.engine = reader(order["file"], order["sample_bytes"], order)
    if order["state"] == "warm" and _Here.engine.goes_past_the_page_cache and not is_in_memory(Path(order["file"])):
        _Here.engine.close()
        return {"left_out": "it reads past the page cache"}
    gpu = torch.cuda.get_device_name() if order["device"] == "cuda" else ""
    facts = {"device": order["device"], "gpu": gpu, **_Here.engine.how}
    return {
        "ceiling": samples_without_storage(order),
        "torch": torch.__version__,
        "facts": {name: value for name, value in facts.items() if value},
    }


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module."""
    order, size = _Here.order, _Here.order["sample_bytes"]
    drawn = in_batches(_Here.numbers, size)
    answered = counted(lambda: hand_out(_Here.engine, drawn, seconds, order["device"]))
    return {**answered, "bytes": answered["samples"] * size}


def check(done: int) -> dict[str, Any]:
    """A sum over the bytes of some of the samples that the pass handed out, read in the same way."""
    numbers, whole = checked_numbers(_Here.numbers[:done]), hashlib.sha256()
    for batch in _Here.engine.batches(in_batches(numbers, _Here.order["sample_bytes"])):
        whole.update(batch.cpu().numpy().tobytes())
    with closing(_Here.engine):
        return {"numbers": numbers, "sha256": whole.hexdigest()}


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return start(order)
    return take_pass(order["seconds"]) if order["do"] == "pass" else check(order["samples"])
