"""Ranks on the nodes of a Slurm cluster: the batch script, submitted, watched, and cancelled with the run.

``slurm_job`` asks Slurm about the job; ``slurm_node`` is what runs on each node.
"""

from __future__ import annotations

import contextlib
import math
import re
import secrets
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.errors import UsageProblem
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed, tail
from tunetool.launch.slurm_job import JobState, Submitted, call, down_nodes
from tunetool.launch.slurm_node import verdict_name
from tunetool.launch.spec import SPEC, NodeSpec, Verdict, read_verdict, write
from tunetool.launch.this_machine import judge
from tunetool.measure.progress import Progress
from tunetool.node.play.host_summary import one_line

SCRIPT, LOG = "job.sbatch", "slurm.log"
_NEEDED = ("sbatch", "scontrol", "scancel")
_TICK = 0.1
_SPARE_SECONDS = 120.0
"""Seconds after the guards' own limit at which this process ends a run that takes too long."""
_SHARED_SECONDS = 15.0
"""Seconds until a node's last write is visible through NFS."""


def need_slurm() -> None:
    """Raise ``UsageProblem`` where Slurm's commands are missing."""
    for program in _NEEDED:
        if shutil.which(program) is None:
            raise UsageProblem(
                f"`{program}` is not on PATH",
                "run this where jobs are submitted, a login node, or use another `--launcher`",
            )


class SlurmLauncher:
    """Runs a batch job: a guard on each node starts torchrun."""

    name = "slurm"

    def __init__(self, options: SlurmOptions, progress: Progress) -> None:
        """Raises ``UsageProblem`` if Slurm's commands are missing."""
        need_slurm()
        self._options = options
        self._progress = progress

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """See ``tunetool.launch.job.Launcher``. The job's hosts are Slurm's nodes; without hosts it runs on any one
        free node. The time that the job waits for its nodes is not limited."""
        # As sbatch itself: every node sees the current directory.
        work = (self._options.work_dir or Path.cwd()) / f".tunetool-{secrets.token_hex(8)}"
        script = render(job, self._options, work)
        count = max(1, len(job.hosts))
        _make_work_dir(work)
        try:
            write(_spec(job, work), work, SPEC)
            (work / SCRIPT).write_text(script)
            with Submitted(script) as submitted:
                ended = self._watch(submitted, job, tick)
            self._judge(submitted.job_id, ended, work, count)
        finally:
            for name in (SPEC, *(verdict_name(index) for index in range(count))):
                (work / name).unlink(missing_ok=True)
            _copy_results(work, job.directory, self._progress)

    def _watch(self, submitted: Submitted, job: Job, tick: Callable[[], None]) -> JobState:
        """Wait until the job has ended. Raises ``RankFailed`` if it would never start, or takes too long."""
        last_words, running_since = "", None
        while True:
            state = submitted.state()
            words = state.words(submitted.job_id)
            if words != last_words and not state.ended:
                last_words = words
                self._progress.say(words)
            if state.ended:
                return state
            if (why := state.hopeless) is not None:
                hint = f"`squeue -j {submitted.job_id} --start` shows what Slurm expects"
                raise RankFailed(f"job {submitted.job_id} would never start: {why.format(id=submitted.job_id)}", hint)
            if state.state == "RUNNING":
                running_since = time.monotonic() if running_since is None else running_since
                if time.monotonic() - running_since > job.timeout + _SPARE_SECONDS:
                    raise RankFailed(f"job {submitted.job_id} did not end within {job.timeout:.0f} s")
            _pause(_interval(submitted.age), tick)

    def _judge(self, job_id: str, ended: JobState, work: Path, count: int) -> None:
        verdicts = _verdicts(work, count, patient=ended.state == "COMPLETED")
        failed = [verdict.failure for verdict in verdicts if verdict.failure is not None]
        message, hint = ended.verdict(job_id)
        raw = tail(work / LOG)
        if ended.state == "NODE_FAIL":
            lost = _down_nodes(ended.nodes)
            named = ", ".join(f"`{name}`" + (f" ({reason})" if reason else "") for name, reason in lost)
            message += f": {named}" if lost else f", one of {ended.nodes}"
            raise RankFailed(message, hint, raw=raw, host=lost[0][0] if lost else None)
        if ended.state == "OUT_OF_MEMORY" and failed:
            first = failed[0]
            raise RankFailed(f"{message}: {first.message}", hint, first.rank, first.raw, first.host)
        if ended.state in ("COMPLETED", "FAILED"):
            judge(verdicts, self._progress)
            if len(verdicts) == count and ended.state == "COMPLETED":
                return
            message, hint = _error_without_verdicts(job_id, ended, work, raw)
        raise RankFailed(message, hint, raw=raw)


def _interval(age: float) -> float:
    """Seconds between two queries: a controller has many users, and a long job can wait."""
    return 0.5 if age < 60 else 2.0 if age < 600 else 10.0


def _pause(seconds: float, tick: Callable[[], None]) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        tick()
        time.sleep(_TICK)


def _spec(job: Job, work: Path) -> NodeSpec:
    """The specification of every node; each fills in its own part (``tunetool.launch.slurm_node``)."""
    return NodeSpec(
        run=secrets.token_hex(16),
        directory="",
        out=str(work),
        hosts=[],
        node=0,
        ranks_per_host=job.ranks_per_host,
        program=list(job.program),
        # Empty: each node asks its own manifest.
        python=job.python or "",
        environment=dict(job.environment),
        timeout=job.timeout,
        stall=job.stall,
    )


def _make_work_dir(work: Path) -> None:
    try:
        work.mkdir(mode=0o700)
    except OSError as error:
        raise UsageProblem(
            f"`{work}` cannot be made: {error.strerror}", "`--slurm work-dir=DIR` is a directory that all nodes share"
        ) from None


def _verdicts(work: Path, count: int, patient: bool) -> list[Verdict]:
    deadline = time.monotonic() + (_SHARED_SECONDS if patient else 0)
    while True:
        verdicts = []
        for index in range(count):
            with contextlib.suppress(OSError, ValueError):
                verdicts.append(read_verdict((work / verdict_name(index)).read_text()))
        if len(verdicts) == count or time.monotonic() > deadline:
            return verdicts
        time.sleep(_TICK)


def _error_without_verdicts(job_id: str, ended: JobState, work: Path, log: str) -> tuple[str, str | None]:
    """Message and hint for a job whose guards left no verdict."""
    if not (work / LOG).exists():
        return (
            f"job {job_id} left no `{work / LOG}`: its nodes do not see that directory",
            "name one that all nodes and this machine share: `--slurm work-dir=DIR`",
        )
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # srun's line about a task that ended may come before or after the task's own output.
    from_tasks = [line for line in lines if "Exited with exit code" not in line]
    telling = next(
        filter(
            None,
            ([line_of_task for line_of_task in from_tasks if word in line_of_task] for word in ("tunetool:", "rror")),
        ),
        from_tasks,
    )
    last = telling[-1].partition("tunetool: ")[2] or telling[-1] if telling else "its log is empty"
    message, _ = ended.verdict(job_id)
    hints = {
        SPEC: "name a directory that all nodes share: `--slurm work-dir=DIR`",
        "No such file or directory": "tunetool must be installed on the nodes: see the role `tunetool`",
    }
    return f"{message}: {last[-300:]}", next((text for word, text in hints.items() if word in last), f"see `{LOG}`")


def _down_nodes(nodes: str) -> list[tuple[str, str]]:
    return down_nodes(call(["scontrol", "show", "node", "-o", nodes]).stdout) if nodes else []


def _copy_results(work: Path, directory: Path, progress: Progress) -> None:
    """Copy the output of ranks and Slurm to the job's directory."""
    try:
        shutil.copytree(work, directory, symlinks=True, dirs_exist_ok=True)
    except OSError as error:
        progress.say(
            f"`{work}` keeps what the ranks wrote: it cannot be copied to `{directory}`: {one_line(str(error))}"
        )
        return
    shutil.rmtree(work, ignore_errors=True)


TEMPLATES = Path(__file__).resolve().parents[1] / "templates/launch"
HOSTS_PYTHON = "/opt/tunetool/bin/python"
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/+=@:,-]*")
_RESERVED = {
    *(
        "output",
        "error",
        "open-mode",
        "input",
        "chdir",
        "job-name",
        "no-requeue",
        "requeue",
        "wait",
        "array",
        "parsable",
    ),
    *("nodes", "ntasks", "ntasks-per-node", "nodelist", "wrap", "test-only"),
}
_HINT = "such as `--slurm partition=gpu --slurm gpus-per-node=8`"
_LIMIT_SPARE_SECONDS = 300
"""Seconds beyond the ranks' own time limit, for start-up and clean-up."""
_ASKED_SECONDS = 86400
"""Seconds: a longer limit of the job counts as none, because few partitions would grant it."""


@dataclass(frozen=True)
class SlurmOptions:
    """``time``: None for the job's own limit, or the partition's if that is longer than a day. ``work_dir``: on a file
    system that all nodes and this machine share; None for the current directory. ``image``: for pyxis and enroot.
    ``lines``: further options for sbatch."""

    time: str | None = None
    work_dir: Path | None = None
    image: str | None = None
    exclusive: bool = True
    lines: Sequence[str] = ()


def parse_options(texts: Sequence[str]) -> SlurmOptions:
    """Options from each ``KEY=VALUE`` or ``KEY``. All but ``work-dir``, ``image`` and ``exclusive=no`` go to sbatch.

    Raises ``UsageProblem``.
    """
    ours: dict[str, str] = {}
    lines = []
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        if not _NAME.fullmatch(key) or "\n" in value or (equals and not value):
            raise UsageProblem(f"`--slurm {text}` is not KEY=VALUE", _HINT)
        if key in _RESERVED:
            raise UsageProblem(f"`--slurm {text}` is set by tunetool itself", _HINT)
        if key in ("time", "work-dir", "image", "exclusive"):
            ours[key] = value
        else:
            lines.append(f"--{key}={value}" if equals else f"--{key}")
    if ours.get("exclusive", "yes") not in ("yes", "no", ""):
        raise UsageProblem(
            f"`--slurm exclusive={ours['exclusive']}` is neither yes nor no", "whole nodes are the default"
        )
    work = ours.get("work-dir")
    if work is not None and not work.startswith("/"):
        raise UsageProblem(f"`--slurm work-dir={work}` is not absolute", "on the nodes there is no current directory")
    return SlurmOptions(
        ours.get("time"),
        Path(work) if work is not None else None,
        ours.get("image"),
        ours.get("exclusive") != "no",
        tuple(lines),
    )


def render(job: Job, options: SlurmOptions, work: Path) -> str:
    """The batch script for ``job``, whose files are in ``work``. Raises ``UsageProblem``."""
    if not _PLAIN_PATH.fullmatch(str(work)):
        raise UsageProblem(
            f"`{work}` has characters with a special meaning in a batch script",
            "name another with `--slurm work-dir=/DIR`: letters, digits and . _ / + = @ : , -",
        )
    environment = Environment(  # noqa: S701  (a shell's text)
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["quote"] = shlex.quote
    # Whole nodes with all of their memory; otherwise another job's load would be measured too.
    lines = ["--exclusive", "--mem=0"] if options.exclusive else []
    if any(line.startswith(("--mem=", "--mem-per")) for line in options.lines):
        lines = lines[:1]
    if options.time is not None:
        lines.append(f"--time={options.time}")
    elif job.timeout <= _ASKED_SECONDS:
        lines.append(f"--time={math.ceil((job.timeout + _LIMIT_SPARE_SECONDS) / 60)}")
    if job.hosts:
        lines.append("--nodelist=" + ",".join(host.name for host in job.hosts))
    return environment.get_template("slurm.sbatch.j2").render(
        name="tunetool",
        nodes=max(1, len(job.hosts)),
        work=str(work),
        options=[*lines, *options.lines],
        python=job.python or HOSTS_PYTHON,
        image=options.image,
    )
