"""One rank's part of a save: its items are laid out over files, then written and synced."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem

from tunetool.checkpoint import space
from tunetool.checkpoint.checksums import seal
from tunetool.checkpoint.created import Created
from tunetool.checkpoint.direct import DataFile, Target
from tunetool.checkpoint.host_buffers import POOL, Source, is_plain, number_of_buffers, size_of_buffers
from tunetool.checkpoint.items import LARGE, Archive, archive
from tunetool.checkpoint.layout import Block
from tunetool.checkpoint.packed import Results
from tunetool.checkpoint.pipeline import Pipeline
from tunetool.checkpoint.planner import DirectSavePlanner
from tunetool.checkpoint.rank_layout import Asked, layout_for, sources_of
from tunetool.errors import CannotJudge

FILE_BYTES = 32 << 20
"""Bytes. A small state is written to fewer files, each of at least this size, since each file costs an fsync."""


@dataclass(frozen=True)
class Settings:
    """The settings of ``DirectWriter``."""

    threads: int
    files_per_rank: int
    buffer_bytes: int
    checksums: bool
    gds: bool = False


@dataclass
class Item:
    """A write item with its data: a tensor's archive and memory, or the bytes of an object."""

    write: WriteItem
    content: Archive | bytes
    source: Source | None = None
    save: str = ""

    def tail(self, digest: str) -> bytes:
        """The bytes after the raw bytes of a tensor with a checksum; ``digest`` is the checksum."""
        assert not isinstance(self.content, bytes)  # noqa: S101  (only tensors have checksums)
        index = self.write.index
        return self.content.tail(digest + seal(digest, self.save, index.fqn, index.offset or ()))

    @property
    def length(self) -> int:
        return len(self.content) if isinstance(self.content, bytes) else self.content.length


def items_of(writes: Sequence[WriteItem], planner: SavePlanner, checksums: bool, save: str) -> list[Item]:
    """The items with their data from the planner, for the save with the token ``save``. Raises ``CannotJudge`` for a
    tensor that cannot be saved."""
    if isinstance(planner, DirectSavePlanner):
        data = planner.data_of(writes)
        return [_item(write, each, checksums, save) for write, each in zip(writes, data, strict=True)]
    return [_item(write, planner.resolve_data(write), checksums, save) for write in writes]


def _item(write: WriteItem, data: torch.Tensor | io.BytesIO, checksums: bool, save: str) -> Item:
    if isinstance(data, io.BytesIO):
        return Item(write, data.getvalue())
    try:
        # An alias with a hold of its own on the memory, whatever becomes of the caller's tensor meanwhile.
        tensor = data.detach()
        if not is_plain(tensor):
            stream = io.BytesIO()
            torch.save(tensor.cpu(), stream)
            return Item(write, stream.getvalue())
    except Exception as error:  # what a tensor's own class raises
        raise CannotJudge(
            f"`{write.index.fqn}`, a `{type(data).__name__}`, cannot be saved: {str(error).partition(chr(10))[0]}",
            "leave it out of the state, or save the plain tensors that it is made of",
        ) from error
    source = Source(tensor)
    return Item(write, archive(_name_of(tensor.dtype), tensor.shape, source.bytes, checksums), source, save)


@lru_cache(256)
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


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
        self.buffer_bytes = size_of_buffers(settings.buffer_bytes, settings.threads, total)
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
        count = number_of_buffers(
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
            results=Results(self.layout.stored(self.writes), tuple(path.name for path in self.paths)),
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
