"""Compares two engines in pairs of the same round, and says whether the difference is decided. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from tunetool.bench.checkpoint.engines import REFERENCE
from tunetool.bench.checkpoint.samples import Matrix, Row
from tunetool.measure.rounds import Ratio, ratio

FEWEST_PAIRS = 3
"""Fewest pairs for an interval: the range of three contains the true median with 75 %."""


def saving(matrix: Matrix, row: Row, rival: Row | None) -> Ratio | None:
    """Durable saves of ``row`` against another engine's."""
    return ratio(rival.name, rival.durable(), row.durable(), FEWEST_PAIRS) if rival and rival is not row else None


def restoring(matrix: Matrix, row: Row, rival: Row | None) -> Ratio | None:
    """Restores of ``row`` against another engine's."""
    return ratio(rival.name, rival.restores(), row.restores(), FEWEST_PAIRS) if rival and rival is not row else None


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
        ratios.append(ratio("fio", fio, seconds, FEWEST_PAIRS))
    return ratios[0], ratios[1]


def fastest(rows: Sequence[Row]) -> Row | None:
    """The fastest durable save of those whose restores were equal."""
    good = [row for row in rows if row.samples and row.different is None]
    return min(good, key=lambda row: median(row.durable().values()), default=None)


def _times(row: Row, seconds: str) -> dict[int, float]:
    return row.durable() if seconds == "durable" else row.restores()
