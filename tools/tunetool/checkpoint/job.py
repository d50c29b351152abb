"""One rank's part of a save: its items are laid out over files, then written and synced."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from tunetool.checkpoint import space
from tunetool.checkpoint.checksums import seal
from tunetool.checkpoint.created import Created
from tunetool.checkpoint.direct import DataFile, Target
from tunetool.checkpoint.host_buffers import POOL, Source, is_plain, number_of_buffers, size_of_buffers, views
from tunetool.checkpoint.items import Archive, Placed, archive, place
from tunetool.checkpoint.layout import Block, Part, cut, share_out
from tunetool.checkpoint.pipeline import Digest, Pipeline
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


def resolve(write: WriteItem, planner: SavePlanner, checksums: bool, save: str) -> Item:
    """The item with its data from the planner, for the save with the token ``save``. Raises ``CannotJudge`` for a
    tensor that cannot be saved."""
    data = planner.resolve_data(write)
    if isinstance(data, io.BytesIO):
        return Item(write, data.getvalue())
    try:
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
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Item(write, archive(dtype, tuple(tensor.shape), source.bytes, checksums), source, save)


@dataclass
class Layout:
    """The layout of a rank's items. ``locations``: by item index, the index of the file and the position in it."""

    sizes: list[int] = field(default_factory=list)
    blocks: list[list[Block]] = field(default_factory=list)
    locations: dict[int, tuple[int, Placed]] = field(default_factory=dict)
    digests: dict[int, Digest] = field(default_factory=dict)

    @property
    def buffers(self) -> int:
        """Number of host buffers that hold everything which is not written without a copy."""
        return sum(not block.zero_copy for blocks in self.blocks for block in blocks)


def lay_out(items: Sequence[Item], files: int, limit: int, zero_copy: Callable[[Part], bool]) -> Layout:
    """Distribute the items over at most ``files`` files, in blocks of at most ``limit`` bytes."""
    layout = Layout()
    for file, share in enumerate(share_out([item.length for item in items], files)):
        of_this_file = [items[number] for number in share]
        placed, size = place([len(i.content) if isinstance(i.content, bytes) else i.content for i in of_this_file])
        parts: list[Part] = []
        for number, item, at in zip(share, of_this_file, placed, strict=True):
            layout.locations[number] = file, at
            parts += _parts(number, item, at, limit, layout.digests)
        layout.sizes.append(size)
        layout.blocks.append(list(cut(file, parts, limit, zero_copy)))
    return layout


def _parts(number: int, item: Item, at: Placed, limit: int, digests: dict[int, Digest]) -> list[Part]:
    content, source = item.content, item.source
    if isinstance(content, bytes) or source is None:
        return [Part(at.offset, item.length, content)]
    parts, position = [Part(at.offset, len(content.head), content.head)], 0
    for view in views(source.tensor, limit):
        part = Source(view)
        parts.append(Part(at.data + position, part.bytes, part, number, position))
        position += part.bytes
    tail: bytes | Callable[[], bytes]
    if content.checksum:
        digest = digests[number] = Digest(content.data_bytes)

        def sealed() -> bytes:
            return item.tail(digest.result())

        tail = sealed
    else:
        tail = content.tail()
    return [*parts, Part(at.data + position, content.tail_bytes, tail, number)]


def _from_gpu(block: Block) -> bool:
    return block.zero_copy and block.pieces[0].part.content.gpu_address is not None


@dataclass(frozen=True)
class Outcome:
    """What writing a rank's items took; see ``writer.Saved``."""

    results: list[WriteResult]
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
    the storage has the data.
    """

    def __init__(
        self, directory: Path, items: Sequence[Item], settings: Settings, names: Callable[[int], str], copy_first: bool
    ) -> None:
        self.items, self.settings = items, settings
        total = sum(item.length for item in items)
        space.need(directory, total)
        self.target = Target(directory)
        self.buffer_bytes = size_of_buffers(settings.buffer_bytes, settings.threads, total)
        zero_copy = (lambda _: False) if copy_first else self._can_zero_copy
        files = max(1, min(settings.files_per_rank, -(-total // FILE_BYTES)))
        self.layout = lay_out(items, files, self.buffer_bytes, zero_copy)
        self.devices = {item.source.tensor.device for item in items if item.source and item.source.tensor.is_cuda}
        self.gpu = min(self.devices, key=str, default=None)
        self.paths = [directory / names(number) for number in range(len(self.layout.sizes))]
        self.created: list[Created] = []
        """The files that this job created. It removes no others."""
        self.copy_first = copy_first
        self.gds_bytes = sum(block.length for blocks in self.layout.blocks for block in blocks if _from_gpu(block))

    def _can_zero_copy(self, part: Part) -> bool:
        if not isinstance(part.content, Source):
            return False
        if self.settings.gds and part.content.gpu_address is not None:
            return True
        address = part.content.address
        return address is not None and address % self.target.memory_alignment == 0

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
        pipeline = Pipeline(open_files, self.layout.blocks, buffers, self.layout.digests, after, on_copied)
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
            results=self._results(),
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

    def _results(self) -> list[WriteResult]:
        results = []
        for number, item in enumerate(self.items):
            file, at = self.layout.locations[number]
            info = _StorageInfo(self.paths[file].name, at.offset, at.length)
            results.append(WriteResult(item.write.index, at.length, info))
        return results
