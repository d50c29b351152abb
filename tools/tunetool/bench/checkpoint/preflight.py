"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.request import Request
from tunetool.bench.checkpoint.site import GUESS
from tunetool.bench.checkpoint.states import Shape, shape
from tunetool.bench.defaults import CHECKPOINT_ENGINES
from tunetool.bench.engine_choice import choose
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.sequential import free_bytes
from tunetool.measure.target import check_target
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.node.units import format_size
from tunetool.origin import install_hint

_COPIES = 2
"""Some engines hold two forms of a checkpoint on the medium for a moment."""
_SLACK_BYTES = 64 * 2**20


def targets(request: Request) -> list[tuple[Path, BlockStack]]:
    """The target directories, each with its medium. Raises ``UsageProblem`` for the wrong kind of medium."""
    if request.target is None and request.memory_target is None:
        raise UsageProblem("no directory to write to", "give `--target DIR` on drives, `--memory-target DIR`, or both")
    checked = []
    for option, path in (("--target", request.target), ("--memory-target", request.memory_target)):
        if path is None:
            continue
        try:
            check_target(path)
        except UsageProblem as error:
            raise UsageProblem(error.message, f"`{option}` takes a writable directory") from None
        stack = read_stack(str(path.resolve()))
        if option == "--target" and stack.in_memory:
            raise UsageProblem(
                f"`{path}` lies on {stack.medium}, in memory",
                "name a directory on drives; what memory does is measured, and marked as such, by `--memory-target`",
            )
        if option == "--memory-target" and not stack.in_memory:
            raise UsageProblem(
                f"`{path}` lies on {stack.medium}, not in memory",
                "use `--target` for it; `/dev/shm`, for example, is in memory",
            )
        checked.append((path.resolve(), stack))
    return checked


def engines(request: Request) -> list[str]:
    """Names of the engines. Raises ``UsageProblem``, or ``CannotJudge`` without torch."""
    names = choose(ENGINES, request.engines_of(request.engines, CHECKPOINT_ENGINES))
    if importlib.util.find_spec("torch") is None:
        raise CannotJudge("torch is not installed beside tunetool", f"install it: {install_hint('checkpoint')}")
    return names


def state(request: Request) -> Shape:
    """The state's shape. Raises ``UsageProblem``."""
    return shape(request.model, request.state_bytes, request.ranks, request.tensors)


def space_needed(request: Request, state_bytes: int) -> int:
    """Bytes that one medium must hold at a time, at most."""
    loop = request.training
    kept = max(loop.saves(loop.sharded_every), loop.saves(loop.consolidated_every)) if loop else 0
    return int(1.02 * state_bytes * max(_COPIES, kept + 1)) + _SLACK_BYTES


def check_space(request: Request, directory: Path, state_bytes: int) -> None:
    """Raises ``UsageProblem`` when the checkpoints would not fit."""
    needed, free = space_needed(request, state_bytes), free_bytes(directory)
    if needed > free:
        smaller = _smaller(request, state_bytes, lambda size: space_needed(request, size) <= free)
        raise UsageProblem(
            f"`{directory}` has too little space: {format_size(free)} free, {format_size(needed)} are needed",
            smaller or "use a directory with more space, or a smaller `--model`",
        )


def copies_in_memory(names: Iterable[str], on_gpu: bool) -> int:
    """Of the state, on a node. Without a GPU: the state itself, and the blank one that it is restored into. Each
    asynchronous engine keeps a copy, and any other may make one while it runs."""
    return (0 if on_gpu else 2) + 1 + sum(ENGINES[name].asynchronous for name in names)


def check_memory(
    request: Request, state_bytes: int, names: Sequence[str], stacks: Sequence[BlockStack], available: int
) -> None:
    """Raises ``UsageProblem`` when ranks, copies of asynchronous engines and a memory file system would not fit."""
    on_gpu = request.device == "cuda" or (request.device == "auto" and bool(device_nodes("nvidia[0-9]*")))
    asynchronous = sum(ENGINES[name].asynchronous for name in names)
    copies = copies_in_memory(names, on_gpu)
    in_memory = sum(stack.in_memory for stack in stacks)

    def needed(size: int, held: int = copies) -> int:
        return held * size + in_memory * space_needed(request, size)

    if needed(state_bytes) > available:
        ways = [_smaller(request, state_bytes, lambda size: needed(size) <= available)]
        if asynchronous and needed(state_bytes, copies - asynchronous) <= available:
            ways.append("`--engines` without asynchronous ones, each of which keeps a copy of the state")
        raise UsageProblem(
            f"too little memory: {format_size(available)} available, up to {format_size(needed(state_bytes))} are "
            f"needed: {copies} times the state of {format_size(state_bytes)}"
            + (", and the checkpoints in memory" if in_memory else ""),
            ", or ".join(filter(None, ways)) or "use a smaller `--model`, or a machine with more memory",
        )


def _smaller(request: Request, state_bytes: int, fits: Callable[[int], bool]) -> str:
    """The largest round `--state-bytes` below the state that fits, as a hint; empty where there is no such state."""
    sizes = (digit * 10**power for power in range(12, 7, -1) for digit in range(9, 0, -1))
    size = next((size for size in sizes if size < state_bytes and fits(size)), None)
    if size is None:
        return ""
    try:
        state(replace(request, state_bytes=size))
    except UsageProblem:
        return ""
    text = f"{size // 10**9}GB" if size >= 10**9 else f"{size // 10**6}MB"
    return f"use a smaller state: `--state-bytes {text}`"


def announcement(request: Request, shape: Shape, names: Sequence[str], stacks: Sequence[BlockStack]) -> list[str]:
    """What the run will write, how long it takes and where, a line each."""
    pace, loop = request.pace, request.training
    searched = 5 if request.against_fio else 0

    def written(rounds: int) -> int:
        passes = rounds * (len(names) + (2 if request.against_fio else 0))
        extra = min(rounds, loop.loops) * len(names) * loop.saves(loop.sharded_every) if loop else 0
        return shape.bytes * (passes + extra + searched)

    lines = [shape.describe() + f"; {request.ranks} rank(s)"]
    for stack in stacks:
        seconds = 2 * written(pace.fewest) / GUESS
        stand_in = ", a stand-in for a medium of that speed" if stack.in_memory else ""
        amount = f"{format_size(written(pace.rounds))} in all{' at most' * bool(pace.looks)}"
        lines.append(
            f"writes to `{stack.directory}` ({stack.medium}{stand_in}): {amount}, at most "
            f"{format_size(space_needed(request, shape.bytes))} at a time, removed afterwards"
        )
        lines.append(
            f"{pace.fewest} rounds of {len(names)} engines, saved and restored each; about {seconds:.0f} s at 1 GB/s"
        )
    return [*lines, *pace.announcement()]
