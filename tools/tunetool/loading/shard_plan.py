"""Which part of each tensor a rank loads: placements of torch's DTensor, given by name or taken from a parameter."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tunetool.errors import UsageProblem
from tunetool.loading.safetensors_files import Listing, Stored, shown
from tunetool.loading.slices import Cut, Part, part_of

Placed: TypeAlias = "str | Any | Sequence[Any] | None"
"""A placement, or one for each dimension of the mesh, or a style of transformers; None is the whole tensor."""
Placements: TypeAlias = "Mapping[str, Placed] | Callable[[str, tuple[int, ...]], Placed]"

_REPLICATED = ("replicate", "replicated_with_grad_allreduce", "sequence_parallel", "all_reduce")
_COLUMNS = ("colwise", "colwise_gather_output", "colwise_rep")
_ROWS = ("rowwise", "rowwise_split_input", "rowwise_rep")
STYLES = (
    *_COLUMNS,
    *_ROWS,
    "packed_colwise",
    "packed_rowwise",
    "embedding_rowwise",
    "embedding_colwise",
    *_REPLICATED,
)
"""Words of transformers' ``tp_plan`` for which the part of a parameter is known."""
_HINT = "see `help(tunetool.loading.ShardPlan)`"


@dataclass(frozen=True)
class ShardPlan:
    """Which part of each tensor this rank loads.

    ``placements``: by the name of a stored tensor, or of its module (the name without ``.weight`` or ``.bias``); ``*``
    stands for one part of a dotted name or some of its letters, ``**`` for one or more parts; the first key that
    matches a tensor is taken, and a tensor that none matches is loaded whole. Or a function of name and shape.
    Each value is a placement of ``torch.distributed.tensor`` (``Shard(dim)``, ``Replicate()``, ``_StridedShard``), a
    sequence of them, one for each dimension of the mesh, a style of transformers' ``tp_plan`` (such as ``colwise``,
    ``rowwise``, ``packed_colwise``; meshes of one dimension only), or None for the whole tensor.

    ``rank`` and ``size``: this rank's place among so many, or one of both for each dimension of the mesh. They need no
    process group; ``of_mesh`` takes them from a ``DeviceMesh``.

    A dimension that ``size`` does not divide is cut as by DTensor and ``torch.chunk``: parts of the rounded-up size, of
    which the last ones are smaller or empty.

    Raises ``UsageProblem`` for ranks and sizes that are impossible.
    """

    placements: Placements
    rank: int | Sequence[int]
    size: int | Sequence[int]

    def __post_init__(self) -> None:
        if not callable(self.placements) and not isinstance(self.placements, Mapping):
            raise UsageProblem(
                f"`placements` of a ShardPlan is a {type(self.placements).__name__}",
                "give placements by name, such as {'**.q_proj': Shard(0)}, or a function of name and shape",
            )
        ranks, sizes = _numbers(self.rank, "rank"), _numbers(self.size, "size")
        if len(ranks) != len(sizes) or not sizes:
            raise UsageProblem(
                f"`rank={self.rank!r}`, `size={self.size!r}`: {len(ranks)} and {len(sizes)} dimensions of a mesh",
                "give one rank for each size",
            )
        for rank, size in zip(ranks, sizes, strict=True):
            if size < 1:
                raise UsageProblem(f"`size={self.size!r}`: at least one rank", "give the number of ranks")
            if not 0 <= rank < size:
                raise UsageProblem(
                    f"`rank={self.rank!r}` is none of {self.size!r}", f"ranks are counted from 0 to {size - 1}"
                )

    @classmethod
    def of_mesh(
        cls, placements: Mapping[str, Placed] | Callable[[str, tuple[int, ...]], Placed], mesh: Any
    ) -> ShardPlan:
        """The plan for this process's place in a ``DeviceMesh``. Raises ``UsageProblem`` where it has none."""
        place = mesh.get_coordinate()
        if place is None:
            raise UsageProblem("`mesh`: this process is none of its ranks", "load on the ranks of the mesh only")
        return cls(placements, tuple(place), tuple(mesh.shape))

    def parts(self, listing: Listing) -> dict[str, Part]:
        """The part of each stored tensor that is not loaded whole.

        Raises ``UsageProblem`` naming a key that matches no tensor, and a tensor that cannot be cut so.
        """
        parts = {}
        for tensor, placed in self._placed(listing):
            cuts = self._cuts(tensor, placed)
            if cuts:
                try:
                    parts[tensor.name] = part_of(tensor.shape, cuts)
                except ValueError as error:
                    raise UsageProblem(f"`shard`: {shown(tensor.name)}: {error}", _HINT) from None
        return parts

    def _placed(self, listing: Listing) -> list[tuple[Stored, Placed]]:
        if callable(self.placements):
            return [(tensor, self.placements(name, tensor.shape)) for name, tensor in listing.tensors.items()]
        patterns = [(_pattern(key), placed) for key, placed in self.placements.items()]
        unused = dict(zip(self.placements, (pattern for pattern, _ in patterns), strict=True))
        found: list[tuple[Stored, Placed]] = []
        for name, tensor in listing.tensors.items():
            matching = [(pattern, placed) for pattern, placed in patterns if pattern.fullmatch(name)]
            if matching:
                found.append((tensor, matching[0][1]))
                used = {pattern for pattern, _ in matching}
                unused = {key: pattern for key, pattern in unused.items() if pattern not in used}
        if unused:
            some = next(iter(listing.tensors), "")
            raise UsageProblem(
                f"`shard`: {shown(next(iter(unused)))} matches no tensor of `{listing.path}` ({len(unused)} such keys)",
                f"names are those in the files, such as {shown(some)}; of tied tensors the files may hold one name",
            )
        return found

    def _cuts(self, tensor: Stored, placed: Placed) -> list[Cut]:
        ranks, sizes = _numbers(self.rank, "rank"), _numbers(self.size, "size")
        if placed is None:
            return []
        if isinstance(placed, str):
            if len(sizes) != 1:
                raise UsageProblem(
                    f"`shard`: {shown(tensor.name)} has the style `{placed}` on a mesh of {len(sizes)} dimensions",
                    "give a placement for each dimension, such as (Replicate(), Shard(0))",
                )
            cut = _of_style(placed, tensor)
            return [] if cut is None else [cut._replace(rank=ranks[0], ranks=sizes[0])]
        placements = list(placed) if isinstance(placed, list | tuple) else [placed]
        if len(placements) != len(sizes):
            raise UsageProblem(
                f"`shard`: {shown(tensor.name)} has {len(placements)} placements, and the mesh {len(sizes)} dimensions",
                "give a placement for each dimension, `Replicate()` where all ranks have the same",
            )
        return cuts_of(f"`shard`: {shown(tensor.name)}", tensor.shape, placements, ranks, sizes)


def cuts_of(
    what: str, shape: Sequence[int], placements: Sequence[Any], ranks: Sequence[int], sizes: Sequence[int]
) -> list[Cut]:
    """The placements of DTensor as cuts. Raises ``UsageProblem`` beginning with ``what`` for one that is not supported,
    or that cuts a dimension which a tensor of ``shape`` does not have."""
    cuts = []
    for placement, rank, size in zip(placements, ranks, sizes, strict=True):
        kind = type(placement).__name__
        if kind == "Replicate":
            continue
        if kind not in {"Shard", "_StridedShard"}:
            raise UsageProblem(
                f"{what} has the placement `{placement!r}`, which is not supported",
                "supported: Shard, _StridedShard and Replicate of torch.distributed.tensor",
            )
        cuts.append(Cut(_dim(what, shape, placement.dim), rank, size, int(getattr(placement, "split_factor", 1))))
    return cuts


def part_of_parameter(name: str, tensor: Any) -> Part:
    """The part of a DTensor that this rank holds. Raises ``UsageProblem`` for placements that are not supported, and
    where the rank holds another shape than they say."""
    what, mesh = f"`{name}`", tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        # A rank that is not in the mesh holds nothing of the tensor.
        return Part(tuple(() for _ in tensor.shape))
    cuts = cuts_of(what, tensor.shape, tensor.placements, place, mesh.shape)
    held = tuple(tensor.to_local().shape)
    try:
        part = part_of(tensor.shape, cuts)
        if part.shape != held:
            raise ValueError(f"the placements give this rank the shape {list(part.shape)}, and it holds {list(held)}")
    except ValueError as error:
        raise UsageProblem(
            f"{what} is placed as {list(tensor.placements)} on a mesh of {list(mesh.shape)}: {error}",
            "load before the model is sharded, or shard a dimension that the ranks divide",
        ) from None
    return part


def _of_style(style: str, tensor: Stored) -> Cut | None:
    """How transformers 5 cuts a parameter of this style; None: not at all."""
    dims = len(tensor.shape)
    what, is_bias = f"`shard`: {shown(tensor.name)}", tensor.name.rpartition(".")[2] == "bias"
    if style not in STYLES:
        raise UsageProblem(
            f"{what} has the style `{style}`, which is not supported",
            f"supported: {', '.join(STYLES)}; or a placement of torch.distributed.tensor",
        )
    if style in _REPLICATED or (style in _ROWS and is_bias) or (style == "packed_rowwise" and dims == 1):
        return None
    dim, groups = -1, 1
    if style in {*_COLUMNS, "packed_colwise"} and dims > 1:
        dim = -2
    elif style.startswith("embedding"):
        dim = 0 if style == "embedding_rowwise" else 1
    if style.startswith("packed") and dims > 1:
        groups = 2
    return Cut(_dim(what, tensor.shape, dim), 0, 1, groups)


def _dim(what: str, shape: Sequence[int], dim: int) -> int:
    if not -len(shape) <= dim < len(shape):
        raise UsageProblem(
            f"{what} has the shape {list(shape)}, which has no dimension {dim} to be cut",
            "load it whole, by `Replicate()`, or cut another dimension",
        )
    return dim % len(shape)


def _numbers(value: int | Sequence[int], name: str) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, value if isinstance(value, list | tuple) else [value]))
    except TypeError:
        raise UsageProblem(f"`{name}={value!r}` of a ShardPlan is no whole number", "give one, or a tuple") from None


def _pattern(key: str) -> re.Pattern[str]:
    if not isinstance(key, str):
        raise UsageProblem(f"`placements` of a ShardPlan has the key {key!r}", "keys are names of tensors or modules")
    words = {"**": ".*", "*": "[^.]*"}
    text = "".join(words.get(part) or re.escape(part) for part in re.split(r"(\*\*|\*)", key))
    return re.compile(rf"{text}(?:\.weight|\.bias)?", re.DOTALL)
