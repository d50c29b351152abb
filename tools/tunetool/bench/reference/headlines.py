"""The figures of each part that the record over all parts repeats. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tunetool.measure.figures import NAMES
from tunetool.record import Measurement, Record

_STAGING = ("model_load", "data_per_batch", "end_to_end", "stage_rate")


def verify(record: Record) -> Sequence[Measurement]:
    """Sequential read and write, of every host of a fleet."""
    return [each for each in record.measurements if each.name in NAMES.values()]


def checkpoint(record: Record) -> Sequence[Measurement]:
    """The fastest durable save and the restore of the same engine, of every host of a fleet."""
    chosen = []
    for host in dict.fromkeys(each.host for each in record.measurements):
        mine = {each.name: each for each in record.measurements if each.host == host}
        saves = [each for name, each in mine.items() if name.endswith(".durable")]
        best = max(saves, key=lambda each: each.value, default=None)
        if best is not None:
            restore = mine.get(best.name.removesuffix(".durable") + ".restore")
            chosen += [best, *([restore] if restore else [])]
    return chosen


def staging(record: Record) -> Sequence[Measurement]:
    """The figures of both paths in every scenario."""
    return [each for each in record.measurements if each.rank is None and each.name.rpartition(".")[2] in _STAGING]


def strategies(record: Record) -> Sequence[Measurement]:
    """The step time of every cell; the prediction is among its parameters."""
    return [each for each in record.measurements if each.name.startswith("strategies.step.")]
