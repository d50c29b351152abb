"""From generations to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from tunetool.bench.defaults import SGLANG_BATCH
from tunetool.bench.inference.predict import Work
from tunetool.bench.inference.samples import TITLES, Place, Row, Served, compare, reference
from tunetool.measure.evidence import doubt, obstacles
from tunetool.measure.figure import Quantity, What, computed, figure, measured
from tunetool.measure.rounds import compared, ratio
from tunetool.record import CheckResult, CheckStatus, Measurement, Scalar
from tunetool.verdict import Case


@dataclass(frozen=True)
class Rung:
    """DeepSpeed's handle alone, in the same run."""

    measurements: Sequence[Measurement]
    unproven: Mapping[str, str]

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second of its reads."""
        return next((each.value for each in self.measurements), None)


@dataclass(frozen=True)
class Measured:
    """All that a run has."""

    rows: Sequence[Row]
    served: Sequence[Served]
    rung: Rung | None
    work: Work

    def floors(self) -> tuple[Work, str]:
        """The work with the least times of its passes: those of the row that moves its weights least, and its name."""
        for place in ("device", "dram"):
            row = next((each for each in self.rows if each.place == place and each.readings), None)
            if row is not None:
                first = median(reading.passes[0] for reading in row.readings.values())
                after = median(reading.next_pass for reading in row.readings.values())
                return replace(self.work, first_floor=first, next_floor=after), place
        return self.work, "none"


def measurements(run: Measured, conditions: Mapping[str, Scalar]) -> list[Measurement]:
    """Every figure of all that was measured."""
    figures = list(run.rung.measurements) if run.rung is not None else []
    for row in run.rows:
        if row.readings:
            figures += _of_row(row, run, {**conditions, **row.facts, "repeated_samples": row.repeated.taken})
    for served in run.served:
        if served.result:
            figures.append(_of_sglang(served, run, conditions))
    return figures


def _of_row(row: Row, run: Measured, common: dict[str, Scalar]) -> Iterator[Measurement]:
    readings = list(row.readings.values())
    engine = "transformers" if row.place == "device" else "DeepSpeed ZeRO-Inference"

    def what(name: str, quantity: Quantity, **more: Scalar) -> What:
        return _what(row.place, name, quantity, engine, row.medium, {**common, **more})

    rates = [reading.rate for reading in readings]
    reads = any(reading.claimed_bytes for reading in readings)
    about = what("tokens", "rate")
    yield measured(about, row.stack, readings, rates) if reads else figure(about, rates)
    yield figure(what("first_pass", "duration"), [reading.passes[0] for reading in readings])
    yield figure(what("next_pass", "duration"), [reading.next_pass for reading in readings])
    if any(reading.peak_bytes for reading in readings):
        yield figure(what("peak_memory", "memory"), [float(reading.peak_bytes) for reading in readings])
    yield from _versus(row, run, what)
    if reads:
        yield from _of_drives(row, run, what)


def _what(
    place: str, name: str, quantity: Quantity, engine: str, medium: str, parameters: Mapping[str, Scalar]
) -> What:
    form = "inference.{place}.{figure}"
    return What(form, quantity, engine, medium, name, {"place": place}, "framework", parameters)


def _versus(row: Row, run: Measured, what: Any) -> Iterator[Measurement]:
    """Times the speed of the drives, in pairs of a round."""
    drives = next((each for each in run.rows if each.place == "nvme" and each.readings), None)
    if drives is not None and drives is not row:
        yield from compared(what("versus_nvme", "ratio"), ratio("nvme", drives.seconds(), row.seconds()))


def _of_drives(row: Row, run: Measured, what: Any) -> Iterator[Measurement]:
    """What was read, beside DeepSpeed's handle alone and what that promises."""
    readings = list(row.readings.values())
    counted = [reading.counted.counted_bytes if reading.counted else reading.claimed_bytes for reading in readings]
    per_token = [count / reading.count for count, reading in zip(counted, readings, strict=True)]
    about = what("bytes_per_token", "memory", expected=run.work.bytes_per_token)
    yield measured(about, row.stack, readings, per_token)
    speeds = [reading.claimed_bytes / reading.seconds for reading in readings]
    yield measured(what("read", "bandwidth", direction="read"), row.stack, readings, speeds)
    alone = run.rung.bandwidth if run.rung is not None else None
    if alone is None:
        return
    yield figure(what("read_share", "ratio", handle=alone), [speed / alone for speed in speeds])
    floored, floor = run.floors()
    expected = floored.rate(alone)
    batch = floored.balanced_batch(alone)
    known: dict[str, Scalar] = {"floor": floor, "handle": alone, **({"balanced_batch": batch} if batch else {})}
    yield computed(what("predicted", "rate", **known), expected)
    yield figure(what("of_predicted", "ratio", **known), [reading.rate / expected for reading in readings])


def _of_sglang(served: Served, run: Measured, conditions: Mapping[str, Scalar]) -> Measurement:
    parameters: dict[str, Scalar] = {**conditions, "batch": SGLANG_BATCH, "mode": served.mode}
    medium = run.rows[0].stack.medium
    about = _what(f"sglang-{served.mode}", "tokens", "rate", "SGLang ZeRO-Inference", medium, parameters)
    return figure(about, [float(served.result["output_throughput"])])


def checks(run: Measured) -> list[CheckResult]:
    """Whether the tokens are the same everywhere; what was left out."""
    trusted = reference(run.rows)
    return [*(_check(row, trusted, run.rows) for row in run.rows), *map(_sglang_check, run.served)]


def _check(row: Row, trusted: Row | None, rows: Sequence[Row]) -> CheckResult:
    status, found, remedy = _outcome(row, trusted, rows)
    return CheckResult(
        id=check_id(row.place),
        labels={"subject": "inference", "place": row.place, "check": "tokens"},
        status=status,
        expected="the same tokens wherever the weights lie",
        found=found,
        remedy=remedy,
    )


def _outcome(row: Row, trusted: Row | None, rows: Sequence[Row]) -> tuple[CheckStatus, str, str]:
    if row.left_out is not None:
        return "skip", row.left_out, row.remedy
    if row.failed is not None:
        return "unknown", row.failed, ""
    if not row.readings or trusted is None:
        return "skip", "nothing was generated", ""
    if row is trusted and len(row.readings) == 1 and not any(each.readings for each in rows if each is not row):
        return "skip", "there is nothing to compare its tokens with", "`--weights nvme,dram`"
    compared = compare(row, trusted)
    where = "of the first round" if row is trusted else f"of {TITLES[trusted.place]}"
    if compared.wrong:
        text = f"{compared.wrong} of {compared.count} sequences are not those {where}"
        return "fail", text, "weights came back wrong: see `dmesg | tail`, `tunetool verify`"
    text = f"all {compared.count} sequences are those {where}"
    if compared.rounded:
        text += f", but for {compared.rounded} that go another way where two tokens score the same but for rounding"
    return "pass", text, ""


def check_id(place: Place) -> str:
    """Of the check of a row."""
    return f"inference.{place}.tokens"


def _sglang_check(served: Served) -> CheckResult:
    outcome: tuple[CheckStatus, str] = ("pass", f"{served.result.get('total_output_tokens', '?')} tokens")
    if served.absent is not None:
        outcome = "skip", served.absent.why
    elif served.failed is not None:
        outcome = "unknown", served.failed
    return CheckResult(
        id=f"inference.sglang-{served.mode}",
        labels={"subject": "inference", "place": f"sglang-{served.mode}"},
        status=outcome[0],
        expected="SGLang's offline benchmark runs",
        found=outcome[1],
        remedy=served.absent.remedy if served.absent is not None else "",
    )


def case(run: Measured, conditions: Mapping[str, Scalar], doubts: Sequence[str]) -> Case:
    """The case for the verdict: the tokens are judged, not the speed."""
    failed = {check_id(row.place): f"{row.place}: {row.failed}" for row in run.rows if row.failed is not None}
    failed |= {f"inference.sglang-{each.mode}": each.failed for each in run.served if each.failed is not None}
    return Case(
        measurements=measurements(run, conditions),
        checks=checks(run),
        failed=failed,
        doubts=[*doubts, *unproven_reasons(run)],
        judged="checks",
    )


def unproven_reasons(run: Measured) -> list[str]:
    """Why figures prove nothing."""
    known = list(run.rung.unproven.values()) if run.rung is not None else []
    for row in run.rows:
        if row.place == "nvme" and row.readings:
            known += obstacles(row.stack)
            counted = [reading.counted for reading in row.readings.values()]
            if line := doubt(row.stack, "read", counted, "DeepSpeed"):
                known.append(line)
    return list(dict.fromkeys(known))
