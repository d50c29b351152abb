"""``--expect`` of a benchmark: its record, judged by goals like those of a file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from tunetool import record as records
from tunetool.accept.goal import Goal
from tunetool.accept.judge import judged, verdict_over
from tunetool.measure.session import Result
from tunetool.node.common.files import replace_file
from tunetool.record import Record, Verdict
from tunetool.verdict import WORST_FIRST


class _Outcome(Protocol):
    @property
    def record(self) -> Record | None: ...
    @property
    def path(self) -> Path | None: ...


def expected(outcome: _Outcome, goals: Sequence[Goal], run: Sequence[str]) -> Result:
    """The outcome of a benchmark with its ``goals`` judged, in the record at its path too. ``run``: its words."""
    record, path = outcome.record, outcome.path
    if record is None or path is None:
        return Result(record, path)
    results = [judged(replace(each, run=tuple(run)), [record]) for each in goals]
    verdict = _both(record.verdict, verdict_over(results))
    judged_record = record.model_copy(update={"goals": results, "verdict": verdict, "sha256": None})
    replace_file(str(path), records.dumps(judged_record))
    return Result(records.read(path), path)


def _both(own: Verdict | None, goals: Verdict) -> Verdict:
    """The worse of two, its reasons first; of two that are as bad, the benchmark's own."""
    if own is None:
        return goals
    first, second = sorted((own, goals), key=lambda each: WORST_FIRST.index(each.status))
    kinds = [kind for each in (first, second) for kind in each.kinds or ["unknown"] * len(each.reasons)]
    return Verdict.model_validate(
        {"status": first.status, "reasons": [*first.reasons, *second.reasons], "kinds": kinds or None}
    )
