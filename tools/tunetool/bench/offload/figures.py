"""From steps to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tunetool.bench.offload.samples import DIRECTIONS, DRAM, NEAR, Place, Row
from tunetool.errors import CannotJudge
from tunetool.measure import Direction
from tunetool.measure.evidence import doubt, obstacles
from tunetool.measure.figure import Quantity, What, figure, measured
from tunetool.measure.rounds import compared, ratio
from tunetool.record import CheckResult, Measurement, Scalar
from tunetool.tune.settings import from_block
from tunetool.verdict import Case

ENGINE, RUNG_ENGINE = "DeepSpeed ZeRO-3", "aio_handle"
MISSING = "offload.deepspeed"

Blocks = Mapping[str, Mapping[str, int | bool]]


def as_json(document: Mapping[str, Any]) -> str:
    """A ds_config as a file has it."""
    return json.dumps(document, indent=2) + "\n"


def measurements(rows: Sequence[Row], conditions: Mapping[str, Scalar], blocks: Blocks) -> list[Measurement]:
    """Every figure of all rows that made a step in a round."""
    return [each for row in rows if row.steps for each in _of_row(row, rows, conditions, blocks)]


def _of_row(row: Row, rows: Sequence[Row], conditions: Mapping[str, Scalar], blocks: Blocks) -> Iterator[Measurement]:
    steps = list(row.steps.values())
    common: dict[str, Scalar] = {**conditions, "place": row.place, "repeated_samples": row.repeated.taken}
    if row.block:
        common |= {"block": row.block, "settings": str(from_block(blocks[row.block])), **blocks[row.block]}

    def what(
        name: str,
        quantity: Quantity,
        more: Mapping[str, Scalar] | None = None,
        engine: str = ENGINE,
        direction: Direction | None = None,
    ) -> What:
        block = {"block": row.block} if row.block else {}
        way: dict[str, str] = {"direction": direction} if direction else {}
        # The name of a wait is that of its direction.
        parts = ["place", *block, *way, *([] if name == "wait" else ["figure"])]
        form = ".".join(["offload", *(f"{{{part}}}" for part in parts)])
        labels = {"place": row.place, **block, **way}
        parameters = {**common, **way, **(more or {})}
        return What(form, quantity, engine, row.medium, name, labels, parameters=parameters)

    yield figure(what("step", "duration"), [step.seconds for step in steps])
    yield figure(what("compute", "duration"), [step.compute for step in steps])
    for direction in DIRECTIONS:
        yield from _of_direction(row, direction, what)
    for name, base in (("gain", _default_of(row, rows)), ("against_dram", _dram_of(row, rows))):
        if base is not None:
            yield from compared(what(name, "ratio"), ratio(base.key, base.seconds(), row.seconds()))


def _of_direction(row: Row, direction: Direction, what: Any) -> Iterator[Measurement]:
    moved = [step.moved[direction] for step in row.steps.values() if direction in step.moved]
    if row.stack is None or not moved:
        return
    yield figure(what("wait", "duration", direction=direction), [each.waited for each in moved])
    if all(each.claimed_bytes for each in moved):
        yield measured(
            what("bandwidth", "bandwidth", {"step_bytes": moved[-1].claimed_bytes}, direction=direction),
            row.stack,
            moved,
            [each.bandwidth for each in moved],
        )
    rungs = row.rungs[direction]
    if not rungs:
        return
    yield measured(
        what("rung", "bandwidth", engine=RUNG_ENGINE, direction=direction),
        row.stack,
        list(rungs.values()),
        [each.bandwidth for each in rungs.values()],
    )
    # As seconds for each byte: the share of its rung's speed that the swap reaches, round by round.
    swap = {
        number: 1 / step.moved[direction].bandwidth
        for number, step in row.steps.items()
        if step.moved[direction].bandwidth
    }
    share = ratio("rung", {number: 1 / each.bandwidth for number, each in rungs.items()}, swap)
    yield from compared(what("share", "ratio", direction=direction), share)


def _default_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The row of the same place with DeepSpeed's default; None for that itself."""
    first = next(each for each in rows if each.place == row.place)
    return first if first is not row else None


def _dram_of(row: Row, rows: Sequence[Row]) -> Row | None:
    return (
        next((each for each in rows if each.medium == DRAM and each is not row), None) if row.medium != DRAM else None
    )


def checks(places: Sequence[Place]) -> list[CheckResult]:
    """Whether every place trains as DRAM does, and whether its files are those that DeepSpeed must have written."""
    reference = next((place for place in places if place.medium == DRAM), None)
    results = []
    for place in places:
        if place.medium == DRAM:
            continue
        results += [_files(place), _losses(place, reference)]
    if reference is not None and reference.losses:
        results.append(_falls(reference))
    return results


def _files(place: Place) -> CheckResult:
    name = f"offload.{place.name}.files"
    expected = "after every step, swap files of the sizes that DeepSpeed must have written, without holes"
    if place.wrong_files:
        remedy = "do not trust what was trained: see `dmesg | tail`, and `tunetool verify`"
        return CheckResult(id=name, status="fail", expected=expected, found=place.wrong_files, remedy=remedy)
    if not place.looks:
        return CheckResult(id=name, status="skip", expected=expected, found="no step was made")
    found = f"{place.file_bytes} bytes, looked at {place.looks} times"
    return CheckResult(id=name, status="pass", expected=expected, found=found)


def _losses(place: Place, reference: Place | None) -> CheckResult:
    name = f"offload.{place.name}.losses"
    if reference is None:
        return _falls(place)
    expected = f"every loss within {NEAR:.1%} of that with states in DRAM"
    pairs = list(zip(place.losses, reference.losses, strict=False))
    if not pairs:
        return CheckResult(id=name, status="skip", expected=expected, found="no step was made")
    # Not `>`: a loss that is no number is near nothing.
    far = [number for number, (ours, theirs) in enumerate(pairs, 1) if not abs(ours - theirs) <= NEAR * abs(theirs)]
    if far:
        ours, theirs = pairs[far[0] - 1]
        found = f"step {far[0]} of {len(pairs)}: {ours:.5g} in place of {theirs:.5g}"
        remedy = "what was swapped came back wrong: see `dmesg | tail`, and `tunetool verify`"
        return CheckResult(id=name, status="fail", expected=expected, found=found, remedy=remedy)
    # Two losses of 0 are equal.
    most = max(abs(ours - theirs) / (abs(theirs) or 1.0) for ours, theirs in pairs)
    found = f"{len(pairs)} steps, at most {most:.2g} apart; from {pairs[0][0]:.4g} to {pairs[-1][0]:.4g}"
    return CheckResult(id=name, status="pass", expected=expected, found=found)


def _falls(place: Place) -> CheckResult:
    """Without another place to compare with, a loss that falls is all that is known."""
    name = f"offload.{place.name}.losses"
    expected = "the loss falls, on the same tokens in every step"
    if len(place.losses) < 2:
        return CheckResult(id=name, status="skip", expected=expected, found="fewer than two steps were made")
    first, last = place.losses[0], place.losses[-1]
    status: Any = "pass" if last < first else "fail"
    found = f"{len(place.losses)} steps, from {first:.5g} to {last:.5g}"
    remedy = "" if status == "pass" else "see the ranks' output beside the record"
    return CheckResult(id=name, status=status, expected=expected, found=found, remedy=remedy)


def case(
    rows: Sequence[Row],
    places: Sequence[Place],
    conditions: Mapping[str, Scalar],
    blocks: Blocks,
    doubts: Sequence[str],
    missing: CannotJudge | None = None,
) -> Case:
    """The case for the verdict: files and losses are judged, not the speed."""
    if missing is not None:
        expected = "torch, DeepSpeed and its ops `async_io` and `cpu_adam`"
        left_out = CheckResult(
            id=MISSING, status="skip", expected=expected, found=missing.message, remedy=missing.hint or ""
        )
        return Case(checks=[left_out], doubts=[f"{missing.message}; {missing.hint}"], judged="checks")
    return Case(
        measurements=measurements(rows, conditions, blocks),
        checks=checks(places),
        doubts=[*doubts, *unproven_reasons(rows)],
        judged="checks",
    )


def unproven_reasons(rows: Sequence[Row]) -> list[str]:
    """Why figures prove nothing. What lies in memory no drive can prove, and its figures say so."""
    known = []
    for row in rows:
        if row.stack is None or row.stack.in_memory:
            continue
        known += obstacles(row.stack)
        for direction in DIRECTIONS:
            steps = [step.moved[direction].counted for step in row.steps.values()]
            rungs = [rung.counted for rung in row.rungs[direction].values()]
            for counted, engine in ((steps, f"`{row.key}`"), (rungs, f"`{row.key}`'s rung")):
                if line := doubt(row.stack, direction, counted, engine):
                    known.append(line)
    return list(dict.fromkeys(known))
