"""The values of a ds_config for a model, a number of ranks and a node, each with its reason. Pure.

``plan`` computes; the templates place the values; every key that lands in a file has an ``Explanation`` by its path.
"""

from __future__ import annotations

from dataclasses import replace

from tunetool.advise import zero
from tunetool.advise.ds_config_plan import Item, Job, Node, Plan
from tunetool.advise.ds_config_reasons import explain
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.units import format_size, format_size_binary

NVME_KINDS = ("zero3-nvme", "zero3-nvme-70b", "zero-inference")
KINDS = ("zero2", "zero3", "zero3-cpu", *NVME_KINDS)
MEMORY_SHARE = 0.75
"""Of a node's memory for what DeepSpeed keeps there; the rest is for loading data, page cache, /dev/shm and the job."""
TILES = 16
"""Tiles of an optimizer step that are aimed at: with a few of them reading, computing and writing overlap."""
PARAM_BUFFER_SHARE = 0.25
"""Of that memory for the buffers of parameters, at most."""
FEWEST_PARAM_BUFFERS = 4
DEFAULT_BUCKET = 5 * 10**8
"""zero/config.py: reduce_bucket_size, allgather_bucket_size."""
DEFAULT_LIVE = 10**9
"""zero/config.py: stage3_max_live_parameters, stage3_max_reuse_distance."""


def plan(job: Job, node: Node) -> Plan:
    """Raises ``UsageProblem`` for a call that fits no run, ``CannotJudge`` where the node has too little for it."""
    _check(job)
    found = Plan(job, node)
    _batch(found)
    found.values.update(aio=dict(job.aio), nvme_path=job.nvme_path, bf16=node.bf16, pin_memory=node.gpu)
    if job.kind == "zero2":
        _buckets(found)
        total = sum(zero.partitions(job.model, job.world))
        found.items += [
            Item("parameters, whole", job.model.numel * zero.LOW, "gpu"),
            Item("gradients, a part", total * zero.LOW, "gpu"),
            Item("master weights, momentum, variance, a part", total * zero.STATES * zero.FP32, "gpu"),
        ]
    else:
        _stage3(found)
    if not node.gpu:
        found.items = [replace(item, where="host") if item.where == "gpu" else item for item in found.items]
    _fits(found)
    explain(found)
    return found


def _check(job: Job) -> None:
    if job.kind not in KINDS:
        raise UsageProblem(f"`{job.kind}` is not a kind of ds_config", f"known: {', '.join(KINDS)}")
    if min(job.world, job.nodes, job.micro_batch) < 1 or job.world % job.nodes:
        raise UsageProblem(
            f"`--world-size {job.world}` ranks do not spread evenly over `--nodes {job.nodes}`",
            "the world size counts the ranks of all nodes together",
        )


def _batch(found: Plan) -> None:
    job = found.job
    step = job.micro_batch * job.world
    batch = step if job.batch is None else job.batch
    if batch < step or batch % step:
        below, above = batch // step * step, (batch // step + 1) * step
        near = f"{below} or {above}" if below else str(above)
        raise UsageProblem(
            f"`--batch {batch}` is no multiple of {step} ({job.micro_batch} x {job.world} ranks)", f"{near} would do"
        )
    found.values.update(batch=batch, micro_batch=job.micro_batch, accumulation=batch // step)


def _buckets(found: Plan) -> None:
    inner = [tensor.numel for tensor in found.job.model.tensors if tensor.layer is not None]
    found.values["bucket"] = min(DEFAULT_BUCKET, max(inner or [found.job.model.largest.numel]))


def _stage3(found: Plan) -> None:
    job, model = found.job, found.job.model
    flat = [tensor.numel for tensor in model.tensors if len(tensor.shape) == 1]
    found.values.update(
        persistence=max(flat, default=0),
        live=max(DEFAULT_LIVE, 2 * model.largest.numel),
        reuse=0 if job.kind in NVME_KINDS else DEFAULT_LIVE,
        sub_group=zero.DEFAULT_SUB_GROUP,
    )
    _buckets(found)
    found.values["prefetch"] = found.values["bucket"]
    total = sum(zero.partitions(model, job.world))
    kept = sum(numel for numel in flat) * zero.LOW
    found.items += [
        Item("tensors gathered at a time, at most", min(found.values["live"], model.numel) * zero.LOW, "gpu"),
        Item("one-dimensional tensors, kept whole", kept, "gpu"),
    ]
    states = Item("master weights, momentum, variance", total * zero.STATES * zero.FP32, "gpu")
    if job.kind == "zero3":
        found.items += [Item("parameters and gradients", total * 2 * zero.LOW, "gpu"), states]
    elif job.kind == "zero3-cpu":
        found.items += [
            Item("parameters", total * zero.LOW, "host"),
            Item("gradients while they add up", total * zero.LOW, "host"),
            Item("gradients in fp32 for the optimizer", total * zero.FP32, "host"),
            Item(states.name, states.rank_bytes, "host"),
        ]
    else:
        _nvme(found, total)


def _nvme(found: Plan, total: int) -> None:
    """Buffers, from the largest tensor and what the node can spare."""
    job, node, values = found.job, found.node, found.values
    training = job.kind != "zero-inference"
    parallelism, block = int(job.aio["intra_op_parallelism"]), int(job.aio["block_size"])
    parts = zero.partitions(job.model, job.world)
    small = sum(part for part in parts if not zero.swappable(part, zero.LOW, block))
    if training:
        found.items.append(Item("gradients while they add up", total * zero.LOW, "host"))
    found.items.append(Item("parameters too small to swap", small * zero.LOW, "host"))
    budget = int(node.memory_bytes * MEMORY_SHARE) // job.ranks_per_node
    swapped = zero.swapped_tensors(job.model, job.world, block)
    values["buffer_size"] = max([zero.partition(tensor.numel, job.world) for tensor in swapped], default=max(parts))
    each = zero.aligned(values["buffer_size"], parallelism, zero.LOW) * zero.LOW
    wanted = 2 * zero.most_swapped_in_a_layer(swapped)
    values["buffer_count"] = max(FEWEST_PARAM_BUFFERS, min(wanted, int(budget * PARAM_BUFFER_SHARE) // each))
    place = "gpu" if job.aio["use_gds"] else "locked"
    found.items.append(Item("buffers of parameters", values["buffer_count"] * each, place))
    values["max_in_cpu"] = 0
    if training:
        _tiles(found, parts, budget)
    files = zero.nvme_bytes(parts, states=training, parameters=True)
    found.items.append(Item("swap files", files, "nvme"))
    if not swapped:
        found.notes.append(
            f"No tensor's part reaches {format_size_binary(max(zero.MIN_AIO_BYTES, block))} on {job.world} ranks: "
            "DeepSpeed keeps all parameters in memory."
        )
    spare = (budget - found.rank_bytes("host", "locked")) // zero.LOW
    if training and spare > 0:
        values["spare"] = min(spare, total)


def _tiles(found: Plan, parts: list[int], budget: int) -> None:
    """The largest tiles that fit, overlapped if that fits too."""
    job, node, values = found.job, found.node, found.values
    parallelism, block = int(job.aio["intra_op_parallelism"]), int(job.aio["block_size"])
    left = budget - found.rank_bytes("host", "locked")
    lockable = None if node.memlock is None else node.memlock - found.rank_bytes("locked")
    smallest = max(parts)
    for pipeline in (True, False):
        count = zero.optimizer_buffer_count(pipeline, pipeline)
        size = min(zero.DEFAULT_SUB_GROUP, max(sum(parts) // TILES, smallest))
        while True:
            largest = zero.largest_group(parts, size)
            buffers = count * zero.aligned(largest, parallelism, zero.FP32) * zero.FP32
            # What is written back to the parameters' files, and Adam's new states before they are first swapped.
            back, first = zero.aligned(largest, parallelism, zero.LOW) * zero.LOW, largest * zero.STATES * zero.FP32
            fits = buffers + back + first <= left and (lockable is None or buffers + back <= lockable)
            if fits or size <= smallest:
                break
            size = max(size // 2, smallest)
        if fits:
            break
    values.update(sub_group=size, pipeline=pipeline, optimizer_buffer_count=count)
    found.items += [
        Item("buffers of the optimizer", buffers, "locked"),
        Item("buffer for parameters that are written back", back, "locked"),
        Item("one tile's states while they are made", first, "host"),
    ]
    misread = zero.misread_gradients(parts, size, block, node.address_bytes)
    if misread:
        raise CannotJudge(
            f"{misread} gradients of `{job.model.name}` on {job.world} ranks would lie at addresses that direct I/O "
            "cannot reach: DeepSpeed would train on wrong ones and say nothing",
            f"take a world size that divides the tensors into multiples of {node.address_bytes // zero.FP32} elements, "
            "or `zero3-cpu`",
        )


def _fits(found: Plan) -> None:
    job, node = found.job, found.node
    ranks = job.ranks_per_node
    needed = found.rank_bytes("host", "locked") * ranks
    if needed > node.memory_bytes * MEMORY_SHARE:
        instead = "" if job.kind in NVME_KINDS else "`ds-config zero3-nvme`, or "
        raise CannotJudge(
            f"`{job.kind}` of `{job.model.name}` keeps {format_size_binary(needed)} in each node's memory; "
            f"{MEMORY_SHARE:.0%} of {format_size_binary(node.memory_bytes)} may be used",
            f"more nodes, {instead or 'or '}`--memory SIZE` where the node that it is for has more",
        )
    locked = found.rank_bytes("locked")
    if node.memlock is not None and locked > node.memlock:
        raise CannotJudge(
            f"RLIMIT_MEMLOCK is {format_size_binary(node.memlock)}, each rank of `{job.kind}` locks "
            f"{format_size_binary(locked)}",
            "set memlock to unlimited (role `host_memory` does), or `ulimit -l unlimited`",
        )
    files = found.rank_bytes("nvme") * ranks
    if node.free_bytes is not None and files > node.free_bytes:
        raise CannotJudge(
            f"`{job.nvme_path}` has {format_size(node.free_bytes)} free, the swap files of `{job.model.name}` take "
            f"{format_size(files)} on each node",
            "more nodes, or `--nvme-space SIZE` where the node that it is for has more",
        )
