"""Which stored tensor belongs to which parameter or buffer of a module; what does not fit is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.host_buffers import is_plain
from tunetool.errors import UsageProblem
from tunetool.loading.fill import want
from tunetool.loading.safetensors_files import Listing, Stored, shown

Rename = Callable[[str], str]


class DoesNotFit(UsageProblem):
    """The files are not those of the module."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "the files and the module are of different models: compare their names and shapes")


def _same(name: str) -> str:
    return name


def match(
    module: Any, listing: Listing, rename: Rename | None = None, *, ignore_unused: bool = False
) -> dict[str, Stored]:
    """The stored tensor of each parameter and each stored buffer of ``module``, by a name that it has there.

    A tied tensor has several names, and a file with any of them suffices. ``rename`` maps the names of the module and
    of the files to a common name. Raises ``DoesNotFit``.
    """
    rename = rename or _same
    renamed = {rename(name): tensor for name, tensor in listing.tensors.items()}
    matched: dict[str, Stored] = {}
    used: set[str] = set()
    for names, tensor in _tensors(module):
        candidates = [listing.tensors.get(name) or renamed.get(rename(name)) for name in names]
        stored = next((candidate for candidate in candidates if candidate is not None), None)
        if stored is None or stored.shape != tuple(tensor.shape):
            mismatch = "no file holds it" if stored is None else f"`{stored.file}` holds it with {list(stored.shape)}"
            raise DoesNotFit(
                f"`{listing.path}`: the model has `{names[0]}` of shape {list(tensor.shape)}, and {mismatch}"
            )
        matched[names[0]] = stored
        used.update(candidate.name for candidate in candidates if candidate is not None)
    unused = [tensor for name, tensor in listing.tensors.items() if name not in used]
    if unused and not ignore_unused:
        raise DoesNotFit(
            f"`{listing.directory / unused[0].file}` holds {shown(unused[0].name)}, which the model does not have "
            f"({len(unused)} such)"
        )
    for name, buffer in module.named_buffers():
        if buffer.is_meta and name not in matched and not any(buffer is tensor for _, tensor in _tensors(module)):
            raise UsageProblem(
                f"`{name}` is on `meta`, and no file holds such a buffer: its values would be lost",
                "make the module with its buffers on the CPU, and its parameters alone on `meta`",
            )
    return matched


def targets(module: Any, matched: dict[str, Stored]) -> list[Want]:
    """The readings that fill ``module``. Raises ``UsageProblem`` for a parameter that has no memory to be filled."""
    wants = []
    for names, tensor in _tensors(module):
        target = tensor.detach()
        try:
            fits = is_plain(target)
        except ValueError as error:
            raise UsageProblem(
                f"`{names[0]}` has no memory: {error}", "load before the model is sharded or offloaded"
            ) from None
        if not fits:
            raise UsageProblem(
                f"`{names[0]}` is no plain tensor with memory (it is of {type(tensor).__name__} on `{tensor.device}`)",
                "give `device`, which gives memory to parameters on `meta`; load before the model is sharded",
            )
        wants.append(want(matched[names[0]], target))
    return wants


def _tensors(module: Any) -> list[tuple[list[str], Any]]:
    """Parameters and stored buffers, each once with all its names."""
    grouped: dict[int, tuple[list[str], Any]] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if hasattr(tensor, "element_size"):  # else a module's extra state, which no .safetensors file holds
            grouped.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(grouped.values())
