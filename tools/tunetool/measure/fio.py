"""A thin driver of the fio program: find it, run one job file's worth of arguments, read its JSON strictly."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.fio_result import INSTALL_HINT, Direction, Fio, FioFailed, Outcome, first_line, shares
from tunetool.node.common.files import read_text

__all__ = [
    "DATA_FILE",
    "Direction",
    "Fio",
    "FioFailed",
    "Job",
    "Outcome",
    "arguments",
    "die_with_parent",
    "execute",
    "find_fio",
    "parse",
    "preloads",
    "run",
    "shares",
]

MINIMUM_VERSION = (3, 20)
"""The oldest release these options and this JSON were read against (2020; every distribution in use is newer)."""

DATA_FILE = "data.{number}"

_PRELOADS = ("LD_PRELOAD", "LD_AUDIT")
_PRELOAD_FILE = "etc/ld.so.preload"
_TICK = 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


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
    """How a file's space is allocated, before the time begins; ``none``: by the writes."""


def preloads(environment: Mapping[str, str], root: str = "/") -> list[str]:
    """What puts foreign code into every program, and so into what fio reports: variables, and a file (ld.so(8))."""
    found = [name for name in _PRELOADS if environment.get(name)]
    everywhere = read_text(f"{root}/{_PRELOAD_FILE}")
    return [*found, f"/{_PRELOAD_FILE}"] if everywhere else found


def find_fio(environment: Mapping[str, str]) -> Fio:
    """The fio found first on PATH, and its version. Raises ``CannotJudge``."""
    on_path = shutil.which("fio", path=environment.get("PATH", os.defpath))
    if on_path is None:
        raise CannotJudge("`fio` is not on PATH", INSTALL_HINT)
    path = str(Path(on_path).absolute())  # it will be started in another directory
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotJudge(f"`{path} --version` does not run: {error}", INSTALL_HINT) from None
    text = done.stdout.strip()
    match = re.match(r"fio-(\d+)\.(\d+)", text)
    if done.returncode != 0 or not match:
        said = text.splitlines()[0] if text else "nothing"
        raise CannotJudge(f"`{path}` is not a fio that can be used: `--version` says {said!r}", INSTALL_HINT)
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

    The process is gone when this returns or raises, also on Ctrl-C. Raises ``FioFailed``.
    """
    with _start(fio, argv, directory, environment) as process:
        try:
            stdout, stderr = _wait(fio, process, timeout, tick)
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        raise FioFailed(*_why(fio, process.returncode, stdout, stderr), raw=stdout + stderr)
    return stdout, stderr


def _start(fio: Fio, argv: list[str], directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    clean = {name: value for name, value in environment.items() if name not in _PRELOADS}
    try:
        return _popen(argv, directory, clean)
    except OSError as error:
        raise FioFailed(f"`{fio.path}` does not start: {error.strerror}", INSTALL_HINT) from None


def _popen(argv: list[str], directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv,
        cwd=directory,
        env={**environment, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C reaches tunetool alone, which then ends fio in order
        preexec_fn=die_with_parent,  # noqa: PLW1509  (tunetool runs no threads here)
    )


def _wait(fio: Fio, process: subprocess.Popen[str], timeout: float, tick: Callable[[], None]) -> tuple[str, str]:
    deadline = time.monotonic() + timeout
    while True:
        try:
            return process.communicate(timeout=_TICK)
        except subprocess.TimeoutExpired:
            tick()
            if time.monotonic() > deadline:
                raise FioFailed(
                    f"`{fio.path}` did not end within {timeout:.0f} s", "look for stuck I/O: `dmesg | tail`"
                ) from None


def parse(fio: Fio, job: Job, stdout: str, stderr: str = "") -> Outcome:
    """Read fio's JSON. Whatever is not a complete, error-free, non-empty result raises ``FioFailed``."""
    (share,) = shares(fio, job.direction, stdout, stderr).values()
    return share


def _why(fio: Fio, returncode: int, stdout: str, stderr: str) -> tuple[str, str | None]:
    if returncode < 0:
        try:
            name = signal.Signals(-returncode).name
        except ValueError:
            name = f"signal {-returncode}"
        hints = {
            "SIGXFSZ": "the limit on file size is too low: see `ulimit -f`",
            "SIGKILL": "the kernel's out-of-memory killer does this: see `dmesg | tail`",
        }
        return f"`{fio.path}` was ended by {name}", hints.get(name)
    said = first_line(stderr, stdout) or "no message"
    hint = next((text for words, text in _HINTS.items() if words in said), None)
    return f"`{fio.path}` failed with exit status {returncode}: {said}", hint


_HINTS = {
    "No space left": "free some space on the target",
    # libaio 0.3.113 asks by io_pgetevents and falls back only where the kernel does not know it; a container's
    # seccomp filter may answer EPERM instead, which fio prints as -1.
    "func=get_events, error=Unknown error -1": (
        "a container's seccomp filter forbids `io_pgetevents`: run on the node itself, or with "
        "`--security-opt seccomp=unconfined`"
    ),
}


def _end(process: subprocess.Popen[str]) -> None:
    # A second Ctrl-C must not leave a fio behind.
    for number, patience in ((signal.SIGTERM, 2.0), (signal.SIGKILL, 30.0)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            process.communicate(timeout=patience)
            return


def die_with_parent() -> None:
    """For a child, before it runs its program: when tunetool is killed outright, the kernel ends the child too."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
