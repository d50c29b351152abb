"""What ranks say to each other in one step under DeepSpeed's ZeRO: which collectives, of how many bytes. Pure.

The ZeRO paper (arXiv 1910.02054, section 7) counts 2 psi elements a step for stages 1 and 2 and 3 psi for stage 3, psi
being the parameters, all of them trained. What DeepSpeed 0.19.8 does differs, and is what stands here; read below
deepspeed/runtime:

- Stages 1 and 2 average gradients by ALL-REDUCE, bucket by bucket, and keep their part of it
  (zero/stage_1_and_2.py: average_tensor, ``use_multi_rank_bucket_allreduce``, on by default), then all-gather what was
  trained once (step: all_gather_dp_groups). For each rank that is 3 (N-1)/N psi, not 2.
- Stage 3 gathers a parameter when the module that holds it runs, forward and backward, unless it is still there
  (``tunetool.advise.zero_steps``), and reduce-scatters gradients (zero/stage3.py: __avg_scatter_grads). Parameters of
  at most ``stage3_param_persistence_threshold`` elements stay, and are gathered one by one after each step
  (stage3.py: _post_step, partition_parameters.py: _allgather_params_coalesced).
- What is not trained (a model under LoRA) has no gradients: stages 1 and 2 never send it, stage 3 gathers it all.

Sizes are in bytes of the whole vector, as nccl-tests count them: an all-gather's is that of the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
Backend = Literal["gloo", "nccl"]
KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter")
SCALAR_BYTES = 4
"""The norm of all gradients, by which they are clipped: one number, all-reduced."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model, or of an adapter."""

    name: str
    numel: int
    trained: bool


@dataclass(frozen=True)
class Module:
    """What holds parameters itself. DeepSpeed gathers by module, in the order in which they run."""

    name: str
    parameters: tuple[Parameter, ...]
    backward: bool = True
    """Whether the gradient passes through it: not where nothing is trained before it."""
    block: int | None = None
    """Number of the layer that activation checkpointing runs again as a whole; None outside of them."""
    works: bool = True
    """Whether it multiplies: an embedding only looks up."""

    @property
    def numel(self) -> int:
        """Elements."""
        return sum(each.numel for each in self.parameters)


@dataclass(frozen=True)
class Zero:
    """What of ds_config decides about traffic. Counts are elements; the defaults are DeepSpeed's (zero/config.py)."""

    stage: int
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence: int = 100_000
    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    clip: bool = True
    recompute: bool = False
    """Activation checkpointing: each block runs forward again before its backward."""
    overlap: bool = True
    """``overlap_comm``: gradients travel while the backward goes on. DeepSpeed's default is on in stage 3 alone."""


@dataclass(frozen=True)
class Call:
    """One collective."""

    kind: Kind
    size: int
    """Bytes of the whole vector."""


@dataclass(frozen=True)
class Traffic:
    """The collectives of one step, in order."""

    calls: tuple[Call, ...]
    world: int
    backend: Backend

    @property
    def counts(self) -> dict[Kind, int]:
        """How many of each kind."""
        found = Counter(call.kind for call in self.calls)
        return {kind: found[kind] for kind in KINDS}

    @property
    def sizes(self) -> dict[Kind, int]:
        """Bytes of all vectors of each kind."""
        return {kind: sum(call.size for call in self.calls if call.kind == kind) for kind in KINDS}

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step, and receives; also what crosses the link of a node, either way, since
        in a ring one rank of each node sends to the next node.
        """
        return sum(size * sent_share(kind, self.world, self.backend) for kind, size in self.sizes.items())


def sent_share(kind: Kind, world: int, backend: Backend) -> float:
    """Bytes that a rank sends for each byte of the vector, by a ring of ``world`` ranks.

    All-gather and reduce-scatter (N-1)/N, all-reduce both of them (Patarasuk and Yuan, JPDC 69 (2009) 117; nccl-tests'
    PERFORMANCE.md). torch's gloo does a reduce-scatter as an all-reduce of which each rank keeps its part
    (ProcessGroupGloo.cpp: reduce_scatter_tensor_coalesced).
    """
    if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo"):
        return 2 * (world - 1) / world
    return (world - 1) / world


def bus_factor(kind: Kind, world: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests define them (doc/PERFORMANCE.md): what a link would show
    if the best algorithm ran on it. Of the operation, whatever the backend does.
    """
    return sent_share(kind, world, "nccl")


def padded(numel: int, world: int) -> int:
    """Elements of a tensor that ``world`` ranks hold equal parts of (partition_parameters.py: _aligned_size)."""
    return -(-numel // world) * world


def trained(modules: Sequence[Module]) -> list[Parameter]:
    """What is trained, each once, in the order in which its gradients come: backwards."""
    found = {each.name: each for module in modules for each in module.parameters if each.trained}
    return list(found.values())[::-1]


def parameters(modules: Sequence[Module]) -> list[Parameter]:
    """All of them, each once (a tied output layer is the embedding)."""
    return list({each.name: each for module in modules for each in module.parameters}.values())


def buckets(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """Elements that are reduced together: a bucket goes out before the gradient that would overfill it.

    stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads, and the same name in stage3.py.
    """
    held = 0
    for size in sizes:
        if held and held + size > limit:
            yield held
            held = 0
        held += size
    if held:
        yield held
