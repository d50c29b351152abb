"""Makes the record's figures, checks and verdict from the samples. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from tunetool.advise.communication import parameters, trained
from tunetool.advise.zero import state_bytes
from tunetool.bench.strategies.matrix import ALONE, Cell, Layout
from tunetool.bench.strategies.predict import Job
from tunetool.bench.strategies.samples import Row, Sample, Study, network
from tunetool.measure.figure import Better, Quantity, What, figure
from tunetool.record import CheckResult, CheckStatus, Measurement, Scalar
from tunetool.verdict import Case

NOTE = "strategies.note"
_LOSS_TOLERANCE = 0.05
"""Largest relative difference of losses between two stages on the same samples: only the order of additions differs."""


def measurements(study: Study, job: Job, conditions: Mapping[str, Scalar]) -> list[Measurement]:
    """The figures of the networks, then of each cell."""
    figures = [each for layout in study.rank_figures for each in _network(study, layout, conditions)]
    for row in study.rows.values():
        if row.samples:
            figures += _row(study, job, row, conditions)
    return figures


def _network(study: Study, layout: Layout, conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    ranks = study.rank_figures[layout]
    common: dict[str, Scalar] = {
        "nodes": layout.nodes,
        "ranks": layout.ranks,
        "backend": ranks[0].backend,
        "compute": ranks[0].device,
        "launcher": conditions["launcher"],
    }
    work = [max(each) for each in zip(*(each.work for each in ranks), strict=False)]
    yield _link(layout, "work", "duration", work, {**common, "what": "a small computation on all ranks"})
    yield from _hooks(study, layout, common)
    if layout.world == 1:
        return
    yield _link(layout, "latency", "latency", ranks[0].latency, {**common, "bytes": 4})
    yield _link(layout, "queued", "latency", ranks[0].queued, common)
    yield _link(layout, "communicator", "duration", [max(each.communicator for each in ranks)], common)
    for kind, line in network(ranks).fits.items():
        points: dict[str, Scalar] = {f"seconds_{size}": median(taken) for size, taken in ranks[0].points[kind]}
        shape: dict[str, Scalar] = {
            **common,
            "latency_seconds": line.latency,
            "worst_residual": line.worst,
            "method": "least squares, relative errors, of latency + bytes / bandwidth (Hockney)",
            **points,
        }
        if math.isfinite(line.algorithm_bandwidth):
            rates = {"algorithm": line.algorithm_bandwidth, "bus": line.bus_bandwidth(kind, layout.world)}
            for name, rate in rates.items():
                yield _link(layout, f"{name}_bandwidth", "bandwidth", [rate], shape, kind)


def _hooks(study: Study, layout: Layout, common: Mapping[str, Scalar]) -> Iterator[Measurement]:
    if layout not in study.hooks:
        return
    hooks = study.hooks[layout]
    probe = {**common, "what": "DeepSpeed's stage 3 beyond its stage 2 and beyond communication, on a small model"}
    yield _link(layout, "hooks_per_use", "duration", [hooks.per_use], probe)
    yield _link(layout, "hooks_per_gather", "duration", [hooks.per_gather], probe)


def _row(study: Study, job: Job, row: Row, conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    cell, layout = row.cell, row.cell.layout
    moved = job.traffic(cell)
    whole, updated = parameters(job.modules), trained(job.modules)
    common: dict[str, Scalar] = {
        **conditions,
        "nodes": layout.nodes,
        "ranks": layout.ranks,
        "world": layout.world,
        "zero_stage": cell.stage,
        "parameters": sum(each.numel for each in whole),
        "trained": sum(each.numel for each in updated),
        "sent_bytes": moved.sent,
        **{f"{kind}_calls": count for kind, count in moved.counts.items() if count},
        **{f"{kind}_bytes": size for kind, size in moved.sizes.items() if size},
        "state_bytes": state_bytes(
            cell.stage,
            sum(each.numel for each in whole),
            sum(each.numel for each in updated),
            layout.world,
            job.element_bytes,
        ),
        "memory_bytes": min(each.memory_bytes for each in study.rank_figures[layout]),
    }
    steps = [sample.step for sample in row.samples]
    versions = f"deepspeed {conditions.get('deepspeed_version', '')}".strip()

    def of_cell(
        name: str, quantity: Quantity, samples: Sequence[float], more: Mapping[str, Scalar], phase: str | None = None
    ) -> Measurement:
        form = f"strategies.{{figure}}{'.{phase}' if phase else ''}.{{layout}}.z{{stage}}"
        labels = {"layout": str(layout), "stage": str(cell.stage), **({"phase": phase} if phase else {})}
        return _figure(form, name, labels, quantity, samples, {**common, **more}, versions, "training")

    yield of_cell("step", "duration", steps, _predicted(row))
    if row.prediction_errors:
        yield of_cell("prediction_error", "ratio", row.prediction_errors, {})
    yield of_cell("data", "duration", [sample.data for sample in row.samples], {})
    for phase in row.samples[0].start:
        yield of_cell("start", "duration", [sample.start[phase] for sample in row.samples], {}, phase)
    start = [sum(sample.start.values()) for sample in row.samples]
    yield of_cell("start", "duration", start, {})
    for name, reference in (("versus_alone", _alone(study, cell)), ("versus_zero2", _beside(study, cell))):
        if reference is not None:
            # The same number of samples: more ranks take fewer steps.
            share = reference.cell.layout.world / layout.world
            ratios = [
                ours.step / theirs.step * share for ours, theirs in zip(row.samples, reference.samples, strict=False)
            ]
            yield of_cell(name, "ratio", ratios, {"against": str(reference.cell)})
            if name == "versus_alone":
                yield of_cell(
                    "efficiency", "ratio", [share / each for each in ratios], {"against": str(reference.cell)}
                )


def _predicted(row: Row) -> dict[str, Scalar]:
    prediction, made = row.prediction, [each for each in row.predictions if each is not None]
    if prediction is None:
        return {}
    return {
        "predicted_seconds": prediction.step,
        "predicted_compute_seconds": prediction.compute,
        "predicted_waiting_seconds": prediction.exposed,
        "prediction_error": prediction.step / row.step - 1,
        "predictions": len(made),
        "first_predicted_seconds": made[0].step,
        "prediction_basis": prediction.basis,
    }


def _alone(study: Study, cell: Cell) -> Row | None:
    """The cell of one rank: under the same stage, else under the lowest measured one."""
    if cell.layout == ALONE:
        return None
    rows = [row for row in study.rows.values() if row.cell.layout == ALONE and row.samples]
    return min(rows, key=lambda row: (row.cell.stage != cell.stage, row.cell.stage), default=None)


def _beside(study: Study, cell: Cell) -> Row | None:
    """The cell with ZeRO-2 on the same ranks."""
    row = study.rows.get(Cell(cell.layout, 2))
    return row if row is not None and row.samples and cell.stage != 2 else None


def _link(
    layout: Layout,
    name: str,
    quantity: Quantity,
    samples: Sequence[float],
    parameters: Mapping[str, Scalar],
    collective: str | None = None,
) -> Measurement:
    """A figure of the network between the ranks of a layout."""
    labels = {"part": "network", "layout": str(layout), **({"collective": collective} if collective else {})}
    form = "strategies.{part}.{layout}.{collective}.{figure}" if collective else "strategies.{part}.{layout}.{figure}"
    return _figure(form, name, labels, quantity, samples, parameters)


def _figure(
    form: str,
    name: str,
    labels: Mapping[str, str],
    quantity: Quantity,
    samples: Sequence[float],
    parameters: Mapping[str, Scalar],
    engine: str = "torch.distributed",
    layer: str = "network",
) -> Measurement:
    # For only one of the ratios, higher is better.
    better: Better | None = "lower" if quantity == "ratio" and name != "efficiency" else None
    what = What(form, quantity, engine, str(parameters["compute"]), name, labels, layer, parameters, better)
    return figure(what, samples)


def checks(study: Study, job: Job | None) -> list[CheckResult]:
    """Of each cell, whether it ran; of each layout, whether its stages train alike; whether what was predicted is what
    was trained.
    """
    results = [_check(row) for row in study.rows.values()]
    results += [_of_cell(cell, "skip", "every step of every round", reason) for cell, reason in study.fitted.left_out]
    results += [
        CheckResult(
            id=f"strategies.hooks.{layout}",
            labels={"subject": "strategies", "check": "hooks", "layout": str(layout)},
            status="skip",
            expected="a probe of ZeRO-3's hooks",
            found=reason,
        )
        for layout, reason in study.unprobed.items()
    ]
    results += _notes(study)
    results += _losses(study)
    if study.first is not None and job is not None:
        results.append(_same_model(study, job))
    return results


def _of_cell(
    cell: Cell, status: CheckStatus, expected: str, found: str, remedy: str = "", check: str | None = None
) -> CheckResult:
    """``check``: None for that of the cell itself."""
    more = {"check": check} if check else {}
    return CheckResult(
        id=".".join(["strategies", cell.key, *more.values()]),
        labels={"subject": "strategies", "layout": str(cell.layout), "stage": str(cell.stage), **more},
        status=status,
        expected=expected,
        found=found,
        remedy=remedy,
    )


def _check(row: Row) -> CheckResult:
    expected = "every step of every round"
    if row.failed is not None:
        return _of_cell(row.cell, "unknown", expected, row.failed)
    if not row.samples:
        return _of_cell(row.cell, "unknown", expected, "it was not run")
    if not all(map(_numbers, row.samples)):
        remedy = (
            "with your own weights, look for infinite values in them; `tunetool bench finetune --learning-rate` shows "
            "whether a lower rate trains"
        )
        return _of_cell(row.cell, "fail", expected, "a loss was not a number", remedy)
    return _of_cell(row.cell, "pass", expected, f"{len(row.samples)} round(s)")


def _numbers(sample: Sample) -> bool:
    return all(math.isfinite(loss) or step in sample.excused for step, loss in enumerate(sample.losses))


def _notes(study: Study) -> list[CheckResult]:
    """What went otherwise than asked, with the cells where it did."""
    cells: dict[str, dict[str, None]] = {}
    for row in study.rows.values():
        for note in (note for sample in row.samples for note in sample.notes):
            cells.setdefault(note, {})[str(row.cell)] = None
    return [
        CheckResult(id=NOTE, status="skip", expected="the run as asked", found=f"{', '.join(where)}: {note}")
        for note, where in cells.items()
    ]


def _losses(study: Study) -> Iterator[CheckResult]:
    """Checks whether the stages of a layout have the same losses: they differ only in where numbers are kept."""
    by_layout: dict[Layout, list[Row]] = {}
    for row in study.rows.values():
        if row.samples:
            by_layout.setdefault(row.cell.layout, []).append(row)
    for layout, rows in by_layout.items():
        for row in rows[1:]:
            pairs = zip(rows[0].samples[0].losses, row.samples[0].losses, strict=False)
            # What is no number was judged above, or is an overflow of fp16 that loss scaling met.
            numbers = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
            worst = max((abs(a - b) / max(abs(a), 1e-9) for a, b in numbers), default=0.0)
            good = worst <= _LOSS_TOLERANCE
            yield _of_cell(
                row.cell,
                "pass" if good else "fail",
                f"the losses of {rows[0].cell} on the same samples, within {_LOSS_TOLERANCE:.0%}",
                f"they differ by up to {worst:.3%}",
                "" if good else f"do not train with ZeRO-{row.cell.stage} on {layout}: it computes something else",
                "losses",
            )


def _same_model(study: Study, job: Job) -> CheckResult:
    assert study.first is not None  # noqa: S101  (asked for by the caller)
    predicted = (sum(each.numel for each in parameters(job.modules)), sum(each.numel for each in trained(job.modules)))
    real = (study.first.parameters, study.first.trainable)
    same = predicted == real
    return CheckResult(
        id="strategies.model",
        status="pass" if same else "unknown",
        expected=f"{predicted[0]:,} parameters, {predicted[1]:,} of them trained, as in the predictions",
        found="the same"
        if same
        else f"the predictions are for another model: {real[0]:,}, {real[1]:,} of them trained",
        remedy="" if same else "its config.json gives other sizes than its weights have",
    )


def case(study: Study, job: Job | None, conditions: Mapping[str, Scalar]) -> Case:
    """The case for the verdict: whether every cell trains, and with equal losses; not speed or prediction."""
    return Case(
        measurements(study, job, conditions) if study.first is not None and job is not None else [],
        checks=checks(study, job),
        failed={
            f"strategies.{row.cell.key}": f"strategies.{row.cell.key}: {row.failed}"
            for row in study.rows.values()
            if row.failed is not None
        },
        errors=study.errors,
        judged="checks",
    )
