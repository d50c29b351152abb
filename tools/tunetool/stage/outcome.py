"""The results of a run as findings for a record of kind ``stage``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from tunetool import __version__
from tunetool.measure.figure import What, computed
from tunetool.measure.session import Findings
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size
from tunetool.record import CheckResult, Measurement, Scalar
from tunetool.stage.build import Built, Job
from tunetool.stage.destination import Destination
from tunetool.stage.manifest import Manifest
from tunetool.stage.moving import Moved, Plan
from tunetool.stage.tree import files_of, total_bytes
from tunetool.verdict import Case

KIND = "stage"
CONTENT = "stage.content"
COPY, READ = "copy", "verify"
"""Figures."""
_CPU_BUSY = 0.8
"""Fraction of busy CPU time from which the CPUs are the bottleneck."""
_NAMED = 20

FIGURES = {
    "B/s": ("copy", "verify"),
}
"""Figures of its records, by unit."""


def binds(moved: Moved) -> str:
    """The bottleneck of a copy: ``cpu``, ``source`` or ``destination``.

    ``cpu`` if the CPUs were busy, also with other work; otherwise the side on which the threads spent more time.
    """
    if moved.busy >= _CPU_BUSY:
        return "cpu"
    return "source" if moved.tally.reading >= moved.tally.writing else "destination"


def copied(job: Job, built: Built, source_medium: str, stack: BlockStack) -> Findings:
    """Of a copy."""
    moved = built.moved
    details: dict[str, Scalar] = {"source": job.source, "source_medium": source_medium, **_details(moved)}
    details |= {"files": len(files_of(job.entries)), "threads": job.threads, "checksum": job.checksum}
    if job.remote:
        details["binds"] = "source"
    size = total_bytes(job.entries)
    figure = _figure(COPY, size, built.seconds, stack, details, size - moved.tally.hole_bytes)
    return findings(job.destination, [figure])


def unchanged(destination: Destination, manifest: Manifest) -> Findings:
    """Of a run that found DST identical to the source."""
    summary = f"{format_size(manifest.bytes)} in {len(files_of(manifest.entries))} files, staged {manifest.staged}"
    check = CheckResult(id="stage.identical", status="pass", expected=f"a copy of `{manifest.source}`", found=summary)
    return findings(destination, [], [check])


def verified(
    destination: Destination,
    manifest: Manifest,
    moved: Moved,
    plan: Plan,
    differences: Mapping[str, str],
    stack: BlockStack,
) -> Findings:
    """Of a verification, which has read DST again."""
    details: dict[str, Scalar] = {**_details(moved), "threads": plan.threads, "checksum": manifest.checksum}
    figure = _figure(READ, moved.tally.bytes, moved.seconds, stack, {**details, "files": len(moved.digests)})
    named = [f"`{path}` {difference}" for path, difference in differences.items()]
    more = [f"and {len(named) - _NAMED} more"] if len(named) > _NAMED else []
    check = CheckResult(
        id=CONTENT,
        status="fail" if differences else "pass",
        expected=f"{len(manifest.digests)} files of {format_size(manifest.bytes)} as in the manifest "
        f"({manifest.checksum})",
        found=f"{len(differences)} entries are not" if differences else "all of them",
        remedy=f"stage `{manifest.source}` again with `--replace`" if differences else "",
    )
    return findings(destination, [figure] if moved.tally.bytes else [], [check], [*named[:_NAMED], *more])


def evicted(destination: Destination, manifest: Manifest) -> Findings:
    """Of a removal of DST."""
    check = CheckResult(
        id="stage.evicted", status="pass", expected="no tree", found=f"{format_size(manifest.bytes)} removed"
    )
    return findings(destination, [], [check])


def _details(moved: Moved) -> dict[str, Scalar]:
    return {
        "direct_bytes": moved.tally.direct_bytes,
        "hole_bytes": moved.tally.hole_bytes,
        "reading_seconds": round(moved.tally.reading, 3),
        "checksum_seconds": round(moved.tally.summing, 3),
        "writing_seconds": round(moved.tally.writing, 3),
        "cpu_seconds": round(moved.cpu_seconds, 3),
        "cpus": len(os.sched_getaffinity(0)),
        "cpu_busy": round(moved.busy, 3),
        "binds": binds(moved),
    }


def _figure(
    figure: str, size: int, seconds: float, stack: BlockStack, details: dict[str, Scalar], moved: int | None = None
) -> Measurement:
    """``moved``: the bytes that count for the speed, if not all of ``size``."""
    parameters: dict[str, Scalar] = {"bytes": size, "seconds": round(seconds, 3), **details}
    what = What("stage.{figure}", "bandwidth", f"tunetool {__version__}", stack.medium, figure, parameters=parameters)
    return computed(what, (size if moved is None else moved) / max(seconds, 1e-6))


def findings(
    destination: Destination,
    figures: Sequence[Measurement] = (),
    checks: Sequence[CheckResult] = (),
    reasons: Sequence[str] = (),
) -> Findings:
    """For the record; without figures and checks, of a run that came to nothing."""
    case = Case(figures, checks=checks, words={CONTENT: reasons} if reasons else {}, judged="work")
    return Findings(case, target=str(destination.path), drives=False)
