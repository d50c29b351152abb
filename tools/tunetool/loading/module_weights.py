"""Which stored tensor belongs to which parameter or buffer of a module; what does not fit is refused by name, and
stored tensors that a module has as one are compared: two names of a tied parameter, two that ``rename`` calls alike."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.host_buffers import is_plain
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.errors import UsageProblem
from tunetool.loading.fill import Filling, Reading, want
from tunetool.loading.safetensors_files import Listing, Stored, shown
from tunetool.loading.wanted import part_wants

Rename = Callable[[str], str]


class DoesNotFit(UsageProblem):
    """The files are not those of the module."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "the files and the module are of different models: compare their names and shapes")


class Same(NamedTuple):
    """Two stored tensors for one tensor of the module, which must have the same bytes."""

    first: Stored
    second: Stored

    def differ(self, listing: Listing) -> DoesNotFit:
        """The error where they have others."""
        first, second = self
        return DoesNotFit(
            f"`{listing.path}`: {shown(first.name)} and {shown(second.name)} are one tensor of the model, and the "
            "files hold two different ones"
        )


class Matched(NamedTuple):
    """The stored tensor of each parameter and each stored buffer, by a name that it has in the module."""

    stored: dict[str, Stored]
    same: list[Same]


def _same(name: str) -> str:
    return name


def match(
    module: Any, listing: Listing, rename: Rename | None = None, *, ignore_unused: bool = False, in_place: bool = False
) -> Matched:
    """The stored tensors of ``module``. ``in_place``: it keeps its memory, so that what shares some is one tensor.

    A tied tensor has several names, and a file with any of them suffices. ``rename`` maps the names of the module and
    of the files to a common name. Raises ``DoesNotFit``.
    """
    rename = rename or _same
    renamed: dict[str, list[Stored]] = {}
    for name, tensor in listing.tensors.items():
        renamed.setdefault(rename(name), []).append(tensor)
    matched: dict[str, Stored] = {}
    same: list[Same] = []
    used: set[str] = set()
    for names, tensor in _tensors(module, in_place):
        candidates: dict[str, Stored] = {}
        for name in names:
            exact = listing.tensors.get(name)
            found = renamed.get(rename(name), []) if exact is None else [exact]
            candidates.update({each.name: each for each in found})
        stored = next(iter(candidates.values()), None)
        if stored is None or stored.shape != tuple(tensor.shape):
            mismatch = "no file holds it" if stored is None else f"`{stored.file}` holds it with {list(stored.shape)}"
            raise DoesNotFit(
                f"`{listing.path}`: the model has `{names[0]}` of shape {list(tensor.shape)}, and {mismatch}"
            )
        matched[names[0]] = stored
        used.update(candidates)
        for other in list(candidates.values())[1:]:
            pair = Same(stored, other)
            if (stored.dtype, stored.shape) != (other.dtype, other.shape):
                raise pair.differ(listing)
            same.append(pair)
    unused = [tensor for name, tensor in listing.tensors.items() if name not in used]
    if unused and not ignore_unused:
        raise DoesNotFit(
            f"`{listing.directory / unused[0].file}` holds {shown(unused[0].name)}, which the model does not have "
            f"({len(unused)} such)"
        )
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in matched and not any(buffer is each for _, each in _tensors(module)):
            raise UsageProblem(
                f"`{name}` is on `meta`, and no file holds such a buffer: its values would be lost",
                "make the module with its buffers on the CPU, and its parameters alone on `meta`",
            )
    return Matched(matched, same)


def targets(module: Any, matched: Matched, *, in_place: bool = False) -> list[Want]:
    """The readings that fill ``module``. Raises ``UsageProblem`` for a parameter that has no memory to be filled."""
    wants: list[Want] = []
    for names, tensor in _tensors(module, in_place):
        target, part = tensor.detach(), None
        if is_cut(tensor):
            from tunetool.loading.shard_plan import part_of_parameter  # noqa: PLC0415  a process alone needs none

            part = part_of_parameter(names[0], target)
            target = target.to_local()
        try:
            fits = is_plain(target)
        except ValueError as error:
            raise UsageProblem(
                f"`{names[0]}` has no memory: {error}", "load before the model is sharded or offloaded"
            ) from None
        if not fits:
            raise UsageProblem(
                f"`{names[0]}` is no plain tensor with memory (it is of {type(tensor).__name__} on `{tensor.device}`)",
                "give `device`, which gives memory to parameters on `meta`; load before the model is sharded"
                if part is None
                else "`module.to_empty(device=...)` gives memory to what is on `meta`",
            )
        if _overlaps(target):
            raise UsageProblem(
                f"`{names[0]}` has elements that share their place in memory: it is expanded, of shape "
                f"{list(target.shape)} with strides {list(target.stride())}",
                "give the module a tensor of its own there, such as `parameter.contiguous()`",
            )
        stored = matched.stored[names[0]]
        wants += [want(stored, target)] if part is None else part_wants(stored, part, target)
    return wants


def cut_tensor(module: Any) -> str | None:
    """The name of the first parameter or stored buffer that is a DTensor; None if there is none."""
    return next((names[0] for names, tensor in _tensors(module) if is_cut(tensor)), None)


def is_cut(tensor: Any) -> bool:
    """Whether it is a DTensor, which only a process that imported torch's module for them can have."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _overlaps(tensor: Any) -> bool:
    """Whether two elements may have one place in memory, as those of an expanded tensor."""
    reach = 0
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and tensor.numel():
            if step <= reach:
                return True
            reach += (size - 1) * step
    return False


def _tensors(module: Any, in_place: bool = False) -> list[tuple[list[str], Any]]:
    """Parameters and stored buffers, each once with all its names. ``in_place``: also one that is two objects."""
    grouped: dict[Any, tuple[list[str], Any]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "element_size"):  # else a module's extra state, which no .safetensors file holds
            grouped.setdefault((in_place and _memory(tensor)) or id(tensor), ([], tensor))[0].append(name)
    return list(grouped.values())


def _memory(tensor: Any) -> tuple[Any, ...] | None:
    """Where the elements lie, and how; None for a tensor without memory, and one that is not plain."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.is_meta or not tensor.numel():
        return None
    if tensor.layout != torch.strided or not tensor.untyped_storage().data_ptr():
        return None
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


PIECE_BYTES = 64 << 20
"""Of each of the two in memory at a time."""


def check_same(listing: Listing, pairs: Sequence[Same], reading: Reading) -> None:
    """Raises ``DoesNotFit`` for the first pair whose bytes differ, ``CannotJudge`` where they cannot be read."""
    if not pairs:
        return
    filling = Filling(listing, 0, reading._replace(progress=None))
    try:
        for pair in pairs:
            for at in range(0, pair.first.length, PIECE_BYTES):
                count = min(PIECE_BYTES, pair.first.length - at)
                both = torch.empty((2, count), dtype=torch.uint8)
                wants = [_bytes_of(tensor, at, both[row]) for row, tensor in enumerate(pair)]
                filling.read(wants, both.device)
                if not torch.equal(both[0], both[1]):
                    raise pair.differ(listing)
    finally:
        filling.files.close()


def _bytes_of(tensor: Stored, at: int, target: torch.Tensor) -> Want:
    count = len(target)
    return Want(tensor.name, tensor.file, tensor.start + at, Plain(0, count, "uint8", (count,)), (0,), (count,), target)
