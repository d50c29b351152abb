"""One rank's part of a save: its items are laid out over files, then written and synced."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from tunetool.checkpoint import space, sums_table
from tunetool.checkpoint.checksums import SHORTEST_OF_GPU, FileSums, Turns
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.direct import Created, DataFile, Target
from tunetool.checkpoint.host_buffers import POOL, Source
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.layout import Block
from tunetool.checkpoint.packed import Results
from tunetool.checkpoint.pipeline import Pipeline
from tunetool.checkpoint.rank_layout import Asked, FileTable, Item, layout_for, sources_of, sums_of

if TYPE_CHECKING:
    from tunetool.checkpoint.gpu_sums import GpuSums

FILE_BYTES = 32 << 20
"""Bytes. A small state is written to fewer files, each of at least this size, since each file costs an fsync."""
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


def _zero_copy(source: Source, alignment: int, gds: bool) -> bool:
    """Whether the tensor's memory can be written as it is."""
    if source.address is not None:
        return source.address % alignment == 0
    return gds and source.gpu_address is not None


def _from_gpu(block: Block, contents: Sequence[Any]) -> bool:
    return block.zero_copy and contents[block.pieces[0].part.content].gpu_address is not None


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


def _size_of_buffers(asked: int, threads: int, total: int) -> int:
    """Bytes of one buffer, ``asked`` at most: less for a state of ``total`` bytes that would not occupy all threads."""
    size = asked
    while size > LARGE and size * threads > total:
        size //= 2
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
    """The checksums of the items, by the tables of their files. Those of GPU memory are begun here, by the GPU, once
    the events ``after`` have passed.

    ``by_cpu``: by item, the sums of its file, which the pipeline makes for it, and its number there.
    """

    def __init__(
        self,
        tables: Sequence[FileTable],
        sources: Sequence[Sequence[Source]],
        after: Sequence[Any],
    ) -> None:
        self.turns = Turns()
        self.by_cpu: dict[int, tuple[FileSums, int]] = {}
        self.streams: list[Any] = []
        self.files = [FileSums(table.lengths, self.turns) for table in tables]
        self._by_gpu: list[tuple[GpuSums, Sequence[tuple[FileSums, int]]]] = []
        on_gpu: dict[Any, list[int]] = {}
        for sums, table in zip(self.files, tables, strict=True):
            for number, (item, length) in enumerate(zip(table.items, table.lengths, strict=True)):
                self.by_cpu[item] = sums, number
                source = sources[item]
                if length >= SHORTEST_OF_GPU and len(source) == 1 and source[0].gpu_address is not None:
                    on_gpu.setdefault(source[0].device, []).append(item)
        if on_gpu:
            self._start(on_gpu, sources, after)

    def _start(
        self, on_gpu: Mapping[Any, Sequence[int]], sources: Sequence[Sequence[Source]], after: Sequence[Any]
    ) -> None:
        from tunetool.checkpoint import gpu_sums  # noqa: PLC0415  (a state in host memory needs none of it)

        for event in after:
            # See Pipeline._stream: not on the GPU.
            event.synchronize()
        for device, items in on_gpu.items():
            try:
                made = gpu_sums.GpuSums(
                    device, [(sources[item][0].gpu_address or 0, sources[item][0].bytes) for item in items]
                )
            except RuntimeError:
                continue  # the CPU then
            self.streams.append(made.stream)
            self._by_gpu.append((made, [self.by_cpu.pop(item) for item in items]))

    def take_from_gpus(self) -> None:
        """Wait for the GPUs' sums, and keep them. By one thread: many would wait for each other."""
        for made, where in self._by_gpu:
            for (sums, number), of_tensor in zip(where, made.all(), strict=True):
                sums.put(number, of_tensor)


class Job:
    """Writes the items of one rank to ``directory``; the name of each file is ``names(file index)``.

    ``copy_first``: use host buffers for all of the data, if the memory suffices, so that ``on_copied`` is called before
    the storage has the data. ``writes``: what the items are of, where they are a plan that may come again. ``save``:
    the token of the save.
    """

    def __init__(
        self,
        directory: Path,
        items: Sequence[Item],
        settings: Settings,
        names: Callable[[int], str],
        copy_first: bool,
        writes: Sequence[WriteItem] | None = None,
        save: str = "",
    ) -> None:
        self.items, self.settings, self.save = items, settings, save
        self.writes = [item.write for item in items] if writes is None else writes
        total = sum(item.length for item in items)
        space.need(directory, total)
        self.target = Target(directory)
        self.buffer_bytes = _size_of_buffers(settings.buffer_bytes, settings.threads, total)
        files = max(1, min(settings.files_per_rank, -(-total // FILE_BYTES)))
        sources = sources_of(items, self.buffer_bytes)
        alignment, gds = self.target.memory_alignment, settings.gds
        asked = Asked(
            files,
            self.buffer_bytes,
            [len(item.content) if isinstance(item.content, bytes) else item.content for item in items],
            [
                [
                    (source.bytes, not copy_first and source.bytes >= LARGE and _zero_copy(source, alignment, gds))
                    for source in of_item
                ]
                for of_item in sources
            ],
            settings.checksums,
        )
        self.layout = layout_for(asked)
        self.sources = sources
        self.devices = {item.source.tensor.device for item in items if item.source and item.source.tensor.is_cuda}
        self.gpu = min(self.devices, key=str, default=None)
        self.paths = [directory / names(number) for number in range(len(self.layout.sizes))]
        self.created: list[Created] = []
        """The files that this job created. It removes no others."""
        self.copy_first = copy_first
        self.gds_bytes = 0
        if gds:
            contents = self.layout.contents(items, sources, [bytes] * len(self.layout.tables))
            self.gds_bytes = sum(
                block.length for blocks in self.layout.blocks for block in blocks if _from_gpu(block, contents)
            )

    def run(self, after: Sequence[Any], on_copied: Callable[[], None]) -> Outcome:
        """Write all items. All files are synced on return; after an error, the files of this job are removed."""
        with torch.cuda.device(self.gpu) if self.gpu else contextlib.nullcontext():
            return self._run(after, on_copied)

    def _run(self, after: Sequence[Any], on_copied: Callable[[], None]) -> Outcome:
        threads = max(1, min(self.settings.threads, sum(map(len, self.layout.blocks))))
        count = _number_of_buffers(
            self.layout.buffers, threads, self.buffer_bytes, pinned=self.gpu is not None, copy_first=self.copy_first
        )
        files: list[DataFile] = []
        tables = self.layout.tables if self.settings.checksums else []
        with without_collections():
            sums = _Sums(tables, self.sources, after)

        def open_files() -> list[DataFile]:
            for path, size in zip(self.paths, self.layout.sizes, strict=True):
                files.append(DataFile(path, size, self.target, gds=self.gds_bytes > 0))
                self.created.append(files[-1].created)
            sums.take_from_gpus()
            return files

        contents = self.layout.contents(self.items, self.sources, self._late(tables, sums.files))
        buffers = POOL.take(count, self.buffer_bytes, self.gpu)
        pipeline = Pipeline(
            open_files, self.layout.blocks, contents, buffers, sums.by_cpu, sums.turns, after, on_copied, sums.streams
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
        return Outcome(
            results=Results(
                self.layout.stored(self.writes),
                tuple(path.name for path in self.paths),
                sums_of(self.items) if self.settings.checksums else None,
            ),
            bytes=sum(self.layout.sizes),
            files=len(files),
            threads=threads,
            host_bytes=count * self.buffer_bytes,
            direct=self.target.direct,
            all_at_once=count >= self.layout.buffers,
            copy_seconds=pipeline.copy_seconds,
            gds_bytes=self.gds_bytes,
        )

    def _late(self, tables: Sequence[FileTable], sums: Sequence[FileSums]) -> list[Callable[[], bytes]]:
        """What returns the table of each file, once its sums are made."""
        keys = self.layout.keys(self.writes) if tables else []

        def late(table: FileTable, of_file: FileSums) -> bytes:
            its = [keys[item] for item in table.items]
            return sums_table.table(table.places, table.lengths, its, of_file.result(), self.save, table.where)

        return [functools.partial(late, *each) for each in zip(tables, sums, strict=True)]

    def remove(self) -> None:
        """Remove the files that this job created, and no others."""
        for file in self.created:
            file.remove()
