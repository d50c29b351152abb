"""``load`` and ``load_into``: the public ways to load weights."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.host_buffers import release_buffers
from tunetool.errors import UsageProblem
from tunetool.loading.device_memory import device_of, give_memory, rounded, taking
from tunetool.loading.fill import (
    BUFFER_BYTES,
    Filling,
    Progress,
    Ranks,
    Reading,
    asked_of,
    by_device,
    checked_reading,
    reads_alone,
)
from tunetool.loading.safetensors_files import Listing, list_tensors
from tunetool.loading.wanted import Wanted, wanted_of

if TYPE_CHECKING:
    from tunetool.loading.module_weights import Rename
    from tunetool.loading.shard_plan import ShardPlan

__all__ = ["load", "load_into", "release_buffers"]


# A full collection beside torch takes 50 ms, a seventh of a load from memory, and threads that read wait for the
# interpreter's lock meanwhile.
@without_collections()
def load(
    path: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    shard: ShardPlan | None = None,
    progress: Callable[[Progress], None] | None = None,
    group: Any = None,
    threads: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> dict[str, torch.Tensor]:
    """All tensors of ``path`` on ``device`` (``cpu``, ``cuda``, ``cuda:1``), by name.

    ``path``: a .safetensors file, an index, or a directory that holds ``model.safetensors`` or
    ``model.safetensors.index.json``. What the page cache or a tmpfs holds is copied from there; the rest is read from
    the drives with O_DIRECT and does not enter the cache. A GPU takes no memory but the tensors'; the host takes two
    pinned buffers of ``buffer_bytes`` for each of ``threads`` (None: this rank's share of the cores, 4 to 12), or 4 MiB
    where compiled code reads from memory, which ``release_buffers`` gives back.

    ``shard``: which part of each tensor this rank gets, as a plain tensor of the part's shape, for tensor parallelism.
    Rows are read alone; columns with what lies between them where that is less than 256 KiB in each row, and a GPU
    takes ``buffer_bytes`` for each thread then. Not together with ``group``.

    ``progress``: called with a ``Progress`` several times a second, and at the end. ``group``: a process group of
    torch.distributed whose ranks all load this path; each byte is then read once, by one of them, which sends it to the
    others.

    Raises ``UsageProblem`` where files, headers or the index are malformed, the device is not there, or ``shard`` does
    not fit the tensors; ``CannotJudge`` where a file cannot be read or changes meanwhile, or the memory does not
    suffice.
    """
    reading = checked_reading(threads, buffer_bytes, progress)
    target = device_of(device)

    def prepare() -> tuple[Listing, list[Wanted], dict[str, torch.Tensor]]:
        if shard is not None:
            _refuse_group(group, "`shard`")
        listing = list_tensors(Path(path))
        wanted = wanted_of(listing, shard)
        return listing, wanted, _empty(listing, wanted, target)

    with _ranks(group, target) as ranks:
        listing, wanted, tensors = ranks.all_or_none(prepare)
        wants = [each for one in wanted for each in one.wants(tensors[one.stored.name])]
        _fill(listing, wants, reading, ranks)
    return tensors


@without_collections()
def load_into(
    module: Any,
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    *,
    rename: Rename | None = None,
    ignore_unused: bool = False,
    progress: Callable[[Progress], None] | None = None,
    group: Any = None,
    threads: int | None = None,
    buffer_bytes: int = BUFFER_BYTES,
) -> Progress:
    """Fill every parameter and stored buffer of ``module`` from ``path``, and return how long that took.

    ``device``: parameters get new memory there, also those on ``meta``, and buffers move there; None: every tensor is
    filled where it is. Of a DTensor, as FSDP2 and tensor parallelism make them, this rank's part is read and filled
    where it is: without ``device`` and ``group``, after ``module.to_empty(device=...)`` where it is on ``meta``.
    Other dtypes are converted as by ``copy_``. ``rename`` maps the names of the module and of the files to a common
    name by which they are matched; a tied tensor needs to be stored once, and where it is stored under two names the
    bytes are compared first. Tensors that the module does not have are refused unless ``ignore_unused``. The other
    arguments and errors are those of ``load``; ``DoesNotFit`` (a ``UsageProblem``) is raised before anything is
    changed. An error while files are read leaves the module filled in part.
    """
    from tunetool.loading.module_weights import (  # noqa: PLC0415  `load` needs none of it
        check_same,
        cut_tensor,
        match,
        targets,
    )

    reading = checked_reading(threads, buffer_bytes, progress)
    target = None if device is None else device_of(device)
    of_group = target or next((each.device for each in module.parameters()), torch.device("cpu"))

    def prepare() -> tuple[Listing, list[Want]]:
        is_cut = cut_tensor(module)
        if is_cut:
            _refuse_group(group, f"the DTensor `{is_cut}`")
            if target is not None:
                raise UsageProblem(
                    f"`device={device}`: `{is_cut}` is a DTensor, which keeps its memory",
                    "leave `device` out; `module.to_empty(device=...)` gives memory to what is on `meta`",
                )
        listing, in_place = list_tensors(Path(path)), target is None
        matched = match(module, listing, rename, ignore_unused=ignore_unused, in_place=in_place)
        if ranks.is_first:
            check_same(listing, matched.same, reading)
        if target is not None:
            give_memory(module, target, f"`{path}`")
        return listing, targets(module, matched, in_place=in_place)

    with _ranks(group, of_group) as ranks:
        listing, wants = ranks.all_or_none(prepare)
        return _fill(listing, wants, reading, ranks)


def _ranks(group: Any, device: torch.device) -> Ranks:
    if group is None:
        return Ranks()
    from tunetool.loading.sharing import Group  # noqa: PLC0415  a process alone needs none of it

    return Group(group, device)


def _refuse_group(group: Any, what: str) -> None:
    if group is not None:
        raise UsageProblem(f"`group` together with {what}: each rank reads its own parts", "leave `group` out")


def _empty(listing: Listing, wanted: Sequence[Wanted], device: torch.device) -> dict[str, torch.Tensor]:
    with taking(device, sum(rounded(each.bytes) for each in wanted), f"`{listing.path}`"):
        return {each.stored.name: torch.empty(each.shape, dtype=each.dtype, device=device) for each in wanted}


def _fill(listing: Listing, wants: list[Want], reading: Reading, ranks: Ranks) -> Progress:
    is_shared = ranks.size > 1 or reads_alone(listing, wants)
    filling = Filling(listing, sum(map(asked_of, wants)), reading, is_shared=is_shared)
    try:
        for device, group in by_device(wants).items():
            ranks.fill(filling, group, device)
    finally:
        filling.files.close()
    ranks.all_or_none(listing.check_unchanged)
    return filling.finish()
