"""Makes the record's figures, checks and verdict from the ranks' results. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from tunetool.measure.evidence import LOWEST
from tunetool.measure.figure import Quantity, What, figure
from tunetool.node.units import format_size
from tunetool.record import CheckResult, Evidence, Measurement, Scalar
from tunetool.training.preparation import Ready
from tunetool.training.workload import RankResult, Workload
from tunetool.verdict import Case

PHASES = (
    *("rendezvous", "imports", "communicator", "model_load", "engine", "start"),
    *("first_batch", "checkpoint", "end_to_end"),
)
"""The phases of a rank, in their order."""
STARTS = PHASES[:6]
"""The phases before the first step."""
_ENOUGH_STEPS = 8
"""Fewest steps whose losses can show whether the model learns."""


@dataclass(frozen=True)
class Run:
    """One run: the ranks' settings, their nodes' preparation, and their results."""

    workload: Workload
    ready: Sequence[Ready]
    results: Sequence[RankResult]
    launcher: str

    def ready_for(self, result: RankResult) -> Ready:
        """Of a rank's node: the launcher gives each as many ranks, in the hosts' order."""
        return self.ready[result.rank * len(self.ready) // max(1, len(self.results))]


def conditions(run: Run) -> dict[str, Scalar]:
    """The parameters that all figures of the run share."""
    workload, first = run.workload, run.results[0]
    parameters: dict[str, Scalar] = {
        "model": workload.model,
        "dataset": workload.dataset if workload.entry is None else f"{workload.dataset}:{workload.entry}",
        "trainer": workload.trainer,
        "launcher": run.launcher,
        "nodes": len(run.ready),
        "ranks": len(run.results),
        "zero_stage": workload.zero_stage,
        "batch_size": workload.batch_size,
        "steps": len(first.step_seconds),
        "learning_rate": workload.learning_rate,
        "tuning": "all parameters" if workload.full else f"LoRA, rank {workload.lora_rank}",
        "parameters": first.parameters,
        "trainable": first.trainable,
        "loader": workload.loader,
        "workers": workload.workers,
        "seed": workload.seed,
        "cold": workload.cold,
        "compute": first.device,
        **({"precision": first.precision} if first.precision else {}),
        **({"skipped_steps": len(first.skipped_steps)} if first.skipped_steps else {}),
    }
    return parameters | {f"{name}_version": version for name, version in first.versions.items()}


def measurements(run: Run) -> list[Measurement]:
    """Every figure of every rank, then those of the whole run."""
    common = conditions(run)
    by_rank = [each for result in run.results for each in _of_rank(run, result, common)]
    return [*by_rank, *_of_all(run, common)]


def _of_rank(run: Run, result: RankResult, common: Mapping[str, Scalar]) -> Iterator[Measurement]:
    ready = run.ready_for(result)
    for name in PHASES:
        if name in result.seconds:
            medium = ready.model_medium if name == "model_load" else result.device
            yield _figure(run, result, name, "duration", [result.seconds[name]], common, medium)
    load = result.seconds.get("model_load")
    if load and result.model_bytes:
        read = result.read_bytes.get("model", {})
        loading: dict[str, Scalar] = {**common, "direction": "read", "model_bytes": result.model_bytes, **_counts(read)}
        evidence = model_evidence(run, result)
        rate = [result.model_bytes / load]
        yield _figure(run, result, "model_bandwidth", "bandwidth", rate, loading, ready.model_medium, evidence)
    data = {**common, **_counts(result.read_bytes.get("data", {}))}
    for name, samples, medium, parameters in (
        ("data", result.data_seconds, ready.dataset_medium, data),
        ("batch", result.load_seconds, ready.dataset_medium, data),
        ("step", updating(result), result.device, common),
    ):
        if samples:
            yield _figure(run, result, name, "duration", steady(samples), parameters, medium)
    seconds = sum(training_seconds(result))
    if seconds > 0:
        yield _figure(run, result, "tokens", "rate", [result.tokens / seconds], common, result.device)
        yield _figure(run, result, "images", "rate", [result.images / seconds], common, result.device)


def _of_all(run: Run, common: Mapping[str, Scalar]) -> Iterator[Measurement]:
    slowest = max(sum(training_seconds(result)) for result in run.results)
    first = run.results[0]
    if slowest > 0:
        for name, count in (("tokens", "tokens"), ("images", "images")):
            rate = sum(getattr(result, count) for result in run.results) / slowest
            yield _figure(run, None, name, "rate", [rate], common, first.device)
    ended = max(result.seconds.get("end_to_end", 0.0) for result in run.results)
    yield _figure(run, None, "end_to_end", "duration", [ended], common, first.device)


def steady(samples: Sequence[float]) -> list[float]:
    """The values without the first step, which makes buffers and compiles kernels, if there are others."""
    return list(samples[1:] or samples)


def updating(result: RankResult) -> list[float]:
    """The times of the first step, for ``steady`` to leave out, and of steps with an update: one without is shorter.
    Of all steps where none had one."""
    skipped = set(result.skipped_steps)
    kept = [seconds for step, seconds in enumerate(result.step_seconds) if step == 0 or step not in skipped]
    return kept if len(kept) > 1 else list(result.step_seconds)


def training_seconds(result: RankResult) -> tuple[float, float]:
    """Seconds of all waits for data, and of all steps."""
    return sum(result.data_seconds), sum(result.step_seconds)


def _counts(read: Mapping[str, int]) -> dict[str, Scalar]:
    return {f"{name}_read_bytes": count for name, count in read.items()}


def model_evidence(run: Run, result: RankResult) -> Evidence:
    """What the kernel fetched from block devices for the model, by all ranks of the node: one may read for others.

    `block`: all bytes came from there. `memory`: from tmpfs, or the page cache had it. `none`: only a part did.
    """
    ready = run.ready_for(result)
    mine = [each for each in run.results if run.ready_for(each) is ready]
    counted = sum(each.read_bytes.get("model", {}).get("storage", 0) for each in mine)
    ratio = counted / result.model_bytes
    kind: Literal["block", "memory", "none"] = (
        "block" if ratio >= LOWEST else "memory" if ratio < 1 - LOWEST else "none"
    )
    return Evidence(
        kind=kind,
        claimed_bytes=result.model_bytes,
        counted_bytes=counted,
        ratio=ratio,
    )


def _figure(
    run: Run,
    result: RankResult | None,
    name: str,
    quantity: Quantity,
    samples: Sequence[float],
    parameters: Mapping[str, Scalar],
    medium: str,
    evidence: Evidence | None = None,
) -> Measurement:
    trainer = run.workload.trainer
    engine = f"{trainer} {(result or run.results[0]).versions.get(trainer, '')}".strip()
    who: dict[str, Any] = {"rank": result.rank, "host": result.host} if result is not None else {}
    form = "finetune.{figure}" if result is not None else "finetune.{ranks}.{figure}"
    labels = {} if result is not None else {"ranks": "all"}
    return figure(
        What(form, quantity, engine, medium, name, labels, "training", parameters, **who), samples, evidence=evidence
    )


def checks(run: Run) -> list[CheckResult]:
    """Checks whether every rank made all of its steps, and whether the loss falls."""
    counts = sorted({len(result.step_seconds) for result in run.results})
    expected = "every rank makes the same number of steps, at least one"
    status = "pass" if len(counts) == 1 and counts[0] > 0 else "fail"
    steps = CheckResult(
        id="finetune.steps",
        status=status,
        expected=expected,
        found=f"{', '.join(map(str, counts))} steps on {len(run.results)} ranks",
        remedy="" if status == "pass" else "look at the ranks' logs beside the record",
    )
    return [steps, _loss(run)]


def _loss(run: Run) -> CheckResult:
    name, expected = "finetune.loss", "a loss that is a number at every step and falls"
    bad = [
        (result.rank, step)
        for result in run.results
        for step, loss in enumerate(result.losses)
        if not math.isfinite(loss) and step not in result.excused_steps
    ]
    if bad:
        rank, step = bad[0]
        remedy = "lower `--learning-rate`; with your own weights, look for infinite values in them"
        observed = f"no number on rank {rank} at step {step}"
        return CheckResult(id=name, status="fail", expected=expected, found=observed, remedy=remedy)
    first = run.results[0]
    if first.losses and len(first.skipped_steps) == len(first.losses):
        remedy = (
            "more steps, until the loss scale fits (`--steps`)" if first.precision == "fp16" else "look at the model"
        )
        observed = f"none of {len(first.losses)} steps made an update: their gradients overflowed in {first.precision}"
        return CheckResult(id=name, status="unknown", expected=expected, found=observed, remedy=remedy)
    before, after = loss_change(run.results)
    observed = f"from {before:.4g} to {after:.4g}"
    if len(run.results[0].losses) < _ENOUGH_STEPS:
        return CheckResult(
            id=name, status="pass", expected=expected, found=f"{observed}, but too few steps to judge whether it falls"
        )
    if after < before:
        return CheckResult(id=name, status="pass", expected=expected, found=observed)
    remedy = "try another `--learning-rate`, or more steps"
    return CheckResult(
        id=name, status="unknown", expected=expected, found=f"{observed}: it does not fall", remedy=remedy
    )


def loss_change(results: Sequence[RankResult]) -> tuple[float, float]:
    """Mean loss over all ranks in the first and in the last quarter of the steps, of those whose loss is a number."""
    curves = list(zip(*(result.losses for result in results), strict=False))
    means = [mean for each in curves if math.isfinite(mean := fmean(each))] or [math.nan]
    quarter = max(1, len(means) // 4)
    return fmean(means[:quarter]), fmean(means[-quarter:])


def doubts(run: Run) -> list[str]:
    """Why figures prove nothing about the storage; empty unless the run asked for a cold cache."""
    if not run.workload.cold:
        return []
    by_host = {}
    for result in run.results:
        ready = run.ready_for(result)
        evidence = model_evidence(run, result)
        if not ready.in_memory and evidence.kind != "block":
            by_host[ready.host] = (
                f"`{ready.host}`: of the model's {format_size(result.model_bytes)} the kernel fetched "
                f"{format_size(evidence.counted_bytes or 0)} from drives: the rest was in memory, though the cache was "
                "dropped, or came over a network, which its counters do not show"
            )
    return list(by_host.values())


def case(run: Run) -> Case:
    """The case for the verdict: only whether it trained is judged, not speed."""
    return Case(measurements(run), checks=checks(run), doubts=doubts(run), judged="checks")
