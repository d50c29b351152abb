"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tunetool.advise.read_model import load_config
from tunetool.bench.defaults import EXPERT_BYTES, TOP_K
from tunetool.bench.experts.blocks import block_bytes
from tunetool.bench.experts.model import StoredExperts, stored_experts
from tunetool.bench.experts.request import Request
from tunetool.bench.experts.samples import MODES, TARGET
from tunetool.bench.experts.trace import PATTERNS, Demand
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.sequential import free_bytes
from tunetool.measure.target import check_target
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.memory import memory_left
from tunetool.node.units import format_count, format_size, parse_size

MOST_EXPERTS, MOST_STEPS, MOST_THREADS = 4096, 100_000, 256
_LEAST_BYTES, _MOST_BYTES = 4096, 64 << 30
_STEEPEST = 4
_GUESS = 1e9
"""Assumed bytes per second before the first measurement."""


@dataclass(frozen=True)
class Plan:
    """What will be written and read."""

    places: tuple[Place, ...]
    model: StoredExperts | None
    expert_bytes: int
    block: int
    """Bytes of an expert in the file."""
    top_k: int
    cached: tuple[int, ...]
    """Sizes of the cache, the first without any."""
    steps: int

    def demands(self, request: Request) -> list[Demand]:
        """The traces."""
        return [Demand(pattern, request.experts, self.top_k, request.seed, request.zipf) for pattern in PATTERNS]

    def slots(self, request: Request, place: str) -> int:
        """Experts for which the reading process needs memory."""
        return max(request.threads, *(self.cached if place == TARGET else ()), self.top_k)


@dataclass(frozen=True)
class Place:
    """A directory that gets a file of experts."""

    name: str
    directory: Path
    stack: BlockStack


def plan(request: Request) -> Plan:
    """Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` for a target that answers no I/O."""
    model = _model(request)
    expert_bytes = request.expert_bytes
    if expert_bytes is None:
        expert_bytes = model.bytes if model else parse_size(EXPERT_BYTES)
    if not _LEAST_BYTES <= expert_bytes <= _MOST_BYTES:
        raise UsageProblem(
            f"`--expert-bytes {expert_bytes}` is not the size of an expert",
            f"from {format_size(_LEAST_BYTES)} to {format_size(_MOST_BYTES)}",
        )
    for option, value, most in (
        ("--experts", request.experts, MOST_EXPERTS),
        ("--steps", request.steps or 1, MOST_STEPS),
        ("--threads", request.threads, MOST_THREADS),
    ):
        if value > most:
            raise UsageProblem(f"`{option} {value}` is too many", f"at most {most}")
    if not 0 <= request.zipf <= _STEEPEST:  # NaN is not either
        raise UsageProblem(f"`--zipf {request.zipf}` is not an exponent", f"from 0 to {_STEEPEST}; 0 is an even demand")
    top_k = request.top_k or (model.per_token if model else TOP_K)
    if top_k > request.experts:
        raise UsageProblem(
            f"a step cannot want {top_k} of {request.experts} experts", "use a smaller `--top-k`, or more `--experts`"
        )
    steps = request.steps or max(1, 2 * request.experts // top_k)
    cached = (0, *_cached(request, top_k))
    return Plan(_places(request), model, expert_bytes, block_bytes(expert_bytes), top_k, cached, steps)


def _model(request: Request) -> StoredExperts | None:
    if request.config is None:
        return None
    return stored_experts(*load_config(request.config), expert_bytes=request.expert_bytes)


def _cached(request: Request, top_k: int) -> list[int]:
    """Sizes of the cache. An eighth, a quarter and a half of the experts unless the call names them."""
    if not request.cached:
        sizes = {request.experts // share for share in (8, 4, 2)}
        return sorted(size for size in sizes if top_k <= size < request.experts)
    for size in request.cached:
        if not top_k <= size < request.experts:
            raise UsageProblem(
                f"`--cached {size}`: the cache holds all experts of a step, {top_k}, and fewer than all, "
                f"{request.experts}",
                f"from {top_k} to {request.experts - 1}",
            )
    return sorted(request.cached)


def _places(request: Request) -> tuple[Place, ...]:
    named = [("--target", TARGET, request.target)]
    named += [("--drive-target", f"drive-{number}", path) for number, path in enumerate(request.drive_targets, 1)]
    return tuple(_place(*each) for each in named)


def _place(option: str, name: str, path: Path) -> Place:
    try:
        check_target(path)
    except UsageProblem as error:
        raise UsageProblem(error.message, f"`{option}` takes a writable directory") from None
    stack = read_stack(str(path.resolve()))
    if stack.in_memory:
        raise UsageProblem(f"`{path}` lies on {stack.medium}, in memory", f"`{option}` takes a directory on drives")
    if name != TARGET and len(stack.leaves) > 1:
        raise UsageProblem(
            f"`{path}` lies on {stack.medium}, on {len(stack.leaves)} drives", f"`{option}` takes one on a single drive"
        )
    return Place(name, path.resolve(), stack)


def check_room(request: Request, planned: Plan) -> None:
    """Raises ``CannotJudge`` where the file does not fit on the drives, or the cache into memory."""
    count = request.experts * planned.block
    for place in planned.places:
        free = free_bytes(place.directory)
        if count > free:
            raise CannotJudge(
                f"{request.experts} experts take {format_size(count)}, `{place.directory}` has {format_size(free)}",
                "free some, or use fewer `--experts` or smaller `--expert-bytes`",
            )
    # One process for each directory.
    needed = planned.block * sum(planned.slots(request, place.name) for place in planned.places)
    left = memory_left()
    if left is not None and needed > left[0]:
        what = "the machine's RAM has" if left[1] == "RAM" else f"the memory limit of `{left[1]}` leaves"
        raise CannotJudge(
            f"the cache and the threads take {format_size(needed)} of memory, {what} {format_size(left[0])}",
            "use a smaller `--cached`, or fewer `--threads`",
        )


def announcement(request: Request, planned: Plan) -> list[str]:
    """What the run will write, read, and how long it takes, a line each."""
    size = request.experts * planned.block
    lines = []
    if planned.model is not None:
        model = planned.model
        lines.append(
            f"`{request.config}`: {model.layers} layers with {model.each_layer} experts of {format_size(model.bytes)}, "
            f"{format_size(model.total_bytes)} in all; a token wants {model.per_token} in each layer, "
            f"{format_size(model.bytes_per_token)}"
        )
    for place in planned.places:
        lines.append(f"writes to `{place.directory}` ({place.stack.medium}): {format_size(size)}, removed afterwards")
    passes = len(planned.places) * len(MODES) * (request.rounds + 1) * size
    a_trace = planned.steps * planned.top_k * planned.block
    misses = sum(a_trace * (1 - held / request.experts) + held * planned.block for held in planned.cached)
    read = passes + request.rounds * len(PATTERNS) * misses
    sizes = ", ".join(str(held) for held in planned.cached[1:]) or "none"
    lines.append(
        f"reads about {format_size(read)} in {format_count(request.rounds, 'round')}, about {read / _GUESS:.0f} s at "
        f"1 GB/s; caches of {sizes} of {request.experts} experts, at most "
        f"{format_size(planned.cached[-1] * planned.block)} of memory"
    )
    return lines
