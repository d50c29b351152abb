"""One rank's part of a save: its items are laid out over files, then written and synced."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tunetool.checkpoint import space, sums_table
from tunetool.checkpoint.ahead import Ahead, Brought, remember
from tunetool.checkpoint.checksums import SHORTEST_OF_GPU, FileSums, Turns
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.columns import Numbers
from tunetool.checkpoint.direct import Created, DataFile, Target
from tunetool.checkpoint.filling import HOST, Contents, Filling
from tunetool.checkpoint.holders import ByItem
from tunetool.checkpoint.host_buffers import POOL
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.layout import Block
from tunetool.checkpoint.packed import Results
from tunetool.checkpoint.pipeline import Pipeline
from tunetool.checkpoint.rank_layout import Asked, FileTable, Items, RankLayout, layout_for
from tunetool.checkpoint.raw_bytes import BLOCK

if TYPE_CHECKING:
    from tunetool.checkpoint.gpu_sums import GpuSums

_NOTHING = np.zeros(0, np.int64)
_MEMORY_SHARE = 0.9
"""Fraction of the available host memory that a save may use if it copies everything before it writes."""


@dataclass(frozen=True)
class Settings:
    """The settings of ``DirectWriter``."""

    threads: int
    files_per_rank: int
    buffer_bytes: int
    checksums: bool
    gds: bool = False


@dataclass(frozen=True)
class Outcome:
    """What writing a rank's items took; see ``writer.Saved``."""

    results: Results
    bytes: int
    files: int
    threads: int
    host_bytes: int
    direct: bool
    all_at_once: bool
    copy_seconds: float
    gds_bytes: int = 0
    ahead: bool = False


def _size_of_buffers(asked: int, threads: int, total: int) -> int:
    """Bytes of one buffer, ``asked`` at most: less for a state of ``total`` bytes that would not occupy all threads."""
    size = asked
    while size > LARGE and size * threads > total:
        size = size // 2 // BLOCK * BLOCK
    return size


def _number_of_buffers(everything: int, threads: int, size: int, *, pinned: bool, copy_first: bool) -> int:
    """How many buffers of ``size`` bytes a save takes: at least one per thread, so that each thread can take any block.

    ``everything``: how many would hold all that is not written without a copy. ``copy_first``: that many if the memory
    suffices, as an asynchronous save needs them.
    """
    if not everything or not copy_first:
        return 2 * threads if everything else 0
    free_bytes = int(space.host_memory_left() * _MEMORY_SHARE) + POOL.idle_bytes(size, pinned)
    return max(threads, min(everything, max(2 * threads, free_bytes // size)))


class _Sums:
    """The checksums of the items, and the tables of them in the files, whose seals are of the token ``save``. Those of
    GPU memory are begun here, by the GPU, once the events ``after`` have passed; the others are made of filled blocks.
    """

    def __init__(self, layout: RankLayout, contents: Contents, items: Items, save: str, after: Sequence[Any]) -> None:
        self._writes, self._save, count = items.writes, save, len(items.contents)
        tables = self._tables = layout.tables if layout.asked.checksums else []
        runs = self._runs = layout.runs
        self.turns = Turns()
        self.streams: list[Any] = []
        self.files = [FileSums(table.lengths.tolist(), self.turns, table.firsts) for table in tables]
        # Of each item, and of the tables after them, which have no number.
        self._file = np.append(np.full(len(items.contents), -1), np.arange(len(tables)))
        self._number = np.full_like(self._file, -1)
        for file, table in enumerate(tables):
            self._file[table.items] = file
            self._number[table.items] = np.arange(len(table.items))
        self._by_gpu: list[tuple[GpuSums, Numbers]] = []
        by_cpu = self._number >= 0
        if tables and items.gpus:
            by_cpu[self._started(tables, contents, after)] = False
        # A table is late: the sums of its file are made first.
        chosen = np.append(by_cpu, np.zeros(len(layout.constants) + 1, bool))[runs.content]
        self._chosen = np.flatnonzero(chosen | (runs.content >= count))
        self._firsts = runs.of(self._chosen).tolist()

    def _started(self, tables: Sequence[FileTable], contents: Contents, after: Sequence[Any]) -> Numbers:
        """The items whose sums the GPUs make."""
        from tunetool.checkpoint import gpu_sums  # noqa: PLC0415  (a state in host memory needs none of it)

        for event in after:
            # See Pipeline._stream: not on the GPU.
            event.synchronize()
        its = np.concatenate([table.items for table in tables])
        lengths = np.concatenate([table.lengths for table in tables])
        where, addresses = contents.where[its], contents.addresses[its]
        for number, device in enumerate(contents.gpus, 1):
            chosen = np.flatnonzero((where == number) & (lengths >= SHORTEST_OF_GPU))
            try:
                made = gpu_sums.GpuSums(device, addresses[chosen], lengths[chosen]) if chosen.size else None
            except RuntimeError:
                continue  # the CPU then
            if made is not None:
                self.streams.append(made.stream)
                self._by_gpu.append((made, its[chosen]))
        return np.concatenate([_NOTHING, *(chosen for _, chosen in self._by_gpu)])

    def take_from_gpus(self) -> None:
        """Wait for the GPUs' sums, and keep them. By one thread: many would wait for each other."""
        for made, its in self._by_gpu:
            file, number = self._file[its], self._number[its]
            # Tensors that follow each other in a file have sums that follow each other.
            breaks = np.flatnonzero((np.diff(file) != 0) | (np.diff(number) != 1)) + 1
            for first, last in itertools.pairwise([0, *breaks.tolist(), len(its)]):
                self.files[file[first]].put(int(number[first]), made.sums(first, last))

    def complete(self, block: Block, view: memoryview) -> None:
        """Add the bytes of a filled block to the sums that the CPU makes, and put what it has of a table into it.
        Raises ``Stopped``."""
        chosen = self._chosen[self._firsts[block.number] : self._firsts[block.number + 1]]
        if not chosen.size:
            return
        runs = self._runs
        content = runs.content[chosen]
        where = self._file[content], self._number[content], runs.skip[chosen], runs.start[chosen], runs.stop[chosen]
        for file, number, skip, start, stop in zip(*(each.tolist() for each in where), strict=True):
            if number >= 0:
                self.files[file].feed(number, skip, view[start:stop])
            else:
                view[start:stop] = self._table(file)[skip : skip + stop - start]

    def _table(self, file: int) -> bytes:
        table = self._tables[file]
        return sums_table.table(table.rows(self._writes), self.files[file].result(), self._save, table.where)


class Job:
    """Writes the items of one rank to ``directory``; the name of each file is ``names(file index)``.

    ``ahead``: is used if it copies just that. ``copy_first``: use host buffers for all of the data, if the memory
    suffices, so that ``on_copied`` is called before the storage has the data. ``save``: the token of the save.
    ``groups``: who holds the items; each group has files of its own.
    """

    def __init__(
        self,
        directory: Path,
        items: Items,
        settings: Settings,
        names: Callable[[int], str],
        copy_first: bool,
        save: str = "",
        ahead: Ahead | None = None,
        groups: ByItem | None = None,
    ) -> None:
        self.items, self.settings, self.save = items, settings, save
        total = sum(items.lengths)
        space.need(directory, total)
        self.target = Target(directory)
        self.buffer_bytes = _size_of_buffers(settings.buffer_bytes, settings.threads, total)
        asked = Asked(
            settings.files_per_rank,
            self.buffer_bytes,
            [len(content) if isinstance(content, bytes) else content for content in items.contents],
            [] if copy_first else self._zero_copy(),
            settings.checksums,
            groups.numbers if groups else [],
        )
        self.groups = groups
        self.layout = layout_for(asked, items.lengths)
        self.devices = [device for device in items.gpus if device.type == "cuda"]
        self.gpu = min(self.devices, key=str, default=None)
        self.paths = [directory / names(number) for number in range(len(self.layout.sizes))]
        self.created: list[Created] = []
        """The files that this job created. It removes no others."""
        self.copy_first = copy_first
        self.contents = self.layout.contents(items)
        self.brought = Brought.of(self.contents, self.buffer_bytes, self.gpu)
        self.ahead = ahead if ahead and ahead.is_for(self.layout, self.brought) else None
        self.filling = Filling(self.layout.runs, self.contents, ahead=self.ahead is not None)
        straight = [block for block in self.layout.blocks if block.zero_copy and not self.filling.memory(block)]
        self.gds_bytes = sum(block.length for block in straight)

    def _zero_copy(self) -> list[int]:
        """The items whose memory can be written as it is."""
        items = self.items
        large = [number for number, length in enumerate(items.lengths) if length >= LARGE]
        alignment, gds = self.target.memory_alignment, self.settings.gds
        return [
            number
            for number in large
            if (items.where[number] == HOST and items.addresses[number] % alignment == 0)
            or (gds and items.where[number] > 0)
        ]

    def run(self, after: Sequence[Any], on_copied: Callable[[], None]) -> Outcome:
        """Write all items. All files are synced on return; after an error, the files of this job are removed."""
        with torch.cuda.device(self.gpu) if self.gpu else contextlib.nullcontext():
            return self._run(after, on_copied)

    def _run(self, after: Sequence[Any], on_copied: Callable[[], None]) -> Outcome:
        threads = max(1, min(self.settings.threads, len(self.layout.blocks)))
        count = self.layout.buffers if self.ahead else self._number_of_buffers(threads)
        files: list[DataFile] = []
        with without_collections():
            sums = _Sums(self.layout, self.contents, self.items, self.save, after)

        def open_files() -> list[DataFile]:
            for path, size in zip(self.paths, self.layout.sizes, strict=True):
                files.append(DataFile(path, size, self.target, gds=self.gds_bytes > 0))
                self.created.append(files[-1].created)
            sums.take_from_gpus()
            return files

        buffers = self.ahead.take() if self.ahead else POOL.take(count, self.buffer_bytes, self.gpu)
        pipeline = Pipeline(
            open_files,
            self.layout.blocks,
            self.filling,
            buffers,
            sums.complete,
            sums.turns,
            after,
            on_copied,
            sums.streams,
            self.ahead,
        )
        try:
            pipeline.run(threads, self.gpu)
        except BaseException:
            self.remove()
            raise
        finally:
            # Otherwise the next save would use buffers, and numbers of files, that a thread of this one still uses.
            if pipeline.uses_nothing:
                for file in files:
                    file.close()
                POOL.give_back(buffers)
        if not any(block.zero_copy for block in self.layout.blocks):
            remember(self.layout, self.brought)
        return Outcome(
            results=Results(
                self.layout.stored(self.items.writes),
                tuple(path.name for path in self.paths),
                self.items.sums() if self.settings.checksums else None,
                self.groups and tuple(self.groups.ranks[group] for group in self.layout.groups),
            ),
            bytes=sum(self.layout.sizes),
            files=len(files),
            threads=threads,
            host_bytes=count * self.buffer_bytes,
            direct=self.target.direct,
            all_at_once=count >= self.layout.buffers,
            copy_seconds=pipeline.copy_seconds,
            gds_bytes=self.gds_bytes,
            ahead=self.ahead is not None,
        )

    def _number_of_buffers(self, threads: int) -> int:
        everything, pinned = self.layout.buffers, self.gpu is not None
        return _number_of_buffers(everything, threads, self.buffer_bytes, pinned=pinned, copy_first=self.copy_first)

    def remove(self) -> None:
        """Remove the files that this job created, and no others."""
        for file in self.created:
            file.remove()
