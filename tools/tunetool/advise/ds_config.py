"""The values of a ds_config for a model, a number of ranks and a node, each with its reason. Pure.

``plan`` computes the values and templates put them into the file; every key in the file has an ``Explanation``.
"""

from __future__ import annotations

from dataclasses import replace

from tunetool.advise import zero
from tunetool.advise.ds_config_plan import Item, Job, Node, Plan
from tunetool.advise.ds_config_reasons import explain
from tunetool.advise.expert_decoder import is_expert
from tunetool.advise.precision import FP16
from tunetool.advise.shapes import Model
from tunetool.advise.zero import ON_HOST
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.units import format_size, format_size_binary

NVME_KINDS = ("zero3-nvme", "zero3-nvme-70b", "zero-inference")
KINDS = ("zero2", "zero3", "zero3-cpu", *NVME_KINDS)
MEMORY_SHARE = 0.75
"""Share of a node's memory that DeepSpeed may use; the rest is for data loading, page cache, /dev/shm and the job."""
TILES = 16
"""Intended number of sub-groups per optimizer step: with several, reading, computing and writing overlap."""
PARAM_BUFFER_SHARE = 0.25
"""Share of that memory that the parameter buffers may take at most."""
FEWEST_PARAM_BUFFERS = 4
_NEAR = 8
"""A hint names world sizes of at most so many times the one that was asked for."""
DEFAULT_BUCKET = 5 * 10**8
"""zero/config.py: reduce_bucket_size, allgather_bucket_size."""
DEFAULT_LIVE = 10**9
"""zero/config.py: stage3_max_live_parameters, stage3_max_reuse_distance."""


def live(model: Model) -> int:
    """Elements of gathered parameters that ZeRO-3 may keep (stage3_max_live_parameters): two of the largest tensor."""
    return max(DEFAULT_LIVE, 2 * model.largest.numel)


class Unreachable(CannotJudge):
    """Direct I/O would not reach the address of every gradient; ``message`` says why, ``hint`` what would work."""


def plan(job: Job, node: Node) -> Plan:
    """Compute the values of the ds_config for ``job`` on ``node``.

    Raises ``UsageProblem`` for arguments that no run can have, ``CannotJudge`` where the node lacks memory, lockable
    memory or free space for the job, ``Unreachable`` where gradients would be misread.
    """
    result, misread = _computed(job, node)
    if misread:
        raise Unreachable(
            f"{misread} gradients of `{job.model.name}` on {_ranks(job.world)} would be at addresses that direct I/O "
            f"cannot reach: DeepSpeed would train on wrong gradients without an error ({node.address_why})",
            _reachable(job, node),
        )
    explain(result)
    return result


def _computed(job: Job, node: Node) -> tuple[Plan, int]:
    """The plan without its reasons, and how many gradients direct I/O would not reach."""
    _check(job)
    result = Plan(job, node)
    _batch(result)
    result.values.update(aio=dict(job.aio), nvme_path=job.nvme_path, pin_memory=node.gpu)
    result.values.update(precision=node.precision.format, fp16=dict(FP16))
    if job.kind == "zero2":
        _buckets(result)
        total = sum(zero.partitions(job.model, job.world))
        result.items += [
            Item("parameters, replicated", job.model.numel * zero.LOW, "gpu"),
            Item("gradients, one partition", total * zero.LOW, "gpu"),
            Item("master weights, momentum, variance, one partition", total * zero.STATES * zero.FP32, "gpu"),
        ]
    else:
        _stage3(result)
    if not node.gpu:
        result.items = [replace(item, where="host") if item.where == "gpu" else item for item in result.items]
    misread = 0
    if "pipeline" in result.values:
        parts = zero.partitions(job.model, job.world)
        block = int(job.aio["block_size"])
        misread = zero.misread_gradients(parts, result.values["sub_group"], block, node.address_bytes)
    _fits(result)
    return result, misread


def _reachable(job: Job, node: Node) -> str:
    """What would work in place of ``job``: each was computed, none is a guess."""

    def works(other: Job) -> bool:
        try:
            return not _computed(other, node)[1]
        except (CannotJudge, UsageProblem):
            return False

    powers = [2**power for power in range((_NEAR * job.world).bit_length())]
    worlds = [world for world in powers if world % job.nodes == 0 and job.world != world <= _NEAR * job.world]
    ways = [
        f"`--world-size {world}`"
        for world in sorted(worlds, key=lambda world: abs(world - job.world))
        if works(replace(job, world=world, batch=None))
    ][:2]
    if works(replace(job, kind="zero3-cpu")):
        ways.append("`zero3-cpu`")
    elsewhere = "`--dma-alignment BYTES` for a job's node whose direct I/O reaches other addresses (NVMe drives: 4)"
    return f"use {' or '.join(ways)}, or {elsewhere}" if ways else elsewhere


def _ranks(world: int) -> str:
    return "1 rank" if world == 1 else f"{world} ranks"


def _check(job: Job) -> None:
    if job.kind not in KINDS:
        raise UsageProblem(f"`{job.kind}` is not a kind of ds_config", f"known: {', '.join(KINDS)}")
    if min(job.world, job.nodes, job.micro_batch) < 1 or job.world % job.nodes:
        raise UsageProblem(
            f"`--world-size {job.world}` ranks do not spread evenly over `--nodes {job.nodes}`",
            "the world size counts the ranks of all nodes together",
        )
    if job.kind in NVME_KINDS and any(map(is_expert, job.model.tensors)):
        raise CannotJudge(
            f"`{job.model.name}` has experts, and the version of transformers decides whether those of a layer are one "
            f"tensor: the buffers of `{job.kind}` have no certain size",
            "`zero3` and `zero3-cpu` have no such buffers",
        )


def _batch(plan: Plan) -> None:
    job = plan.job
    step = job.micro_batch * job.world
    batch = step if job.batch is None else job.batch
    if batch < step or batch % step:
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else str(above)
        raise UsageProblem(
            f"`--batch {batch}` is not a multiple of {step} ({job.micro_batch} x {job.world} ranks)", f"use {near}"
        )
    plan.values.update(batch=batch, micro_batch=job.micro_batch, accumulation=batch // step)


def _buckets(plan: Plan) -> None:
    inner = [tensor.numel for tensor in plan.job.model.tensors if tensor.layer is not None]
    plan.values["bucket"] = min(DEFAULT_BUCKET, max(inner or [plan.job.model.largest.numel]))


def _stage3(plan: Plan) -> None:
    job, model = plan.job, plan.job.model
    flat = [tensor.numel for tensor in model.tensors if len(tensor.shape) == 1]
    plan.values.update(
        persistence=max(flat, default=0),
        live=live(model),
        reuse=0 if job.kind in NVME_KINDS else DEFAULT_LIVE,
        sub_group=zero.DEFAULT_SUB_GROUP,
    )
    _buckets(plan)
    plan.values["prefetch"] = plan.values["bucket"]
    total = sum(zero.partitions(model, job.world))
    kept = sum(numel for numel in flat) * zero.LOW
    plan.items += [
        Item("largest amount of gathered tensors", min(plan.values["live"], model.numel) * zero.LOW, "gpu"),
        Item("one-dimensional tensors, replicated", kept, "gpu"),
    ]
    states = Item("master weights, momentum, variance", total * zero.STATES * zero.FP32, "gpu")
    if job.kind == "zero3":
        plan.items += [Item("parameters and gradients", total * 2 * zero.LOW, "gpu"), states]
    elif job.kind == "zero3-cpu":
        plan.items += [Item(name, total * each, "host") for name, each in ON_HOST.items()]
    else:
        _nvme(plan, total)


def _nvme(plan: Plan, total: int) -> None:
    """Size the NVMe offload's buffers from the largest tensor and the memory that the node can spare."""
    job, node, values = plan.job, plan.node, plan.values
    training = job.kind != "zero-inference"
    parallelism, block = int(job.aio["intra_op_parallelism"]), int(job.aio["block_size"])
    parts = zero.partitions(job.model, job.world)
    small = sum(part for part in parts if not zero.swappable(part, zero.LOW, block))
    if training:
        plan.items.append(Item("accumulated gradients", total * zero.LOW, "host"))
    plan.items.append(Item("parameters too small to swap", small * zero.LOW, "host"))
    budget = int(node.memory_bytes * MEMORY_SHARE) // job.ranks_per_node
    swapped = zero.swapped_tensors(job.model, job.world, block)
    values["buffer_size"] = max([zero.partition(tensor.numel, job.world) for tensor in swapped], default=max(parts))
    buffer_bytes = zero.aligned(values["buffer_size"], parallelism, zero.LOW) * zero.LOW
    wanted = 2 * zero.most_swapped_in_a_layer(swapped)
    values["buffer_count"] = max(FEWEST_PARAM_BUFFERS, min(wanted, int(budget * PARAM_BUFFER_SHARE) // buffer_bytes))
    buffer_memory = "gpu" if job.aio["use_gds"] else "locked"
    plan.items.append(Item("parameter buffers", values["buffer_count"] * buffer_bytes, buffer_memory))
    values["max_in_cpu"] = 0
    if training:
        _tiles(plan, parts, budget)
    files = zero.nvme_bytes(parts, states=training, parameters=True)
    plan.items.append(Item("swap files", files, "nvme"))
    if not swapped:
        plan.notes.append(
            f"No tensor's partition reaches {format_size_binary(max(zero.MIN_AIO_BYTES, block))} on {job.world} ranks: "
            "DeepSpeed keeps all parameters in memory."
        )
    spare = (budget - plan.rank_bytes("host", "locked")) // zero.LOW
    if training and spare > 0:
        values["spare"] = min(spare, total)


def _tiles(plan: Plan, parts: list[int], budget: int) -> None:
    """Choose the largest sub-groups whose buffers fit, with pipelining where its buffers fit too."""
    job, node, values = plan.job, plan.node, plan.values
    parallelism, block = int(job.aio["intra_op_parallelism"]), int(job.aio["block_size"])
    available = budget - plan.rank_bytes("host", "locked")
    lockable = None if node.memlock is None else node.memlock - plan.rank_bytes("locked")
    # Smaller tiles than a block would never be swapped.
    smallest = max(*parts, -(-max(zero.MIN_AIO_BYTES, block) // zero.FP32))
    for pipeline in (True, False):
        count = zero.optimizer_buffer_count(pipeline, pipeline)
        size = min(zero.DEFAULT_SUB_GROUP, max(sum(parts) // TILES, smallest))
        while True:
            largest = zero.largest_group(parts, size)
            buffers = count * zero.aligned(largest, parallelism, zero.FP32) * zero.FP32
            # Parameters that are written back to their files, and Adam's new states before their first swap.
            write_back, new_states = (
                zero.aligned(largest, parallelism, zero.LOW) * zero.LOW,
                largest * zero.STATES * zero.FP32,
            )
            fits = buffers + write_back + new_states <= available and (
                lockable is None or buffers + write_back <= lockable
            )
            if fits or size <= smallest:
                break
            size = max(size // 2, smallest)
        if fits:
            break
    values.update(sub_group=size, pipeline=pipeline, optimizer_buffer_count=count)
    plan.items += [
        Item("optimizer buffers", buffers, "locked"),
        Item("buffer for parameters that are written back", write_back, "locked"),
        Item("one sub-group's states while they are created", new_states, "host"),
    ]


def _fits(plan: Plan) -> None:
    job, node = plan.job, plan.node
    ranks = job.ranks_per_node
    needed = plan.rank_bytes("host", "locked") * ranks
    if needed > node.memory_bytes * MEMORY_SHARE:
        instead = "" if job.kind in NVME_KINDS else "`ds-config zero3-nvme`, or "
        raise CannotJudge(
            f"`{job.kind}` of `{job.model.name}` keeps {format_size_binary(needed)} in each node's memory; "
            f"{MEMORY_SHARE:.0%} of {format_size_binary(node.memory_bytes)} may be used",
            f"use more nodes, {instead or 'or '}`--memory SIZE` if the target node has more",
        )
    locked = plan.rank_bytes("locked")
    if node.memlock is not None and locked > node.memlock:
        raise CannotJudge(
            f"RLIMIT_MEMLOCK is {format_size_binary(node.memlock)}, but each rank of `{job.kind}` locks "
            f"{format_size_binary(locked)}",
            "set memlock to unlimited (role `host_memory` does), or `ulimit -l unlimited`",
        )
    files = plan.rank_bytes("nvme") * ranks
    if node.free_bytes is not None and files > node.free_bytes:
        raise CannotJudge(
            f"`{job.nvme_path}` has {format_size(node.free_bytes)} free, but the swap files of `{job.model.name}` take "
            f"{format_size(files)} on each node",
            "use more nodes, or `--nvme-space SIZE` if the target node has more",
        )
