"""Why each value of a ds_config is what it is: unit, formula with its numbers, reason. Pure."""

from __future__ import annotations

from typing import Any

from tunetool.advise import zero
from tunetool.advise.ds_config_plan import Explanation, Plan
from tunetool.node.units import format_size_binary


def explain(found: Plan) -> None:
    """Fill in ``found.reasons`` by the paths of the keys."""
    found.reasons.update(_training(found))
    found.reasons.update(_aio())
    found.reasons.update(_zero(found))


def _training(found: Plan) -> dict[str, Explanation]:
    job, values = found.job, found.values
    batch = f"{values['micro_batch']} x {values['accumulation']} x {job.world} ranks"
    yours = "the training's own; nothing here depends on it"
    return {
        "train_batch_size": Explanation(
            "samples", batch, "micro batch x accumulation x world size; DeepSpeed refuses any other (config.py)"
        ),
        "train_micro_batch_size_per_gpu": Explanation("samples", "`--micro-batch`", "what one pass of one rank holds"),
        "gradient_accumulation_steps": Explanation(
            "steps",
            "batch / (micro batch x world size)",
            "the optimizer's states move once for so many passes: more of them hide slower storage",
        ),
        "bf16.enabled": Explanation(
            "", "DeepSpeed's accelerator says so", "where it computes in bf16: fp32's range, no loss scaling"
        ),
        "fp16.enabled": Explanation("", "no bf16 here", "with DeepSpeed's dynamic loss scaling"),
        "optimizer.type": Explanation("", "", "Adam on the CPU (op `cpu_adam`) where states are offloaded"),
        "optimizer.params.lr": Explanation("", "", yours),
        "optimizer.params.betas": Explanation("", "", yours),
        "optimizer.params.eps": Explanation("", "", yours),
        "optimizer.params.weight_decay": Explanation("", "", yours),
    }


def _aio() -> dict[str, Explanation]:
    measured = "measured on this storage, or as `--aio` gives it"
    return {
        "aio.block_size": Explanation("bytes", measured, "of one request; parts smaller than it are never swapped"),
        "aio.queue_depth": Explanation("requests", measured, "in flight, for each thread"),
        "aio.intra_op_parallelism": Explanation(
            "threads", measured, "of one transfer; all pieces are multiples of 1024 bytes x this"
        ),
        "aio.single_submit": Explanation("", measured, "requests one by one instead of a queue at a time"),
        "aio.overlap_events": Explanation("", measured, "submission and completion overlap"),
        "aio.use_gds": Explanation("", measured, "parameters by cuFile to GPU memory; the optimizer's never"),
    }


def _zero(found: Plan) -> dict[str, Explanation]:
    values, job = found.values, found.job
    path = "zero_optimization."
    bucket = values["bucket"]
    reasons = {
        "stage": Explanation("", "", "1: states, 2: and gradients, 3: and parameters are spread over the ranks"),
        "overlap_comm": Explanation("", "", "gradients are reduced while the backward pass goes on"),
        "contiguous_gradients": Explanation("", "", "gradients in one buffer: no fragments"),
        "reduce_scatter": Explanation("", "", "each rank gets its part only"),
        "allgather_partitions": Explanation("", "", "updated parts come by few large collectives"),
        "reduce_bucket_size": _elements(
            bucket,
            2,
            "the largest tensor of a layer, at most 5e8 (DeepSpeed's default)",
            "a larger bucket is never full",
        ),
        "allgather_bucket_size": _elements(bucket, 2, "the same", "GPU memory for gathering"),
    }
    if job.kind != "zero2":
        reasons |= _gathering(values)
    if job.kind == "zero3-cpu":
        for part in ("offload_optimizer", "offload_param"):
            reasons[f"{part}.device"] = Explanation("", "", "memory of the node")
            reasons[f"{part}.pin_memory"] = _pin(values["pin_memory"])
        reasons["sub_group_size"] = _elements(
            values["sub_group"], 4, "DeepSpeed's default", "states stay in memory: tiles need no buffers"
        )
    if job.kind == "zero3":
        reasons["sub_group_size"] = _elements(
            values["sub_group"], 4, "DeepSpeed's default", "states stay on the GPU: tiles need no buffers"
        )
    if "buffer_count" in values:
        reasons |= _parameters(found)
    if "optimizer_buffer_count" in values:
        reasons |= _optimizer(found)
    return {path + key: reason for key, reason in reasons.items()}


def _gathering(values: dict[str, Any]) -> dict[str, Explanation]:
    reuse = (
        "0: a tensor's buffer is free as soon as its module is done. With DeepSpeed's default of 1e9 the tensors of "
        "the last layers keep theirs until the backward pass, and training ends with `Not enough buffers` (ran)"
        if values["reuse"] == 0
        else "DeepSpeed's default: what is used again that soon stays gathered"
    )
    return {
        "stage3_prefetch_bucket_size": _elements(
            values["prefetch"], 2, "the largest tensor of a layer", "so much is fetched ahead of its use (GPU memory)"
        ),
        "stage3_param_persistence_threshold": _elements(
            values["persistence"],
            2,
            "the largest one-dimensional tensor",
            "norms and biases stay whole on each GPU: gathering them would cost a round trip for kilobytes",
        ),
        "stage3_max_live_parameters": _elements(
            values["live"],
            2,
            "1e9 (DeepSpeed's default), or two of the largest tensor",
            "gathered at a time (GPU memory)",
        ),
        "stage3_max_reuse_distance": Explanation("elements", f"{values['reuse']:g}", reuse),
    }


def _parameters(found: Plan) -> dict[str, Explanation]:
    values, job = found.values, found.job
    largest = job.model.largest
    unit = zero.aligned(values["buffer_size"], int(job.aio["intra_op_parallelism"]), zero.LOW) * zero.LOW
    rank = unit * values["buffer_count"]
    spare = (
        f"all are read from NVMe, as asked; beside the rest {values['spare']:,} elements "
        f"({format_size_binary(values['spare'] * zero.LOW)} per rank) would fit into this node's memory"
        if values.get("spare")
        else "all are read from NVMe, as asked"
    )
    if job.kind == "zero-inference":
        spare = "only training keeps some: there is no optimizer here that groups them"
    return {
        "offload_param.device": Explanation("", "", "each rank's part of every large tensor lies in a file of its own"),
        "offload_param.nvme_path": Explanation("path", "`--target`", "`zero_stage_3/` is made below it"),
        "offload_param.pin_memory": _pin(values["pin_memory"]),
        "offload_param.buffer_size": Explanation(
            "elements",
            f"`{largest.name}` has {largest.numel:,}: over {job.world} ranks, rounded up",
            f"each buffer holds one tensor's part, so the largest must fit; {format_size_binary(unit)} each, as two "
            f"bytes an element (partitioned_param_swapper.py)",
        ),
        "offload_param.buffer_count": Explanation(
            "buffers",
            "twice the swapped tensors of one layer; fewer where memory is short",
            f"one layer computes while the next one is read; {format_size_binary(rank)} locked per rank, "
            f"{format_size_binary(rank * job.ranks_per_node)} per node",
        ),
        "offload_param.max_in_cpu": Explanation("elements per rank", "0", spare),
    }


def _optimizer(found: Plan) -> dict[str, Explanation]:
    values, job = found.values, found.job
    parts = zero.partitions(job.model, job.world)
    largest = zero.largest_group(parts, values["sub_group"])
    parallelism = int(job.aio["intra_op_parallelism"])
    each = zero.aligned(largest, parallelism, zero.FP32) * zero.FP32
    rank = each * values["optimizer_buffer_count"]
    tiles = len(zero.sub_groups(parts, values["sub_group"]))
    overlap = (
        "a tile's transfer overlaps with another one's step" if values["pipeline"] else "memory is too short for it"
    )
    return {
        "sub_group_size": Explanation(
            "elements",
            f"a rank's {sum(parts):,} / 16, at most 1e9, at least the largest part; halved until it fits",
            f"{tiles} tile(s) of the optimizer step, the largest of {largest:,} elements: a tile is closed by the "
            "tensor that fills it (stage3.py)",
        ),
        "offload_optimizer.device": Explanation("", "", "master weights, momentum, variance and gradients in files"),
        "offload_optimizer.nvme_path": Explanation("path", "`--target`", "`zero_stage_3/` is made below it"),
        "offload_optimizer.pin_memory": _pin(values["pin_memory"]),
        "offload_optimizer.buffer_count": Explanation(
            "buffers",
            "4 x (1 + pipeline_read + pipeline_write)",
            "master weight, momentum, variance, gradient of a tile, and of those in flight; "
            f"{format_size_binary(each)} each, {format_size_binary(rank)} locked per rank, "
            f"{format_size_binary(rank * job.ranks_per_node)} per node. Their size is the largest tile's: there is no "
            "`buffer_size` here",
        ),
        "offload_optimizer.pipeline_read": Explanation("", "three sets of buffers fit", overlap),
        "offload_optimizer.pipeline_write": Explanation("", "three sets of buffers fit", overlap),
    }


def _elements(count: int, element_bytes: int, formula: str, why: str) -> Explanation:
    return Explanation("elements", formula, f"{why}; {format_size_binary(count * element_bytes)}")


def _pin(pinned: bool) -> Explanation:
    if pinned:
        return Explanation("", "there is a GPU", "copies from and to it at full speed")
    return Explanation("", "there is no GPU", "nothing to copy to; the swap buffers are locked in any case")
