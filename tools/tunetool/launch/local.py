"""Ranks on this machine, started by torchrun: one log per rank; all are ended together; the first failure is named.

``run_ranks`` runs a program to its end; ``Ranks`` does so as a context. Ranks that are asked for one thing after the
other are those of ``tunetool.launch.asked_ranks``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge
from tunetool.measure import worker
from tunetool.measure.worker import TAIL, TICK, describe_end
from tunetool.node.common.waiting import wait_for

_POLITE_SECONDS = 10.0
"""Seconds to wait after SIGTERM, which torchrun passes to its ranks before it waits for them."""
_VERDICT, _OWN_LOG = "verdict.json", "torchrun.log"


class RankFailed(CannotJudge):
    """A rank failed or could not be started. ``rank`` is None if torchrun itself failed; ``raw``: the end of the
    output;
    ``host``: the host of the rank, in a run of ``tunetool.launch.job``."""

    raw_name = "ranks.txt"

    def __init__(
        self, message: str, hint: str | None = None, rank: int | None = None, raw: str = "", host: str | None = None
    ) -> None:
        super().__init__(message, hint)
        self.rank = rank
        self.raw = raw
        self.host = host


class Ranks:
    """``world`` processes of one program. A context manager: all processes have ended when it is left, for any reason.

    ``meet``: torchrun's rendezvous arguments, for ranks on several machines; default: this machine only.
    """

    def __init__(
        self,
        program: Sequence[str],
        world: int,
        environment: Mapping[str, str],
        log_dir: Path,
        python: Path = Path(sys.executable),
        meet: Sequence[str] = ("--standalone", "--local-addr", "127.0.0.1"),
    ) -> None:
        self.world = world
        self.log_dir = log_dir
        self.exit: int | None = None
        """Exit status of the rank that failed first; negative for a signal number."""
        self._started: list[int] = []
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / _VERDICT).unlink(missing_ok=True)
        argv = [str(python), str(Path(__file__).with_name("agent.py")), str(log_dir / _VERDICT), *meet]
        argv += [
            "--nproc-per-node",
            str(world),
            "--max-restarts",
            "0",
            "--log-dir",
            str(log_dir),
            "--redirects",
            "3",
            *program,
        ]
        with (log_dir / _OWN_LOG).open("wb") as log:
            try:
                started = rank_environment(environment, world, os.cpu_count() or 1)
                self._process = worker.start(argv, started, stdout=log, stderr=subprocess.STDOUT)
            except OSError as error:
                raise RankFailed(f"`{python}` does not start: {error.strerror}") from None

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def register_pid(self, pid: int) -> None:
        """Register the process id of a rank, which leads a process group: ``end`` ends the whole group."""
        self._started.append(pid)

    def running(self) -> bool:
        """Whether torchrun is still running."""
        return self._process.poll() is None

    def check(self) -> None:
        """Raises ``RankFailed`` if torchrun has ended with a failure."""
        if self._process.poll():
            raise self.failure()

    def wait(self, timeout: float, tick: Callable[[], None] = lambda: None) -> None:
        """Wait until all ranks have succeeded, at most ``timeout`` seconds. Raises ``RankFailed``."""
        if not wait_for(lambda: not self.running(), timeout, TICK / 2, tick):
            self.end()
            raise RankFailed(
                f"the {self.world} ranks did not end within {timeout:.0f} s",
                "check for stuck I/O: `dmesg | tail`",
                raw=self.messages(),
            )
        self.check()

    def failure(self) -> RankFailed:
        """End the ranks, and return the error of the rank that failed first, with the end of its output."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_POLITE_SECONDS)
        self.end()
        try:
            verdict = json.loads((self.log_dir / _VERDICT).read_text())
            rank, code = int(verdict["rank"]), int(verdict["exit"])
        except (OSError, ValueError, KeyError, TypeError):
            output = tail(self.log_dir / _OWN_LOG)
            return RankFailed(*describe_end("torchrun", self._process.returncode or 0, output), raw=output)
        self.exit = code
        output = self.output_of(rank)
        return RankFailed(*describe_end(f"rank {rank}", code, output), rank=rank, raw=output)

    def output_of(self, rank: int) -> str:
        """The end of a rank's output: stdout, stderr last."""
        # torchrun: LOG_DIR/RUN_ID/attempt_N/LOCAL_RANK/
        logs = sorted(self.log_dir.glob(f"*/attempt_*/{rank}/std*.log"), reverse=True)
        return "".join(tail(path) for path in logs)

    def messages(self) -> str:
        """The end of the output of every rank and of torchrun."""
        parts = [f"--- rank {rank}\n{output}" for rank in range(self.world) if (output := self.output_of(rank))]
        torchrun_log = tail(self.log_dir / _OWN_LOG)
        return "\n".join([*parts, f"--- torchrun\n{torchrun_log}"] if torchrun_log else parts)

    def end(self) -> None:
        """End torchrun, its ranks and what they started. Ctrl-C counts once that is done."""
        ctrl_c = CtrlC()
        if not self._started:
            # Ranks that have not reported their ids yet: torchrun knows them.
            with ctrl_c.held():
                worker.end(self._process, _POLITE_SECONDS)
        left = list(self._started)
        while left:
            with ctrl_c.held():
                while left:
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        # torchrun makes each rank the leader of a session; a recycled id is not one of ours.
                        if os.getpgid(left[-1]) == left[-1] == os.getsid(left[-1]):
                            os.killpg(left[-1], signal.SIGKILL)
                    left.pop()
        worker.end(self._process, _POLITE_SECONDS)
        ctrl_c.deliver()


def run_ranks(
    program: Sequence[str],
    world: int,
    environment: Mapping[str, str],
    log_dir: Path,
    timeout: float,
    tick: Callable[[], None] = lambda: None,
) -> None:
    """Run ``program`` (what torchrun takes: ``-m MODULE ...`` or ``SCRIPT ...``) on ``world`` ranks to its end.

    Raises ``RankFailed`` when one dies or ``timeout`` seconds pass; then, and on Ctrl-C, all of them are gone.
    """
    with Ranks(program, world, environment, log_dir) as ranks:
        ranks.wait(timeout, tick)


def rank_environment(environment: Mapping[str, str], world: int, cpu_count: int) -> dict[str, str]:
    """Environment of the ranks: no variable that runs foreign code, none by which they would look for the store of a
    launcher around this one, an equal share of the cores, the loopback."""
    preloads = worker.without_preloads(environment)
    clean = {name: value for name, value in preloads.items() if not name.startswith("TORCHELASTIC_")}
    defaults = {
        # torchrun would set 1 for more than one rank, and say so on every start.
        "OMP_NUM_THREADS": str(max(1, cpu_count // world)),
        # The name of a node need not resolve, and all ranks are here.
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
    }
    return {**defaults, **clean}


def tail(path: Path) -> str:
    """The last ``TAIL`` bytes of a text file; empty if the file cannot be read."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
