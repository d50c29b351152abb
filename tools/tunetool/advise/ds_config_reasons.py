"""The explanation of each value of a ds_config: unit, formula with its numbers, reason. Pure."""

from __future__ import annotations

from typing import Any

from tunetool.advise import zero
from tunetool.advise.ds_config_plan import Explanation, Plan
from tunetool.node.units import format_size_binary


def explain(plan: Plan) -> None:
    """Fill in ``plan.reasons`` by the paths of the keys."""
    plan.reasons.update(_training(plan))
    plan.reasons.update(_aio())
    plan.reasons.update(_zero(plan))


def _training(plan: Plan) -> dict[str, Explanation]:
    job, values = plan.job, plan.values
    batch = f"{values['micro_batch']} x {values['accumulation']} x {job.world} ranks"
    unrelated = "a choice of the training; I/O does not depend on it"
    return {
        "train_batch_size": Explanation(
            "samples", batch, "micro batch x accumulation x world size; DeepSpeed refuses any other (config.py)"
        ),
        "train_micro_batch_size_per_gpu": Explanation("samples", "`--micro-batch`", "samples of one pass of one rank"),
        "gradient_accumulation_steps": Explanation(
            "steps",
            "batch / (micro batch x world size)",
            "the optimizer states move once per this many passes: more passes hide slower storage",
        ),
        "bf16.enabled": Explanation(
            "", plan.node.precision.why, "bf16 has the range of fp32 and needs no loss scaling"
        ),
        "fp16.enabled": Explanation(
            "", plan.node.precision.why, "for GPUs without bf16; small gradients would be 0 in it without loss scaling"
        ),
        "fp16.loss_scale": Explanation("", "0: dynamic", "halved where gradients overflow, whose step is skipped"),
        "fp16.initial_scale_power": Explanation(
            "", "2 to this power", "DeepSpeed's default; the first steps may be skipped until the scale fits"
        ),
        "fp16.loss_scale_window": Explanation("steps", "", "so many without an overflow double the scale"),
        "fp16.hysteresis": Explanation("overflows", "", "so many halve the scale"),
        "fp16.min_loss_scale": Explanation("", "", "an overflow at this scale ends the job"),
        "optimizer.type": Explanation("", "", "Adam on the CPU (op `cpu_adam`) where states are offloaded"),
        "optimizer.params.lr": Explanation("", "", unrelated),
        "optimizer.params.betas": Explanation("", "", unrelated),
        "optimizer.params.eps": Explanation("", "", unrelated),
        "optimizer.params.weight_decay": Explanation("", "", unrelated),
    }


def _aio() -> dict[str, Explanation]:
    measured = "measured on this storage, or given by `--aio`"
    return {
        "aio.block_size": Explanation("bytes", measured, "size of one request; smaller partitions are never swapped"),
        "aio.queue_depth": Explanation("requests", measured, "requests in flight per thread"),
        "aio.intra_op_parallelism": Explanation(
            "threads", measured, "threads per transfer; every transfer is a multiple of 1024 bytes x this"
        ),
        "aio.single_submit": Explanation("", measured, "submits requests one by one instead of a full queue"),
        "aio.overlap_events": Explanation("", measured, "submission and completion overlap"),
        "aio.use_gds": Explanation(
            "", measured, "parameters go to GPU memory through cuFile; optimizer states never do"
        ),
    }


def _zero(plan: Plan) -> dict[str, Explanation]:
    values, job = plan.values, plan.job
    path = "zero_optimization."
    bucket = values["bucket"]
    reasons = {
        "stage": Explanation("", "", "1 partitions optimizer states over the ranks, 2 gradients too, 3 parameters too"),
        "overlap_comm": Explanation("", "", "gradients are reduced while the backward pass continues"),
        "contiguous_gradients": Explanation("", "", "gradients are copied to one buffer, which avoids fragmentation"),
        "reduce_scatter": Explanation("", "", "each rank receives its partition only"),
        "allgather_partitions": Explanation("", "", "few large collectives distribute the updated partitions"),
        "reduce_bucket_size": _elements(
            bucket,
            2,
            "the largest tensor of a layer, at most 5e8 (DeepSpeed's default)",
            "a larger bucket would never be full",
        ),
        "allgather_bucket_size": _elements(bucket, 2, "as `reduce_bucket_size`", "GPU memory for gathering"),
    }
    if job.kind != "zero2":
        reasons |= _gathering(values)
    if job.kind == "zero3-cpu":
        for part in ("offload_optimizer", "offload_param"):
            reasons[f"{part}.device"] = Explanation("", "", "the node's memory")
            reasons[f"{part}.pin_memory"] = _pin(values["pin_memory"])
        reasons["sub_group_size"] = _elements(
            values["sub_group"], 4, "DeepSpeed's default", "states stay in memory: sub-groups need no buffers"
        )
    if job.kind == "zero3":
        reasons["sub_group_size"] = _elements(
            values["sub_group"], 4, "DeepSpeed's default", "states stay on the GPU: sub-groups need no buffers"
        )
    if "buffer_count" in values:
        reasons |= _parameters(plan)
    if "optimizer_buffer_count" in values:
        reasons |= _optimizer(plan)
    return {path + key: reason for key, reason in reasons.items()}


def _gathering(values: dict[str, Any]) -> dict[str, Explanation]:
    reuse = (
        "0: a tensor's buffer is free as soon as its module is done. With DeepSpeed's default of 1e9 the tensors of "
        "the last layers keep theirs until the backward pass, and training fails with `Not enough buffers` (observed)"
        if values["reuse"] == 0
        else "DeepSpeed's default: parameters that are reused within this distance stay gathered"
    )
    return {
        "stage3_prefetch_bucket_size": _elements(
            values["prefetch"], 2, "the largest tensor of a layer", "this much is fetched before its use (GPU memory)"
        ),
        "stage3_param_persistence_threshold": _elements(
            values["persistence"],
            2,
            "the largest one-dimensional tensor",
            "norms and biases stay replicated on each GPU: gathering them would cost a round trip for kilobytes",
        ),
        "stage3_max_live_parameters": _elements(
            values["live"],
            2,
            "1e9 (DeepSpeed's default), or two of the largest tensor",
            "limit of the elements that are gathered at once (GPU memory)",
        ),
        "stage3_max_reuse_distance": Explanation("elements", f"{values['reuse']:g}", reuse),
    }


def _parameters(plan: Plan) -> dict[str, Explanation]:
    values, job = plan.values, plan.job
    largest = job.model.largest
    unit = zero.aligned(values["buffer_size"], int(job.aio["intra_op_parallelism"]), zero.LOW) * zero.LOW
    rank = unit * values["buffer_count"]
    spare = (
        f"all parameters are read from NVMe; {values['spare']:,} elements "
        f"({format_size_binary(values['spare'] * zero.LOW)} per rank) would also fit into this node's memory"
        if values.get("spare")
        else "all parameters are read from NVMe"
    )
    if job.kind == "zero-inference":
        spare = "DeepSpeed keeps parameters in memory only in training, where the optimizer groups them"
    return {
        "offload_param.device": Explanation("", "", "each rank's partition of every large tensor has its own file"),
        "offload_param.nvme_path": Explanation("path", "`--target`", "DeepSpeed creates `zero_stage_3/` below it"),
        "offload_param.pin_memory": _pin(values["pin_memory"]),
        "offload_param.buffer_size": Explanation(
            "elements",
            f"`{largest.name}` has {largest.numel:,}: over {job.world} ranks, rounded up",
            f"each buffer holds one tensor's partition, so the largest must fit; {format_size_binary(unit)} each, at "
            f"two bytes per element (partitioned_param_swapper.py)",
        ),
        "offload_param.buffer_count": Explanation(
            "buffers",
            "twice the number of swapped tensors of one layer; fewer where memory is short",
            f"one layer computes while the next one is read; {format_size_binary(rank)} locked per rank, "
            f"{format_size_binary(rank * job.ranks_per_node)} per node",
        ),
        "offload_param.max_in_cpu": Explanation("elements per rank", "0", spare),
    }


def _optimizer(plan: Plan) -> dict[str, Explanation]:
    values, job = plan.values, plan.job
    parts = zero.partitions(job.model, job.world)
    largest = zero.largest_group(parts, values["sub_group"])
    parallelism = int(job.aio["intra_op_parallelism"])
    buffer_bytes = zero.aligned(largest, parallelism, zero.FP32) * zero.FP32
    rank = buffer_bytes * values["optimizer_buffer_count"]
    tiles = len(zero.sub_groups(parts, values["sub_group"]))
    overlap = (
        "a sub-group's transfer overlaps with the step of another one"
        if values["pipeline"]
        else "the node has too little memory for it"
    )
    return {
        "sub_group_size": Explanation(
            "elements",
            f"a rank's {sum(parts):,} / 16, at most 1e9, at least the largest partition and a block; "
            "halved until it fits",
            f"{tiles} sub-group(s) per optimizer step, the largest of {largest:,} elements: the tensor that fills a "
            "sub-group is its last (stage3.py)",
        ),
        "offload_optimizer.device": Explanation(
            "", "", "master weights, momentum, variance and gradients are in files"
        ),
        "offload_optimizer.nvme_path": Explanation("path", "`--target`", "DeepSpeed creates `zero_stage_3/` below it"),
        "offload_optimizer.pin_memory": _pin(values["pin_memory"]),
        "offload_optimizer.buffer_count": Explanation(
            "buffers",
            "4 x (1 + pipeline_read + pipeline_write)",
            "master weight, momentum, variance and gradient of a sub-group, and of those in flight; "
            f"{format_size_binary(buffer_bytes)} each, {format_size_binary(rank)} locked per rank, "
            f"{format_size_binary(rank * job.ranks_per_node)} per node. Their size is that of the largest "
            "sub-group: there is no `buffer_size` here",
        ),
        "offload_optimizer.pipeline_read": Explanation("", "three sets of buffers fit", overlap),
        "offload_optimizer.pipeline_write": Explanation("", "three sets of buffers fit", overlap),
    }


def _elements(count: int, element_bytes: int, formula: str, why: str) -> Explanation:
    return Explanation("elements", formula, f"{why}; {format_size_binary(count * element_bytes)}")


def _pin(pinned: bool) -> Explanation:
    if pinned:
        return Explanation("", "there is a GPU", "pinned memory is copied from and to the GPU at full speed")
    return Explanation(
        "", "there is no GPU", "there are no copies to speed up; the swap buffers are locked in any case"
    )
