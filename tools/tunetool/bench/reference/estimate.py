"""What the chain will write, where, and how long it takes, as lines that are printed before it starts. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.preflight import space_needed
from tunetool.bench.checkpoint.request import Request as Checkpoint
from tunetool.bench.checkpoint.site import GUESS
from tunetool.bench.checkpoint.states import shape
from tunetool.bench.defaults import CHECKPOINT_ENGINES
from tunetool.bench.engine_choice import choose
from tunetool.bench.reference.choice import material_bytes
from tunetool.bench.reference.request import Complete
from tunetool.bench.strategies.matrix import parse
from tunetool.bench.strategies.request import STEPS
from tunetool.measure.sequential import plan
from tunetool.node.machine.capacity import Capacity
from tunetool.node.units import format_size
from tunetool.training.model import reference_model

_START = 30.0
"""Approximate seconds until the first step of the ranks."""
_STEP_ON_GPU, _STEP_ON_CPU = 0.5, 2.0


def lines(request: Complete, nodes: Mapping[str, Capacity], parts: Sequence[str]) -> list[str]:
    """A line for every part, then one for all of them. Raises ``UsageProblem`` if there is too little space."""
    said, seconds = [], 0.0
    for name in parts:
        text, part_seconds = _PARTS[name](request, nodes)
        said.append(f"{name}: {text}, about {minutes(part_seconds)}")
        seconds += part_seconds
    return [
        *said,
        f"on {', '.join(nodes)}: about {minutes(seconds)} in all; everything but model and pictures is "
        "removed afterwards",
    ]


def minutes(seconds: float) -> str:
    """A rough duration."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _verify(request: Complete, nodes: Mapping[str, Capacity]) -> tuple[str, float]:
    least = min(nodes.values(), key=lambda node: node.free_bytes)
    shaped = plan(request.verify_target or request.target, "", least.free_bytes, least.cpus, request.duration, None)
    where = f" in `{request.verify_target}`" if request.verify_target else " on the volume of the manifest"
    return f"reads and writes files of at most {format_size(shaped.space_bytes)}{where}", shaped.seconds + 30


def _checkpoint(request: Complete, nodes: Mapping[str, Capacity]) -> tuple[str, float]:
    state = shape(request.checkpoint_model, request.state_bytes, request.cluster.ranks_per_node or 1)
    asked = Checkpoint(model=request.checkpoint_model, state_bytes=request.state_bytes, **request.in_rounds)
    engines = len(choose(ENGINES, asked.engines_of((), CHECKPOINT_ENGINES)))
    most, saves = asked.pace.rounds * engines, asked.pace.fewest * engines
    return (
        f"{'up to ' * bool(asked.pace.looks)}{most} saves and restores of {state.describe()} in `{request.target}`: "
        f"{format_size(most * state.bytes)} written in all on each node, at most "
        f"{format_size(space_needed(asked, state.bytes))} at a time",
        2 * saves * state.bytes / GUESS + 2 * saves,
    )


def _staging(request: Complete, nodes: Mapping[str, Capacity]) -> tuple[str, float]:
    files = _files(request)
    ranks = max(1, min(node.gpus for node in nodes.values()) if _on_gpu(request, nodes) else 1)
    ranks = request.cluster.ranks_per_node or ranks
    scenarios = 1 + (ranks > 1) + (len(nodes) > 1) if request.thorough else 1
    runs = 2 * request.pace.fewest * scenarios
    made = f"makes model and pictures, {format_size(files)}, in `{request.target}`, " if files else ""
    each = _START + 2 * files / GUESS + _steps(request) * _step(request, nodes)
    return (
        f"{made}copies them to `{request.memory}` {request.pace.fewest * scenarios} times, {runs} fine-tunes",
        files / GUESS + runs * each,
    )


def _strategies(request: Complete, nodes: Mapping[str, Capacity]) -> tuple[str, float]:
    cells = parse(request.matrix)
    steps = request.settings.steps or STEPS
    each = _START + _files(request) / GUESS + steps * _step(request, nodes)
    runs = request.pace.fewest * len(cells)
    return f"{runs} runs of {steps} steps ({request.matrix}), nothing written", (runs + len(cells)) * each


def _files(request: Complete) -> int:
    material = request.material
    if material.model not in reference_model.SIZES or material.dataset is not None:
        return 0
    return material_bytes(material.model, material.images)


def _steps(request: Complete) -> float:
    settings = request.settings
    return settings.steps or settings.epochs * request.material.images / settings.batch_size


def _on_gpu(request: Complete, nodes: Mapping[str, Capacity]) -> bool:
    return request.cluster.device != "cpu" and all(node.gpus for node in nodes.values())


def _step(request: Complete, nodes: Mapping[str, Capacity]) -> float:
    return _STEP_ON_GPU if _on_gpu(request, nodes) else _STEP_ON_CPU


_PARTS = {"verify": _verify, "checkpoint": _checkpoint, "staging": _staging, "strategies": _strategies}
