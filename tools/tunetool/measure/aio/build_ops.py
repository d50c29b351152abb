"""Compile DeepSpeed's ops once, where everybody sees it, so that nothing compiles in the middle of a job."""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure.aio.build_child import CANNOT
from tunetool.measure.aio.ops import LOCK, Probe, builders, need_deepspeed, probe, write_stamp
from tunetool.measure.aio.process import Child, describe_end, script
from tunetool.measure.fio import die_with_parent, preloads
from tunetool.measure.progress import Progress
from tunetool.node.machine.memory import memory_total

OPS = ("async_io", "gds", "utils", "cpu_adam")
GIB = 2**30
MEMORY_PER_JOB = 2 * GIB
"""What a compiler of torch's headers takes at most, rounded up."""
_OBJECT = re.compile(r"^\[(\d+)/(\d+)\]")
_EXPECTED_SECONDS = 300.0
_KEPT_LINES = 200


@dataclass(frozen=True)
class Built:
    """One op and what became of it."""

    op: str
    status: str
    """built, already built, would be built, cannot be built here."""
    seconds: float
    detail: str = ""


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
    found = probe(python, environment)
    need_deepspeed(found)
    wanted = list(ops) or [op for op in OPS if op != "gds" or found.cuda]
    done = []
    if "gds" in ops and not found.cuda:
        raise CannotJudge(f"DeepSpeed's op `gds` needs a GPU, and torch in `{found.python}` sees none", "leave it out")
    for op in wanted:
        if dry_run:
            there = found.has(op) and not rebuild
            status = "already built" if there else "would be built"
            done.append(Built(op, status, 0.0, str(found.find(op) if there else found.folder(op))))
            continue
        for part in found.parts(op):
            clear_lock(found.folder(part) / LOCK, progress)
        began = time.monotonic()
        if found.has(op) and not rebuild:
            done.append(Built(op, "already built", 0.0, str(found.find(op))))
            continue
        reason = _build(python, op, found, environment, progress)
        seconds = time.monotonic() - began
        if reason is not None and ops:
            raise CannotJudge(f"DeepSpeed's op `{op}` cannot be built here: {reason}", _hint(op))
        if reason is None:
            _try(python, op, found, environment)
        done.append(Built(op, "cannot be built here" if reason else "built", seconds, reason or str(found.find(op))))
    return found, done


def clear_lock(lock: Path, progress: Progress) -> None:
    """Remove a lock that nobody holds. Raises ``CannotJudge`` when somebody builds."""
    if not lock.exists():
        return
    busy = builders(lock)
    if busy:
        raise CannotJudge(f"process {busy[0]} builds in `{lock.parent}`", "wait until it is done")
    lock.unlink(missing_ok=True)
    progress.say(f"removed `{lock}`: left by a build that died, and DeepSpeed would have waited for it for ever")


def build_environment(environment: Mapping[str, str], python: Path, cpus: int, memory: int) -> dict[str, str]:
    """What the compilers are to see: ninja beside the interpreter, as many jobs as there is memory for."""
    built = {name: value for name, value in environment.items() if name not in preloads(environment)}
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


def _build(python: Path, op: str, found: Probe, environment: Mapping[str, str], progress: Progress) -> str | None:
    """Why it cannot be built here, None when it was built. Raises ``CannotJudge`` when the build fails."""
    for part in found.parts(op):
        if part == op or not found.has(part):
            # Objects of another torch must not be taken for this one's: their times may say that they are newer.
            shutil.rmtree(found.folder(part), ignore_errors=True)
    clean = build_environment(environment, python, os.cpu_count() or 1, memory_total())
    if clean.get("TORCH_CUDA_ARCH_LIST") != environment.get("TORCH_CUDA_ARCH_LIST"):
        progress.say(
            f"TORCH_CUDA_ARCH_LIST is taken as `{clean['TORCH_CUDA_ARCH_LIST']}`: DeepSpeed's builder refuses the rest"
        )
    progress.say(f"building `{op}` by {clean['MAX_JOBS']} jobs in `{found.folder(op)}`: a few minutes")
    lines: list[str] = []
    began = time.monotonic()
    with progress.step(f"building {op}", _EXPECTED_SECONDS) as tick:
        for line in _output([str(python), str(script("build_child.py")), op], clean, found, op, tick):
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
        raise CannotJudge(message, hint or _hint(op))
    write_stamp(found, op)
    if not found.has(op):
        raise CannotJudge(f"DeepSpeed built `{op}`, but it is not in `{found.folder(op)}`", "see TORCH_EXTENSIONS_DIR")
    return None


def _output(argv: Sequence[str], environment: Mapping[str, str], found: Probe, op: str, tick: object) -> Iterator[str]:
    """Lines as they come, then the exit status; the whole group is gone and its lock removed when it ends."""
    call = tick if callable(tick) else lambda: None
    process = subprocess.Popen(
        argv,
        env={**environment, "LC_ALL": "C", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=die_with_parent,  # noqa: PLW1509  (tunetool runs no threads here)
    )
    assert process.stdout is not None  # noqa: S101  (a pipe, as asked for above)
    try:
        with selectors.DefaultSelector() as selector, process.stdout as stdout:
            selector.register(stdout, selectors.EVENT_READ)
            rest = b""
            while True:
                if not selector.select(0.2):
                    call()
                    continue
                part = os.read(stdout.fileno(), 65536)
                if not part:
                    break
                *whole, rest = (rest + part).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        yield str(process.wait())
    finally:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for name in found.parts(op):
            lock = found.folder(name) / LOCK
            if lock.exists() and not builders(lock):
                lock.unlink(missing_ok=True)


def _try(python: Path, op: str, found: Probe, environment: Mapping[str, str]) -> None:
    """Load it once, in a process that may die of it. Raises ``Failed``."""
    files = [str(found.find(part)) for part in found.parts(op)]
    with Child([str(python), str(script("child.py"))], f"loading DeepSpeed's op `{op}`", environment) as child:
        child.ask({"do": "load", "files": files}, 120)


def _hint(op: str) -> str:
    if op in ("async_io", "gds"):
        return "install a C++ compiler, libaio's and Python's headers: `apt install g++ libaio-dev python3-dev`"
    return "install a C++ compiler: `apt install g++`"
