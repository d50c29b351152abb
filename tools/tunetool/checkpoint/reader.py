"""``DirectReader``: distributed checkpoints at the speed of the storage, ours and those of torch's own writer."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.planner import LoadItemType
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tunetool.checkpoint import archive, index, metadata
from tunetool.checkpoint.checksums import Chain, seal
from tunetool.checkpoint.fetch import Fetch, Want, plan_reads
from tunetool.checkpoint.items import BLOCK
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.writer import BUFFER_BYTES, default_threads
from tunetool.errors import CannotJudge, UsageProblem

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem


class DirectReader(StorageReader):
    """Reads a checkpoint: ``torch.distributed.checkpoint.load(state, storage_reader=DirectReader(path))``.

    It reads what ``DirectWriter`` and torch's ``FileSystemWriter`` (one file or many per rank) wrote, over any other
    number of ranks too: of a saved tensor only the bytes that this rank wants, in requests of ``buffer_bytes``, in the
    order of the files, past the page cache. What goes to a GPU passes through pinned buffers; what stays in the host's
    memory is read to where it belongs when addresses allow, so memory beside the state is at most ``threads`` x
    ``buffer_bytes``, for a GPU twice that, plus 8 KiB per tensor; the buffers are kept for the next load or save
    (``tunetool.checkpoint.release_buffers``).

    ``path``: the directory. ``threads``: readers of this rank, by default 4 to 16 by its share of the cores.
    ``buffer_bytes``: of one buffer, a multiple of 4096, of at least 64 KiB.
    ``verify``: tensors that were saved with a checksum are checked where they are read whole; the names of those of
    which only a part was read, and which are therefore not checked, are in ``unverified`` afterwards.
    ``allow_objects``: also unpickle objects that ``torch.load(weights_only=True)`` refuses. Unpickling runs what the
    file says, so only for checkpoints whose writer you know.

    A tensor that is not plain in its file (not contiguous, quantized ...) is read whole by ``torch.load``.

    Raises ``UsageProblem`` where there is no checkpoint or its metadata is refused, ``CannotJudge`` naming tensor and
    file where a file is missing, cut short, unreadable, damaged, or holds another shape than the metadata says;
    ``dcp.load`` wraps both in its ``CheckpointException``.
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
                f"`threads={threads}, buffer_bytes={buffer_bytes}` cannot be read with",
                "at least 1 thread, and buffers of a multiple of 4096 bytes from 65536 on",
            )
        self.path = Path(path)
        self.threads, self.buffer_bytes, self.verify, self.allow_objects = threads, buffer_bytes, verify, allow_objects
        self.unverified: list[str] = []
        self._metadata: Any = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """torch calls this before a load, with the path that ``dcp.load`` was given, if any."""
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
        """torch asks for the directory's, and for that of one ``rank`` when there is none."""
        return metadata.read(self.path, kwargs.get("rank"))

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the plan's tensors and objects. Everything is there when this returns."""
        self.unverified = []
        files = Files(self.path)
        try:
            tensors = [item for item in plan.items if item.type != LoadItemType.BYTE_IO]
            self._objects([item for item in plan.items if item.type == LoadItemType.BYTE_IO], planner, files)
            stored_items = [self._item(item) for item in tensors]
            plain_tensors = index.find(stored_items, files, self.threads)
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            self._tensors(tensors, targets, [plain_tensors[stored_item] for stored_item in stored_items], files)
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
        finally:
            files.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _place(self, item: ReadItem) -> Any:
        stored = (self._metadata.storage_data or {}).get(item.storage_index)
        name = item.storage_index.fqn
        if stored is None:
            raise CannotJudge(
                f"`{self.path / metadata.NAME}` does not say where `{name}` lies", "the metadata is damaged"
            )
        if getattr(stored, "transform_descriptors", None):
            through = ", ".join(stored.transform_descriptors)
            raise CannotJudge(
                f"`{self.path / stored.relative_path}`: `{name}` passed through `{through}` when it was saved",
                "load it with torch's FileSystemReader",
            )
        return stored

    def _item(self, item: ReadItem) -> index.Item:
        stored = self._place(item)
        return index.Item(item.storage_index.fqn, stored.relative_path, stored.offset, stored.length)

    def _objects(self, items: Sequence[ReadItem], planner: LoadPlanner, files: Files) -> None:
        for item in items:
            stored = self._place(item)
            name = item.storage_index.fqn
            content = files.content(stored.relative_path, stored.offset, stored.length, name)
            if not self.allow_objects:
                # torch's planner unpickles it freely a moment later.
                _load(content, f"`{self.path / stored.relative_path}`: `{name}`")
            planner.load_bytes(item, io.BytesIO(content))

    def _tensors(
        self,
        items: Sequence[ReadItem],
        targets: Sequence[Any],
        plain_tensors: Sequence[archive.Plain | None],
        files: Files,
    ) -> None:
        wants: dict[Any, list[Want]] = {}
        checked: set[Any] = set()
        for item, target, plain in zip(items, targets, plain_tensors, strict=True):
            self._agrees(item, target, plain)
        for item, target, plain in zip(items, targets, plain_tensors, strict=True):
            if self.verify and plain is not None and plain.checksum and plain.seal:
                self._is_of_this_save(item, plain)
            if plain is None:
                self._by_torch(item, target, files)
            else:
                want = self._want(item, target, plain, checked)
                wants.setdefault(target.device, []).append(want)
        for device, some in wants.items():
            reads = plan_reads(some, files, self.buffer_bytes)
            Fetch(files, device, self.threads, self.buffer_bytes).run(reads)

    def _want(self, item: ReadItem, target: Any, plain: archive.Plain, checked: set[Any]) -> Want:
        stored, name = self._place(item), item.storage_index.fqn
        start = stored.offset + plain.offset
        chain = None
        if self.verify and plain.checksum is not None and plain.length and item.storage_index not in checked:
            if tuple(item.lengths) == plain.shape:
                checked.add(item.storage_index)
                where = f"from {start} on in `{self.path / stored.relative_path}`"
                chain = Chain(plain.checksum, plain.length, name, where)
            else:
                self.unverified.append(name)
        return Want(
            name, stored.relative_path, start, plain, tuple(item.storage_offsets), tuple(item.lengths), target, chain
        )

    def _agrees(self, item: ReadItem, target: Any, plain: archive.Plain | None) -> None:
        """Raises where the metadata, the file and the tensor that is to be filled are of different shapes."""
        name, file = item.storage_index.fqn, self.path / self._place(item).relative_path
        described = self._metadata.state_dict_metadata.get(name)
        offset = tuple(item.storage_index.offset or ())
        sizes = [tuple(chunk.sizes) for chunk in getattr(described, "chunks", ()) if tuple(chunk.offsets) == offset]
        if plain is not None and sizes and plain.shape not in sizes:
            raise CannotJudge(
                f"`{file}` holds `{name}` with shape {list(plain.shape)}, and the metadata says {list(sizes[0])}",
                "data file and metadata are of different saves; load another checkpoint",
            )
        if tuple(target.shape) != tuple(item.lengths):
            raise CannotJudge(
                f"`{name}` is to be read into shape {list(target.shape)}, and {list(item.lengths)} of it are asked"
                f" for from `{file}`",
                "the planner's resolve_tensor() must give the part that its read item names",
            )

    def _is_of_this_save(self, item: ReadItem, plain: archive.Plain) -> None:
        index, save = item.storage_index, getattr(self._metadata.storage_meta, "save_id", None)
        if seal(plain.checksum or "", save, index.fqn, index.offset or ()) != plain.seal:
            raise CannotJudge(
                f"`{self.path / self._place(item).relative_path}` holds another tensor, or that of another save, where "
                f"`{index.fqn}` must lie",
                "data files were swapped or replaced; load another checkpoint",
            )

    def _by_torch(self, item: ReadItem, target: Any, files: Files) -> None:
        stored, name = self._place(item), item.storage_index.fqn
        where = f"`{self.path / stored.relative_path}`: `{name}`"
        tensor = _load(files.content(stored.relative_path, stored.offset, stored.length, name), where)
        if not isinstance(tensor, torch.Tensor):
            raise CannotJudge(f"{where} is a `{type(tensor).__name__}`, not a tensor", "the metadata is damaged")
        try:
            for dimension, (offset, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                tensor = tensor.narrow(dimension, offset, length)
        except (RuntimeError, ValueError, IndexError):
            raise CannotJudge(
                f"{where} has shape {list(tensor.shape)}, too small for {list(item.lengths)} from "
                f"{list(item.storage_offsets)} on",
                "data file and metadata are of different saves; load another checkpoint",
            ) from None
        target.copy_(tensor)


def _load(content: bytes, where: str) -> Any:
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except Exception as error:  # whatever a damaged or made-up archive raises
        # torch begins with half a page on how to switch the safety off.
        refusal = re.search(r"WeightsUnpickler error: (.*)", str(error))
        reason = refusal[1] if refusal else str(error).partition("\n")[0]
        raise CannotJudge(
            f"{where} cannot be unpickled safely: {reason}",
            "if it holds objects of your own and you know who wrote it: `allow_objects=True`; else load another one",
        ) from None
