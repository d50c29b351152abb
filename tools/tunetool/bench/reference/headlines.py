"""The figures of each part that the record over all parts repeats. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.measure.figures import is_sequential
from tunetool.record import Measurement, Record, chosen

_STAGING = ("model_load", "data_per_batch", "end_to_end", "stage_rate")


def verify(record: Record) -> Sequence[Measurement]:
    """Sequential read and write, of every host of a fleet."""
    return [each for each in record.measurements if is_sequential(each)]


def checkpoint(record: Record) -> Sequence[Measurement]:
    """The fastest durable save and the restore of the same engine, of every host of a fleet."""
    kept: list[Measurement] = []
    for host in dict.fromkeys(each.host for each in record.measurements):
        mine = [each for each in record.measurements if each.host == host]
        best = max(chosen(mine, "durable"), key=lambda each: each.value, default=None)
        if best is not None:
            restores = (each for each in chosen(mine, "restore") if each.labels == best.labels)
            kept += [best, *restores]
    return kept


def staging(record: Record) -> Sequence[Measurement]:
    """The figures of both paths in every scenario."""
    return [each for each in record.measurements if each.rank is None and each.figure in _STAGING]


def strategies(record: Record) -> Sequence[Measurement]:
    """The step time of every cell; the prediction is among its parameters."""
    return chosen(record.measurements, "step", subject="strategies")
