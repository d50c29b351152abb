"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tunetool.advise import ds_config, zero
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.ds_config_plan import Plan as ConfigPlan
from tunetool.bench.inference.model import BYTES, Described, describe
from tunetool.bench.inference.predict import Work
from tunetool.bench.inference.request import Request
from tunetool.bench.inference.samples import PLACES, TITLES, Place
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.aio import Probe, Spec, default_io_bytes, default_parallelism, need, probe
from tunetool.measure.aio.driver import memlock
from tunetool.measure.aio.spec import SMALLEST
from tunetool.measure.sequential import free_bytes
from tunetool.measure.target import check_target
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.capacity import read_capacity
from tunetool.node.machine.container import device_nodes
from tunetool.node.machine.memory import memory_left
from tunetool.node.units import format_count, format_size
from tunetool.origin import install_hint
from tunetool.tune.configs import read_settings, render
from tunetool.tune.settings import AioSettings

MIB = 2**20
GPU_SHARE = 0.9
"""Of a GPU's memory: the rest is for CUDA's context, the libraries and what the allocator cannot use."""
MOST = 100_000
RUNG_SECONDS, RUNG_SAMPLES = 0.5, 6
_EMBEDDING = "model.embed_tokens.weight"
_GUESS = 1e9
"""Assumed bytes per second before the first measurement."""
_SMALLER = "use a smaller `--batch` or `--prompt`, or a smaller `--model`"


@dataclass(frozen=True)
class Plan:
    """What will be written and read."""

    described: Described
    directory: Path
    stack: BlockStack
    settings: AioSettings
    gpu: bool
    config: ConfigPlan
    """DeepSpeed's configuration, as `ds-config zero-inference` computes it."""
    left_out: Mapping[Place, tuple[str, str]] = field(default_factory=dict)
    """Of the places that are asked for: why it is not measured, and what helps."""
    places: tuple[Place, ...] = ()
    """That are asked for."""

    @property
    def swapped_bytes(self) -> int:
        """Of the swap files."""
        return sum(self._swapped().values())

    @property
    def read_bytes(self) -> int:
        """Of weights that one pass over text reads from drives; an embedding that is the output layer too, twice."""
        swapped = {name: count for name, count in self._swapped().items() if not name.startswith("visual.")}
        return sum(swapped.values()) + (swapped.get(_EMBEDDING, 0) if self.described.decoder.tied else 0)

    def _swapped(self) -> dict[str, int]:
        """Bytes of each tensor that goes to a file, by name."""
        block, threads = self.settings.block_size, self.settings.intra_op_parallelism
        tensors = zero.swapped_tensors(self.described.model, 1, block)
        return {each.name: zero.aligned(each.numel, threads, BYTES) * BYTES for each in tensors}

    def work(self, request: Request) -> Work:
        """One generation."""
        return Work(request.batch, request.new_tokens, self.read_bytes)

    def document(self, place: Place, directory: Path) -> dict[str, Any] | None:
        """DeepSpeed's configuration for weights in ``place``, with swap files in ``directory``; None without it."""
        if place == "device":
            return None
        document = render(self.config)
        offload = document["zero_optimization"]["offload_param"]
        # Its own linear layer saves memory in a backward pass, which there is none of, and may round otherwise.
        document["zero_optimization"]["memory_efficient_linear"] = False
        if place == "dram":
            document["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": offload["pin_memory"]}
        else:
            offload["nvme_path"] = str(directory)
        return document


def check_call(request: Request) -> tuple[Described, BlockStack]:
    """The model, and what the directory lies on. Raises ``UsageProblem`` for what is wrong under every Python,
    ``CannotJudge`` for a target that answers no I/O."""
    _asked(request)
    for name in ("batch", "prompt", "new_tokens"):
        if getattr(request, name) > MOST:
            option = name.replace("_", "-")
            raise UsageProblem(f"`--{option} {getattr(request, name)}` is too many", f"at most {MOST}")
    described = describe(request.model)
    check_target(request.target)
    stack = read_stack(str(request.target.resolve()))
    if stack.in_memory:
        raise UsageProblem(
            f"`{request.target}` lies on {stack.medium}, in memory", "`--target` takes a directory on drives"
        )
    settings(request)
    return described, stack


def plan(request: Request) -> Plan:
    """Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` for a model that does not fit."""
    described, stack = check_call(request)
    places = _asked(request)
    chosen, gpu = settings(request), on_gpu(request)
    left = memory_left()
    memory = left[0] if left is not None else sys.maxsize
    working = described.working_bytes(request.batch, request.prompt) + described.cache_bytes(
        request.batch, request.prompt + request.new_tokens
    )
    # Without a GPU everything is in one memory, and the buffers get what is left.
    node = Node(
        memory_bytes=memory if gpu else max(0, memory - working),
        memlock=memlock(),
        free_bytes=free_bytes(request.target) if "nvme" in places else None,
        gpu=gpu,
    )
    job = Job(
        "zero-inference",
        described.model,
        chosen.block(),
        str(request.target.resolve()),
        world=1,
        micro_batch=request.batch,
    )
    if not gpu and working > memory:
        raise CannotJudge(
            f"the batch takes about {format_size(working)} of memory, and {format_size(memory)} are left", _SMALLER
        )
    try:
        config = ds_config.plan(job, node)
    except CannotJudge as error:
        raise CannotJudge(error.message, "free some, use another `--target`, or a smaller `--model`") from None
    planned = Plan(described, request.target.resolve(), stack, chosen, gpu, config, places=places)
    if "nvme" in places and not planned.read_bytes:
        raise CannotJudge(
            f"no tensor of `{request.model}` has {format_size(max(zero.MIN_AIO_BYTES, chosen.block_size))} or more: "
            "DeepSpeed keeps all of them in memory",
            "use a larger `--model`, such as `llama-tiny`",
        )
    return Plan(**{**planned.__dict__, "left_out": _left_out(planned, memory, working)})


def _asked(request: Request) -> tuple[Place, ...]:
    if not request.weights:
        raise UsageProblem("`--weights` names no place for weights", f"known: {', '.join(PLACES)}")
    for pattern in request.weights:
        if not any(fnmatchcase(place, pattern) for place in PLACES):
            raise UsageProblem(f"`--weights {pattern}` is no place for weights", f"known: {', '.join(PLACES)}")
    return tuple(place for place in PLACES if any(fnmatchcase(place, pattern) for pattern in request.weights))


def settings(request: Request) -> AioSettings:
    """The `aio` block of the call; by default as `verify` measures DeepSpeed's handle. Raises ``UsageProblem``."""
    if request.aio is not None:
        chosen = read_settings(request.aio)
        if chosen.use_gds and not on_gpu(request):
            raise UsageProblem(f"`{request.aio}`: `use_gds` needs a GPU", "set it to false")
        return chosen
    return AioSettings(2**20, 32, default_parallelism(os.cpu_count() or 1), single_submit=False, overlap_events=True)


def on_gpu(request: Request) -> bool:
    """Whether a GPU generates."""
    return request.device == "cuda" or (request.device == "auto" and bool(device_nodes("nvidia[0-9]*")))


def _left_out(planned: Plan, memory: int, working: int) -> dict[Place, tuple[str, str]]:
    """Places for which the weights are too large. Raises ``CannotJudge`` where the batch is, whatever the place."""
    weights = planned.described.weight_bytes
    needed = {"dram": _in_host_memory(planned), "device": weights}
    left = {"dram": memory - planned.config.rank_bytes("host", "locked"), "device": 0}
    if planned.gpu:
        whole = read_capacity(str(planned.directory)).gpu_bytes
        limit = int(whole * GPU_SHARE) if whole else sys.maxsize
        working += planned.config.rank_bytes("gpu")
        if working > limit:
            raise CannotJudge(
                f"the batch takes about {format_size(working)} of the GPU's memory, which has {format_size(whole)}",
                _SMALLER,
            )
        left["device"] = limit - working
    else:
        left["dram"] -= working
        left["device"] = left["dram"] - (needed["dram"] if "dram" in planned.places else 0)
    problems: dict[Place, tuple[str, str]] = {}
    for place in planned.places:
        if place != "nvme" and needed[place] > left[place]:
            lacking = f"the weights take {format_size(needed[place])} there, and {format_size(max(0, left[place]))} are"
            problems[place] = f"{lacking} left", "a smaller `--model` fits"
    if len(problems) == len(planned.places):
        raise CannotJudge(f"`{planned.described.model.name}`: {next(iter(problems.values()))[0]}", _SMALLER)
    return problems


def _in_host_memory(planned: Plan) -> int:
    """Bytes of all weights under DeepSpeed's offload to host memory. CUDA's host allocator, which pins each tensor by
    itself, rounds sizes up to a power of 2 (ATen/core/CachingHostAllocator.h)."""
    sizes = [tensor.numel * BYTES for tensor in planned.described.model.tensors]
    return sum(1 << (size - 1).bit_length() for size in sizes) if planned.gpu else sum(sizes)


def need_libraries(planned: Plan, environment: Mapping[str, str]) -> Probe:
    """What this Python has. Raises ``CannotJudge`` without torch, transformers, DeepSpeed or its op."""
    installed = probe(Path(sys.executable), environment)
    need(installed, op(planned))
    if importlib.util.find_spec("transformers") is None:
        raise CannotJudge(f"transformers is not installed in `{sys.executable}`", install_hint("finetune"))
    if planned.gpu and not installed.cuda:
        raise CannotJudge("torch sees no GPU", "use `--device cpu`, or see `nvidia-smi`")
    return installed


def op(planned: Plan) -> str:
    """DeepSpeed's op that reads and writes the swap files."""
    return "gds" if planned.settings.use_gds else "async_io"


def rung(planned: Plan, directory: Path) -> Spec:
    """DeepSpeed's handle alone, with the settings that the swap files are read by."""
    chosen = planned.settings
    threads = chosen.intra_op_parallelism
    size = default_io_bytes(free_bytes(directory), planned.config.node.memory_bytes, threads)
    # As large as the swap files, where they are small.
    size = min(size, max(SMALLEST, planned.swapped_bytes)) // (MIB * threads) * (MIB * threads)
    return Spec(
        directory,
        size,
        device="gds" if chosen.use_gds else "cpu",
        block_bytes=chosen.block_size,
        queue_depth=chosen.queue_depth,
        intra_op_parallelism=threads,
        single_submit=chosen.single_submit,
        overlap_events=chosen.overlap_events,
        directions=("read",),
        samples=RUNG_SAMPLES,
        seconds=RUNG_SECONDS,
    )


def announcement(request: Request, planned: Plan) -> list[str]:
    """What the run will write, read, and how long it takes, a line each."""
    work, device = planned.work(request), "GPU" if planned.gpu else "CPU"
    lines = [
        f"`{request.model}`: {format_size(planned.described.weight_bytes)} of random weights; a {device} generates "
        f"{request.new_tokens} tokens for each of {format_count(request.batch, 'prompt')} of {request.prompt}"
    ]
    for place, (why, _) in planned.left_out.items():
        lines.append(f"{TITLES[place]}: left out, {why}")
    if "nvme" in planned.places:
        size = planned.swapped_bytes
        lines.append(
            f"writes to `{planned.directory}` ({planned.stack.medium}): swap files of {format_size(size)}, removed "
            "afterwards"
        )
        read = work.read_bytes * (request.rounds * request.new_tokens + min(2, request.new_tokens))
        lines.append(
            f"reads about {format_size(read)} in {format_count(request.rounds, 'round')}: each of "
            f"{request.new_tokens} passes reads {format_size(work.read_bytes)}, "
            f"{format_size(int(work.bytes_per_token))} for a token; about {(read + size) / _GUESS:.0f} s at 1 GB/s"
        )
    return lines
