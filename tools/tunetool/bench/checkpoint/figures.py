"""From samples to the record's measurements, its checks and its verdict. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from tunetool.bench.checkpoint.engines import REFERENCE
from tunetool.bench.checkpoint.samples import FioRows, Matrix, Moved, Row
from tunetool.measure import Direction, tester
from tunetool.measure.evidence import obstacles, summed
from tunetool.measure.figure import Quantity, What, figure
from tunetool.measure.rounds import Ratio, compared, ratio
from tunetool.node.units import format_size
from tunetool.record import CheckResult, CheckStatus, Evidence, Measurement, Scalar
from tunetool.verdict import Case, ComparedEngine, ComparedEngines, case_of_engines


def saving(matrix: Matrix, row: Row, rival: Row | None) -> Ratio | None:
    """Durable saves of ``row`` against another engine's."""
    return ratio(rival.name, rival.durable(), row.durable()) if rival and rival is not row else None


def restoring(matrix: Matrix, row: Row, rival: Row | None) -> Ratio | None:
    """Restores of ``row`` against another engine's."""
    return ratio(rival.name, rival.restores(), row.restores()) if rival and rival is not row else None


def base(matrix: Matrix) -> Row | None:
    """torch.save's row if it has figures, else None."""
    row = matrix.rows.get(REFERENCE)
    return row if row and row.samples else None


def best_other(matrix: Matrix, row: Row, seconds: str = "durable") -> Row | None:
    """The fastest engine of others, in durable saves or in restores."""
    rivals = [
        each
        for each in matrix.measured
        if not each.engine.own and each is not row and each.different is None and _times(each, seconds)
    ]
    return min(rivals, key=lambda each: median(_times(each, seconds).values()), default=None)


def of_fio(matrix: Matrix, row: Row) -> tuple[Ratio | None, Ratio | None]:
    """The shares of fio's best, in the same round, that ``row`` reaches in writes and in reads."""
    if matrix.fio is None:
        return None, None
    ratios = []
    for direction, seconds in (("write", row.durable()), ("read", row.restores())):
        taken = matrix.fio.samples["write" if direction == "write" else "read"]
        # Bytes per second, since fio's files are whole MiB: not to the byte what the state has.
        fio = {number: matrix.state_bytes / sample.bandwidth for number, sample in taken.items()}
        ratios.append(ratio("fio", fio, seconds))
    return ratios[0], ratios[1]


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest durable save of those whose restores were equal."""
    good = [row for row in rows if row.samples and row.different is None]
    return min(good, key=lambda row: median(row.durable().values()), default=None)


def _times(row: Row, seconds: str) -> dict[int, float]:
    return row.durable() if seconds == "durable" else row.restores()


_STEADY, _STEADY_SAMPLES = 0.05, 3
"""An engine's own surplus is nearly the same each time; a neighbour's is not. Fewer samples cannot tell."""
_DIFFERENT = "do not use it for checkpoints here; look for I/O errors in `dmesg`, and check its version"
FIO = "fio"


def measurements(matrix: Matrix, conditions: dict[str, Scalar]) -> list[Measurement]:
    """Every figure of one medium."""
    common: dict[str, Scalar] = {
        **conditions,
        "state_bytes": matrix.state_bytes,
        "repeated_samples": matrix.repeated.taken,
        **({"stand_in": True} if matrix.memory else {}),
    }
    figures = list(_fio(matrix, matrix.fio, common)) if matrix.fio else []
    for row in matrix.rows.values():
        figures += _row(matrix, row, {**common, "engine": row.name, "family": row.engine.family})
    if matrix.baseline:
        what = _what(matrix, "training.baseline", "baseline", {}, "duration", common, "training loop")
        figures.append(figure(what, matrix.baseline))
    return figures


def _row(matrix: Matrix, row: Row, common: dict[str, Scalar]) -> Iterator[Measurement]:
    samples = list(row.samples.values())
    if row.first is not None:
        yield figure(_of(matrix, row, "first_stall", "duration", common), [row.first.stall])
    if row.lost:
        loop = {**common, "every": row.every}
        yield figure(_of(matrix, row, "lost_time", "duration", loop), row.lost)
        yield figure(_of(matrix, row, "held", "duration", loop), row.held)
    if not samples:
        return
    writes, reads = [each.write for each in samples], [each.read for each in samples if each.read]
    for direction, name, moves in (("write", "durable", writes), ("read", "restore", reads)):
        if moves:
            rates = [matrix.state_bytes / move.seconds for move in moves]
            parameters = {**common, "direction": direction, "file_bytes": moves[0].bytes}
            what = _of(matrix, row, name, "bandwidth", parameters)
            yield figure(what, rates, evidence=_evidence(matrix, moves))
    yield _size(matrix, row, [move.bytes for move in writes], common)
    yield figure(_of(matrix, row, "durable_time", "duration", common), [move.seconds for move in writes])
    yield figure(_of(matrix, row, "stall", "duration", common), [each.stall for each in samples])
    yield figure(_of(matrix, row, "cpu", "duration", common), [move.cpu_seconds for move in writes])
    peaks = [float(each.peak_bytes) for each in samples if each.peak_bytes is not None]
    if peaks:
        yield figure(_of(matrix, row, "peak_memory", "memory", common), peaks)
    for name, to_base in ratios(matrix, row).items():
        yield from compared(_of(matrix, row, name, "ratio", common), to_base)


def _size(matrix: Matrix, row: Row, sizes: Sequence[int], common: dict[str, Scalar]) -> Measurement:
    """The files' bytes as a share of the state's: what an engine adds, or what its compression saves."""
    parameters = {**common, "file_bytes": sizes[-1], "compression": row.engine.compression}
    what = replace(_of(matrix, row, "size", "ratio", parameters), better="lower")
    return figure(what, [size / matrix.state_bytes for size in sizes])


def ratios(matrix: Matrix, row: Row) -> dict[str, Ratio | None]:
    """The ratios of a row to torch.save, to fio and, for tunetool's own engines, to the best other engine."""
    write, read = of_fio(matrix, row)
    figures = {
        "versus_torch_save": saving(matrix, row, base(matrix)),
        "restore_versus_torch_load": restoring(matrix, row, base(matrix)),
        "of_fio_write": write,
        "of_fio_read": read,
    }
    if row.engine.own:
        figures["versus_best_other"] = saving(matrix, row, best_other(matrix, row))
        figures["restore_versus_best_other"] = restoring(matrix, row, best_other(matrix, row, "restore"))
    return figures


def _fio(matrix: Matrix, fio: FioRows, common: dict[str, Scalar]) -> Iterator[Measurement]:
    for direction, samples in fio.samples.items():
        if not samples:
            continue
        files = fio.files[direction]
        searched = {f"searched_{number}": rate for number, rate in fio.searched[direction].items()}
        shape: dict[str, Scalar] = {"direction": direction, "jobs": files, "files": files, "direct": fio.direct}
        taken = list(samples.values())
        limits = tester.limits(taken, fio.ceilings.get(direction, ()), files)
        parameters = {**common, **shape, **searched, **limits}
        evidence = summed(matrix.stack, [each.counted for each in taken], sum(each.claimed_bytes for each in taken))
        rates = [each.bandwidth for each in taken]
        labels = {"engine": FIO, "direction": direction}
        what = _what(matrix, "fio.{direction}", "bandwidth", labels, "bandwidth", parameters, f"fio {fio.version}")
        yield figure(what, rates, evidence=evidence)


def _evidence(matrix: Matrix, moves: Sequence[Moved]) -> Evidence:
    return summed(matrix.stack, [move.counted for move in moves], sum(move.bytes for move in moves))


def _of(matrix: Matrix, row: Row, name: str, quantity: Quantity, parameters: dict[str, Scalar]) -> What:
    return _what(matrix, "{engine}.{figure}", name, {"engine": row.name}, quantity, parameters, row.name)


def _what(
    matrix: Matrix,
    form: str,
    name: str,
    labels: Mapping[str, str],
    quantity: Quantity,
    parameters: dict[str, Scalar],
    engine: str,
) -> What:
    known = {**_place(matrix), **labels}
    medium = matrix.stack.medium
    form = f"checkpoint.{'{place}.' if matrix.memory else ''}{form}"
    return What(form, quantity, engine, medium, name, known, parameters=parameters)


def _place(matrix: Matrix) -> dict[str, str]:
    return {"place": "memory"} if matrix.memory else {}


def checks(matrix: Matrix) -> list[CheckResult]:
    """One check for each engine: whether it ran, and whether its restores equal what was saved."""
    return [_check(matrix, row) for row in matrix.rows.values()]


def _check(matrix: Matrix, row: Row) -> CheckResult:
    status, found = _outcome(row)
    return CheckResult(
        id=f"checkpoint.{'memory.' if matrix.memory else ''}{row.name}",
        labels={"subject": "checkpoint", **_place(matrix), "engine": row.name},
        status=status,
        expected="what is restored equals what was saved, bit by bit",
        found=found,
        remedy=_DIFFERENT if status == "fail" else "",
    )


def _outcome(row: Row) -> tuple[CheckStatus, str]:
    if row.left_out is not None:
        return "skip", row.left_out
    if row.different is not None:
        return "fail", row.different
    if row.failed is not None:
        return "unknown", row.failed
    count = sum(sample.read is not None for sample in row.samples.values()) + (row.first is not None)
    if not count:
        return "skip", "nothing was restored"
    return "pass", f"equal in {count} restores" + (f"; {row.remark}" if row.remark else "")


def case(matrices: Sequence[Matrix], conditions: dict[str, Scalar], doubts: Sequence[str] = ()) -> Case:
    """The case for the verdict: only equality is judged, not speed."""
    return case_of_engines([_part(matrix, conditions) for matrix in matrices], doubts)


def _part(matrix: Matrix, conditions: dict[str, Scalar]) -> ComparedEngines:
    engines = [_compared(matrix, row) for row in matrix.rows.values()]
    return ComparedEngines(measurements(matrix, conditions), engines, unproven_reasons(matrix), matrix.errors)


def _compared(matrix: Matrix, row: Row) -> ComparedEngine:
    name = f"`{row.name}` on {matrix.stack.medium}"
    differs = f"{name} restores something else than it saved: {row.different}" if row.different else None
    return ComparedEngine(_check(matrix, row), differs, row.failed and f"{name} could not be measured: {row.failed}")


def unproven_reasons(matrix: Matrix) -> list[str]:
    """Why figures of this medium prove nothing. Memory needs no proof: tables mark it as a stand-in."""
    if matrix.memory:
        return []
    moves = [(row.name, side, moved) for row in matrix.rows.values() for side, moved in _directions(row).items()]
    for direction, samples in matrix.fio.samples.items() if matrix.fio else ():
        taken = [Moved(1.0, each.claimed_bytes, 0.0, counted=each.counted) for each in samples.values()]
        moves.append((FIO, direction, taken))
    missing = [line for name, side, moved in moves if (line := _missing(name, side, moved))]
    return [*obstacles(matrix.stack), *missing, *_foreign(moves)]


def _directions(row: Row) -> dict[Direction, list[Moved]]:
    samples = list(row.samples.values())
    return {
        "write": [each.write for each in samples],
        "read": [each.read for each in samples if each.read],
    }


def _missing(name: str, direction: Direction, moves: Sequence[Moved]) -> str | None:
    """One line for a claim that the drives' counters contradict."""
    missing = [move for move in moves if "missing" in move.judgements]
    if not missing:
        return None
    least = min((move.counted.ratio for move in missing if move.counted), default=0.0)
    size = format_size(missing[0].bytes)
    if direction == "write":
        return (
            f"`{name}`: the drives counted only {least:.3f} of the {size} that it calls durable: the rest was in "
            "memory when it said so"
        )
    return f"`{name}`: the drives read only {least:.3f} of its {size}: the rest was in the page cache"


def _foreign(moves: Sequence[tuple[str, Direction, Sequence[Moved]]]) -> list[str]:
    """One line for all figures during which something else used the drives."""
    disturbed = []
    for name, direction, each in moves:
        ratios = [move.counted.ratio for move in each if move.counted is not None]
        # What an engine itself moves besides its files is the same in each sample, and part of what it costs.
        steady = len(ratios) >= _STEADY_SAMPLES and max(ratios) - min(ratios) <= _STEADY * min(ratios)
        if any("other-io" in move.judgements for move in each) and not steady:
            who = next((move.counted.others for move in each if move.counted is not None and move.counted.others), "")
            disturbed.append((max(ratios), name, direction, who))
    if not disturbed:
        return []
    most, name, direction, who = max(disturbed)
    by = f": {who}" if who else ""
    return [
        f"something else used the drives beside {len(disturbed)} of the figures, most beside `{name}`: they counted "
        f"{most:.2f} times what its files hold at a {direction}{by}; stop it (see `pidstat -d 1`) and run again, with "
        "3 rounds at least, which tell an engine's own surplus apart"
    ]
