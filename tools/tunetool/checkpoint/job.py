"""One rank's part of a save: its items are laid out over files, then written and synced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import WriteItem

from tunetool.checkpoint import space
from tunetool.checkpoint.direct import Created, DataFile, Target
from tunetool.checkpoint.host_buffers import POOL, Source
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.layout import Block
from tunetool.checkpoint.packed import Results
from tunetool.checkpoint.pipeline import Pipeline
from tunetool.checkpoint.rank_layout import Asked, Item, layout_for, sources_of, sums_of

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


class Job:
    """Writes the items of one rank to ``directory``; the name of each file is ``names(file index)``.

    ``copy_first``: use host buffers for all of the data, if the memory suffices, so that ``on_copied`` is called before
    the storage has the data. ``writes``: what the items are of, where they are a plan that may come again.
    """

    def __init__(
        self,
        directory: Path,
        items: Sequence[Item],
        settings: Settings,
        names: Callable[[int], str],
        copy_first: bool,
        writes: Sequence[WriteItem] | None = None,
    ) -> None:
        self.items, self.settings = items, settings
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
        )
        self.layout = layout_for(asked)
        self.contents, self.digests = self.layout.contents(items, sources)
        self.devices = {item.source.tensor.device for item in items if item.source and item.source.tensor.is_cuda}
        self.gpu = min(self.devices, key=str, default=None)
        self.paths = [directory / names(number) for number in range(len(self.layout.sizes))]
        self.created: list[Created] = []
        """The files that this job created. It removes no others."""
        self.copy_first = copy_first
        self.gds_bytes = 0
        if gds:
            self.gds_bytes = sum(
                block.length for blocks in self.layout.blocks for block in blocks if _from_gpu(block, self.contents)
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

        def open_files() -> list[DataFile]:
            for path, size in zip(self.paths, self.layout.sizes, strict=True):
                files.append(DataFile(path, size, self.target, gds=self.gds_bytes > 0))
                self.created.append(files[-1].created)
            return files

        buffers = POOL.take(count, self.buffer_bytes, self.gpu)
        pipeline = Pipeline(open_files, self.layout.blocks, self.contents, buffers, self.digests, after, on_copied)
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

    def remove(self) -> None:
        """Remove the files that this job created, and no others."""
        for file in self.created:
            file.remove()
