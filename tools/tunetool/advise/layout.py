"""Which rank holds which part of a model, and so reads and writes it, under TP, PP, DP, EP and FSDP. Pure.

Ranks are numbered as Megatron-core's default order has them (`tp-cp-ep-dp-pp`, core/parallel_state.py): tensor ranks
are neighbours, then come FSDP's and the data-parallel ones, and pipeline stages are farthest apart. Matrices are
divided over the tensor ranks, vectors (norms, biases) are not. Every stage has as many layers as the next, give or take
one; the first has the embedding, the last the output layer. FSDP divides each of these parts over its ranks. Experts
are divided over the larger of EP and FSDP, and over the tensor ranks, which is Megatron's default for experts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise.expert_decoder import is_expert, routed
from tunetool.advise.shapes import Model
from tunetool.errors import UsageProblem

MOST_RANKS = 65_536
_TOWER = "visual."
"""How names of a vision tower begin: it runs before the decoder, on the first stage."""


@dataclass(frozen=True)
class Layout:
    """The degrees of parallelism, and the GPUs of a node."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    experts: int = 1
    fsdp: int = 1
    of_node: int = 8

    @property
    def samplers(self) -> int:
        """Ranks with samples of their own: FSDP is data parallelism too."""
        return self.data * self.fsdp

    @property
    def world(self) -> int:
        """Number of ranks. Experts divide the data-parallel ranks and add none."""
        return self.tensor * self.pipeline * self.samplers

    @property
    def nodes(self) -> int:
        """Number of nodes, the last of which may be partly used."""
        return -(-self.world // self.of_node)

    @property
    def of_experts(self) -> int:
        """Number of ranks over which experts are divided, beside the tensor ranks."""
        return max(self.experts, self.fsdp)

    def check(self, model: Model) -> None:
        """Raises ``UsageProblem`` for degrees that no job can have."""
        if self.world > MOST_RANKS:
            raise UsageProblem(f"{self.world} ranks are more than {MOST_RANKS}", "give the degrees of one job")
        if self.samplers % self.experts or (self.experts % self.fsdp and self.fsdp % self.experts):
            raise UsageProblem(
                f"`--ep {self.experts}` does not divide the {self.samplers} ranks of `--dp {self.data}` and `--fsdp "
                f"{self.fsdp}` evenly",
                "experts are divided over data-parallel ranks: give a divisor",
            )
        layers, found = len(_blocks(model)), routed(model)
        if self.pipeline > max(1, layers):
            raise UsageProblem(f"`--pp {self.pipeline}` stages, but `{model.name}` has {layers} layers", "give fewer")
        if self.experts > 1 and found is None:
            raise UsageProblem(f"`--ep {self.experts}`, but `{model.name}` has no experts", "leave `--ep` out")
        if found is not None and found.per_layer % self.experts:
            raise UsageProblem(
                f"`--ep {self.experts}` does not divide the {found.per_layer} experts of a layer", "give a divisor"
            )


@dataclass(frozen=True)
class Place:
    """The coordinates of a rank."""

    tensor: int
    fsdp: int
    sampler: int
    """Number among the ranks with samples of their own."""
    stage: int


def place(layout: Layout, rank: int) -> Place:
    """The coordinates of the rank with this number."""
    rest, tensor = divmod(rank, layout.tensor)
    stage, sampler = divmod(rest, layout.samplers)
    return Place(tensor, sampler % layout.fsdp, sampler, stage)


@dataclass(frozen=True)
class Stage:
    """Elements of one pipeline stage, by how they are divided."""

    matrices: int
    vectors: int
    experts: int


def stages(model: Model, count: int) -> list[Stage]:
    """The model's elements by pipeline stage."""
    order = {block: number for number, block in enumerate(_blocks(model))}
    sums = [[0, 0, 0] for _ in range(count)]
    seen = False
    for tensor in model.tensors:
        number = order.get(tensor.block) if tensor.block is not None else None
        if number is not None:
            stage, seen = number * count // len(order), True
        else:
            stage = count - 1 if seen and not tensor.name.startswith(_TOWER) else 0
        kind = 2 if is_expert(tensor) else 0 if len(tensor.shape) > 1 else 1
        sums[stage][kind] += tensor.numel
    return [Stage(*each) for each in sums]


def _blocks(model: Model) -> list[str]:
    """The decoder's layers in order."""
    names = (tensor.block for tensor in model.tensors)
    return list(dict.fromkeys(name for name in names if name is not None and not name.startswith(_TOWER)))


Part = tuple[str, int, int, int]
"""A part of the model: its kind, stage, tensor rank and number. Ranks that hold the same part have the same key."""


def parts_of(layout: Layout, stage: Stage, at: Place) -> dict[Part, float]:
    """The parts that a rank holds, in elements."""
    expert = at.sampler % layout.of_experts
    return {
        ("matrices", at.stage, at.tensor, at.fsdp): stage.matrices / (layout.tensor * layout.fsdp),
        ("vectors", at.stage, 0, at.fsdp): stage.vectors / layout.fsdp,
        ("experts", at.stage, at.tensor, expert): stage.experts / (layout.tensor * layout.of_experts),
    }


@dataclass(frozen=True)
class Held:
    """Elements that ranks hold."""

    rank: float
    """Of the rank with the most."""
    node: float
    """Of all ranks of the node with the most, parts that several of them hold counted once for each."""
    node_once: float
    """Of the node with the most different parts, each counted once."""
    job: float
    """Of all ranks together."""
    job_once: float
    """Of all nodes together, each part counted once in each node that holds it."""
    samplers: int
    """Ranks with samples of their own on the node of the first stage that has the most of them."""

    @property
    def redundant(self) -> float:
        """Share of what a node's ranks hold that another of its ranks holds too."""
        return 1 - self.node_once / self.node if self.node else 0.0


def held(model: Model, layout: Layout) -> Held:
    """What ranks and nodes hold. Raises ``UsageProblem``."""
    layout.check(model)
    elements = stages(model, layout.pipeline)
    most = {"rank": 0.0, "node": 0.0, "once": 0.0}
    job, job_once, samplers = 0.0, 0.0, 0
    for first in range(0, layout.world, layout.of_node):
        places = [place(layout, rank) for rank in range(first, min(first + layout.of_node, layout.world))]
        each = [parts_of(layout, elements[at.stage], at) for at in places]
        ranks = [sum(parts.values()) for parts in each]
        once: dict[Part, float] = {}
        for parts in each:
            once.update(parts)
        _raise(most, rank=max(ranks), node=sum(ranks), once=sum(once.values()))
        job, job_once = job + sum(ranks), job_once + sum(once.values())
        samplers = max(samplers, len({at.sampler for at in places if at.stage == 0}))
    return Held(most["rank"], most["node"], most["once"], job, job_once, samplers)


def _raise(most: dict[str, float], **values: float) -> None:
    for name, value in values.items():
        most[name] = max(most[name], value)


def names(layout: Layout) -> Sequence[str]:
    """The degrees above 1, for people."""
    degrees = (
        ("TP", layout.tensor),
        ("PP", layout.pipeline),
        ("DP", layout.data),
        ("FSDP", layout.fsdp),
        ("EP", layout.experts),
    )
    return [f"{name} {degree}" for name, degree in degrees if degree > 1] or ["one rank"]
