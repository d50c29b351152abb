"""``DirectReader``: reads distributed checkpoints, from DirectWriter or torch's writer, at the speed of the storage.

A load fills all that is asked for, or is refused: chunks of damaged metadata could leave elements as they were.
"""

from __future__ import annotations

import io
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tunetool.checkpoint import index, metadata, sums_table
from tunetool.checkpoint.checksums import SHORTEST_OF_GPU, Saved, Sums, Turns, Verified, digest_of, key_of
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.fetch import Fetch, Want, plan_reads
from tunetool.checkpoint.host_buffers import is_plain
from tunetool.checkpoint.items import Archive
from tunetool.checkpoint.items import archive as archive_of
from tunetool.checkpoint.load_targets import first_unfilled, targets_of
from tunetool.checkpoint.metadata_pickle import SUMS
from tunetool.checkpoint.raw_bytes import BLOCK, ITEM_SIZES, Plain
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.workers import BUFFER_BYTES, default_threads
from tunetool.errors import CannotJudge, UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem


_ANOTHER = "load another checkpoint, and look at the health of the drives: `tunetool verify`"
_ITEM_SIZES = {getattr(torch, name): (name, size) for name, size in ITEM_SIZES.items() if hasattr(torch, name)}
"""Name and bytes per element of each dtype of torch."""


class DirectReader(StorageReader):
    """Reads a checkpoint: ``torch.distributed.checkpoint.load(state, storage_reader=DirectReader(path))``.

    It reads checkpoints of ``DirectWriter`` and of torch's ``FileSystemWriter`` (one file or many per rank), with any
    number of ranks. A rank reads only the bytes of a tensor that it needs, in requests of ``buffer_bytes``, in file
    order, with O_DIRECT. Data for a GPU passes through pinned host buffers; data for host memory is read in place if
    the alignment allows. So memory in addition to the state is at most ``threads`` x ``buffer_bytes`` (for a GPU twice
    that) plus 8 KiB per tensor; the buffers are kept for the next load or save (``release_buffers`` frees them).

    ``path``: the directory. ``threads``: reader threads of this rank; default: its share of the cores, 4 to 16.
    ``buffer_bytes``: size of one host buffer in bytes, a multiple of 4096, at least 64 KiB.
    ``verify``: check the checksums of all that is read, if it was saved with checksums; those of a GPU's tensors are
    made there. Afterwards, ``unverified`` lists the names of tensors that were not checked, because a part was read
    that lies in pieces in the file, such as some columns. The checksum of `.metadata` is always checked.
    ``allow_objects``: also unpickle objects that ``torch.load(weights_only=True)`` refuses. Unpickling runs code that
    the file names: use it only for checkpoints from a source you trust.

    ``torch.load`` reads a tensor that is not plain in its file (not contiguous, quantized ...), always whole.

    Raises ``UsageProblem`` if there is no checkpoint or its metadata is refused, ``CannotJudge`` naming tensor and file
    if a file is missing, truncated, unreadable, damaged, its shape differs from the metadata, or the metadata leaves
    elements out that are asked for; ``dcp.load`` wraps
    both in its ``CheckpointException``.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        verify: bool = True,
        allow_objects: bool = False,
    ) -> None:
        super().__init__()
        threads = default_threads() if threads is None else threads
        if threads < 1 or buffer_bytes < 16 * BLOCK or buffer_bytes % BLOCK:
            raise UsageProblem(
                f"`threads={threads}, buffer_bytes={buffer_bytes}` cannot be used",
                "use at least 1 thread, and buffers of at least 65536 bytes, a multiple of 4096",
            )
        self.path = Path(path)
        self.threads, self.buffer_bytes, self.verify, self.allow_objects = threads, buffer_bytes, verify, allow_objects
        self.unverified: list[str] = []
        self._metadata: Any = None
        self._sums: Sums | None = None
        """Of objects; None if the save made no checksums."""
        self._for_gpus: dict[Any, list[tuple[Saved, Any]]] = {}
        """By GPU: what a tensor was saved with, and its memory, shape (bytes,)."""
        self._tables: dict[str, sums_table.Table] = {}
        self._turns = Turns()
        self._shapes_of: dict[str, dict[tuple[int, ...], list[tuple[int, ...]]]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """torch calls this before a load, with the path that was given to ``dcp.load``, if any."""
        self._metadata = None
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return isinstance(checkpoint_id, os.PathLike) or "://" not in str(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The metadata of the directory. If there is none, torch asks again with the keyword ``rank``."""
        return metadata.read(self.path, kwargs.get("rank"))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata
        self._sums = getattr(metadata, SUMS, None)

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all tensors and objects of the plan. The returned future is already done."""
        self.unverified, self._for_gpus, self._tables, self._turns = [], {}, {}, Turns()
        self._shapes_of = {}
        unfilled = first_unfilled(planner, plan.items, self._metadata.state_dict_metadata)
        if unfilled is not None:
            raise CannotJudge(
                f"`{unfilled}` would not be filled: the chunks in `{self.path / metadata.NAME}` leave out elements, or "
                "have some twice",
                "the metadata is damaged, or only a part of the tensor was saved; load another checkpoint",
            )
        files = Files(self.path, contained=True)
        try:
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            self._objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner, files)
            with without_collections():
                stored = self._stored(tensors)
                ours = self.verify and self._sums is not None
                plain_tensors = index.find(stored, files, self.threads, self._expected(tensors), ours=ours)
                targets = list(targets_of(planner, tensors))
                wants = self._wants(tensors, stored, targets, plain_tensors, files)
                reads = [(device, plan_reads(some, files, self.buffer_bytes)) for device, some in wants.items()]
            for device, some_reads in reads:
                Fetch(files, device, self.threads, self.buffer_bytes, self._turns).run(some_reads)
            if self._for_gpus:
                self._verify_on_gpus()
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
        finally:
            files.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _verify_on_gpus(self) -> None:
        from tunetool.checkpoint import gpu_sums  # noqa: PLC0415  (a state in host memory needs none of it)

        for device, some in self._for_gpus.items():
            gpu_sums.verify(device, some)

    def _location(self, item: ReadItem) -> Any:
        stored = (self._metadata.storage_data or {}).get(item.storage_index)
        name = item.storage_index.fqn
        if stored is None:
            raise CannotJudge(
                f"`{self.path / metadata.NAME}` does not say where `{name}` is", "the metadata is damaged"
            )
        if getattr(stored, "transform_descriptors", None):
            through = ", ".join(stored.transform_descriptors)
            raise CannotJudge(
                f"`{self.path / stored.relative_path}`: `{name}` passed through `{through}` when it was saved",
                "load it with torch's FileSystemReader",
            )
        return stored

    def _stored(self, items: Sequence[ReadItem]) -> list[index.Item]:
        """The byte range of each item."""
        places = self._metadata.storage_data or {}
        ranges = []
        for item in items:
            at = item.storage_index
            place = places.get(at)
            if place is None or getattr(place, "transform_descriptors", None):
                place = self._location(item)
            ranges.append(index.Item(at.fqn, place.relative_path, place.offset, place.length))
        return ranges

    def _expected(self, items: Sequence[ReadItem]) -> list[Archive | None]:
        """What ``DirectWriter`` would have written if each item were a whole tensor."""
        described, archives = self._metadata.state_dict_metadata, dict[Any, Archive | None]()
        expected = []
        for item in items:
            properties = getattr(described.get(item.storage_index.fqn), "properties", None)
            key = getattr(properties, "dtype", None), tuple(item.lengths)
            if key not in archives:
                dtype = _ITEM_SIZES.get(key[0])
                size = math.prod(key[1]) * dtype[1] if dtype else 0
                # No file holds more, nor the header of an archive.
                archives[key] = archive_of(dtype[0], key[1], size) if dtype and size < 1 << 63 else None
            expected.append(archives[key])
        return expected

    def _objects(self, items: Sequence[ReadItem], planner: LoadPlanner, files: Files) -> None:
        for item in items:
            stored = self._location(item)
            name = item.storage_index.fqn
            content = self._content(item, files)
            self._check_content(item, content)
            if not self.allow_objects:
                # torch's planner unpickles the content without restrictions after this.
                _load(content, f"`{self.path / stored.relative_path}`: `{name}`", self.path / stored.relative_path)
            planner.load_bytes(item, io.BytesIO(content))

    def _content(self, item: ReadItem, files: Files) -> bytes:
        """All bytes of an item."""
        stored = self._location(item)
        return files.content(stored.relative_path, stored.offset, stored.length, item.storage_index.fqn)

    def _check_content(self, item: ReadItem, content: bytes) -> None:
        """Raises ``CannotJudge`` if the checksum of an object is wrong, where the save made checksums."""
        if not self.verify or self._sums is None:
            return
        stored, now = self._location(item), digest_of(content)
        saved = self._sums.get(key_of(item.storage_index), "none")
        if saved != now:
            raise CannotJudge(
                f"`{item.storage_index.fqn}` is damaged: its {len(content)} bytes from {stored.offset} on in "
                f"`{self.path / stored.relative_path}` have checksum {now}, and were saved with {saved}",
                _ANOTHER,
            )

    def _wants(
        self,
        items: Sequence[ReadItem],
        stored: Sequence[index.Item],
        targets: Sequence[Any],
        plain_tensors: Mapping[index.Item, Plain | None],
        files: Files,
    ) -> dict[Any, list[Want]]:
        """What is to be read, by device. Tensors that only torch can read are filled here."""
        wants: dict[Any, list[Want]] = {}
        checked: set[index.Item] = set()
        plain = [plain_tensors[where] for where in stored]
        each = list(zip(items, stored, targets, plain, strict=True))
        # All are checked before one is filled.
        are_plain = [self._check_shapes(*one) for one in each]
        for (item, where, target, its), is_plain_target in zip(each, are_plain, strict=True):
            saved = None if its is None else self._saved_sums(item, where, its, files)
            if its is None or not is_plain_target:
                self._load_with_torch(item, target, files, its, saved)
            else:
                wants.setdefault(target.device, []).append(self._want(item, where, target, its, saved, checked))
        return wants

    def _want(
        self,
        item: ReadItem,
        stored: index.Item,
        target: Any,
        plain: Plain,
        saved: Saved | None,
        checked: set[index.Item],
    ) -> Want:
        place = stored.offset + plain.offset, plain, tuple(item.storage_offsets), tuple(item.lengths)
        want = Want(stored.tensor, stored.file, *place, target)
        if saved is None or 0 in want.lengths:
            return want
        is_whole = want.is_whole
        if is_whole and stored in checked:
            return want
        if is_whole and want.by_address and target.is_cuda and plain.length >= SHORTEST_OF_GPU:
            self._for_gpus.setdefault(target.device, []).append((saved, target))
        elif is_whole or want.by_address:
            want.sums = Verified(saved, self._turns)
        else:
            self.unverified.append(stored.tensor)
        if is_whole:
            checked.add(stored)
        return want

    def _shapes(self, name: str) -> Mapping[tuple[int, ...], list[tuple[int, ...]]]:
        """The shapes that the metadata has for the chunks of a tensor, by offset. Made once, whatever asks."""
        if name not in self._shapes_of:
            shapes: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            self._shapes_of[name] = shapes
            for chunk in getattr(self._metadata.state_dict_metadata.get(name), "chunks", ()):
                shapes.setdefault(chunk.offsets, []).append(chunk.sizes)
        return self._shapes_of[name]

    def _check_shapes(
        self,
        item: ReadItem,
        stored: index.Item,
        target: Any,
        plain: Plain | None,
    ) -> bool:
        """Whether the target is a plain tensor. Raises ``CannotJudge`` if the shapes of the metadata, of the file and
        of the target differ, or if the target cannot be filled."""
        name, file = stored.tensor, stored.file
        chunks: Sequence[Any] = getattr(self._metadata.state_dict_metadata.get(name), "chunks", ())
        if plain is not None and not (len(chunks) == 1 and chunks[0].sizes == plain.shape):
            described = self._shapes(name).get(item.storage_index.offset or ())
            if described and plain.shape not in described:
                raise CannotJudge(
                    f"`{self.path / file}` holds `{name}` with shape {list(plain.shape)}, and the metadata says "
                    f"{list(described[0])}",
                    "data file and metadata are of different saves; load another checkpoint",
                )
        if plain is not None and not _is_within(item.storage_offsets, item.lengths, plain.shape):
            raise CannotJudge(
                f"`{self.path / file}` holds `{name}` with shape {list(plain.shape)}, and {list(item.lengths)} from "
                f"{list(item.storage_offsets)} on are read",
                "data file and metadata are of different saves; load another checkpoint",
            )
        if target.shape != tuple(item.lengths):
            raise CannotJudge(
                f"`{name}`: the target has shape {list(target.shape)}, and the plan reads {list(item.lengths)}"
                f" from `{self.path / file}`",
                "the planner's resolve_tensor() must return the part that its read item names",
            )
        if target.layout is not torch.strided:
            raise CannotJudge(
                f"`{name}` cannot be filled: the target's layout is `{target.layout}`",
                "load into a dense tensor, then convert it",
            )
        if not target.is_contiguous() and any(
            step == 0 and size > 1 for step, size in zip(target.stride(), target.shape, strict=True)
        ):
            raise CannotJudge(
                f"`{name}` cannot be filled: several elements of the target share their memory, as `expand` makes them",
                "load into a tensor with memory of its own: `tensor.contiguous()`",
            )
        try:
            return is_plain(target)
        except ValueError as error:
            raise CannotJudge(
                f"`{name}` cannot be filled: {error}", "load into tensors whose memory was not freed (FSDP frees it)"
            ) from None

    def _saved_sums(self, item: ReadItem, stored: index.Item, plain: Plain, files: Files) -> Saved | None:
        """What a tensor was saved with; None where nothing is verified. Raises ``CannotJudge`` if its file does not say
        that, or holds something else."""
        if not self.verify or self._sums is None:
            return None
        start, at = stored.offset + plain.offset, item.storage_index
        row = (self._tables.get(stored.file) or self._table(stored, files)).row(start)
        if row is None or row.length != plain.length or row.key != sums_table.key_of(at.fqn, at.offset):
            raise CannotJudge(
                f"`{self.path / stored.file}` holds another tensor, or one of another save, where `{stored.tensor}` "
                "must be",
                "data files were swapped or replaced: load another checkpoint",
            )
        return Saved(row.sums, plain.length, stored.tensor, self.path, stored.file, start)

    def _table(self, stored: index.Item, files: Files) -> sums_table.Table:
        if stored.file not in self._tables:
            save = getattr(self._metadata.storage_meta, "save_id", None)
            self._tables[stored.file] = sums_table.read(files, stored.file, stored.tensor, save)
        return self._tables[stored.file]

    def _plain_for_torch(self, item: ReadItem, stored: index.Item, content: bytes, files: Files) -> Plain | None:
        """Where the raw bytes are in an item that only torch reads, but ``DirectWriter`` wrote as it writes others: a
        dtype that is unknown here. None if it is another item."""
        table = self._table(stored, files)
        place = table.place_within(stored.offset, stored.offset + stored.length)
        properties = getattr(self._metadata.state_dict_metadata.get(item.storage_index.fqn), "properties", None)
        row = None if place is None else table.row(place)
        if place is None or row is None or properties is None:
            return None
        dtype, offset = str(properties.dtype).removeprefix("torch."), place - stored.offset
        shape = tuple(self._shapes(stored.tensor)[item.storage_index.offset or ()][0])
        expected = archive_of(dtype, shape, row.length)
        if content[:offset] != expected.head or content[offset + row.length :] != expected.tail:
            return None
        return Plain(offset, row.length, dtype, shape)

    def _load_with_torch(
        self, item: ReadItem, target: Any, files: Files, plain: Plain | None, saved: Saved | None
    ) -> None:
        stored, name = self._location(item), item.storage_index.fqn
        where = f"`{self.path / stored.relative_path}`: `{name}`"
        content = self._content(item, files)
        if plain is None and self.verify and self._sums is not None and key_of(item.storage_index) not in self._sums:
            of = index.Item(name, stored.relative_path, stored.offset, stored.length)
            plain = self._plain_for_torch(item, of, content, files)
            saved = None if plain is None else self._saved_sums(item, of, plain, files)
        if plain is None:
            self._check_content(item, content)
        elif saved is not None:
            Verified(saved, self._turns).feed(0, memoryview(content)[plain.offset : plain.offset + plain.length])
        tensor = _load(content, where, self.path / stored.relative_path)
        if not isinstance(tensor, torch.Tensor):
            raise CannotJudge(f"{where} is a `{type(tensor).__name__}`, not a tensor", "the metadata is damaged")
        try:
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                # Some tensors, such as those with a scale for each row, can only be taken whole.
                if (offset, length) != (0, tensor.shape[dimension]):
                    tensor = tensor.narrow(dimension, offset, length)
            if tuple(tensor.shape) != tuple(item.lengths):
                raise ValueError
        except (RuntimeError, ValueError, IndexError):
            raise CannotJudge(
                f"{where} has shape {list(tensor.shape)}, too small for {list(item.lengths)} from "
                f"{list(item.storage_offsets)} on",
                "data file and metadata are of different saves; load another checkpoint",
            ) from None
        target.copy_(tensor)


def _is_within(offsets: Sequence[int], lengths: Sequence[int], shape: Sequence[int]) -> bool:
    if lengths == shape and not any(offsets):
        return True
    return len(offsets) == len(lengths) == len(shape) and all(
        at >= 0 and at + count <= size for at, count, size in zip(offsets, lengths, shape, strict=True)
    )


def _load(content: bytes, where: str, file: Path) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or made-up archive raises
        if _is_safetensors(file):
            raise CannotJudge(
                f"`{file}` is a .safetensors file, as torch's FileSystemWriter writes with "
                "`serialization_format=SAFETENSORS`, and torch itself does not read it by `.metadata` either",
                f"`tunetool.loading.load({str(file)!r})` gives what this rank saved; save without that setting",
            ) from None
        # The message of torch begins with half a page on how to disable the check.
        refusal = re.search(r"WeightsUnpickler error: (.*)", str(error))
        reason = (refusal[1] if refusal else str(error).strip().partition("\n")[0]) or type(error).__name__
        raise CannotJudge(
            f"{where} cannot be unpickled safely: {reason}",
            "if it holds your own objects and you trust its source, use `allow_objects=True`",
        ) from None


def _is_safetensors(file: Path) -> bool:
    from tunetool import safetensors_header  # noqa: PLC0415  (a sound checkpoint needs none of it)

    try:
        safetensors_header.read(file)
    except (OSError, UsageProblem, safetensors_header.Invalid):
        return False
    return True
