"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tunetool.bench.dataset import files, huge_pool, megatron
from tunetool.bench.dataset.corpus import Extent
from tunetool.bench.dataset.engines import HUGE_POOL, Engine, TokenEngine, engines
from tunetool.bench.dataset.request import Request
from tunetool.bench.dataset.samples import TITLES, State
from tunetool.bench.defaults import DATASET_ENGINES
from tunetool.bench.engine_choice import choose
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.target import check_target
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.units import format_size
from tunetool.stage.room import need_room

_SMALLEST_SIDE = 28
_MOST_PARALLEL = 256
_GUESS = 1e9
"""Assumed bytes per second before the first measurement."""


def states(request: Request, stack: BlockStack) -> Sequence[State]:
    """In which states the files are read: what is in memory is never cold."""
    return [each for each in TITLES if each in request.states and not (stack.in_memory and each == "cold")]


def check_call(request: Request) -> None:
    """Raises ``UsageProblem`` for what is wrong under every Python, before one with torch is looked for."""
    if fills_pool(request, chosen(request)) and (why := huge_pool.too_large(request.huge_pages or 0)):
        raise UsageProblem(f"`--huge-pages {request.huge_pages}`: {why}", "take fewer")
    check_target(request.target)
    if not request.states or not {*request.states} <= {*TITLES}:
        raise UsageProblem(f"`--states {','.join(request.states)}`: not all are known", "take cold, warm or both")
    there = {*states(request, read_stack(str(request.target.resolve())))}
    if not any(there & {*each.states} for each in chosen(request).values()) and chosen(request):
        raise UsageProblem(
            f"`{request.target}` with `--states {','.join(request.states)}` has nothing to read for these engines: "
            "memory is never cold, and `direct-shuffled` never warm",
            "take a directory on drives, other engines or other states",
        )
    for option, value in (("--threads", request.threads), ("--num-workers", max(request.workers, default=0))):
        if value > _MOST_PARALLEL:
            raise UsageProblem(f"`{option} {value}` is too many", f"at most {_MOST_PARALLEL}")
    if request.image_side < _SMALLEST_SIDE:
        raise UsageProblem(f"`--image-side {request.image_side}` is too small", f"at least {_SMALLEST_SIDE} pixels")


def chosen(request: Request) -> dict[str, Engine]:
    """The engines that are asked for. Raises ``UsageProblem``."""
    every = engines(request.workers, request.huge_pages is not None)
    few = DATASET_ENGINES if request.huge_pages is None else (*DATASET_ENGINES, f"*-{HUGE_POOL}")
    return {name: every[name] for name in choose(every, request.engines_of(request.engines, few))}


def fills_pool(request: Request, among: Mapping[str, Engine]) -> bool:
    """Whether a row of the run is measured beside a pool of huge pages."""
    return request.huge_pages is not None and any(
        isinstance(each, TokenEngine) and each.pool for each in among.values()
    )


def libraries(request: Request, rows: Mapping[str, str]) -> dict[str, str]:
    """Those of ``rows`` that are asked for."""
    return {name: why for name, why in rows.items() if any(name.startswith(f"{each}-") for each in chosen(request))}


def check_samples(request: Request, extent: Extent) -> int:
    """Number of whole samples. Raises ``UsageProblem`` for a corpus that is smaller than one."""
    tokens = megatron.bytes_of_tokens(extent.documents, extent.text_bytes) // megatron.TOKEN_BYTES
    if tokens < request.sequence_length:
        raise UsageProblem(
            f"the corpus has {tokens} tokens, fewer than one sample of {request.sequence_length}",
            "take a larger corpus, or a smaller `--sequence-length`",
        )
    return tokens // request.sequence_length


def samples_there(request: Request, expected: int, tokens: int) -> int:
    """Number of whole samples in a file with this number of tokens: the documents of a made corpus have random lengths,
    so that it has some more or fewer of them. Raises ``CannotJudge`` for none."""
    there = min(expected, tokens // request.sequence_length)
    if not there:
        raise CannotJudge(
            f"the files have {tokens} tokens, fewer than one sample of {request.sequence_length}",
            "take a larger corpus, or a smaller `--sequence-length`",
        )
    return there


def room(request: Request, extent: Extent, with_images: bool, with_records: bool) -> int:
    """Bytes that all files take at most."""
    images = files.room_for_images(request) if with_images else 0
    # A made corpus may have some samples more than are expected: a tenth covers them.
    samples = 11 * check_samples(request, extent) // 10 + 1 if with_records else 0
    records = files.room_for_records(samples, request.sequence_length * megatron.TOKEN_BYTES)
    return files.room_for_tokens(request, extent) + images + records


def check_space(request: Request, count: int) -> None:
    """Raises ``CannotJudge`` where the files do not fit."""
    need_room(request.target.resolve(), count, "the data set")


def direct_obstacle(directory: str) -> str | None:
    """Why no file here can be read past the page cache; None if one can. ``directory`` has at least one file."""
    with os.scandir(directory) as entries:
        path = next(entry.path for entry in entries if entry.is_file())
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
    except OSError as error:
        return f"the file system does not open files past the page cache: {error.strerror}"
    return None


def announcement(request: Request, stack: BlockStack, size: int, rows: int) -> list[str]:
    """What the run will write, read, and how long it takes, a line each."""
    passes = len(states(request, stack)) * rows * request.pace.fewest
    lines = [
        f"writes to `{request.target}` ({stack.medium}): {format_size(size)} at most, removed afterwards",
        f"{passes} passes over it at most, each of {request.seconds:g} s at most, and as many preparations; about "
        f"{size / _GUESS + passes * (request.seconds + 1):.0f} s",
        *request.pace.announcement(),
    ]
    if request.huge_pages is not None:
        lines.append(
            f"sets `vm.nr_hugepages` to {request.huge_pages} for the rows `*-{HUGE_POOL}` if it is 0, and back after "
            "each pass"
        )
    return lines
