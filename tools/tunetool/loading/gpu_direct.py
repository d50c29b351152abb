"""``GpuDirectDataset``: samples of one size from files straight into the memory of a GPU, for torch."""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import Dataset, get_worker_info

from tunetool.checkpoint.raw_bytes import BLOCK
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.cufile_reads import CuFileJob, CuFileReads, NoKvikio
from tunetool.loading.device_memory import device_of, free_memory, named_refusal
from tunetool.loading.fill import BUFFER_BYTES, checked_reading, loading_threads
from tunetool.loading.sample_files import SampleFiles
from tunetool.loading.standing_reads import Job, StandingReads
from tunetool.measure.gds.counters import Moved
from tunetool.node.units import format_size

Engine = Literal["auto", "threads", "kvikio"]
_ENGINES = ("auto", "threads", "kvikio")
_SHARE = 4
"""A quarter of the device's free memory is the default for ``most_bytes``."""
_UNKNOWN_FREE = 8 << 30
"""Assumed bytes of free memory where the system does not say."""
_PATIENCE = 10.0
AHEAD = 2
"""Batches that ``batches`` reads ahead: one is read while the next is planned."""


class BouncingBytes(UserWarning):
    """Bytes for the GPU go through the host's memory. The text says why, in one line."""


@dataclass(frozen=True)
class Transfers:
    """What a dataset has read so far.

    ``cufile``: what cuFile was asked for and what it counted; None where it has no part in it or does not count.
    ``waited_seconds``: for how long reading waited because ``most_bytes`` of batches were held (back-pressure).
    """

    samples: int
    bytes: int
    batches: int
    waited_seconds: float
    cufile: Moved | None


class Rows(list[Any]):
    """The samples of a batch, each a view; ``whole`` is the batch in one tensor, shape (samples, elements)."""

    def __init__(self, whole: Any) -> None:
        super().__init__(whole.unbind(0))
        self.whole = whole


class GpuDirectDataset(Dataset):  # type: ignore[misc]  # mypy does not follow torch
    """A map-style dataset of the samples in ``files``, which are of ``sample_bytes`` bytes each, one after another.

    A sample is a tensor of ``dtype`` (None: uint8) with ``sample_bytes / itemsize`` elements on ``device`` (``cuda``,
    ``cuda:1``, ``cpu``). ``files``: a path or several; ``ignore_rest`` leaves the end of a file out that is no whole
    sample. ``engine``: ``kvikio`` reads by kvikio, by cuFile where its counters prove that no byte goes through the
    host's memory, else with the warning ``BouncingBytes`` that says why; ``threads`` by threads with O_DIRECT, for a
    GPU through a ring of pinned buffers of ``buffer_bytes``, two for each of ``threads`` (None: this process's share of
    the cores, 4 to 12); ``auto``: by kvikio for a GPU where it is installed.

    Each batch has memory of its own, which is not used again while anything refers to it: a tensor, a view, a numpy
    array, a DLPack capsule, or work that is queued on the CUDA stream which was current when the batch was handed out.
    Batches that are read or referred to take ``most_bytes`` at most (None: a quarter of the device's free memory);
    reading then waits for up to ``patience`` seconds until some are let go of.

    A DataLoader needs ``num_workers=0`` for a GPU; ``collate_fn=dataset.collate`` hands the batch out without a copy.
    ``batches`` reads ahead, which a DataLoader without workers does not. One thread at a time may use a dataset.

    Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` where a file cannot be read, was cut short, or the memory
    does not suffice; ``IndexError`` for a sample that is not there.
    """

    def __init__(
        self,
        files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        sample_bytes: int,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cuda",
        engine: Engine = "auto",
        threads: int | None = None,
        most_bytes: int | None = None,
        ignore_rest: bool = False,
        buffer_bytes: int = BUFFER_BYTES,
        patience: float = _PATIENCE,
    ) -> None:
        refuse_worker(str(device))
        self.device = device_of(device)
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UsageProblem(f"`dtype={dtype!r}` is not a dtype of torch", "such as `torch.uint16`")
        self.dtype = dtype or torch.uint8
        sample_bytes = _whole(sample_bytes, "sample_bytes")
        threads = None if threads is None else _whole(threads, "threads")
        most_bytes = None if most_bytes is None else _whole(most_bytes, "most_bytes")
        buffer_bytes = _whole(buffer_bytes, "buffer_bytes")
        if not patience >= 0:  # NaN is not either
            raise UsageProblem(f"`patience={patience}`: at least 0 seconds", "leave it out")
        paths = [files] if isinstance(files, str | os.PathLike) else list(files)
        self.samples = SampleFiles(paths, sample_bytes, ignore_rest=ignore_rest)
        if sample_bytes % self.dtype.itemsize:
            raise UsageProblem(
                f"`sample_bytes={sample_bytes}` is no multiple of the {self.dtype.itemsize} bytes of `{self.dtype}`",
                "check the size of a sample and its dtype",
            )
        if engine not in _ENGINES:
            raise UsageProblem(f"`engine={engine!r}` is not an engine", f"take one of {', '.join(_ENGINES)}")
        self.threads = checked_reading(threads, buffer_bytes, None).threads or loading_threads()
        if most_bytes is not None and most_bytes < 1:
            raise UsageProblem(f"`most_bytes={most_bytes}`: at least the bytes of a batch", "leave it out")
        self._engine, self._buffer_bytes, self._patience = engine, buffer_bytes, patience
        self._most_bytes = most_bytes
        self.bounce: str | None = None
        """Why bytes go through the host's memory; None where they do not, for ``cpu`` and for ``engine='threads'``."""
        self._start()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> torch.Tensor:
        return self.read([number])[0]

    def __getitems__(self, numbers: Sequence[int]) -> Rows:
        """These samples, in this order. torch's DataLoader asks for whole batches by this name."""
        return Rows(self.read(numbers))

    def read(self, numbers: Sequence[int]) -> torch.Tensor:
        """These samples in one tensor, shape (samples, elements)."""
        return self._taken(self._begin(numbers))

    def batches(self, order: Iterable[Sequence[int]], ahead: int = AHEAD) -> Iterator[torch.Tensor]:
        """A tensor, shape (samples, elements), for each entry of ``order``, which is a list of numbers (any
        ``BatchSampler`` is such an order). ``ahead`` more batches are read meanwhile, fewer where ``most_bytes`` has no
        room for them."""
        if _whole(ahead, "ahead") < 0:
            raise UsageProblem(f"`ahead={ahead}`: at least 0 batches", "leave it out")
        coming: deque[tuple[int, Job | CuFileJob]] = deque()
        try:
            for numbers in order:
                # A batch that was read ahead goes out before reading waits for memory.
                while coming and not self._held.has_room(self._room(len(numbers))):
                    yield self._taken(coming.popleft())
                coming.append(self._begin(numbers))
                if len(coming) > ahead:
                    yield self._taken(coming.popleft())
            while coming:
                yield self._taken(coming.popleft())
        finally:
            for _, job in coming:
                job.settle()

    @staticmethod
    def collate(rows: Rows) -> torch.Tensor:
        """For ``collate_fn`` of a DataLoader: the batch as it was read, not copied."""
        return rows.whole

    @property
    def transfers(self) -> Transfers:
        """What was read so far."""
        cufile = self._reads.moved() if isinstance(self._reads, CuFileReads) and self._reads.by_cufile else None
        size = self.samples.sample_bytes
        return Transfers(self._count, self._count * size, self._batches, self._held.waited_seconds, cufile)

    @property
    def engine(self) -> Engine:
        """The engine in use: ``threads`` or ``kvikio``."""
        return "kvikio" if isinstance(self._reads, CuFileReads) else "threads"

    def close(self) -> None:
        """End the threads and close the files. Batches that were handed out stay. A closed dataset reads no more."""
        if self._pid == os.getpid() and self._end.detach() is not None:
            try:
                if isinstance(self._reads, CuFileReads) and self.bounce is None:
                    self._warn(self._reads.bounced())
            finally:
                self._reads.close()

    def __enter__(self) -> GpuDirectDataset:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> Mapping[str, Any]:
        """Without threads, files and memory, which no other process can use."""
        kept = {**self.__dict__}
        for name in ("_reads", "_held", "_end", "_pid"):
            kept.pop(name, None)
        return kept

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state)
        refuse_worker(self.device.type)
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._count = self._batches = 0
        most = self._most_bytes or (free_memory(self.device) or _UNKNOWN_FREE) // _SHARE
        self._held = HeldBatches(most, self._patience)
        self._reads = self._open_reads()
        self._end = weakref.finalize(self, _end_here, self._pid, self._reads)

    def _open_reads(self) -> StandingReads | CuFileReads:
        if self.device.type == "cpu" and self._engine == "kvikio":
            raise UsageProblem("`engine='kvikio'` reads into a GPU, not to `cpu`", "leave `engine` out")
        if self.device.type == "cpu" or self._engine == "threads":
            return self._threads()
        reads, why = by_kvikio(self.samples, self.device, self.threads, is_needed=self._engine == "kvikio")
        try:
            self._warn(why)
        except BouncingBytes:
            # Whoever made an error of the warning gets kvikio's settings back.
            if reads is not None:
                reads.close()
            raise
        return reads or self._threads()

    def _threads(self) -> StandingReads:
        return StandingReads(self.samples, self.device, self.threads, self._buffer_bytes)

    def _warn(self, why: str | None) -> None:
        if why is None:
            return
        self.bounce = why
        warnings.warn(
            f"bytes for `{self.device}` go through the host's memory: {why}; see `tunetool inspect --gds`",
            BouncingBytes,
            stacklevel=2,
        )

    def _room(self, count: int) -> int:
        """Bytes that a batch of ``count`` samples takes."""
        # Whole blocks of a drive go to page-aligned memory of the host without a copy.
        return count * self.samples.sample_bytes + (BLOCK if self.device.type == "cpu" else 0)

    def _begin(self, numbers: Sequence[int]) -> tuple[int, Job | CuFileJob]:
        refuse_worker(self.device.type)
        if not self._end.alive:
            raise UsageProblem("the dataset is closed", "read before `close`, or make another one")
        if self._pid != os.getpid():
            # A worker of a DataLoader on the CPU: threads do not come along with a fork.
            self._start()
        if not len(numbers):
            raise UsageProblem("a batch of no samples", "give the number of at least one")
        rows = [self.samples.where(_whole(number, "number")) for number in numbers]
        room = self._room(len(rows))
        self._held.wait_for_room(room)
        with named_refusal(self.device, room, f"a batch of {len(rows)} samples"), self._on_stream():
            memory = torch.empty(room, dtype=torch.uint8, device=self.device)
        if self.device.type == "cpu":
            first = -memory.data_ptr() % BLOCK
            memory = memory[first : first + len(rows) * self.samples.sample_bytes]
        self._held.add(memory)
        return len(rows), self._reads.submit(memory, rows)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        """Memory of a batch belongs to a stream of the reads: torch hands it out again in that stream's order, and not
        before the streams that used the batch are through with it."""
        return torch.cuda.stream(self._reads.stream) if self._reads.stream is not None else contextlib.nullcontext()

    def _taken(self, begun: tuple[int, Job | CuFileJob]) -> torch.Tensor:
        count, job = begun
        job.wait()
        self._count += count
        self._batches += 1
        return job.memory.view(self.dtype).view(count, -1)


def _whole(number: Any, name: str) -> int:
    """The number, of whatever type it is. Raises ``UsageProblem`` for one that is no whole number."""
    try:
        return operator.index(number)
    except TypeError:
        raise UsageProblem(f"`{name}={number!r}` is no whole number", "give one") from None


def by_kvikio(
    samples: SampleFiles, device: torch.device, threads: int, *, is_needed: bool
) -> tuple[CuFileReads | None, str | None]:
    """Reads by kvikio, None where it is not there, and why bytes go through the host's memory.

    Raises ``UsageProblem`` where kvikio ``is_needed`` and not there.
    """
    try:
        reads = CuFileReads(samples, device, threads)
    except NoKvikio as error:
        from tunetool.origin import install_hint  # noqa: PLC0415  few need the hint

        if is_needed:
            raise UsageProblem(f"`engine='kvikio'`: {error}", f"run {install_hint('gds')}") from None
        return None, f"{error}, which {install_hint('gds')} installs"
    return reads, reads.bounce


def _end_here(process: int, reads: StandingReads | CuFileReads) -> None:
    """End the threads, where they are: a fork has the object alone."""
    if os.getpid() == process:
        reads.end()


def refuse_worker(device: str, worker: Callable[[], Any] = get_worker_info) -> None:
    """Raises ``UsageProblem`` in a DataLoader's worker and in a fork of a process that uses CUDA, where ``device`` is
    a GPU: its GPU memory is not the trainer's, and CUDA does not survive a fork."""
    if device.partition(":")[0] != "cuda":
        return
    info = worker()
    if info is not None or torch.cuda._is_in_bad_fork():
        where = f"a DataLoader with num_workers={info.num_workers}" if info is not None else "a process that was forked"
        raise UsageProblem(
            f"`GpuDirectDataset` on `cuda` in {where}: its GPU memory is not the trainer's, so batches would be copied "
            "through the host's memory, and CUDA does not survive a fork",
            "use num_workers=0, and `dataset.batches` to read ahead",
        )


_LOOK_SECONDS = 0.001


class HeldBatches:
    """The bytes of batches that are being read, wait, or are referred to: at most ``most_bytes``.

    A batch counts until nothing refers to its memory: no tensor, view, numpy array or DLPack capsule.
    """

    def __init__(self, most_bytes: int, patience: float) -> None:
        self.most_bytes, self._patience = most_bytes, patience
        self.waited_seconds = 0.0
        """For how long reading has waited, in all, because batches were held."""
        self._batches: list[tuple[StorageWeakRef, int]] = []

    def has_room(self, count: int) -> bool:
        """Whether ``count`` more bytes fit now."""
        self._batches = [each for each in self._batches if not each[0].expired()]
        return sum(size for _, size in self._batches) + count <= self.most_bytes

    def wait_for_room(self, count: int) -> None:
        """Wait until ``count`` more bytes fit. Raises ``UsageProblem`` where they never do, and ``CannotJudge`` where
        batches are held for too long."""
        if count > self.most_bytes:
            raise UsageProblem(
                f"a batch of {format_size(count)} is larger than `most_bytes` ({format_size(self.most_bytes)})",
                "take fewer samples at a time, or give `most_bytes` more",
            )
        if self.has_room(count):
            return
        began = time.monotonic()
        # Batches in a circle of references go with the next collection alone.
        gc.collect()
        while not self.has_room(count):
            if time.monotonic() - began > self._patience:
                self.waited_seconds += time.monotonic() - began
                raise self._too_many(count)
            time.sleep(_LOOK_SECONDS)
        self.waited_seconds += time.monotonic() - began

    def add(self, memory: Any) -> None:
        """Count the storage of this tensor from now on."""
        storage = memory.untyped_storage()
        self._batches.append((StorageWeakRef(storage), storage.nbytes()))

    def _too_many(self, count: int) -> CannotJudge:
        held = sum(size for _, size in self._batches)
        return CannotJudge(
            f"batches that something still refers to take {format_size(held)} ({len(self._batches)} of them), and "
            f"`most_bytes` ({format_size(self.most_bytes)}) leaves no room for {format_size(count)} more after "
            f"{self._patience:g} s",
            "let go of old batches (a view of one sample keeps its whole batch: `clone()` it), or give `most_bytes` "
            "more",
        )
