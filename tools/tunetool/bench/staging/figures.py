"""Makes the record's measurements, checks and verdict from samples. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf

from tunetool.bench.staging.advice import Advice
from tunetool.bench.staging.published import TITLES
from tunetool.bench.staging.reading import Explanation, explain
from tunetool.bench.staging.samples import FIGURES, PATHS, Path, Row, Sample, compare_losses
from tunetool.measure.figure import Quantity, What, figure
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus, Evidence, Measurement, Scalar
from tunetool.verdict import Case

SAME_START, SAME = 1e-5, 1e-2
"""Relative difference of the first loss, which weights and data alone decide, and of any later one, into which the
order of a GPU's additions goes as well."""
_BY_CHANCE = 2
"""Times what rounds of each path differ by, though they read the same bytes, is no difference of the paths yet."""
_COLD = 0.9
"""Share of the files that a node must have fetched from storage, if its cache was cold."""


def measurements(row: Row, media: Mapping[Path, str], conditions: Mapping[str, Scalar]) -> Iterator[Measurement]:
    """Every figure of one scenario."""
    common: dict[str, Scalar] = {
        **conditions,
        "scenario": row.name,
        "nodes": row.nodes,
        "ranks": row.ranks,
        "model_bytes": row.model_bytes,
        "data_bytes": row.data_bytes,
    }
    for path in PATHS:
        samples = list(row.samples[path].values())
        if not samples:
            continue
        engine = _engine(samples[0])
        shape: dict[str, Scalar] = {**common, "path": path, **_shape(samples[0])}
        for title in FIGURES:
            values = list(row.seconds(path, title).values())
            if values:
                evidence = _evidence(samples, media[path]) if title == "end_to_end" else None
                yield _figure(row, path, title, values, media[path], engine, shape, evidence)
        rates = [sample.staged.rate for sample in samples if sample.staged]
        if rates:
            yield _figure(row, path, "stage_rate", rates, media[path], "tunetool stage", shape, quantity="bandwidth")
        spreads = [spread for sample in samples if (spread := sample.batch_spread) is not None]
        if spreads:
            what = _what(row, path, "batch_spread", media[path], engine, shape, "ratio")
            yield figure(replace(what, better="lower"), spreads)
        yield from _by_rank(row, path, samples, media[path], engine, shape)
    yield from _ratios(row, media["bulk"], common)


def _by_rank(
    row: Row, path: Path, samples: Sequence[Sample], medium: str, engine: str, common: Mapping[str, Scalar]
) -> Iterator[Measurement]:
    """Model load of each rank, with the bytes that it read in the last round."""
    for index, read in enumerate(samples[-1].reads()):
        loads = [sample.ranks[index].seconds["model_load"] for sample in samples]
        bytes_read: dict[str, Scalar] = {
            "model_read_bytes": read.model,
            "model_storage_bytes": read.model_storage,
            "data_read_bytes": read.data,
            "data_storage_bytes": read.data_storage,
        }
        load = _figure(row, path, "rank_model_load", loads, medium, engine, {**common, **bytes_read})
        yield load.model_copy(update={"rank": read.rank, "host": read.host})


def _ratios(row: Row, medium: str, common: Mapping[str, Scalar]) -> Iterator[Measurement]:
    for title in ("model_load", "data_per_batch", "first_epoch", "fine_tune", "end_to_end"):
        ours, theirs = row.seconds("memory", title), row.seconds("bulk", title)
        shared = sorted(ours.keys() & theirs.keys())
        if shared and all(ours[number] > 0 for number in shared):
            ratios = [theirs[number] / ours[number] for number in shared]
            labels = {"scenario": row.name, "phase": title}
            form = "staging.{scenario}.{figure}.{phase}"
            yield figure(What(form, "ratio", "tunetool", medium, "speedup", labels, parameters=common), ratios)


def _engine(sample: Sample) -> str:
    versions = sample.ranks[0].versions
    return " ".join(f"{name} {versions[name]}" for name in ("deepspeed", "torch") if name in versions) or "torch"


def _shape(sample: Sample) -> dict[str, Scalar]:
    return {
        "device": sample.ranks[0].device,
        **({"precision": precision} if (precision := sample.ranks[0].precision) else {}),
        "steps": sample.steps,
        "steps_per_epoch": sample.steps_per_epoch,
        "extrapolated": sample.extrapolated,
        "batch_size": sample.batch_size,
        "images": sample.images,
    }


def _evidence(samples: Sequence[Sample], medium: str) -> Evidence:
    """Bytes that the ranks read, and that storage delivered: fewer if they share a page cache."""
    reads = [read for sample in samples for read in sample.reads()]
    asked = sum(read.model + read.data for read in reads)
    delivered = sum(read.model_storage + read.data_storage for read in reads)
    ratio = delivered / asked if asked else 0.0
    kind = "memory" if medium in ("tmpfs", "ramfs") else "block"
    return Evidence(kind=kind, claimed_bytes=asked, counted_bytes=delivered, ratio=ratio)


def _figure(
    row: Row,
    path: Path,
    title: str,
    samples: Sequence[float],
    medium: str,
    engine: str,
    parameters: Mapping[str, Scalar],
    evidence: Evidence | None = None,
    quantity: Quantity = "duration",
) -> Measurement:
    return figure(_what(row, path, title, medium, engine, parameters, quantity), samples, evidence=evidence)


def _what(
    row: Row, path: Path, title: str, medium: str, engine: str, parameters: Mapping[str, Scalar], quantity: Quantity
) -> What:
    labels = {"scenario": row.name, "path": path}
    return What("staging.{scenario}.{path}.{figure}", quantity, engine, medium, title, labels, parameters=parameters)


def checks(row: Row, bulk_in_memory: bool) -> list[CheckResult]:
    """Checks whether the scenario ran, both paths trained the same, and the cache was cold."""
    expected = "path A and path B, each to its end"
    if row.left_out is not None:
        return [_result(row.name, None, "skip", expected, row.left_out)]
    ran: list[CheckResult] = []
    if row.failed is not None:
        ran.append(_result(row.name, None, "unknown", expected, row.failed))
    if not row.complete:
        return ran
    return [*ran, _losses(row), _cold(row, bulk_in_memory), *_explained(row), *_notes(row)]


def _losses(row: Row) -> CheckResult:
    result = partial(_result, row.name, "losses")
    expected = f"the same losses on both paths: the first within {SAME_START:g}, each later one within {SAME:.0%}"
    difference = compare_losses(row)
    if difference is None:
        return result("unknown", expected, "no round has both paths")
    expected += f", or {_BY_CHANCE} times what rounds of each path differ by"
    chance = difference.by_chance
    apart = f"they differ by {difference.largest:.2g} at most"
    if chance is not None and difference.largest > SAME:
        of_other = f", of the other by {max(chance):.2g}" if max(chance) > min(chance) else ""
        apart += f" (rounds of one path by {min(chance):.2g}{of_other})"
    # Of the path whose rounds agree more: a round in which the other read wrong bytes is no chance.
    alike = max(SAME, _BY_CHANCE * min(chance or [0.0]))
    if difference.first <= SAME_START and difference.largest <= alike and difference.largest < inf:
        sentence = "equal to the last bit" if difference.largest == 0 else apart
        return result("pass", expected, f"{sentence}, over {difference.steps} steps")
    if difference.largest == inf:
        sentence = "one path has other steps, or a loss that is not a number"
    elif difference.first > SAME_START:
        sentence = f"the first differs by {difference.first:.2g}, the most different by {difference.largest:.2g}"
    elif chance is None:
        remedy = "one round does not show what the order of a GPU's additions does by itself: `--rounds 2` or more"
        return result("unknown", expected, f"the first is equal, later ones: {apart}", remedy)
    elif difference.largest <= _BY_CHANCE * max(chance):
        remedy = "chance, or a round in which one path read other bytes: more `--rounds` show which"
        return result("unknown", expected, f"the first is equal, later ones: {apart}", remedy)
    else:
        sentence = f"the first is equal, later ones: {apart}"
    remedy = "the two paths did not read the same bytes: `tunetool stage verify` compares a copy with its manifest"
    return result("fail", expected, sentence, remedy)


def _cold(row: Row, bulk_in_memory: bool) -> CheckResult:
    """Check that every node of path B fetched its files from storage; otherwise its cache was warm."""
    result = partial(_result, row.name, "cold")
    expected = f"on path B at least {_COLD:.0%} of the files that a node needed came from storage"
    if bulk_in_memory:
        return result("skip", expected, "bulk storage is in memory itself")
    share, fetched, needed = min(_fetched(row, sample) for sample in row.samples["bulk"].values())
    amounts = f"{format_size(fetched)} of {format_size(needed)}"
    if share >= _COLD:
        return result("pass", expected, amounts)
    remedy = "the page cache kept the files, or this file system's reads are not counted (`/proc/self/io`, read_bytes)"
    return result("unknown", expected, amounts, remedy)


def _fetched(row: Row, sample: Sample) -> tuple[float, int, int]:
    """Of the node with the smallest share: share, bytes from storage, bytes of distinct files that its ranks needed.

    Ranks of one node need the same model, and each its own pictures: in the first epoch none twice.
    """
    worst = (inf, 0, 0)
    reads = sample.reads()
    for host in {read.host for read in reads}:
        local_reads = [read for read in reads if read.host == host]
        seen = len(local_reads) * sample.batch_size * min(sample.steps, sample.steps_per_epoch)
        needed = row.model_bytes + round(row.data_bytes * min(1.0, seen / sample.images))
        fetched = sum(read.model_storage + read.data_storage for read in local_reads)
        worst = min(worst, (fetched / needed if needed else 0.0, fetched, needed))
    return worst


def explanation(row: Row) -> Explanation | None:
    """Of path B's last round; None where there is none."""
    samples = row.samples["bulk"]
    return explain(row.model_bytes, samples[max(samples)].reads()) if samples else None


def _explained(row: Row) -> list[CheckResult]:
    explained = explanation(row)
    if explained is None or explained.finding == "undecided":
        return []
    # A published claim is reported, not judged: its result says nothing about this node.
    return [_result(row.name, "sharding", "pass", "confirmed or refuted by bytes", explained.sentence)]


def _notes(row: Row) -> list[CheckResult]:
    """The notes of the runs on what differed from the request, perhaps on one path only."""
    notes = [
        f"{'path A' if path == 'memory' else 'path B'}: {note}"
        for path in PATHS
        for note in dict.fromkeys(note for sample in row.samples[path].values() for note in sample.notes)
    ]
    if not notes:
        return []
    return [_result(row.name, "notes", "skip", "both paths as asked", "; ".join(notes))]


def advice_checks(advice: Mapping[str, Advice]) -> list[CheckResult]:
    """The advice of every scenario, kept in the record so that it can be shown again."""
    return [
        _result(name, "advice", "skip" if advised.stage is None else "pass", "stage, or do not", advised.sentence)
        for name, advised in advice.items()
    ]


def _result(
    scenario: str, check: str | None, status: CheckStatus, expected: str, found: str, remedy: str = ""
) -> CheckResult:
    """``check``: None for that of the scenario itself."""
    named = {"scenario": scenario, **({"check": check} if check else {})}
    return CheckResult(
        id=".".join(["staging", *named.values()]),
        labels={"subject": "staging", **named},
        status=status,
        expected=expected,
        found=found,
        remedy=remedy,
    )


def case(rows: Sequence[Row], checks: Sequence[CheckResult], figures: Sequence[Measurement] = ()) -> Case:
    """The case for the verdict: only equal losses are judged, not speed."""
    failed = {
        f"staging.{row.name}": f"{TITLES[row.name]} could not be measured: {row.failed}" for row in rows if row.failed
    }
    return Case(figures, checks=checks, failed=failed, judged="checks")
