"""A fine-tune on whatever ranks a launcher starts: told to each, run to its end, their results brought together."""

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
    """What each rank did, sorted by rank. ``what`` names the run on the progress line, ``seconds`` is a guess.

    ``job`` says where and how many; its program is set here. Raises ``RankFailed`` when a rank dies, with the reason
    that it gave itself where it gave one, ``UsageProblem`` when that is the caller's, ``CannotJudge`` without results.
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
    """What the caller's environment tells the ranks of every host: where LLaMA-Factory is."""
    return {name: environment[name] for name in ("TUNETOOL_LLAMAFACTORY",) if name in environment}


def explained(error: RankFailed, job: Job) -> CannotJudge | UsageProblem:
    """The same with what the rank that failed first, or else any rank, said of it."""
    first = [] if error.rank is None else [error.rank]
    for rank in [*first, *range(world_of(job))]:
        try:
            told = json.loads((rank_directory(job.directory, rank) / ERROR).read_text())
            message, hint, usage = str(told["message"]), told["hint"], bool(told["usage"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        host = job.hosts[rank // job.ranks_per_host].name if job.hosts else None
        named = f"rank {rank}{f' on `{host}`' if host else ''}: {message}"
        return UsageProblem(named, hint) if usage else RankFailed(named, hint, rank, error.raw, host)
    if "SIGILL" in error.message:
        return RankFailed(error.message, _ILLEGAL, error.rank, error.raw, error.host)
    return error


def world_of(job: Job) -> int:
    """All ranks of a job."""
    return job.ranks_per_host * max(1, len(job.hosts))
