"""Run a fine-tune on the ranks that a launcher starts, and collect their results."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch.job import Job, Launcher
from tunetool.launch.local import RankFailed
from tunetool.measure.progress import Progress
from tunetool.training.workload import ERROR, RankResult, Workload, as_environment, rank_directory, read_result

_WORKER = "tunetool.training.rank.worker"
_ILLEGAL = (
    "the processor does not have an instruction that it advertises: set ONEDNN_MAX_CPU_ISA=AVX2; "
    "if DeepSpeed's ops were built elsewhere, `tunetool build-ops --rebuild`"
)


def run_workload(
    workload: Workload, launcher: Launcher, job: Job, progress: Progress, what: str, seconds: float = 0.0
) -> list[RankResult]:
    """Run ``workload`` and return the results of all ranks, sorted by rank.

    ``job``: hosts and number of ranks; its program is set here. ``what``: the run's name on the progress line;
    ``seconds``: its estimated duration. Raises ``RankFailed`` when a rank fails, with the rank's own reason if it left
    one, ``UsageProblem`` if that is an error of the caller, ``CannotJudge`` where a result is missing.
    """
    job = replace(
        job,
        program=("-m", _WORKER, "--workload", workload.to_json()),
        environment=as_environment(workload, {**handed_on(os.environ), **job.environment}),
    )
    with progress.step(what, seconds) as tick:
        try:
            launcher.run(job, tick)
        except RankFailed as error:
            raise explained(error, job) from error
    return [read_result(job.directory, rank) for rank in range(world_of(job))]


def handed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of the caller's environment that every rank gets: the location of LLaMA-Factory."""
    return {name: environment[name] for name in ("TUNETOOL_LLAMAFACTORY",) if name in environment}


def explained(error: RankFailed, job: Job) -> CannotJudge | UsageProblem:
    """The error with the reason that the first failed rank left, or else any rank; unchanged where none left one."""
    first = [] if error.rank is None else [error.rank]
    for rank in [*first, *range(world_of(job))]:
        try:
            report = json.loads((rank_directory(job.directory, rank) / ERROR).read_text())
            message, hint, usage = str(report["message"]), report["hint"], bool(report["usage"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        host = job.hosts[rank // job.ranks_per_host].name if job.hosts else None
        named = f"rank {rank}{f' on `{host}`' if host else ''}: {message}"
        return UsageProblem(named, hint) if usage else RankFailed(named, hint, rank, error.raw, host)
    if "SIGILL" in error.message:
        return RankFailed(error.message, _ILLEGAL, error.rank, error.raw, error.host)
    return error


def world_of(job: Job) -> int:
    """Number of all ranks of a job."""
    return job.ranks_per_host * max(1, len(job.hosts))
