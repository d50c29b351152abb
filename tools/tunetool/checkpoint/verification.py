"""Checks all of a checkpoint that has a checksum, and names everything that is not as it was saved.

What a load of the whole checkpoint would read is read and checked as ``DirectReader`` does it, but only buffers are in
memory. A load ends at the first damaged block; here each is found.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from tunetool.checkpoint import bulk, index, markers, metadata
from tunetool.checkpoint.checksums import Saved, Turns, Verified, block_bytes, block_range, key_of, number_of_blocks
from tunetool.checkpoint.contents import pieces_of
from tunetool.checkpoint.fetch import Buffers, DirectRead, Fetch, FileRead, Part, Want, in_turn
from tunetool.checkpoint.load_targets import fills
from tunetool.checkpoint.raw_bytes import BLOCK, Plain
from tunetool.checkpoint.reader import DirectReader
from tunetool.checkpoint.regions import Read, merge
from tunetool.checkpoint.resume import leads_out, problem_of_file
from tunetool.checkpoint.source import Files
from tunetool.ctrl_c import Threads
from tunetool.errors import CannotJudge, ExitCode, TunetoolError, UsageProblem
from tunetool.regular_files import read_bytes

if TYPE_CHECKING:
    from tunetool.measure.progress import MovingProgress


_FORBIDDEN = f"cannot be read ({os.strerror(errno.EACCES)})"


@dataclass(frozen=True)
class Fault:
    """Something that is not as it was saved, or could not be looked at."""

    message: str
    file: str
    tensor: str | None = None
    judged: bool = True
    """False for what this user may not read."""


@dataclass(frozen=True)
class Verification:
    """What was found in a step."""

    step: str
    faults: tuple[Fault, ...]
    files: int
    """The data files that `.metadata` names."""
    has_sums: bool
    """Whether the save made checksums. Without these and a drain, only lengths and structure could be checked."""
    drained: bool
    """Whether all files were also compared with the marker of the drain."""
    replica: bool
    """The same of a replica, which is not on shared storage."""
    checked_bytes: int
    """Read and compared with checksums."""
    seconds: float

    @property
    def code(self) -> ExitCode:
        """The exit code of a command that found this."""
        if any(fault.judged for fault in self.faults):
            return ExitCode.FALLS_SHORT
        proven = self.has_sums or self.drained or self.replica
        return ExitCode.OK if proven and not self.faults else ExitCode.NOT_JUDGED


def verify(step: Path, progress: MovingProgress, threads: int | None = None) -> Verification:
    """Check the checkpoint in ``step``, with ``threads`` threads.

    Every block of tensors and every object is compared with its checksum, and what is around a tensor with what
    ``DirectWriter`` writes there. Each file of a drained step is also compared with the drain's marker. Of a checkpoint
    without checksums, lengths and structure are checked.
    """
    began = time.monotonic()
    checks = _Checks(step, threads)
    described = checks.described()
    if described is not None:
        checks.look(described, progress)
    marker = checks.marker()
    marked = marker is not None and checks.are_all_in(marker)
    replica = marker is not None and marker.is_of_replica
    if marker is not None:
        checks.compare_with(marker, progress)
    return Verification(
        str(step),
        tuple(checks.faults),
        len(checks.files),
        checks.has_sums,
        marked and not replica,
        marked and replica,
        checks.checked_bytes,
        time.monotonic() - began,
    )


class _Blocks(Verified):
    """Keeps the numbers of the blocks that are not as they were saved."""

    def __init__(self, saved: Saved, turns: Turns) -> None:
        super().__init__(saved, turns)
        self.damaged: list[int] = []

    def finish(self, tensor: int, block: int, value: int) -> None:
        """Compare the sum."""
        try:
            super().finish(tensor, block, value)
        except CannotJudge:
            self.damaged.append(block)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """The bytes [start, stop) of the tensor in damaged blocks; neighbours together."""
        for _, together in itertools.groupby(enumerate(sorted(self.damaged)), lambda entry: entry[1] - entry[0]):
            blocks = [block for _, block in together]
            yield block_range(blocks[0], self._saved.length)[0], block_range(blocks[-1], self._saved.length)[1]


class _Reads(Fetch):
    """Goes on after a read that failed."""

    def __init__(self, files: Files, reader: _Checks, turns: Turns) -> None:
        super().__init__(files, torch.device("cpu"), reader.threads, reader.buffer_bytes, turns)
        self._reader = reader

    def carry_out_one(self, name: str, read: Read[Part] | DirectRead, buffers: Buffers) -> None:
        """As in ``Fetch``; what cannot be read is a fault."""
        try:
            super().carry_out_one(name, read, buffers)
        except CannotJudge as error:
            self._reader.add(error.message, name)


class _Checks(DirectReader):
    """A reader that collects ``faults``."""

    def __init__(self, step: Path, threads: int | None) -> None:
        super().__init__(step, threads=threads)
        self.faults: dict[Fault, None] = {}
        self.files: dict[str, int] = {}
        """The data files, and the least bytes of each."""
        self.checked_bytes = 0
        self.has_sums = False

    def add(self, message: str, file: str, tensor: str | None = None, *, judged: bool = True) -> None:
        """One fault more; not the same one twice."""
        self.faults.setdefault(Fault(message, file, tensor, judged))

    def described(self) -> Any:
        """The metadata; None if it is damaged. Raises ``UsageProblem`` if it cannot be read by this user."""
        path = self.path / metadata.NAME
        problem = leads_out(self.path, metadata.NAME)
        if problem is not None:
            self.add(f"`{path}` {problem}", metadata.NAME)
            return None
        try:
            content = read_bytes(path, metadata.LARGEST)
            described = metadata.loads(content, path)
        except FileNotFoundError:
            self.add(f"`{path}` is missing: the save did not end, or it is on another node", metadata.NAME)
            return None
        except OSError as error:
            judged = not isinstance(error, PermissionError)
            self.add(f"`{path}` cannot be read: {error.strerror}", metadata.NAME, judged=judged)
            return None
        except UsageProblem as error:
            self.add(error.message, metadata.NAME)
            return None
        self.set_up_storage_reader(described, True)
        self.has_sums = self._sums is not None
        if self.has_sums and metadata.without_sum(content) is content:
            self.add(f"`{path}` is damaged: its own checksum is not at its end", metadata.NAME)
        return described

    def marker(self) -> markers.Marker | None:
        """That of a drained step; None if it is none, or the marker is damaged."""
        try:
            return markers.marker_of(self.path)
        except CannotJudge as error:
            self.add(error.message, markers.MARKER)
        except OSError as error:
            judged = not isinstance(error, PermissionError)
            self.add(f"`{self.path / markers.MARKER}` cannot be read: {error.strerror}", markers.MARKER, judged=judged)
        return None

    def are_all_in(self, marker: markers.Marker) -> bool:
        """Whether the marker has every data file. Those that have no checksum of the save either are not proven."""
        unproven = marker.lacks(self.files)
        if unproven and not self.has_sums:
            of_these = f"`{self.path / markers.MARKER}` has no checksum of {bulk.shown(unproven)}"
            self.add(of_these, markers.MARKER, judged=False)
        return not unproven

    def compare_with(self, marker: markers.Marker, progress: MovingProgress) -> None:
        """Read every file again, to compare it with the marker of the drain."""
        total = sum(filed.size for filed in marker.files.values())
        with progress.moving(f"compare {self.path} with what was drained", total) as tick:
            changes = markers.changes(self.path, marker, self.threads, tick)
        for name, change in changes.items():
            self.add(f"`{self.path}` differs from what was drained: {change}", name)
        self.checked_bytes = max(self.checked_bytes, total)

    def look(self, described: Any, progress: MovingProgress) -> None:
        """Check everything that the metadata names."""
        for stored in (described.storage_data or {}).values():
            least = max(self.files.get(stored.relative_path, 0), stored.offset + stored.length)
            self.files[stored.relative_path] = least
        readable = {name for name, least in sorted(self.files.items()) if self._is_whole(name, least)}
        items = [item for item in self._items(described) if self._location(item).relative_path in readable]
        files = Files(self.path, contained=True)
        try:
            if self.has_sums:
                damaged = self._files_without_table(items, files)
                items = [item for item in items if self._location(item).relative_path not in damaged]
            self._tensors_and_objects(items, files, progress)
        finally:
            files.close()

    def _is_whole(self, name: str, least: int) -> bool:
        problem = problem_of_file(self.path, name, least)
        if problem is None:
            return True
        self.add(f"`{self.path / name}` {problem}", name, judged=problem != _FORBIDDEN)
        return False

    def _items(self, described: Any) -> Iterator[ReadItem]:
        """Everything that is stored, as whole items. What is described and not stored is a fault."""
        where = f"`{self.path / metadata.NAME}`"
        for name, about in described.state_dict_metadata.items():
            is_tensor = isinstance(about, TensorStorageMetadata)
            if is_tensor and not fills(about.size, [(chunk.offsets, chunk.sizes) for chunk in about.chunks]):
                self.add(f"{where}: the chunks of `{name}` leave out elements, or have some twice", metadata.NAME, name)
            for at, offsets, sizes in pieces_of(name, about):
                stored = (described.storage_data or {}).get(at)
                if stored is None:
                    self.add(f"{where} does not say where `{name}` is", metadata.NAME, name)
                elif not getattr(stored, "transform_descriptors", None):
                    kind = LoadItemType.TENSOR if is_tensor else LoadItemType.BYTE_IO
                    nowhere = torch.Size([0] * len(offsets))
                    yield ReadItem(kind, at, nowhere, at, nowhere, torch.Size(sizes))

    def _files_without_table(self, items: Sequence[ReadItem], files: Files) -> set[str]:
        """The files whose checksums cannot be read, or are of another save."""
        damaged: set[str] = set()
        for item, where in zip(items, self._stored(items), strict=True):
            has_own = item.type == LoadItemType.BYTE_IO or key_of(item.storage_index) in (self._sums or ())
            if has_own or where.file in damaged or where.file in self._tables:
                continue
            try:
                self._table(where, files)
            except CannotJudge as error:
                damaged.add(where.file)
                self.add(error.message, where.file)
        return damaged

    def _tensors_and_objects(self, items: Sequence[ReadItem], files: Files, progress: MovingProgress) -> None:
        tensors = [item for item in items if item.type == LoadItemType.TENSOR]
        plain_tensors = self._plain_tensors(tensors, files)
        whole = [item for item in items if item.type == LoadItemType.BYTE_IO]
        sums: list[tuple[Saved, _Blocks, index.Item]] = []
        for item, where in zip(tensors, self._stored(tensors), strict=True):
            if where not in plain_tensors:  # it is a fault already
                continue
            try:
                saved = self._saved_of(item, where, plain_tensors[where], files)
            except TunetoolError as error:
                self.add(error.message, where.file, where.tensor)
                continue
            if saved is not None:
                sums.append((saved, _Blocks(saved, self._turns), where))
            elif plain_tensors[where] is None:
                whole.append(item)
        if not self.has_sums:
            return
        reads = self._reads(sums)
        with progress.moving(f"verify {self.path}", sum(read.stop - read.start for _, read in reads)) as tick:
            _Reads(files, self, self._turns).run(reads, tick)
        for saved, blocks, where in sums:
            for start, stop in blocks.ranges():
                self.add(
                    f"`{where.tensor}` is damaged: bytes {start} to {stop - 1} of its {saved.length}, which begin at "
                    f"{saved.start} in `{self.path / where.file}`, are not what was saved",
                    where.file,
                    where.tensor,
                )
        self.checked_bytes += sum(saved.length for saved, _, _ in sums)
        self._check_whole(whole, files)

    def _plain_tensors(self, items: Sequence[ReadItem], files: Files) -> dict[index.Item, Plain | None]:
        """Where their raw bytes are, as ``index.find`` has it, but for items that are damaged."""
        stored = self._stored(items)
        try:
            return index.find(stored, files, self.threads, self._expected(items), ours=self.has_sums)
        except CannotJudge as error:
            if len(items) == 1:
                self.add(error.message, stored[0].file, stored[0].tensor)
                return {}
        half = len(items) // 2
        return self._plain_tensors(items[:half], files) | self._plain_tensors(items[half:], files)

    def _saved_of(self, item: ReadItem, where: index.Item, plain: Plain | None, files: Files) -> Saved | None:
        """What a tensor was saved with; None for one without checksum, or with that of an object.

        Raises ``CannotJudge`` if the file does not say it, or holds something else.
        """
        if plain is None and self._sums is not None and key_of(item.storage_index) not in self._sums:
            plain = self._plain_for_torch(item, where, self._content(item, files), files)
            if plain is None:
                raise CannotJudge(
                    f"`{self.path / where.file}`: `{where.tensor}` is damaged: what is around its data is not what was "
                    "saved"
                )
        if plain is None:
            return None
        if plain.shape != tuple(item.lengths):
            raise CannotJudge(
                f"`{self.path / where.file}` holds `{where.tensor}` with shape {list(plain.shape)}, and the metadata "
                f"says {list(item.lengths)}"
            )
        return self._saved_sums(item, where, plain, files)

    def _reads(self, sums: Sequence[tuple[Saved, _Blocks, index.Item]]) -> list[FileRead]:
        """Reads of whole blocks, so that no thread waits for the rest of one."""
        per_file: dict[str, list[tuple[int, int, Part]]] = {}
        nothing = torch.empty(0, dtype=torch.uint8)
        for saved, blocks, where in sums:
            plain = Plain(0, saved.length, "uint8", (saved.length,))
            want = Want(where.tensor, where.file, saved.start, plain, (0,), (0,), nothing, blocks)
            size, count = block_bytes(saved.length), number_of_blocks(saved.length)
            # The last block may have nearly twice the size.
            at_once = max(1, (self.buffer_bytes - 2 * BLOCK) // size - 1)
            for first in range(0, count if saved.length else 0, at_once):
                start = first * size
                stop = block_range(min(first + at_once, count) - 1, saved.length)[1]
                part = Part(want, start, None, wanted=False)
                per_file.setdefault(where.file, []).append((saved.start + start, saved.start + stop, part))
        return [*in_turn({file: merge(some, self.buffer_bytes) for file, some in sorted(per_file.items())})]

    def _check_whole(self, items: Sequence[ReadItem], files: Files) -> None:
        """Compare what has one checksum: objects, and tensors that only torch reads."""

        def check(item: ReadItem) -> int:
            where = self._stored([item])[0]
            try:
                content = self._content(item, files)
                self._check_content(item, content)
            except CannotJudge as error:
                self.add(error.message, where.file, where.tensor)
            return where.length

        with Threads(self.threads) as pool:
            self.checked_bytes += sum(pool.each(check, items))
