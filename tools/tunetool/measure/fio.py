"""A thin driver of the fio program: find it, run one job file's worth of arguments, read its JSON strictly; and whether
its engine io_uring can be used here."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge
from tunetool.measure import Direction, worker
from tunetool.measure.evidence import Claim
from tunetool.measure.worker import Failed
from tunetool.node.common import documents
from tunetool.node.common.commands import captured, in_c_locale
from tunetool.system_packages import install_line

INSTALL_HINT = f"install it: {install_line('fio')}"


_NO_NUMBER = re.compile(r'("(?:[^"\\]|\\.)*")|-?\b(?:nan|inf(?:inity)?)\b', re.IGNORECASE)
"""A text of JSON, or what printf(3) makes of a quotient by 0, such as the share of a time that was none."""


class FioFailed(Failed):
    """fio did not do what it was asked to. ``raw`` is what it printed, for the record's directory."""


@dataclass(frozen=True)
class Fio:
    """The program that was found."""

    path: str
    version: str


@dataclass(frozen=True)
class Outcome(Claim):
    """The claim of one fio process; ``seconds`` are those of its longest-running job."""

    percentiles: dict[str, float]
    """Completion latency in seconds, by percentile (``p50``)."""
    raw: str
    requests: int = 0
    cores: float = 0.0
    """How many cores' worth of time the jobs spent."""
    places: Mapping[str, Outcome] = field(default_factory=dict)
    """Of each of several places, by name."""

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def shares(
    fio: Fio, direction: Direction, stdout: str, stderr: str = "", *, by_name: bool = False
) -> dict[str, Outcome]:
    """The result of all jobs together or, by their name, of those that share one. Raises ``FioFailed``."""
    raw = stdout + stderr
    document = _json_of(fio, stdout, stderr)
    sides: dict[str, list[Mapping[str, Any]]] = {}
    try:
        if not document["jobs"]:
            raise FioFailed(f"`{fio.path}` reports no job", raw=raw)
        errors = [int(entry["error"]) for entry in document["jobs"] if entry["error"]]
        if errors:
            raise FioFailed(
                f"`{fio.path}` reports an error: {first_line(stderr, stdout) or os.strerror(errors[0])}", raw=raw
            )
        for entry in document["jobs"]:
            sides.setdefault(str(entry["jobname"]) if by_name else "", []).append(entry)
        return {name: _outcome(fio, direction, entries, stdout, stderr) for name, entries in sides.items()}
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise FioFailed(
            f"`{fio.path}` printed JSON without what a result needs ({error!r})", INSTALL_HINT, raw=raw
        ) from None


def _outcome(fio: Fio, direction: Direction, entries: Sequence[Mapping[str, Any]], stdout: str, stderr: str) -> Outcome:
    sides = [entry[direction] for entry in entries]
    claimed = sum(_whole(side["io_bytes"]) for side in sides)
    milliseconds = max(_whole(side["runtime"]) for side in sides)
    if claimed <= 0 or milliseconds <= 0:
        raise FioFailed(
            f"`{fio.path}` moved {claimed} bytes in {milliseconds} ms: {first_line(stderr, stdout) or 'no message'}",
            raw=stdout + stderr,
        )
    # Per cent of each thread's time; of a group, of all its threads' time together.
    shares_of_time = [(entry.get("usr_cpu", 0.0), entry.get("sys_cpu", 0.0)) for entry in entries]
    # A share of no time is no number: such a job spent none.
    spent = sum(
        sum(share or 0.0 for share in pair) / 100 * entry.get("job_runtime", 0)
        for pair, entry in zip(shares_of_time, entries, strict=True)
    )
    return Outcome(
        claimed,
        milliseconds / 1000,
        _percentiles(sides[0]),
        stdout,
        requests=sum(_whole(side.get("total_ios", 0)) for side in sides),
        cores=spent / milliseconds,
    )


def _json_of(fio: Fio, stdout: str, stderr: str) -> dict[str, Any]:
    # Warnings precede the JSON on stdout; nothing may follow it.
    start = 0 if stdout.startswith("{") else stdout.find("\n{") + 1
    text = _NO_NUMBER.sub(lambda found: found[1] or "null", stdout[start:])
    try:
        document = documents.parse(text, repeated=True)
    except ValueError as error:
        if stdout[start : start + 1] == "{":
            why = f"`{fio.path}` printed a result that is no JSON: {error}"
            raise FioFailed(why, INSTALL_HINT, stdout + stderr) from None
        message = first_line(stderr, stdout) or "nothing"
        raise FioFailed(f"`{fio.path}` did not print a result: {message}", INSTALL_HINT, stdout + stderr) from None
    if not isinstance(document, dict):
        raise FioFailed(f"`{fio.path}` did not print a result", INSTALL_HINT, stdout + stderr)
    return document


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise TypeError(f"{value!r} is not a count")
    return value


def _percentiles(side: Mapping[str, Any]) -> dict[str, float]:
    # Nanoseconds, keyed "50.000000"; without group_reporting's merge the first group stands for all.
    wanted = {"50.000000": "p50", "95.000000": "p95", "99.000000": "p99", "99.900000": "p99.9"}
    percentiles = side.get("clat_ns", {}).get("percentile", {})
    return {name: _whole(percentiles[key]) / 1e9 for key, name in wanted.items() if key in percentiles}


def first_line(*texts: str) -> str | None:
    """The line of fio's output that says most: the first that begins with ``fio:``, else the first."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip() not in ("", "{", "}")]
    telling = [line for line in lines if line.startswith("fio:")]
    return next(iter(telling or lines), None)


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
    touched: bool = False
    """For reads: into memory that was written before the time begins. Without this, the first request also waits until
    the kernel has found and zeroed its pages."""
    places: Sequence[tuple[str, Path]] = ()
    """Names and directories of several places, with ``jobs`` in each; empty: there is the one."""


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
    if job.touched:
        # fio fills the buffers of jobs that might write.
        argv[argv.index(f"--rw={job.direction}")] = "--rw=rw"
        argv.append("--rwmixread=100")
    if job.direction == "write":
        # The time of this sync counts: what sits in a volatile cache is not written yet.
        argv.append("--end_fsync=1")
    if job.seconds is not None:
        argv += ["--time_based=1", f"--runtime={round(job.seconds * 1000)}ms"]
    # A group for each place, so that its own figures are reported.
    return in_places([*argv, "--new_group=1"], job.places) if job.places else argv


def in_places(argv: Sequence[str], places: Sequence[tuple[str, Path]]) -> list[str]:
    """The command line ``argv`` of one job, in each of ``places`` at the same time under its name."""
    shared = [word for word in argv if not word.startswith("--name=")]
    # fio takes a colon for the end of a directory's name.
    escaped = [(name, str(directory).replace(":", "\\:")) for name, directory in places]
    return [*shared, *(word for name, path in escaped for word in (f"--name={name}", f"--directory={path}"))]


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
    if not job.places:
        return share
    found = shares(fio, job.direction, stdout, stderr, by_name=True)
    missing = [name for name, _ in job.places if name not in found]
    if missing:
        raise FioFailed(f"`{fio.path}` reports nothing of `{missing[0]}`", raw=stdout + stderr)
    return replace(share, places=found)


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


_IO_URING_SETUP = 425
"""The same number on every architecture: it is younger than the common table (Linux 5.1)."""
_PARAMETERS_BYTES = 120


def no_io_uring() -> str | None:
    """Why io_uring cannot be used here; None where it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_PARAMETERS_BYTES))
    if handle >= 0:
        os.close(handle)
        return None
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        return "this kernel has no io_uring"
    if number == errno.EPERM:
        return "io_uring is forbidden here: by `kernel.io_uring_disabled`, or by a container's seccomp filter"
    return f"io_uring does not work here: {os.strerror(number)}"
