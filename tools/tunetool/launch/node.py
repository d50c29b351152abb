"""A node's guard: ``python -m tunetool.launch.node DIR`` starts the ranks of one node, watches them, and cleans up.

DIR contains ``spec.json`` (``tunetool.launch.spec``), and ``verdict.json`` at the end. The guard ends the ranks when
its standard input is closed or on SIGTERM. It survives the launcher, so that nothing of the run remains if the launcher
is killed; it then removes DIR too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import time
from pathlib import Path
from types import FrameType

from tunetool.launch import rank as ranks
from tunetool.launch.control_channel import meet_others
from tunetool.launch.decision import Report
from tunetool.launch.engines import Adopted, Engine, Torchrun, started
from tunetool.launch.shm_cleanup import ShmCleanup
from tunetool.launch.spec import RUN, VERDICT, Failure, NodeSpec, Verdict, read_spec, write
from tunetool.launch.start import PROGRAM, STACK, STACK_SIGNAL
from tunetool.launch.watchdog import Compilers, Stuck, innermost, read_beats
from tunetool.measure.marked_processes import end_marked, has_mark, marked
from tunetool.node.common.waiting import wait_for

_TICK = 0.1
_SIOCGIFADDR = 0x8915
_LOOK_EVERY = 2.0
_DUMP_SECONDS = 3.0
"""Seconds to wait for stacks. faulthandler writes them at once, unless the process is stuck in the kernel."""


class Guard:
    """Runs one node's part of a run."""

    def __init__(self, directory: Path, spec: NodeSpec) -> None:
        self._directory = directory
        self._spec = spec
        self._shm_cleanup = ShmCleanup()
        self._compilers = Compilers()
        self._looked_at = 0.0
        self._stuck: dict[int, Stuck] | None = None
        self._hung_up = False

    def run(self) -> Verdict:
        """Run until the run has ended on all nodes. Nothing of it remains on this node except DIR."""
        spec = self._spec
        environment = rank_variables(spec, self._directory)
        program = {"program": list(spec.program), "environment": environment}
        path = self._directory / PROGRAM
        path.touch(mode=0o600)
        failure: Failure | None = None
        engine: Engine = Adopted(spec, self._directory)
        if spec.engine == "torchrun":
            engine = Torchrun(spec, self._directory, {**os.environ, **environment})
        try:
            with meet_others(spec) as channel:
                path.write_text(json.dumps(program))
                try:
                    with engine:
                        try:
                            while True:
                                self._look()
                                decision = channel.exchange(self._report(engine))
                                if decision.do == "end":
                                    failure = decision.failure
                                    break
                                if self._wait():
                                    failure = Failure("the launcher has ended", spec.host)
                                    break
                                if decision.do == "go":
                                    self._stuck = None
                                elif self._stuck is None:
                                    self._stuck = self._dump()
                        finally:
                            # Also after a signal: the files in shared memory are known only now.
                            self._look(now=True)
                finally:
                    end_marked(RUN, spec.run)
        except OSError as error:
            where = f"`{spec.master[0]}` port {spec.line_port}" if spec.master else f"`{self._directory}`"
            failure = Failure(f"{where}: {error.strerror or error} (on `{spec.host}`)", spec.host)
        finally:
            kept = self._shm_cleanup.remove()
        return Verdict(spec.node, spec.host, failure, kept)

    @property
    def abandoned(self) -> bool:
        """Whether the launcher has ended, so that nobody waits for a verdict."""
        return self._hung_up

    def _look(self, now: bool = False) -> None:
        if not now and time.monotonic() - self._looked_at < _LOOK_EVERY:
            return
        self._looked_at = time.monotonic()
        ranks_here = started(self._directory).values()
        running = marked(RUN, self._spec.run)
        self._compilers.look(running)
        # A rank that has ended has reported its id; its child processes are known only while they run.
        self._shm_cleanup.look([*running, *(rank_file["pid"] for rank_file in ranks_here)])
        for rank_file in ranks_here:
            address, port = rank_file["master"]
            self._shm_cleanup.expect_buffers(address, port, self._spec.world)

    def _report(self, engine: Engine) -> Report:
        beats, compiling = read_beats(self._directory), self._compilers.age()
        failure = engine.failure()
        if failure is not None:
            return Report(self._spec.node, "failed", failure, beats, self._stuck, compiling)
        return Report(self._spec.node, "done" if engine.done() else "running", None, beats, self._stuck, compiling)

    def _wait(self) -> bool:
        """Wait a moment. Returns whether the launcher has closed standard input."""
        ready, _, _ = select.select([0], [], [], _TICK)
        self._hung_up = bool(ready) and not os.read(0, 4096)
        return self._hung_up

    def _dump(self) -> dict[int, Stuck]:
        """Dump every rank's stack to its ``stack.txt``; returns the code position of each rank."""
        stack_files = {rank: Path(self._spec.out) / f"rank-{rank}" / STACK for rank in started(self._directory)}
        before = {rank: _size(path) for rank, path in stack_files.items()}
        for rank_file in started(self._directory).values():
            if has_mark(rank_file["pid"], RUN, self._spec.run):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank_file["pid"], STACK_SIGNAL)
        wait_for(lambda: all(_size(path) != before[rank] for rank, path in stack_files.items()), _DUMP_SECONDS, 0.05)
        time.sleep(0.05)  # a stack of many threads is more than one write
        innermost_frames = {rank: innermost(_read(path)) for rank, path in stack_files.items()}
        return {rank: stuck for rank, stuck in innermost_frames.items() if stuck is not None}


def rank_variables(spec: NodeSpec, directory: Path) -> dict[str, str]:
    """The environment variables that the ranks of this node get in addition."""
    variables = {
        **spec.environment,
        RUN: spec.run,
        ranks.OUT: spec.out,
        ranks.NODE: str(directory),
        ranks.LAUNCHED: repr(time.time()),
    }
    if spec.master is not None and (interface := _interface_towards(spec.towards or spec.master[0])) is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            variables.setdefault(name, os.environ.get(name, interface))
    return variables


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


class _Terminated(BaseException):
    """The guard got SIGTERM."""


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise _Terminated


def _interface_towards(address: str) -> str | None:
    """The network interface from which this machine connects to ``address`` (IPv4); None if unknown.

    By default, gloo and NCCL use the address to which the host name resolves (127.0.1.1 on Debian), or any interface.
    """
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, 9))  # sends nothing, only looks up the route
            own_address = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                with contextlib.suppress(OSError):
                    request = struct.pack("256s", name.encode()[:15])
                    reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
                    if socket.inet_ntoa(reply[20:24]) == own_address:
                        return name
    except OSError:
        return None
    return None


def main(name: str) -> int:
    """Run the guard for the directory ``name``. Returns exit status 0 if it has written a verdict, 3 after SIGTERM."""
    directory = Path(name)
    signal.signal(signal.SIGTERM, _on_sigterm)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides
    spec = read_spec(directory)
    guard = Guard(directory, spec)
    abandoned = True
    try:
        verdict = guard.run()
        abandoned = guard.abandoned
        write(verdict, directory, VERDICT)
    except _Terminated:
        return 3
    finally:
        if abandoned:
            shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
