"""Who reads and writes what in a job: in a step, at the start, at a checkpoint; and the strategy for each. Pure.

Bytes come from the model and the layout of its ranks (``layout``), seconds from the slowest layer of a node's storage
(``layers``): bytes over bandwidth, without latency, and as if nothing came from the page cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.advise.checkpoint import FULL_STATE, WEIGHTS, format_duration
from tunetool.advise.expert_decoder import routed
from tunetool.advise.layers import Layers
from tunetool.advise.layout import Layout, held, names
from tunetool.advise.shapes import Model
from tunetool.measure import Direction
from tunetool.node.units import format_bandwidth, format_size

ENDS = 2
"""Stages that need samples: the first, and the last for its labels (Megatron-LM, `is_dataset_built_on_rank`)."""


@dataclass(frozen=True)
class Asked:
    """The job."""

    model: Model
    layout: Layout
    sample: int
    """Bytes of a sample."""
    batch: int
    """Samples of one step of the whole job."""
    step: float | None = None
    """Seconds of a step; None: not known."""

    @property
    def of_a_rank(self) -> float:
        """Bytes of the samples of one rank in a step."""
        return self.batch / self.layout.samplers * self.sample


@dataclass(frozen=True)
class Way:
    """One way to read or write: the bytes of the busiest rank, of the busiest node, and of the job."""

    what: str
    """``step``, ``load`` or ``checkpoint``."""
    name: str
    direction: Direction
    rank: float
    node: float
    job: float
    needed: float
    """Bytes of the job without any repetition."""
    seconds: float
    """Of the busiest node at its storage's speed."""

    @property
    def times(self) -> float:
        """How often a byte is read or written on average."""
        return self.job / self.needed if self.needed else 1.0


def ways(asked: Asked, layers: Layers) -> list[Way]:
    """The ways of a step, of the start and of a checkpoint; of each the one that repeats most comes first."""
    layout, parts = asked.layout, held(asked.model, asked.layout)
    read, write = layers.binds("read").value, layers.binds("write").value
    local = min(layout.of_node, layout.world)
    result = []

    def add(what: str, name: str, needed: float, rank: float, node: float, job: float) -> None:
        direction: Direction = "write" if what == "checkpoint" else "read"
        speed = write if direction == "write" else read
        result.append(Way(what, name, direction, rank, node, job, needed, node / speed))

    own = asked.of_a_rank
    samples = asked.batch * asked.sample
    if layout.tensor * layout.pipeline > 1:
        add("step", "every rank reads", samples, own, local * own, layout.world * own)
    ends = min(ENDS, layout.pipeline)
    add("step", "one rank of a tensor group reads", samples, own, parts.samplers * own, ends * samples)
    weights = float(asked.model.numel * WEIGHTS)
    add("load", "every rank reads all", weights, weights, local * weights, layout.world * weights)
    per_rank, per_node = parts.rank * WEIGHTS, parts.node * WEIGHTS
    add("load", "each rank reads its part", weights, per_rank, per_node, parts.job * WEIGHTS)
    once = parts.job_once * WEIGHTS
    add(
        "load",
        "each node reads a part once",
        weights,
        parts.node_once * WEIGHTS / local,
        parts.node_once * WEIGHTS,
        once,
    )
    full = float(asked.model.numel * FULL_STATE)
    add("checkpoint", "rank 0 writes all", full, full, full, full)
    add(
        "checkpoint",
        "each rank writes what it holds",
        full,
        parts.rank * FULL_STATE,
        parts.node * FULL_STATE,
        parts.job * FULL_STATE,
    )
    even = full / layout.world
    add("checkpoint", "each part is written once", full, even, even * local, full)
    return result


@dataclass(frozen=True)
class Streaming:
    """Experts that are read from storage for each token, as in inference with offload."""

    size: float
    """Bytes of an expert."""
    token: float
    """Bytes of the experts that one token uses."""
    all: float
    """Bytes of all experts."""
    speed: float
    """Bytes per second of the reads."""
    of: str
    """What has that speed."""

    def tokens(self, cached: float) -> float:
        """Tokens per second where that share of the experts is in memory, and all are equally likely."""
        return self.speed / (self.token * (1 - cached))


def streaming(model: Model, layers: Layers) -> Streaming | None:
    """The experts' reads; None for a model without experts, or where it is not known how many a token uses."""
    experts = routed(model)
    if experts is None or experts.used is None:
        return None
    layer = layers.random or layers.binds("read")
    return Streaming(
        size=experts.numel / experts.count * WEIGHTS,
        token=experts.used * WEIGHTS,
        all=float(experts.numel * WEIGHTS),
        speed=layer.value,
        of=layer.name,
    )


def strategies(asked: Asked, layers: Layers, found: Sequence[Way]) -> list[tuple[str, str]]:
    """By name of a strategy, a sentence with its figures."""
    return [
        *_of_a_step(asked, layers, found),
        *_of_the_start(asked, found),
        *_of_a_checkpoint(asked, found),
        *_of_experts(asked, layers),
    ]


def _of_a_step(asked: Asked, layers: Layers, found: Sequence[Way]) -> Iterator[tuple[str, str]]:
    layout = asked.layout
    (best,) = _ways(found, "step", "one rank of a tensor group reads")
    if layout.samplers > 1:
        both = " and ".join(
            f"{name} {degree}" for name, degree in (("DP", layout.data), ("FSDP", layout.fsdp)) if degree > 1
        )
        yield (
            "pre-shard",
            f"each of the {layout.samplers} data-parallel ranks ({both}) has samples of its own, "
            f"{format_size(best.rank)} in a step: give each its own shard of the data, then no sample is read twice",
        )
    if layout.tensor > 1:
        (every,) = _ways(found, "step", "every rank reads")
        yield (
            "read once and broadcast samples",
            f"the {layout.tensor} tensor ranks of a group need the same samples: one reads and sends them to the "
            f"others, {format_size(best.job)} of the job in a step in place of {format_size(every.job)}",
        )
    if layout.pipeline > 1:
        yield (
            "double-buffer",
            f"only the first and the last of the {layout.pipeline} stages need samples: {format_size(best.node)} on a "
            f"node of the first stage in a step; two buffers of {format_size(best.rank)} on each of its reading ranks "
            "let the next samples come while these are computed",
        )
    if asked.step is not None:
        rate = best.node / asked.step
        share = rate / layers.binds("read").value
        verdict = "the data do not limit the step" if share < 1 else "the step waits for its data"
        part = f"{share:.2%}" if share >= 1e-4 else "less than 0.01%"
        yield (
            "data",
            f"a step of {format_duration(asked.step)} reads {format_size(best.node)} on a node, {part} of what its "
            f"slowest layer gives in that time: {verdict}",
        )


def _of_the_start(asked: Asked, found: Sequence[Way]) -> Iterator[tuple[str, str]]:
    whole, own, once = _ways(
        found, "load", "every rank reads all", "each rank reads its part", "each node reads a part once"
    )
    if asked.layout.world == 1:
        yield "load", f"one rank reads all: {format_size(whole.node)}, {format_duration(whole.seconds)}"
        return
    yield (
        "shard the weights",
        f"each rank reads only its part: a node reads {format_size(own.node)} in {format_duration(own.seconds)}, in "
        f"place of {format_size(whole.node)} in {format_duration(whole.seconds)} where every rank reads all",
    )
    if once.node < own.node * 0.999:
        yield (
            "read once and broadcast weights",
            f"ranks of a node hold the same parts: if one reads them and sends them to the others, a node reads "
            f"{format_size(once.node)} in {format_duration(once.seconds)}, {once.node / own.node:.0%} of that",
        )
    elif own.times > 1.001:
        yield (
            "read once and broadcast weights",
            f"within a node nothing is read twice; all nodes together read {own.times:.3g} times the model, so that on "
            "storage which they share one copy sends to the others, while local drives each read their own",
        )
    else:
        yield "load", "no byte is read twice: a broadcast would gain nothing"


def _of_a_checkpoint(asked: Asked, found: Sequence[Way]) -> Iterator[tuple[str, str]]:
    zero, held_, once = _ways(
        found, "checkpoint", "rank 0 writes all", "each rank writes what it holds", "each part is written once"
    )
    if asked.layout.world == 1:
        yield "checkpoint", f"one rank writes all: {format_size(zero.node)}, {format_duration(zero.seconds)}"
        return
    alone = f"rank 0 alone writes {format_size(zero.node)} in {format_duration(zero.seconds)}"
    if asked.layout.nodes == 1:
        alone = f"rank 0 alone writes all {format_size(zero.node)} from one process to the same drives"
    yield (
        "sharded checkpoint",
        f"each part once, spread over all ranks: {format_size(once.rank)} a rank, {format_size(once.node)} a node in "
        f"{format_duration(once.seconds)}; {alone}",
    )
    if held_.times > 1.01:
        yield (
            "write each copy once",
            f"if every rank wrote what it holds, the job would write {held_.times:.3g} times the state, "
            f"{format_size(held_.job)}: let one of the copies write each part",
        )


def _of_experts(asked: Asked, layers: Layers) -> Iterator[tuple[str, str]]:
    stream = streaming(asked.model, layers)
    if stream is None:
        return
    yield (
        "expert cache",
        "in training all experts stay in memory and a step reads none; where they are read for each token, an expert "
        f"is {format_size(stream.size)} and a token uses {format_size(stream.token)} of {format_size(stream.all)}: "
        f"{stream.tokens(0):.3g} tokens/s at {format_bandwidth(stream.speed)} ({stream.of}) without a cache; a cache "
        f"of half the experts, {format_size(stream.all / 2)}, gives {stream.tokens(0.5):.3g} if all are equally "
        "likely, and more where some are used more often",
    )


def _ways(found: Sequence[Way], what: str, *names: str) -> list[Way]:
    by_name = {each.name: each for each in found if each.what == what}
    return [by_name[name] for name in names]


def readers_to_saturate(layers: Layers) -> list[str]:
    """Where one process does not use what the storage gives: how many would, if they add up."""
    sentences = []
    for direction, each in layers.processes.items():
        storage = layers.binds(direction)
        for layer in each:
            if layer.value < storage.value:
                count = -(-storage.value // layer.value)
                sentences.append(
                    f"{layer.name} reaches {format_bandwidth(layer.value)} in one process: it binds, not the storage, "
                    f"below {count:.0f} such processes on a node"
                )
    return sentences


def as_document(asked: Asked, layers: Layers, found: Sequence[Way]) -> dict[str, Any]:
    """The answer as JSON values: bytes, seconds, bytes per second."""
    layout = asked.layout
    stream = streaming(asked.model, layers)
    return {
        "model": asked.model.name,
        "parameters": asked.model.numel,
        "layout": {
            "tp": layout.tensor,
            "pp": layout.pipeline,
            "dp": layout.data,
            "ep": layout.experts,
            "fsdp": layout.fsdp,
            "ranks": layout.world,
            "gpus_per_node": layout.of_node,
            "nodes": layout.nodes,
            "description": ", ".join(names(layout)),
        },
        "sample_bytes": asked.sample,
        "batch": asked.batch,
        "storage": {
            "source": layers.source,
            "measured": layers.measured,
            "binds": {
                direction: {"layer": layers.binds(direction).name, "value": layers.binds(direction).value}
                for direction in layers.storage
            },
            "layers": {
                direction: [{"layer": layer.name, "value": layer.value} for layer in each]
                for direction, each in layers.storage.items()
            },
            "loss": layers.loss,
        },
        "ways": [
            {
                "what": each.what,
                "name": each.name,
                "direction": each.direction,
                "rank_bytes": each.rank,
                "node_bytes": each.node,
                "job_bytes": each.job,
                "times": each.times,
                "node_seconds": each.seconds,
            }
            for each in found
        ],
        "experts": {
            "expert_bytes": stream.size,
            "token_bytes": stream.token,
            "all_bytes": stream.all,
            "tokens_per_second": stream.tokens(0),
        }
        if stream is not None
        else None,
        "strategies": [{"name": name, "sentence": sentence} for name, sentence in strategies(asked, layers, found)],
    }
