"""Ranks on this machine only."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tunetool.ctrl_c import CtrlC
from tunetool.errors import UsageProblem
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed, tail
from tunetool.launch.spec import SPEC, VERDICT, NodeSpec, Verdict, read_verdict, write
from tunetool.measure.progress import Progress
from tunetool.node.common.commands import last_line

_TICK = 0.1
_END_SECONDS = 60.0
GUARD = "tunetool.launch.node"


class LocalLauncher:
    """Runs torchrun here, under a guard that outlives this process."""

    name = "local"

    def __init__(self, progress: Progress) -> None:
        self._progress = progress

    def run(self, job: Job, tick: Callable[[], None]) -> None:
        """See ``tunetool.launch.job.Launcher``."""
        if job.hosts:
            raise UsageProblem("the launcher `local` takes no hosts", "use `--launcher ssh` with an inventory")
        job.directory.mkdir(parents=True, exist_ok=True)
        directory = Path(tempfile.mkdtemp(prefix="tunetool-launch-"))
        try:
            spec = NodeSpec(
                run=secrets.token_hex(16),
                directory=str(directory),
                out=str(job.directory.resolve()),
                hosts=[socket.gethostname()],
                node=0,
                ranks_per_host=job.ranks_per_host,
                program=list(job.program),
                python=job.python or sys.executable,
                environment=dict(job.environment),
                timeout=job.timeout,
                stall=job.stall,
            )
            write(spec, directory, SPEC)
            judge([_run_guard(spec, directory, tick)], self._progress)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def _run_guard(spec: NodeSpec, directory: Path, tick: Callable[[], None]) -> Verdict:
    log = directory / "guard.log"
    with log.open("wb") as stream:
        # After an interrupt, the guard continues until it has cleaned up: its standard input has closed.
        guard = subprocess.Popen(
            [sys.executable, "-m", GUARD, str(directory)],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    assert guard.stdin is not None  # noqa: S101  (a pipe, as asked for above)
    try:
        while guard.poll() is None:
            tick()
            time.sleep(_TICK)
    finally:
        with contextlib.suppress(OSError):
            guard.stdin.close()
        _wait(guard)
    try:
        return read_verdict((directory / VERDICT).read_text())
    except (OSError, ValueError):
        output = tail(log)
        raise RankFailed(f"the guard of the ranks died: {last_line(output)}", raw=output, host=spec.host) from None


def _wait(guard: subprocess.Popen[bytes]) -> None:
    """End the guard. Ctrl-C counts once that is done."""
    ctrl_c = CtrlC()
    if not ctrl_c.wait_for(lambda: guard.poll() is not None, _END_SECONDS, _TICK):
        guard.kill()
        guard.wait()
    ctrl_c.deliver()


def judge(verdicts: list[Verdict], progress: Progress) -> None:
    """Raises ``RankFailed`` for the failure of the run, which the first node decided for all."""
    for verdict in verdicts:
        for name in verdict.kept:
            progress.say(f"{verdict.host}: `/dev/shm/{name}` stays: another process has it mapped")
    for verdict in sorted(verdicts, key=lambda node_verdict: node_verdict.node):
        if (failure := verdict.failure) is not None:
            raise RankFailed(failure.message, failure.hint, failure.rank, failure.raw, failure.host)
