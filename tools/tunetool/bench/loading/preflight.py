"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.defaults import LOADING_ENGINES
from tunetool.bench.engine_choice import choose
from tunetool.bench.loading.engines import ENGINES
from tunetool.bench.loading.request import Request
from tunetool.bench.loading.samples import State
from tunetool.bench.media import medium_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.safetensors_files import list_tensors
from tunetool.measure.fio import Fio, find_fio
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.node.machine.memory import memory_left
from tunetool.node.units import format_size
from tunetool.origin import install_hint
from tunetool.regular_files import refuse_pointers
from tunetool.stage.room import need_room
from tunetool.training.model import reference_model

_PROCESS = 300 << 20
"""About the memory of a process with torch, beside the model."""
_GUESS = 1e9
"""Assumed bytes per second before the first measurement."""


@dataclass(frozen=True)
class Medium:
    """A directory for the model, or one that has it already, and the states in which it is loaded."""

    directory: Path
    stack: BlockStack
    states: Sequence[State]
    is_made: bool
    """Whether the model is made there for this run."""


def media(request: Request) -> list[Medium]:
    """Where the model is loaded from. Raises ``UsageProblem``."""
    if request.model not in reference_model.SIZES:
        if request.target is not None or request.memory_targets:
            raise UsageProblem(
                f"`{request.model}` is read where it is; `--target` and `--memory-target` are for a model that is made",
                f"leave them out, or make one of {', '.join(sorted(reference_model.SIZES))}",
            )
        if not Path(request.model).is_dir():
            raise UsageProblem(
                f"`{request.model}` is neither a size nor a directory with .safetensors files",
                f"use one of {', '.join(sorted(reference_model.SIZES))}, or a model's directory",
            )
        listing = list_tensors(Path(request.model))
        refuse_pointers([listing.directory / "config.json"])
        stack = read_stack(str(listing.directory.resolve()))
        return [Medium(listing.directory.resolve(), stack, _states(stack), is_made=False)]
    named = [("--target", path) for path in (request.target,) if path is not None]
    named += [("--memory-target", path) for path in request.memory_targets]
    if not named:
        raise UsageProblem(
            "no directory to make the model in", "give `--target DIR` on drives, `--memory-target DIR`, or both"
        )
    return [_medium(option, path) for option, path in named]


def _medium(option: str, path: Path) -> Medium:
    directory, stack = medium_of(option, path)
    return Medium(directory, stack, _states(stack), is_made=True)


def _states(stack: BlockStack) -> Sequence[State]:
    if not stack.in_memory:
        return ("cold", "cached")
    options = stack.mount.options if stack.mount else ()
    huge = next((option.partition("=")[2] for option in options if option.startswith("huge=")), "never")
    return ("tmpfs",) if huge == "never" else ("huge",)


def on_gpu(request: Request) -> bool:
    """Whether the tensors go to a GPU."""
    return request.device == "cuda" or (request.device == "auto" and bool(device_nodes("nvidia[0-9]*")))


def engine_names(request: Request) -> list[str]:
    """The engines that are asked for. Raises ``UsageProblem``."""
    return choose(ENGINES, request.engines_of(request.engines, LOADING_ENGINES))


def check_call(request: Request) -> None:
    """Raises ``UsageProblem`` for what is wrong under every Python, before one with torch is looked for."""
    engine_names(request)
    media(request)


def need_torch() -> None:
    """Raises ``CannotJudge`` without torch."""
    if importlib.util.find_spec("torch") is None:
        raise CannotJudge("torch is not installed beside tunetool", install_hint("checkpoint"))


def check_gpus(request: Request) -> None:
    """Raises ``UsageProblem`` for more GPUs than this machine has, and ``CannotJudge`` for more processes than its
    memory has room for."""
    present = len(device_nodes("nvidia[0-9]*"))
    if on_gpu(request) and present and max(request.gpus) > present:
        raise UsageProblem(
            f"`--gpus {max(request.gpus)}`: this machine has {present}", "name fewer, or use `--device cpu`"
        )
    needed, left = max(request.gpus) * (model_bytes(request) + _PROCESS), memory_left()
    if not on_gpu(request) and left is not None and needed > left[0]:
        raise CannotJudge(
            f"`--gpus {max(request.gpus)}`: as many processes, each with the whole model, take {format_size(needed)} "
            f"of memory, and {format_size(left[0])} are left",
            "name fewer, or use a smaller `--model`",
        )


def fio(media: Sequence[Medium], environment: Mapping[str, str], say: Callable[[str], None]) -> Fio | None:
    """fio, for files on drives; None, with a line that says so, where it is not there."""
    if not any("cold" in medium.states for medium in media):
        return None
    try:
        return find_fio(environment)
    except CannotJudge as error:
        say(f"cold loads are not compared with fio: {error.line}")
        return None


def model_bytes(request: Request) -> int:
    """Bytes of all tensors. Raises ``UsageProblem``."""
    if request.model in reference_model.SIZES:
        return reference_model.describe(request.model).bytes
    return list_tensors(Path(request.model)).bytes


def check_space(request: Request, places: Sequence[Medium]) -> None:
    """Raises ``CannotJudge`` where the model does not fit."""
    for medium in places:
        if medium.is_made:
            need_room(medium.directory, reference_model.room(request.model), f"the model `{request.model}`")


def announcement(request: Request, size: int, names: Sequence[str], places: Sequence[Medium]) -> list[str]:
    """What the run will write, read, and how long it takes, a line each."""
    lines = []
    runners = [name for name in names if ENGINES[name].unavailable(on_gpu(request)) is None]
    for medium in places:
        if medium.is_made:
            lines.append(
                f"writes to `{medium.directory}` ({medium.stack.medium}): {format_size(size)}, removed afterwards"
            )
        loads = len(request.gpus) * request.pace.fewest * sum(1 if state == "cold" else 2 for state in medium.states)
        lines.append(
            f"reads it from there {loads} times by each engine that is here ({', '.join(runners) or 'none'}); "
            f"about {loads * len(runners) * size / _GUESS:.0f} s at 1 GB/s"
        )
    return [*lines, *request.pace.announcement()]
