"""What is asked of Slurm, and the batch script that asks for it."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from tunetool.errors import UsageProblem
from tunetool.launch.job import Job

TEMPLATES = Path(__file__).resolve().parents[1] / "templates/launch"
HOSTS_PYTHON = "/opt/tunetool/bin/python"
_NAME = re.compile(r"[a-z][a-z0-9-]*")
_PLAIN_PATH = re.compile(r"/[A-Za-z0-9._/+=@:,-]*")
_OURS = {
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
_SPARE_SECONDS = 300
"""Beyond the ranks' own time, for their start and for cleaning up."""
_ASKED_SECONDS = 86400
"""A job whose own limit is longer has none in earnest, and few partitions would give it."""


@dataclass(frozen=True)
class SlurmOptions:
    """``time``: None for the job's own, or the partition's where the job has days. ``work_dir``: on a file system that
    all nodes and this machine share; None for the current directory. ``image``: for pyxis and enroot. ``lines``: more
    for sbatch."""

    time: str | None = None
    work_dir: Path | None = None
    image: str | None = None
    exclusive: bool = True
    lines: Sequence[str] = ()


def parse_options(texts: Sequence[str]) -> SlurmOptions:
    """Each ``KEY=VALUE`` or ``KEY`` of a call. All but ``work-dir``, ``image`` and ``exclusive=no`` are sbatch's.

    Raises ``UsageProblem``.
    """
    ours: dict[str, str] = {}
    lines = []
    for text in texts:
        key, equals, value = text.removeprefix("--").partition("=")
        if not _NAME.fullmatch(key) or "\n" in value or (equals and not value):
            raise UsageProblem(f"`--slurm {text}` is not KEY=VALUE", _HINT)
        if key in _OURS:
            raise UsageProblem(f"`--slurm {text}` is tunetool's own to set", _HINT)
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
    """The batch script for ``job``, whose files lie in ``work``. Raises ``UsageProblem``."""
    if not _PLAIN_PATH.fullmatch(str(work)):
        raise UsageProblem(
            f"`{work}` has characters that a batch script reads in its own way",
            "name another with `--slurm work-dir=/DIR`: letters, digits and . _ / + = @ : , -",
        )
    environment = Environment(  # noqa: S701  (a shell's text)
        loader=FileSystemLoader(TEMPLATES), undefined=StrictUndefined, keep_trailing_newline=True, trim_blocks=True
    )
    environment.filters["quote"] = shlex.quote
    # Whole nodes with all of their memory: a neighbour's load would be measured, too.
    lines = ["--exclusive", "--mem=0"] if options.exclusive else []
    if any(line.startswith(("--mem=", "--mem-per")) for line in options.lines):
        lines = lines[:1]
    if options.time is not None:
        lines.append(f"--time={options.time}")
    elif job.timeout <= _ASKED_SECONDS:
        lines.append(f"--time={math.ceil((job.timeout + _SPARE_SECONDS) / 60)}")
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
