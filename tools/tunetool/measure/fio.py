"""A thin driver of the fio program: find it, run one job file's worth of arguments, read its JSON strictly."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure import worker
from tunetool.measure.direction import Direction
from tunetool.measure.fio_result import INSTALL_HINT, Fio, FioFailed, Outcome, first_line, shares
from tunetool.node.common.commands import captured, in_c_locale

__all__ = [
    "DATA_FILE",
    "Fio",
    "FioFailed",
    "Job",
    "Outcome",
    "arguments",
    "execute",
    "find_fio",
    "parse",
    "run",
    "shares",
]

MINIMUM_VERSION = (3, 20)
"""The oldest release these options and this JSON were read against (2020; every distribution in use is newer)."""

DATA_FILE = "data.{number}"


@dataclass(frozen=True)
class Job:
    """One fio process. Its files lie in the directory that it is started in."""

    direction: Direction
    jobs: int
    file_bytes: int
    """Size of each job's own file."""
    seconds: float | None = None
    """Run for so long, over the file again and again; None: once over the file."""
    direct: bool = True
    block_bytes: int = 2**20
    queue_depth: int = 32
    engine: str = "libaio"
    fallocate: str = "native"
    """How a file's space is allocated, before the time begins; ``none`` and ``truncate``: by the writes, the latter to
    files that have their size."""


def find_fio(environment: Mapping[str, str]) -> Fio:
    """The fio found first on PATH, and its version. Raises ``CannotJudge``."""
    on_path = shutil.which("fio", path=environment.get("PATH", os.defpath))
    if on_path is None:
        raise CannotJudge("`fio` is not on PATH", INSTALL_HINT)
    path = str(Path(on_path).absolute())  # it will be started in another directory
    try:
        done = captured([path, "--version"], 20, env=dict(environment))
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotJudge(f"`{path} --version` does not run: {error}", INSTALL_HINT) from None
    text = done.stdout.strip()
    match = re.match(r"fio-(\d+)\.(\d+)", text)
    if done.returncode != 0 or not match:
        first_printed = text.splitlines()[0] if text else "nothing"
        raise CannotJudge(f"`{path}` is not a fio that can be used: `--version` says {first_printed!r}", INSTALL_HINT)
    if (int(match.group(1)), int(match.group(2))) < MINIMUM_VERSION:
        wanted = ".".join(map(str, MINIMUM_VERSION))
        raise CannotJudge(f"`{path}` is {text}, too old", f"install fio {wanted} or newer")
    return Fio(path=path, version=text.removeprefix("fio-"))


def arguments(fio: Fio, job: Job) -> list[str]:
    """The command line of ``job``."""
    argv = [
        fio.path,
        f"--name=sequential-{job.direction}",
        # Threads, because each process that fio forks makes itself a session that a signal to fio does not reach.
        "--thread=1",
        f"--numjobs={job.jobs}",
        "--group_reporting=1",
        f"--rw={job.direction}",
        f"--bs={job.block_bytes}",
        f"--size={job.file_bytes}",
        "--filename_format=" + DATA_FILE.format(number="$jobnum"),
        f"--direct={int(job.direct)}",
        f"--ioengine={job.engine}",
        f"--iodepth={job.queue_depth}",
        f"--fallocate={job.fallocate}",
        # Random content, altered for each request: drives that compress or de-duplicate gain nothing.
        "--zero_buffers=0",
        "--scramble_buffers=1",
        "--randrepeat=0",
        "--output-format=json",
    ]
    if job.direction == "write":
        # The time of this sync counts: what sits in a volatile cache is not written yet.
        argv.append("--end_fsync=1")
    if job.seconds is not None:
        argv += ["--time_based=1", f"--runtime={round(job.seconds * 1000)}ms"]
    return argv


def run(
    fio: Fio,
    job: Job,
    directory: Path,
    environment: Mapping[str, str],
    timeout: float,
    tick: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run ``job`` in ``directory``. Raises ``FioFailed``."""
    return parse(fio, job, *execute(fio, arguments(fio, job), directory, environment, timeout, tick))


def execute(
    fio: Fio,
    argv: list[str],
    directory: Path,
    environment: Mapping[str, str],
    timeout: float,
    tick: Callable[[], None] = lambda: None,
) -> tuple[str, str]:
    """What fio prints when it is called so in ``directory``, calling ``tick`` a few times a second.

    The process is gone when this returns or raises, also on Ctrl-C, unless it is stuck in the kernel. Raises
    ``FioFailed``.
    """
    try:
        process = worker.start(argv, in_c_locale(environment), directory)
    except OSError as error:
        raise FioFailed(f"`{fio.path}` does not start: {error.strerror}", INSTALL_HINT) from None
    try:
        done = worker.finish(process, timeout, tick)
    except worker.Overdue as left:
        raise FioFailed(f"`{fio.path}` did not end within {timeout:.0f} s{left}", worker.STUCK_HINT) from None
    if done.code != 0:
        raise FioFailed(*_why(fio, done), raw=done.stdout + done.stderr)
    return done.stdout, done.stderr


def parse(fio: Fio, job: Job, stdout: str, stderr: str = "") -> Outcome:
    """Read fio's JSON. Whatever is not a complete, error-free, non-empty result raises ``FioFailed``."""
    (share,) = shares(fio, job.direction, stdout, stderr).values()
    return share


def _why(fio: Fio, done: worker.Finished) -> tuple[str, str | None]:
    if done.code < 0:
        name, hint = worker.describe_signal(-done.code)
        return f"`{fio.path}` was ended by {name}", hint
    message = first_line(done.stderr, done.stdout) or "no message"
    hint = next((text for words, text in _HINTS.items() if words in message), None)
    return f"`{fio.path}` failed with exit status {done.code}: {message}", hint


_HINTS = {
    "No space left": "free some space on the target",
    # libaio 0.3.113 asks by io_pgetevents and falls back only where the kernel does not know it; a container's
    # seccomp filter may answer EPERM instead, which fio prints as -1.
    "func=get_events, error=Unknown error -1": (
        "a container's seccomp filter forbids `io_pgetevents`: run on the node itself, or with "
        "`--security-opt seccomp=unconfined`"
    ),
}
