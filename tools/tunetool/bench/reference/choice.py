"""Chooses what the call leaves open from the nodes' capacities: target, model, sizes, strategies. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.preflight import copies_in_memory
from tunetool.bench.checkpoint.states import shape
from tunetool.bench.defaults import CHECKPOINT_MODEL
from tunetool.bench.reference.request import MAIN_STATE_BYTES, Complete, Request
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.machine.capacity import Capacity
from tunetool.node.units import format_size
from tunetool.training.data import pictures
from tunetool.training.model import reference_model
from tunetool.training.preparation import HEIGHT, TINY, WIDTH
from tunetool.training.workload import IMAGES, Cluster

_MODELS: Sequence[tuple[str, int]] = (("7b", 40 * 10**9), ("3b", 20 * 10**9))
"""The largest model first, each with the memory that a GPU needs for LoRA on it; ``tiny`` runs anywhere."""
_SMALLEST = "tiny"
_CPU_IMAGES = 32
"""Fewer than on GPUs, since a step takes seconds on CPUs."""
_SHARE = 0.8
"""Share of free space and of memory that is used."""
_FILE_COPIES = 2.1
"""Copies of a checkpoint that some engines have on the medium at the same time."""


def complete(
    asked: Request, nodes: Mapping[str, Capacity], verify_target: Path | None = None
) -> tuple[Complete, list[str]]:
    """The complete request, and a line for each choice. ``verify_target``: see ``Complete``.

    Raises ``UsageProblem`` if a person must decide, ``CannotJudge`` if nothing can be measured.
    """
    target = asked.target or _common_target(nodes)
    cluster = _cluster(asked.cluster, nodes)
    on_gpu = cluster.device != "cpu" and all(node.gpus for node in nodes.values())
    images = asked.images or (IMAGES if on_gpu else _CPU_IMAGES)
    model, why = (asked.model, "as asked") if asked.model else _model(nodes, on_gpu, images)
    checkpoint_model, state_bytes = _state(asked, nodes, on_gpu)
    ranks = cluster.ranks_per_node or (min(node.gpus for node in nodes.values()) if on_gpu else 1)
    matrix = asked.matrix or matrix_for(len(nodes), ranks)
    decided = {
        "model": model,
        "images": images,
        "target": target,
        "verify_target": verify_target,
        "device": cluster.device,
        "ansible": cluster.ansible,
        "checkpoint_model": checkpoint_model,
        "state_bytes": state_bytes,
        "matrix": matrix,
    }
    request = Complete(**{**{each.name: getattr(asked, each.name) for each in fields(asked)}, **decided})
    compute = f"{ranks} GPU(s) of each node" if on_gpu else f"CPUs, {ranks} rank(s) on each node"
    return request, [
        f"target: `{target}`" + ("" if asked.target else ", from the manifest"),
        f"model: `{model}` ({why}), on {compute}",
    ]


def _common_target(nodes: Mapping[str, Capacity]) -> Path:
    by_target: dict[str, list[str]] = {}
    for name, node in nodes.items():
        by_target.setdefault(node.target, []).append(name)
    if len(by_target) > 1:
        named = "; ".join(f"`{target}` on {', '.join(names)}" for target, names in by_target.items())
        raise UsageProblem(f"nodes have different volumes: {named}", "name a directory of all with `--target DIR`")
    return Path(next(iter(by_target)))


def _cluster(cluster: Cluster, nodes: Mapping[str, Capacity]) -> Cluster:
    """The cluster, set to compute on CPUs if the torch of a node was built for CPUs and cannot use GPUs."""
    built_for_cpu = cluster.python is None and any(node.accelerator == "cpu" for node in nodes.values())
    return replace(cluster, device="cpu") if cluster.device == "auto" and built_for_cpu else cluster


def _model(nodes: Mapping[str, Capacity], on_gpu: bool, images: int) -> tuple[str, str]:
    """The largest model that every node can train, and why it is no larger one."""
    if not on_gpu:
        return _SMALLEST, "there are no GPUs to train on"
    why = "the largest"
    for name, gpu_bytes in _MODELS:
        refused = _refusal(nodes, gpu_bytes, material_bytes(name, images))
        if refused is None:
            return name, why
        why = f"not `{name}`: {refused}"
    return _SMALLEST, why


def _refusal(nodes: Mapping[str, Capacity], gpu_bytes: int, files: int) -> str | None:
    for host, node in nodes.items():
        for what, there, needed in (
            ("GPU memory", node.gpu_bytes, gpu_bytes),
            ("memory for staged files", node.shared_bytes * _SHARE, files),
            ("memory", node.memory_bytes * _SHARE, files),
            ("free space", node.free_bytes * _SHARE, 2 * files),
        ):
            if there < needed:
                return f"{host} has {format_size(round(there))} of {what}, it needs {format_size(needed)}"
    return None


def material_bytes(model: str, images: int) -> int:
    """Bytes of a model that is made, with its pictures."""
    size = TINY if model == _SMALLEST else (WIDTH, HEIGHT)
    return reference_model.room(model) + pictures.room(images, *size)


def _state(asked: Request, nodes: Mapping[str, Capacity], on_gpu: bool) -> tuple[str, int | None]:
    """Model and upper bound of the checkpoints: as in the call, or as much as every node has room for."""
    if asked.state_bytes is not None:
        return asked.checkpoint_model or CHECKPOINT_MODEL, asked.state_bytes
    copies = copies_in_memory(ENGINES, on_gpu)
    most = min(
        min(node.memory_bytes * _SHARE / copies, node.free_bytes * _SHARE / _FILE_COPIES) for node in nodes.values()
    )
    bound = min(MAIN_STATE_BYTES, int(most))
    for model in (asked.checkpoint_model,) if asked.checkpoint_model else (CHECKPOINT_MODEL, _SMALLEST):
        try:
            fitting = shape(model, bound)
        except UsageProblem:
            continue
        return model, None if fitting.layers == fitting.of_layers and fitting.outside else bound
    if asked.checkpoint_model:
        return asked.checkpoint_model, bound
    raise CannotJudge(
        f"the nodes have too little memory or free space for any checkpoint: {format_size(bound)} of state would fit",
        "free some, or `--skip checkpoint`",
    )


def matrix_for(nodes: int, ranks: int) -> str:
    """One rank, one node, all nodes. The last cell, stage 3 on one node, shows what the network between nodes costs."""
    cells = ["1x1:z2", f"1x{ranks}:z2", f"{nodes}x{ranks}:z2", f"{nodes}x{ranks}:z3", f"1x{ranks}:z3"]
    return ",".join(dict.fromkeys(cells))
