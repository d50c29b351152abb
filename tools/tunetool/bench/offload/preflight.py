"""Checks whether a run is possible, and describes it before it starts. Writes nothing to what is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.advise import zero
from tunetool.advise.ds_config import Unreachable
from tunetool.advise.ds_config import plan as plan_config
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.shapes import Model
from tunetool.advise.zero import SwapFiles, swap_files
from tunetool.bench import media
from tunetool.bench.offload.architecture import IMAGE_TOKENS, Architecture, architecture
from tunetool.bench.offload.request import WARM_UPS, Request
from tunetool.bench.offload.samples import DRAM
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.aio.driver import memlock
from tunetool.measure.aio.spec import granule
from tunetool.measure.direct_addresses import addresses
from tunetool.measure.sequential import free_bytes
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.container import device_nodes
from tunetool.node.machine.memory import bytes_left
from tunetool.node.units import format_count, format_size
from tunetool.tune.check import Facts
from tunetool.tune.configs import precision_of, read_settings, render
from tunetool.tune.pool import aio_left
from tunetool.tune.settings import DEFAULTS, AioSettings

TARGET, MEMORY, DEFAULT, TUNED = "target", "memory", "default", "tuned"
LEARNING_RATE = 0.03
"""Divided by the width, as a step of Adam changes what a layer gives in proportion to it (arXiv 2203.03466). The loss
of one batch then falls in every step, and does not reach zero, where losses cannot be compared."""
_LEAST_RUNG, _MOST_RUNG = 16 << 20, 512 << 20
_GUESS = 1e9
"""Assumed bytes per second before the first measurement."""
_LESS = "use a smaller model, or fewer places"


@dataclass(frozen=True)
class Store:
    """A directory that gets swap files."""

    name: str
    directory: Path
    stack: BlockStack


@dataclass(frozen=True)
class Plan:
    """What will be trained, and what it writes."""

    shape: Architecture
    stores: tuple[Store, ...]
    blocks: Mapping[str, Mapping[str, int | bool]]
    """``aio`` blocks by name, the default first."""
    aio: Mapping[str, int | bool]
    """The block by which the files are laid out, so that the handles of all ``blocks`` can move them."""
    gpu: bool
    rung_bytes: int
    """Of a rank's file of the ladder's rung."""

    @property
    def model(self) -> Model:
        """Its tensors."""
        return self.shape.model


@dataclass(frozen=True)
class Configured:
    """What needs DeepSpeed's facts: the ds_configs, and what they cost."""

    configs: Mapping[str, dict[str, Any]]
    """By place."""
    files: Sequence[SwapFiles]
    """Of each rank, in each store."""
    memory_bytes: int
    """Of all places at the same time, at most."""
    precision: str

    @property
    def file_bytes(self) -> int:
        """Of all ranks, in one store."""
        return sum(each.total for each in self.files)


def check_call(request: Request) -> AioSettings | None:
    """The settings of ``--aio``. Raises ``UsageProblem`` for what is wrong under every Python, ``CannotJudge`` for a
    target that answers no I/O."""
    tuned = read_settings(request.aio) if request.aio is not None else None
    plan(request, tuned)
    return tuned


def plan(request: Request, tuned: AioSettings | None = None) -> Plan:
    """``tuned``: the settings that are compared with DeepSpeed's default. Raises ``UsageProblem`` for a wrong call,
    ``CannotJudge`` for a target that answers no I/O."""
    shape = architecture(request.model)
    if request.tokens <= IMAGE_TOKENS:
        raise UsageProblem(
            f"`--sequence-length {request.tokens}` is too short", f"it must be more than {IMAGE_TOKENS} tokens"
        )
    gpu = on_gpu(request)
    present = len(device_nodes("nvidia[0-9]*"))
    if gpu and present and request.ranks > present:
        raise UsageProblem(
            f"`--ranks {request.ranks}`: this machine has {format_count(present, 'GPU')}",
            "one rank uses one GPU: name fewer, or use `--device cpu`",
        )
    blocks = {DEFAULT: DEFAULTS.block()}
    if tuned is not None and tuned != DEFAULTS:
        if tuned.use_gds:
            raise UsageProblem(
                "`use_gds` in the `aio` block: the optimizer's states never use it, and memory that its handle "
                "registered cannot change to another",
                "find a block by `tunetool tune` without `--device cuda`",
            )
        blocks[TUNED] = tuned.block()
    aio = {**DEFAULTS.block(), **layout(list(blocks.values()))}
    _need_requests(request, blocks)
    least = sum(zero.partitions(shape.model, request.ranks)) * zero.STATES * zero.FP32
    unit = granule(int(aio["intra_op_parallelism"]), 4096)
    rung = min(_MOST_RUNG, max(_LEAST_RUNG, least)) // unit * unit
    return Plan(shape, _stores(request), blocks, aio, gpu, rung)


def _need_requests(request: Request, blocks: Mapping[str, Mapping[str, int | bool]]) -> None:
    """Raises ``CannotJudge`` where the kernel would refuse the handles of all places, at which the op aborts."""
    stores = sum(path is not None for path in (request.target, request.memory_target))
    swappers = 1 + (request.parameters == "nvme")
    # Each swapper reads and writes by handles of its own, and DeepSpeed made those of one block; the rung has one more.
    each = [requests(block) for block in blocks.values()]
    needed = stores * request.ranks * ((2 * swappers + 1) * sum(each) + 2 * swappers * max(each))
    left = aio_left()
    if left is not None and needed > left:
        raise CannotJudge(
            f"the handles need {needed} asynchronous requests, `fs.aio-max-nr` leaves {left}",
            "`sysctl fs.aio-max-nr=1048576`",
        )


def requests(block: Mapping[str, int | bool]) -> int:
    """Asynchronous requests of a handle: each thread has its own queue, and the handle one more."""
    return int(block["queue_depth"]) * (int(block["intra_op_parallelism"]) + 1)


def layout(blocks: Sequence[Mapping[str, int | bool]]) -> dict[str, int]:
    """Keys of an ``aio`` block whose files all of ``blocks`` can move: a multiple of each parallelism; and of the block
    sizes the smallest, below which nothing is swapped."""
    return {
        "intra_op_parallelism": math.lcm(*(int(each["intra_op_parallelism"]) for each in blocks)),
        "block_size": min(int(each["block_size"]) for each in blocks),
    }


def on_gpu(request: Request) -> bool:
    """Whether the ranks compute on GPUs."""
    return request.device == "cuda" or (request.device == "auto" and bool(device_nodes("nvidia[0-9]*")))


def _stores(request: Request) -> tuple[Store, ...]:
    named = [(TARGET, media.TARGET, request.target), (MEMORY, media.MEMORY_TARGET, request.memory_target)]
    stores = tuple(Store(name, *media.medium_of(option, path)) for name, option, path in named if path is not None)
    if not stores:
        raise UsageProblem(
            "no directory to offload to", "give `--target DIR` on drives, `--memory-target DIR`, or both"
        )
    return stores


def configure(request: Request, planned: Plan, facts: Facts) -> Configured:
    """The ds_config of each place; only the place differs. Raises ``CannotJudge`` where something lacks room."""
    model, world = planned.model, request.ranks
    left = bytes_left()
    total = sum(zero.partitions(model, world)) * world
    kept = zero.STATES * zero.FP32 + zero.FP32 + 2 * zero.LOW
    # With states in DRAM; what the ranks hold on a processor beside that is the same in every place.
    dram = total * kept * request.dram
    in_memory = sum(store.stack.in_memory for store in planned.stores)
    files = total * ((zero.STATES + 1) * zero.FP32 + zero.LOW * (request.parameters == "nvme"))
    spare = left - dram - files * in_memory
    if spare <= 0:
        raise CannotJudge(
            f"`{model.name}` takes {format_size(dram + files * in_memory)} of memory"
            + (f", {format_size(dram)} of it with its states in DRAM" if request.dram else "")
            + f"; {format_size(left)} are left",
            "use a smaller model, or `--without-dram`, which proves less of the losses" if request.dram else _LESS,
        )
    base: dict[str, Any] = {}
    buffers = 0
    for store in planned.stores:
        job = Job("zero3-nvme", model, planned.aio, str(store.directory), world, micro_batch=request.micro_batch)
        reached = addresses(store.directory, store.stack)
        node = Node(
            memory_bytes=spare // len(planned.stores),
            memlock=memlock(),
            free_bytes=free_bytes(store.directory) - planned.rung_bytes * world,
            address_bytes=reached.alignment,
            address_why=reached.why,
            gpu=planned.gpu,
            precision=precision_of(request.precision, facts),
        )
        try:
            made = plan_config(job, node)
        except Unreachable as error:
            raise CannotJudge(error.message, "use other `--ranks`, or another `--model`") from None
        buffers += made.rank_bytes("host", "locked") * world
        # The same sub-groups everywhere, as small as the place with the least room needs them.
        size = made.values["sub_group"]
        if not base or size < base["zero_optimization"]["sub_group_size"]:
            base = render(made)
    base["optimizer"]["params"]["lr"] = LEARNING_RATE / planned.shape.decoder.hidden
    if request.parameters != "nvme":
        del base["zero_optimization"]["offload_param"]
    configs = {store.name: _placed(base, str(store.directory)) for store in planned.stores}
    if request.dram:
        configs[DRAM.lower()] = _in_dram(base, planned.gpu)
    swapped = [
        swap_files(
            model,
            world,
            rank,
            base["zero_optimization"]["sub_group_size"],
            int(planned.aio["block_size"]),
            int(planned.aio["intra_op_parallelism"]),
            request.parameters == "nvme",
        )
        for rank in range(world)
    ]
    configured = Configured(
        configs, swapped, dram + files * in_memory + buffers, precision_of(request.precision, facts).format
    )
    if not configured.file_bytes:
        raise CannotJudge(
            f"DeepSpeed would swap nothing of `{model.name}` on {format_count(world, 'rank')}: it is too small",
            "use a larger model, or fewer ranks",
        )
    return configured


def _placed(base: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The configuration with that directory for its swap files."""
    blocks = {
        name: {**value, "nvme_path": path} if name.startswith("offload_") else value
        for name, value in base["zero_optimization"].items()
    }
    return {**base, "zero_optimization": blocks}


def _in_dram(base: Mapping[str, Any], gpu: bool) -> dict[str, Any]:
    """The configuration with everything that is offloaded in the node's memory."""
    blocks = {
        name: {"device": "cpu", "pin_memory": gpu} if name.startswith("offload_") else value
        for name, value in base["zero_optimization"].items()
    }
    return {**{name: value for name, value in base.items() if name != "aio"}, "zero_optimization": blocks}


def placed(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The configuration for the run's own directory."""
    return _placed(config, str(directory)) if "aio" in config else dict(config)


def announcement(request: Request, planned: Plan, configured: Configured) -> list[str]:
    """What the run will write, how long it takes and where, a line each."""
    model, files = planned.model, configured.file_bytes
    where = "GPU" if planned.gpu else "CPU"
    lines = [
        f"`{request.model}`: {model.numel:,} parameters, {format_count(request.ranks, 'rank')} on the {where}, "
        f"{configured.precision}; parameters {'swapped too' if request.parameters == 'nvme' else 'stay in its memory'}"
    ]
    for store in planned.stores:
        room = files + planned.rung_bytes * request.ranks
        lines.append(
            f"writes to `{store.directory}` ({store.stack.medium}): {format_size(room)}, again in every step, removed "
            "afterwards"
        )
    steps = WARM_UPS + request.rounds * len(planned.blocks)
    moved = len(planned.stores) * (
        (steps + 1) * sum(each.read + each.written for each in configured.files)
        + 2 * request.rounds * len(planned.blocks) * planned.rung_bytes * request.ranks
    )
    lines.append(
        f"{format_count(steps, 'step')} in each place, {format_size(moved)} read and written in all; about "
        f"{moved / _GUESS:.0f} s at 1 GB/s, and the computation; at most {format_size(configured.memory_bytes)} of "
        "memory"
    )
    return lines


def shortfall(configured: Configured, directory: Path) -> tuple[str, int] | None:
    """What is wrong with the swap files below ``directory``, and the bytes that are missing; None where they are those
    that DeepSpeed must have written."""
    for rank, expected in enumerate(configured.files):
        sizes, stored = [], 0
        for path in directory.glob(f"zero_stage_3/**/rank{rank}/*.swp"):
            status = path.stat()
            sizes.append(status.st_size)
            stored += min(status.st_size, status.st_blocks * 512)
        if sorted(sizes) != expected.sizes:
            return (
                f"rank {rank} has {format_count(len(sizes), 'swap file')} of {sum(sizes)} bytes in all, and must have "
                f"{len(expected.sizes)} of {expected.total}",
                max(0, expected.total - sum(sizes)),
            )
        if stored < expected.total:
            return f"rank {rank}'s swap files hold {stored} of {expected.total} bytes", expected.total - stored
    return None
