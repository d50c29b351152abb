"""From readings to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tunetool.bench.experts.model import StoredExperts
from tunetool.bench.experts.samples import MODES, Row
from tunetool.measure.evidence import doubt, obstacles
from tunetool.measure.figure import Quantity, What, figure, measured
from tunetool.measure.rounds import Ratio, compared, ratio
from tunetool.record import CheckResult, CheckStatus, Measurement, Scalar
from tunetool.verdict import Case

ENGINE = "preadv by threads"


def measurements(rows: Sequence[Row], conditions: dict[str, Scalar], model: StoredExperts | None) -> list[Measurement]:
    """Every figure of all rows that were measured."""
    return [each for row in rows if row.readings for each in _of_row(row, rows, conditions, model)]


def _of_row(
    row: Row, rows: Sequence[Row], conditions: dict[str, Scalar], model: StoredExperts | None
) -> Iterator[Measurement]:
    readings = list(row.readings.values())
    common = {**conditions, **_parameters(row)}

    def what(name: str, quantity: Quantity, **more: Scalar) -> What:
        form, labels = _named(row)
        return What(form, quantity, ENGINE, row.medium, name, labels, parameters={**common, **more})

    speeds = [reading.bandwidth for reading in readings]
    if any(reading.claimed_bytes for reading in readings):
        yield measured(what("bandwidth", "bandwidth", direction="read"), row.stack, readings, speeds)
    else:
        yield figure(what("bandwidth", "bandwidth", direction="read"), speeds)
    for name, share in (("p50", 0.5), ("p99", 0.99)):
        yield figure(what(name, "latency"), [reading.percentile(share) for reading in readings])
    if row.pattern is not None:
        rates = [reading.hits / reading.wanted for reading in readings]
        yield figure(what("hit_rate", "ratio", expected=row.expected), rates)
    yield from compared(what("gain", "ratio"), against_base(row, rows))
    if model is not None and row.pattern is not None:
        # What reads a layer's experts as fast as this reads a step's gives no more tokens.
        about = what("tokens", "rate", bytes_per_token=model.bytes_per_token)
        yield figure(about, [speed / model.bytes_per_token for speed in speeds])


def _named(row: Row) -> tuple[str, Mapping[str, str]]:
    """The form of the figures' names, and their labels."""
    if row.pattern is None:
        return "experts.{place}.{mode}.{figure}", {"place": row.place, "mode": row.mode}
    return "experts.{pattern}.cached-{cached}.{figure}", {"pattern": row.pattern, "cached": str(row.slots)}


def _parameters(row: Row) -> dict[str, Scalar]:
    known: dict[str, Scalar] = {"place": row.place, "mode": row.mode, "repeated_samples": row.repeated.taken}
    if row.pattern is not None:
        return {**known, "pattern": row.pattern, "cached": row.slots}
    # The worst of all rounds: the kernel's word that a pass began cold, and where it left its bytes.
    before = max(reading.cached_bytes[0] for reading in row.readings.values())
    after = max(reading.cached_bytes[1] for reading in row.readings.values())
    return {**known, "page_cache_before_bytes": before, "page_cache_after_bytes": after}


def against_base(row: Row, rows: Sequence[Row]) -> Ratio | None:
    """How many times as fast a row is as the one that it is compared with, in pairs of the same round: a cache with
    none, direct I/O with the page cache."""
    if row.pattern is not None and row.slots:
        base = next((each for each in rows if (each.pattern, each.slots) == (row.pattern, 0)), None)
    elif row.pattern is None and row.mode == MODES[0]:
        base = next((each for each in rows if (each.place, each.mode) == (row.place, MODES[1])), None)
    else:
        base = None
    return ratio(base.key, base.seconds(), row.seconds()) if base is not None else None


def checks(rows: Sequence[Row], conditions: Mapping[str, Scalar]) -> list[CheckResult]:
    """Whether every expert was the one that was wanted, from each directory."""
    results = []
    for place in dict.fromkeys(row.place for row in rows):
        readings = [reading for row in rows if row.place == place for reading in row.readings.values()]
        wrong, wanted = sum(reading.wrong for reading in readings), sum(reading.wanted for reading in readings)
        misread = max(row.misread for row in rows if row.place == place)
        if misread:
            wrong, wanted = misread, int(conditions["experts"])
        status: CheckStatus = "fail" if wrong else "pass" if wanted else "skip"
        texts = {"fail": f"{wrong} of {wanted} hold other bytes", "pass": f"all {wanted}", "skip": "nothing was read"}
        results.append(
            CheckResult(
                id=f"experts.{place}.bytes",
                labels={"subject": "experts", "place": place, "check": "bytes"},
                status=status,
                expected="every expert as it was written, by marks in its pages",
                found=texts[status],
                remedy="do not trust this storage: see `dmesg | tail`, and `tunetool verify`" if wrong else "",
            )
        )
    return results


def case(
    rows: Sequence[Row], conditions: dict[str, Scalar], model: StoredExperts | None, doubts: Sequence[str]
) -> Case:
    """The case for the verdict: the bytes are judged, not the speed."""
    return Case(
        measurements=measurements(rows, conditions, model),
        checks=checks(rows, conditions),
        doubts=[*doubts, *unproven_reasons(rows)],
        judged="checks",
    )


def unproven_reasons(rows: Sequence[Row]) -> list[str]:
    """Why figures prove nothing."""
    known = [line for stack in {row.place: row.stack for row in rows}.values() for line in obstacles(stack)]
    for row in rows:
        counted = [reading.counted for reading in row.readings.values()]
        if line := doubt(row.stack, "read", counted, f"`{row.key}`"):
            known.append(line)
    return list(dict.fromkeys(known))
