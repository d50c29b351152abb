"""A thin driver of the fio program: find it, run one job file's worth of arguments, read its JSON strictly."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tunetool.errors import CannotJudge

Direction = Literal["read", "write"]

MINIMUM_VERSION = (3, 20)
"""The oldest release these options and this JSON were read against (2020; every distribution in use is newer)."""

DATA_FILE = "data.{number}"

_PRELOADS = ("LD_PRELOAD", "LD_AUDIT")
_INSTALL_HINT = "install it: `apt install fio` or `dnf install fio`"
_TICK = 0.2
_PR_SET_PDEATHSIG = 1
_prctl = ctypes.CDLL(None).prctl


class FioFailed(CannotJudge):
    """fio did not do what it was asked to. ``raw`` is what it printed, for the record's directory."""

    def __init__(self, message: str, hint: str | None = None, raw: str = "") -> None:
        super().__init__(message, hint)
        self.raw = raw


@dataclass(frozen=True)
class Fio:
    """The program that was found."""

    path: str
    version: str


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


@dataclass(frozen=True)
class Outcome:
    """What one fio process says it did."""

    claimed_bytes: int
    seconds: float
    percentiles: dict[str, float]
    """Completion latency in seconds, by percentile (``p50``)."""
    raw: str

    @property
    def bandwidth(self) -> float:
        """Bytes per second, over the longest-running job."""
        return self.claimed_bytes / self.seconds


def preloads(environment: Mapping[str, str]) -> list[str]:
    """Variables that put foreign code into every program, and so into what fio reports."""
    return [name for name in _PRELOADS if environment.get(name)]


def find_fio(environment: Mapping[str, str]) -> Fio:
    """The fio found first on PATH, and its version. Raises ``CannotJudge``."""
    on_path = shutil.which("fio", path=environment.get("PATH", os.defpath))
    if on_path is None:
        raise CannotJudge("`fio` is not on PATH", _INSTALL_HINT)
    path = str(Path(on_path).absolute())  # it will be started in another directory
    try:
        done = subprocess.run(
            [path, "--version"], capture_output=True, text=True, errors="replace", timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotJudge(f"`{path} --version` does not run: {error}", _INSTALL_HINT) from None
    text = done.stdout.strip()
    match = re.match(r"fio-(\d+)\.(\d+)", text)
    if done.returncode != 0 or not match:
        said = text.splitlines()[0] if text else "nothing"
        raise CannotJudge(f"`{path}` is not a fio that can be used: `--version` says {said!r}", _INSTALL_HINT)
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
        "--fallocate=native",
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
    """Run ``job`` in ``directory``, calling ``tick`` a few times a second.

    The process is gone when this returns or raises, also on Ctrl-C. Raises ``FioFailed``.
    """
    with _start(fio, job, directory, environment) as process:
        try:
            stdout, stderr = _wait(fio, process, timeout, tick)
        except BaseException:
            _end(process)
            raise
    if process.returncode != 0:
        raise FioFailed(*_why(fio, process.returncode, stdout, stderr), raw=stdout + stderr)
    return parse(fio, job, stdout, stderr)


def _start(fio: Fio, job: Job, directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[str]:
    clean = {name: value for name, value in environment.items() if name not in _PRELOADS}
    try:
        return _popen(arguments(fio, job), directory, clean)
    except OSError as error:
        raise FioFailed(f"`{fio.path}` does not start: {error.strerror}", _INSTALL_HINT) from None


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
    raw = stdout + stderr
    document = _json_of(fio, stdout, stderr)
    try:
        if not document["jobs"]:
            raise FioFailed(f"`{fio.path}` reports no job", raw=raw)
        errors = [int(entry["error"]) for entry in document["jobs"] if entry["error"]]
        if errors:
            raise FioFailed(
                f"`{fio.path}` reports an error: {_first_line(stderr, stdout) or os.strerror(errors[0])}", raw=raw
            )
        sides = [entry[job.direction] for entry in document["jobs"]]
        claimed = sum(_whole(side["io_bytes"]) for side in sides)
        milliseconds = max(_whole(side["runtime"]) for side in sides)
        percentiles = _percentiles(sides[0])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FioFailed(
            f"`{fio.path}` printed JSON without what a result needs ({error!r})", _INSTALL_HINT, raw=raw
        ) from None
    if claimed <= 0 or milliseconds <= 0:
        raise FioFailed(
            f"`{fio.path}` moved {claimed} bytes in {milliseconds} ms: {_first_line(stderr, stdout) or 'no message'}",
            raw=raw,
        )
    return Outcome(claimed, milliseconds / 1000, percentiles, stdout)


def _json_of(fio: Fio, stdout: str, stderr: str) -> dict[str, Any]:
    # Warnings precede the JSON on stdout; nothing may follow it.
    start = 0 if stdout.startswith("{") else stdout.find("\n{") + 1
    try:
        document = json.loads(stdout[start:])
    except ValueError:
        said = _first_line(stderr, stdout) or "nothing"
        raise FioFailed(f"`{fio.path}` did not print a result: {said}", _INSTALL_HINT, stdout + stderr) from None
    if not isinstance(document, dict):
        raise FioFailed(f"`{fio.path}` did not print a result", _INSTALL_HINT, stdout + stderr)
    return document


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _percentiles(side: Mapping[str, Any]) -> dict[str, float]:
    # Nanoseconds, keyed "50.000000"; without group_reporting's merge the first group stands for all.
    wanted = {"50.000000": "p50", "95.000000": "p95", "99.000000": "p99", "99.900000": "p99.9"}
    found = side.get("clat_ns", {}).get("percentile", {})
    return {name: _whole(found[key]) / 1e9 for key, name in wanted.items() if key in found}


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
    said = _first_line(stderr, stdout) or "no message"
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


def _first_line(*texts: str) -> str | None:
    """fio's own words: a line that starts with its name tells more than what surrounds it."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip() not in ("", "{", "}")]
    telling = [line for line in lines if line.startswith("fio:")]
    return next(iter(telling or lines), None)


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
