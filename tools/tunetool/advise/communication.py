"""The collectives that ranks run in one training step under DeepSpeed's ZeRO, with their sizes in bytes. Pure.

The ZeRO paper (arXiv 1910.02054, section 7) counts 2 psi elements a step for stages 1 and 2 and 3 psi for stage 3, psi
being the number of parameters, all of them trained. DeepSpeed 0.19.8 does something else, and this module follows
DeepSpeed; the file names below are relative to deepspeed/runtime:

- Stages 1 and 2 average gradients by ALL-REDUCE, bucket by bucket, and each rank keeps its partition of the result
  (zero/stage_1_and_2.py: average_tensor, ``use_multi_rank_bucket_allreduce``, on by default), then all-gather what was
  trained once (step: all_gather_dp_groups). For each rank that is 3 (N-1)/N psi, not 2.
- Stage 3 gathers a parameter when the module that holds it runs, forward and backward, unless it is still gathered
  (``tunetool.advise.zero_steps``), and reduce-scatters gradients (zero/stage3.py: __avg_scatter_grads). Parameters of
  at most ``stage3_param_persistence_threshold`` elements stay gathered, and are gathered one by one after each step
  (stage3.py: _post_step, partition_parameters.py: _allgather_params_coalesced).
- Frozen parameters (a model under LoRA) have no gradients: stages 1 and 2 never send them, stage 3 gathers them all.

The size of a collective is that of the whole vector in bytes, as nccl-tests counts it: for an all-gather, the result.
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
"""Bytes of the norm of all gradients, which gradient clipping all-reduces."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the model, or of an adapter."""

    name: str
    numel: int
    trained: bool


@dataclass(frozen=True)
class Module:
    """A module that owns parameters directly. DeepSpeed gathers module by module, in the order in which they run."""

    name: str
    parameters: tuple[Parameter, ...]
    backward: bool = True
    """Whether a backward pass runs through it: False where nothing before it is trained."""
    block: int | None = None
    """Index of the layer that activation checkpointing recomputes as a whole; None outside the layers."""
    works: bool = True
    """Whether it multiplies matrices: an embedding only looks up rows."""

    @property
    def numel(self) -> int:
        """Elements of all its parameters."""
        return sum(each.numel for each in self.parameters)


@dataclass(frozen=True)
class Zero:
    """The settings of a ds_config that decide the traffic, in elements; defaults are DeepSpeed's (zero/config.py)."""

    stage: int
    reduce_bucket: int = 500_000_000
    prefetch_bucket: int = 50_000_000
    persistence: int = 100_000
    live: int = 1_000_000_000
    reuse: int = 1_000_000_000
    clip: bool = True
    recompute: bool = False
    """Activation checkpointing: each block runs forward again before its backward pass."""
    overlap: bool = True
    """``overlap_comm``: gradients are sent during the backward pass. DeepSpeed's default is on in stage 3 only."""


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
        """Number of collectives of each kind."""
        counts = Counter(call.kind for call in self.calls)
        return {kind: counts[kind] for kind in KINDS}

    @property
    def sizes(self) -> dict[Kind, int]:
        """Bytes of all vectors of each kind together."""
        return {kind: sum(call.size for call in self.calls if call.kind == kind) for kind in KINDS}

    @property
    def sent(self) -> float:
        """Bytes that one rank sends in a step; it receives as many. A node's link carries as many in each direction,
        since in a ring one rank of each node sends to the next node.
        """
        return sum(size * sent_share(kind, self.world, self.backend) for kind, size in self.sizes.items())


def sent_share(kind: Kind, world: int, backend: Backend) -> float:
    """Bytes that a rank sends per byte of the vector, in a ring of ``world`` ranks.

    All-gather and reduce-scatter send (N-1)/N, an all-reduce is one of each (Patarasuk and Yuan, JPDC 69 (2009) 117;
    nccl-tests' PERFORMANCE.md). torch's gloo implements a reduce-scatter as an all-reduce of which each rank keeps its
    partition (ProcessGroupGloo.cpp: reduce_scatter_tensor_coalesced).
    """
    if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo"):
        return 2 * (world - 1) / world
    return (world - 1) / world


def bus_factor(kind: Kind, world: int) -> float:
    """Bus bandwidth divided by algorithm bandwidth, as nccl-tests defines them (doc/PERFORMANCE.md). It depends on the
    operation only, not on how the backend implements it.
    """
    return sent_share(kind, world, "nccl")


def padded(numel: int, world: int) -> int:
    """Elements of a tensor after padding to equal partitions for ``world`` ranks
    (partition_parameters.py: _aligned_size).
    """
    return -(-numel // world) * world


def trained(modules: Sequence[Module]) -> list[Parameter]:
    """The trained parameters, each once, in the order in which the backward pass produces their gradients."""
    by_name = {each.name: each for module in modules for each in module.parameters if each.trained}
    return list(by_name.values())[::-1]


def parameters(modules: Sequence[Module]) -> list[Parameter]:
    """All parameters, each once (a tied output layer shares the embedding's)."""
    return list({each.name: each for module in modules for each in module.parameters}.values())


def buckets(sizes: Sequence[int], limit: int) -> Iterator[int]:
    """The elements of each reduce bucket: a bucket is sent before the gradient that would exceed ``limit``.

    See stage_1_and_2.py: reduce_independent_p_g_buckets_and_remove_grads, and the same name in stage3.py.
    """
    held = 0
    for size in sizes:
        if held and held + size > limit:
            yield held
            held = 0
        held += size
    if held:
        yield held
