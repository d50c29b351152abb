"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

from tunetool.bench.ds_io.request import Request
from tunetool.errors import UsageProblem
from tunetool.measure.aio.spec import granule, misfit
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size


def check_request(request: Request, sector: int) -> None:
    """Raises ``UsageProblem`` for what ds_io answers with silence, an abort or a division by zero."""
    for name in ("io_parallel", "queue_depth", "block_size", "loops"):
        if getattr(request, name) < 1:
            raise UsageProblem(f"`--{name} {getattr(request, name)}` is too small", "it must be at least 1")
    if request.use_gds and not request.gpu:
        raise UsageProblem("`--use_gds` needs `--gpu`", "add `--gpu`: cuFile moves between storage and GPU memory")
    hint = misfit(request.io_size, request.io_parallel, sector)
    if hint:
        raise UsageProblem(f"`--io_size {request.io_size}` cannot be moved exactly", hint)
    unit = granule(1, sector)
    if request.block_size % unit:
        near = max(unit, request.block_size // unit * unit)
        raise UsageProblem(
            f"`--block_size {request.block_size}` cannot be moved exactly", f"{near} is possible: a multiple of {unit}"
        )


def announcement(request: Request, stack: BlockStack) -> list[str]:
    """Lines that describe the run before it starts."""
    passes = request.loops + request.warmup_loops
    written = request.io_size * (1 if request.read else 1 + passes)
    return [
        f"writes to `{stack.directory}` ({stack.medium}): a file of {format_size(request.io_size)}, removed afterwards",
        f"{passes} {request.direction}s of it, {format_size(written)} written in all, without a time limit",
    ]
