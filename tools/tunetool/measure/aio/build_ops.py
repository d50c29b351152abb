"""Compiles DeepSpeed's ops once, visibly, so that nothing compiles in the middle of a job."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shutil
import subprocess
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure import worker
from tunetool.measure.aio.build_child import CANNOT
from tunetool.measure.aio.ops import LIBAIO, LOCK, Probe, builders, need_deepspeed, probe, write_stamp
from tunetool.measure.aio.spec import script
from tunetool.measure.marked_processes import swept_away
from tunetool.measure.progress import Progress
from tunetool.measure.worker import Worker, child_command, describe_end, without_preloads
from tunetool.node.common.commands import in_c_locale
from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.waiting import wait_for
from tunetool.node.machine.memory import memory_total
from tunetool.system_packages import find, install_line

OPS = ("async_io", "gds", "utils", "cpu_adam")
OPTIONAL = ("gds",)
"""What a machine may do without: it needs cuFile too."""
CANNOT_BE_BUILT = "cannot be built here"
SHARED_RUNTIME = "`CXX=c++ tunetool build-ops --rebuild`"
"""What compiles ops without a C++ runtime of their own, where the machine's compiler is an ordinary one."""
GIB = 2**30
MEMORY_PER_JOB = 2 * GIB
"""Peak memory in bytes of a compiler with torch's headers, rounded up."""
_OBJECT = re.compile(r"^\[(\d+)/(\d+)\]")
_EXPECTED_SECONDS = 300.0
_KEPT_LINES = 200
_MARK = "TUNETOOL_BUILD"
"""Environment variable of everything that a build starts. ninja gives each compiler a process group of its own."""
_OWN_LOCK = ".tunetool-build"
"""In the folder of all ops, held while one is built: torch's own lock appears only seconds after a build has begun."""
WAIT_SECONDS = 1800.0
"""Seconds that a build waits for another one."""
_POLL_SECONDS = 0.2


@dataclass(frozen=True)
class Built:
    """One op and the result of its build."""

    op: str
    status: str
    """built, already built, would be built, cannot be built here."""
    seconds: float
    detail: str = ""
    own_runtime: Sequence[str] = ()
    """Its files that hold a C++ runtime of their own; looked at after a build only."""


def build_ops(
    python: Path,
    ops: Sequence[str],
    rebuild: bool,
    environment: Mapping[str, str],
    progress: Progress,
    dry_run: bool = False,
) -> tuple[Probe, list[Built]]:
    """Build ``ops``, or what this machine can build; only say so for a dry run. Raises ``CannotJudge`` when one that
    was asked for fails."""
    installed = probe(python, environment)
    need_deepspeed(installed)
    wanted = list(ops) or [op for op in OPS if op != "gds" or installed.cuda]
    if "gds" in ops and not installed.cuda:
        raise CannotJudge(
            f"DeepSpeed's op `gds` needs a GPU, and torch in `{installed.python}` sees none", "leave it out"
        )
    if dry_run:
        return installed, [_planned(op, installed, rebuild) for op in wanted]
    if not rebuild and all(installed.has(op) for op in wanted):
        # Perhaps a place where this user may not even write a lock.
        return installed, [Built(op, "already built", 0.0, str(installed.find(op))) for op in wanted]
    with only_build(Path(installed.root or ""), progress):
        return installed, [_ensure(python, op, installed, op in ops, rebuild, environment, progress) for op in wanted]


def _planned(op: str, installed: Probe, rebuild: bool) -> Built:
    """What a run without `--dry-run` would do for one op."""
    built = installed.has(op) and not rebuild
    where = installed.find(op) if built else installed.folder(op)
    return Built(op, "already built" if built else "would be built", 0.0, str(where))


def _ensure(
    python: Path,
    op: str,
    installed: Probe,
    required: bool,
    rebuild: bool,
    environment: Mapping[str, str],
    progress: Progress,
) -> Built:
    """Build one op unless it is built."""
    for part in installed.parts(op):
        clear_lock(installed.folder(part) / LOCK, progress)
    began = time.monotonic()
    if installed.has(op) and not rebuild:
        return Built(op, "already built", 0.0, str(installed.find(op)))
    reason = _build(python, op, installed, environment, progress)
    seconds = time.monotonic() - began
    if reason is not None and required:
        raise CannotJudge(f"DeepSpeed's op `{op}` cannot be built here: {reason}", cure([op], environment))
    if reason is not None:
        return Built(op, CANNOT_BE_BUILT, seconds, reason)
    own = _try(python, op, installed, environment)
    return Built(op, "built", seconds, str(installed.find(op)), own)


@contextlib.contextmanager
def only_build(root: Path, progress: Progress, patience: float = WAIT_SECONDS) -> Iterator[None]:
    """A context in which no other tunetool builds ops in ``root``. Waits for one that does.

    Raises ``CannotJudge`` when the other one is not done after ``patience`` seconds.
    """
    root.mkdir(parents=True, exist_ok=True)
    with FileLock.file(root / _OWN_LOCK) as lock:
        _wait_for(lambda: None if lock.take(patience=0) else lock.note() or "?", root, progress, patience)
        lock.sign(str(os.getpid()))
        yield


def clear_lock(lock: Path, progress: Progress, patience: float = WAIT_SECONDS) -> None:
    """Wait until no process holds torch's lock of an op, then remove a stale one.

    Raises ``CannotJudge`` if another build still runs after ``patience`` seconds.
    """

    def holder() -> str | None:
        busy = builders(lock) if lock.exists() else []
        return str(busy[0]) if busy else None

    _wait_for(holder, lock.parent, progress, patience)
    if lock.exists():
        lock.unlink(missing_ok=True)
        progress.say(f"removed `{lock}`: left by a build that died, and DeepSpeed would have waited for it for ever")


def _wait_for(holder: Callable[[], str | None], folder: Path, progress: Progress, patience: float) -> None:
    """Wait until ``holder`` names no process any more."""
    process = holder()
    if process is None:
        return
    limit = f"{patience / 60:g} min"
    progress.say(f"process {process} builds in `{folder}`: waiting until it is done, at most {limit}")

    def is_free() -> bool:
        nonlocal process
        process = holder()
        return process is None

    with progress.step(f"waiting for process {process}", _EXPECTED_SECONDS) as tick:
        if not wait_for(is_free, patience, _POLL_SECONDS, tick):
            raise CannotJudge(
                f"process {process} still builds in `{folder}` after {limit}", f"see what it does: `ps -fp {process}`"
            )


def build_environment(environment: Mapping[str, str], python: Path, cpus: int, memory: int) -> dict[str, str]:
    """The environment of the compilers: ninja beside the interpreter, and as many jobs as memory allows."""
    built = without_preloads(environment)
    # Not resolved: the programs of a venv lie beside the link that its python is.
    built["PATH"] = f"{python.parent}{os.pathsep}{environment.get('PATH', os.defpath)}"
    jobs = max(1, min(cpus, memory // MEMORY_PER_JOB))
    built.setdefault("MAX_JOBS", str(jobs))
    architectures = environment.get("TORCH_CUDA_ARCH_LIST")
    if architectures:
        built["TORCH_CUDA_ARCH_LIST"] = plain_architectures(architectures)
    return built


def plain_architectures(text: str) -> str:
    """``9.0a`` as ``9.0``: DeepSpeed's builder takes numbers only."""
    plain = [re.sub(r"^(\d+\.\d+)[a-z]", r"\1", each) for each in re.split(r"[;\s]+", text.strip())]
    return ";".join(dict.fromkeys(plain))


def _build(python: Path, op: str, installed: Probe, environment: Mapping[str, str], progress: Progress) -> str | None:
    """Build an op; returns why it cannot be built here, or None. Raises ``CannotJudge`` when the build fails."""
    for part in installed.parts(op):
        if part == op or not installed.has(part):
            # Objects of another torch must not be taken for this one's: their times may say that they are newer.
            shutil.rmtree(installed.folder(part), ignore_errors=True)
    clean = build_environment(environment, python, os.cpu_count() or 1, memory_total())
    if clean.get("TORCH_CUDA_ARCH_LIST") != environment.get("TORCH_CUDA_ARCH_LIST"):
        progress.say(
            f"TORCH_CUDA_ARCH_LIST is taken as `{clean['TORCH_CUDA_ARCH_LIST']}`: DeepSpeed's builder refuses the rest"
        )
    progress.say(f"building `{op}` by {clean['MAX_JOBS']} jobs in `{installed.folder(op)}`: a few minutes")
    lines: list[str] = []
    began = time.monotonic()
    argv = [str(python), str(script("build_child.py")), op]
    with (
        progress.step(f"building {op}", _EXPECTED_SECONDS) as tick,
        contextlib.closing(_output(argv, clean, installed, op, tick)) as output,
    ):
        for line in output:
            lines = [*lines[-_KEPT_LINES:], line]
            match = _OBJECT.match(line)
            if match:
                progress.say(f"{op}: {match[1]} of {match[2]} objects, {time.monotonic() - began:.0f} s")
    code = int(lines.pop())
    if code == CANNOT:
        return next((line.removeprefix("cannot: ") for line in reversed(lines) if line.startswith("cannot: ")), "?")
    if code != 0:
        errors = [line for line in lines if "error:" in line.lower() or line.startswith("RuntimeError")]
        message, hint = describe_end(f"building DeepSpeed's op `{op}`", code, "\n".join(errors[:1] or lines))
        raise CannotJudge(message, hint or cure([op], environment))
    write_stamp(installed, op)
    if not installed.has(op):
        raise CannotJudge(
            f"DeepSpeed built `{op}`, but it is not in `{installed.folder(op)}`", "see TORCH_EXTENSIONS_DIR"
        )
    return None


def _output(
    argv: Sequence[str], environment: Mapping[str, str], installed: Probe, op: str, tick: Callable[[], None]
) -> Generator[str, None, None]:
    """Lines as they come, then the exit status. Afterwards nothing that the build started runs, and its lock is gone.

    The compilers end also when this process is killed outright.
    """
    token = secrets.token_hex(16)
    try:
        with swept_away(_MARK, token):
            settings = {**in_c_locale(environment), "PYTHONUNBUFFERED": "1", _MARK: token}
            process = worker.start(argv, settings, stderr=subprocess.STDOUT)
            try:
                yield from _lines(process, tick)
                yield str(process.wait())
            finally:
                worker.end(process)
    finally:
        for name in installed.parts(op):
            lock = installed.folder(name) / LOCK
            if lock.exists() and not builders(lock):
                lock.unlink(missing_ok=True)


def _lines(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> Iterator[str]:
    assert process.stdout is not None  # noqa: S101  (a pipe, as asked for above)
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ)
        rest = b""
        while True:
            if not selector.select(_POLL_SECONDS):
                tick()
                continue
            part = os.read(stdout.fileno(), 65536)
            if not part:
                break
            *whole, rest = (rest + part).split(b"\n")
            yield from (line.decode(errors="replace") for line in whole)


def _try(python: Path, op: str, installed: Probe, environment: Mapping[str, str]) -> list[str]:
    """Load the op once, in a process of its own, since a bad op kills it; returns the files with a C++ runtime of their
    own. Raises ``Failed``."""
    files = [str(installed.find(part)) for part in installed.parts(op)]
    with Worker(child_command(python, script("child.py")), f"loading DeepSpeed's op `{op}`", environment) as child:
        own: list[str] = child.ask({"do": "load", "files": files}, 120)["own_runtime"]
    return own


def cure(ops: Sequence[str], environment: Mapping[str, str]) -> str:
    """The line that installs what this machine lacks to compile these ops, or what is needed at all."""
    needed = [environment.get("CXX") or "c++", *([LIBAIO] if {"async_io", "gds"} & set(ops) else [])]
    missing = [program for program in needed if find(program) is None]
    if missing:
        known = ["c++" if program == environment.get("CXX") else program for program in missing]
        return f"install what is missing: {install_line(*known)}"
    return "it takes `g++ libaio-dev python3-dev` (Debian, Ubuntu), `gcc-c++ libaio-devel python3-devel` (RHEL)"
