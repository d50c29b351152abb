"""Fills tensors on a device from files, with the threads and pinned buffers of the checkpoint reader; a process alone
reads all of them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch

from tunetool.checkpoint.fetch import Fetch, FileRead, Want, plan_reads
from tunetool.checkpoint.raw_bytes import BLOCK, ITEM_SIZES, Plain
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.workers import default_threads, local_ranks
from tunetool.errors import UsageProblem
from tunetool.loading.safetensors_files import AGAIN, Listing, Stored
from tunetool.measure.process_reads import counted_reads
from tunetool.node.units import format_size

BUFFER_BYTES = 4 << 20
"""Bytes of one host buffer. Every thread pins two at a process's first load; with smaller ones the threads wait more
often for the interpreter's lock, and larger ones leave the processor's cache. Where compiled code reads, that has a
ring of its own (``read_loop.RING_BYTES``)."""
_MOST_THREADS = 12
"""More than these read no faster into a GPU on an H200 machine, and take longer to start."""
_FEW, _MOST = 0.01, 0.99
_OVERLAP = 1.1
"""Times the files' bytes that all ranks of a machine together read, at most, past the page cache."""


@dataclass(frozen=True)
class Progress:
    """How far a load is: ``bytes`` of ``total`` are on the device after ``seconds``.

    ``read``: bytes that this process read for it; fewer than ``bytes`` if ranks share the reading, and more where parts
    of tensors are read with what lies between them and with the rest of their blocks. ``from_drives``:
    bytes that the kernel counted meanwhile as fetched from drives for this process, other threads included; None where
    it does not count. ``shared_by``: ranks of which each reads a share and sends it to the others; 1 if this process
    reads everything itself.
    """

    bytes: int
    total: int
    seconds: float
    read: int
    from_drives: int | None
    shared_by: int = 1

    @property
    def bytes_per_second(self) -> float:
        return self.bytes / self.seconds if self.seconds else 0.0

    @property
    def source(self) -> str:
        """Where the bytes came from, for people; empty if nothing says."""
        if self.from_drives is None or not self.read:
            return ""
        share = self.from_drives / self.read
        if share < _FEW:
            return "from memory"
        return "from drives" if share > _MOST else f"{share:.0%} from drives"

    def __str__(self) -> str:
        parts = [f"{format_size(self.bytes)} of {format_size(self.total)}", f"{self.bytes_per_second / 1e9:.3g} GB/s"]
        shared = f"read once by {self.shared_by} ranks" if self.shared_by > 1 else ""
        return ", ".join(part for part in (*parts, self.source, shared) if part)


class Reading(NamedTuple):
    """How files are read: by so many ``threads`` (None: this rank's share of the cores), each with buffers of
    ``buffer_bytes``. ``progress`` is called several times a second and at the end."""

    threads: int | None = None
    buffer_bytes: int = BUFFER_BYTES
    progress: Callable[[Progress], None] | None = None


class Filling:
    """One load of ``listing``: reads, and counts what has come."""

    def __init__(self, listing: Listing, total: int, reading: Reading, *, is_shared: bool = False) -> None:
        """``is_shared``: what this rank reads, no other one reads."""
        inodes = {name: identity.inode for name, identity in listing.files.items()}
        self.files = Files(listing.directory, prefer_cache=True, hint=AGAIN, listed=inodes)
        # With O_DIRECT every rank would read the drives; ranks that load the same files share the page cache instead.
        self.files.direct = self.files.direct and (is_shared or local_ranks() == 1)
        self.threads = reading.threads or loading_threads()
        self.buffer_bytes, self._report = reading.buffer_bytes, reading.progress
        self._before = counted_reads()
        self._began = time.perf_counter()
        self.progress = Progress(0, total, 0.0, 0, None if self._before is None else 0)

    def plan(self, wants: Sequence[Want]) -> list[FileRead]:
        """The reads that fill the targets of ``wants``."""
        return plan_reads(wants, self.files, self.buffer_bytes)

    def fetch(self, device: torch.device) -> Fetch:
        """What carries them out, for targets on ``device``."""
        return Fetch(self.files, device, self.threads, self.buffer_bytes)

    def read(self, wants: Sequence[Want], device: torch.device) -> None:
        """Fill the targets of ``wants`` on ``device``. Raises ``CannotJudge``."""
        come, read = self.progress.bytes, self.progress.read
        reads, fetch, count = self.plan(wants), self.fetch(device), sum(map(asked_of, wants))
        all_of_it = planned(reads)

        def tick(so_far: int) -> None:
            self._now(min(come + so_far * count // all_of_it, self.progress.total), read + so_far)

        fetch.run(reads, tick if self._report else None)
        # What is read around whole tensors is less than a block for each file, and no news.
        read += fetch.read_bytes if any(map(is_part, wants)) else count
        self.progress = replace(self.progress, bytes=come + count, read=read)

    def has_come(self, count: int, read: int) -> None:
        """Count bytes that are on the device, of which this process read ``read``."""
        self._now(self.progress.bytes + count, self.progress.read + read)

    def add(self, count: int, read: int) -> None:
        """As ``has_come``, and report nothing yet."""
        self.progress = replace(self.progress, bytes=self.progress.bytes + count, read=self.progress.read + read)

    def is_shared_by(self, ranks: int) -> None:
        """So many ranks read a share each."""
        self.progress = replace(self.progress, shared_by=ranks)

    def finish(self) -> Progress:
        """The whole load. Every byte must be on the device."""
        self._now(self.progress.total, self.progress.read)
        return self.progress

    def _now(self, count: int, read: int) -> None:
        counted = counted_reads()
        drives = None if self._before is None or counted is None else counted.since(self._before).storage
        seconds = time.perf_counter() - self._began
        self.progress = replace(self.progress, bytes=count, seconds=seconds, read=read, from_drives=drives)
        if self._report:
            self._report(self.progress)


def checked_reading(threads: int | None, buffer_bytes: int, progress: Callable[[Progress], None] | None) -> Reading:
    """How files are read. Raises ``UsageProblem`` for numbers that are impossible."""
    whole = isinstance(buffer_bytes, int) and (threads is None or isinstance(threads, int))
    if not whole or (threads is not None and threads < 1) or buffer_bytes < 16 * BLOCK or buffer_bytes % BLOCK:
        raise UsageProblem(
            f"`threads={threads!r}`, `buffer_bytes={buffer_bytes!r}`: at least one thread, and a multiple of "
            f"{BLOCK} bytes from {16 * BLOCK} on",
            "leave both out",
        )
    return Reading(threads, buffer_bytes, progress)


def loading_threads() -> int:
    """Default number of threads that read: this rank's share of the cores, from 4 to 12."""
    return min(_MOST_THREADS, default_threads())


def size_of(want: Want) -> int:
    """Bytes that are read for it, from the first to the last one."""
    return want.bytes[1] - want.bytes[0]


def planned(reads: Sequence[FileRead]) -> int:
    """Bytes of all reads."""
    return sum(each.stop - each.start for _, each in reads)


def asked_of(want: Want) -> int:
    """Bytes of its elements."""
    return math.prod(want.lengths) * ITEM_SIZES[want.plain.dtype]


def is_part(want: Want) -> bool:
    """Whether it is not the whole tensor."""
    return want.lengths != want.plain.shape


def want(tensor: Stored, target: Any) -> Want:
    """The reading of one whole stored tensor into ``target``, which has its shape."""
    plain = Plain(0, tensor.length, tensor.dtype, tensor.shape)
    return Want(tensor.name, tensor.file, tensor.start, plain, (0,) * len(tensor.shape), tensor.shape, target)


def reads_alone(listing: Listing, wants: Sequence[Want]) -> bool:
    """Whether the ranks of this machine read parts that hardly overlap, if all read as much as this one: then each
    reads past the page cache. Columns do overlap, since what lies between them is read as well."""
    mine = sum(map(size_of, wants))
    return any(map(is_part, wants)) and mine * local_ranks() <= _OVERLAP * listing.bytes


def by_device(wants: Sequence[Want]) -> Mapping[torch.device, Sequence[Want]]:
    """The wants of each device."""
    grouped: dict[torch.device, list[Want]] = {}
    for each in wants:
        grouped.setdefault(each.target.device, []).append(each)
    return grouped


T = TypeVar("T")


class Ranks:
    """This process alone: it reads everything. A context manager of one load."""

    size = 1
    is_first = True
    """Whether this is the one rank that does what need not be done twice."""

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        """Give back what the load took beside its tensors."""

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Do ``work``, on all ranks. Raises on every rank if it raised on one of them."""
        return work()

    def fill(self, filling: Filling, wants: Sequence[Want], device: torch.device) -> None:
        """Fill the targets of ``wants`` on ``device``."""
        filling.read(wants, device)
