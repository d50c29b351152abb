"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tunetool.bench.api.catalogue import OLDEST
from tunetool.bench.api.request import Request
from tunetool.bench.versions import version_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.aio import Probe, Spec, default_io_bytes, default_parallelism, need, probe
from tunetool.measure.aio.driver import sector_bytes
from tunetool.measure.aio.spec import Call, check_shape, largest_io_bytes
from tunetool.measure.sequential import MIB, free_bytes
from tunetool.measure.target import check_target
from tunetool.measure.worker import Failed
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_count, format_size

OP = "async_io"
GUESS = 1e9
"""Assumed bytes per second before the first measurement."""


@dataclass(frozen=True)
class Way:
    """How the timed bytes move."""

    name: str
    call: Call
    parallelism: int = 1
    pending: int = 1


@dataclass(frozen=True)
class Plan:
    """What will be called, and what will be timed."""

    stack: BlockStack
    sector: int
    """Bytes of the drives' sectors."""
    io_bytes: int
    ways: tuple[Way, ...]
    installed: Probe | None
    """The libraries; None where DeepSpeed or its op is missing."""
    missing: str = ""
    """Why nothing can be called: DeepSpeed, its op or its version."""
    remedy: str = ""
    """The line that installs what is missing."""

    def spec(self, request: Request, way: Way, directory: Path) -> Spec:
        """The transfers of one way: a sample is one pass over the file."""
        return Spec(
            directory=directory,
            io_bytes=self.io_bytes,
            intra_op_parallelism=way.parallelism,
            python=request.training_python.path,
            samples=request.samples,
            seconds=None,
            call=way.call,
            pending=way.pending,
        )


def plan(request: Request, environment: Mapping[str, str]) -> Plan:
    """Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` for a target that answers no I/O.

    What the chosen Python lacks is a reason to skip the rows, not an error.
    """
    check_target(request.target)
    stack = read_stack(str(request.target.resolve()))
    sector = sector_bytes(stack)
    parallelism = request.parallelism or default_parallelism(os.cpu_count() or 1)
    ways = (
        Way("sync", "sync"),
        Way("async", "async", pending=request.pending),
        Way("parallel", "sync", parallelism=parallelism),
    )
    free = free_bytes(request.target)
    io_bytes = _io_bytes(request, free, parallelism * request.pending)
    planned = Plan(stack, sector, io_bytes, ways, None)
    for way in ways:
        try:
            check_shape(planned.spec(request, way, request.target), sector)
        except Failed as error:
            raise UsageProblem(f"`--size {io_bytes}`: {error.message}", error.hint) from None
    return _with_libraries(planned, request, environment)


def _io_bytes(request: Request, free: int, parts: int) -> int:
    """Of the file that is timed, of which so many ``parts`` may be in flight. Raises ``UsageProblem``, and
    ``CannotJudge`` where it has no room."""
    if request.io_bytes is None:
        io_bytes = default_io_bytes(free, memory_total(), parts)
        if not io_bytes:
            raise CannotJudge(
                f"{parts} parts in flight need a file of {format_size(parts * MIB)}, and `{request.target}` has room "
                f"for {format_size(largest_io_bytes(free, memory_total()))}, a tenth of the space or of the memory",
                "free some, use a smaller `--parallelism` or `--pending`, or give `--size`",
            )
        return io_bytes
    if not request.io_bytes:
        raise UsageProblem("`--size 0`: there is nothing to time", "give the bytes of a file, such as `1GiB`")
    if request.io_bytes > free:
        raise CannotJudge(
            f"`{request.target}` has {format_size(free)} free, {format_size(request.io_bytes)} are needed",
            "free some, or use a smaller `--size`",
        )
    return request.io_bytes


def _with_libraries(planned: Plan, request: Request, environment: Mapping[str, str]) -> Plan:
    known = {name: getattr(planned, name) for name in ("stack", "sector", "io_bytes", "ways")}
    try:
        installed = probe(request.training_python.need().path, environment)
        need(installed, OP)
    except CannotJudge as error:
        return Plan(**known, installed=None, missing=error.message, remedy=error.hint or "")
    wanted = ".".join(map(str, OLDEST))
    if version_of(installed.deepspeed or "") < OLDEST:
        missing = f"deepspeed {installed.deepspeed} is older than {wanted}, the first with these calls"
        return Plan(**known, installed=None, missing=missing, remedy=f"pip install 'deepspeed>={wanted}'")
    return Plan(**known, installed=installed)


def announcement(request: Request, planned: Plan) -> list[str]:
    """What the run will write, and how long it takes, a line each."""
    if planned.installed is None:
        return [f"nothing can be called: {planned.missing}"]
    # The file is laid out, warmed up and then written; read once for its checksum, once to warm up, and then timed.
    moved = len(planned.ways) * planned.io_bytes * 2 * (request.samples + 2)
    return [
        f"writes to `{request.target}` ({planned.stack.medium}): files of {format_size(planned.io_bytes)} and less, "
        "removed afterwards",
        f"each call in a process of its own, about 30 s; then {format_count(len(planned.ways), 'way')} to move "
        f"{format_size(moved)} in all, about {moved / GUESS:.0f} s at 1 GB/s",
    ]
