"""QEMU processes: started detached, recognised by their own command line, ended by pid.

A pid alone may be reused by something else, so nothing is signalled unless its command line names the pid
file that only this node's QEMU has.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.lab.machine import Machine

QEMU = "qemu-system-x86_64"
START_SECONDS = 60.0
TERMINATE_SECONDS = 10.0


def qemu_version() -> str:
    """The first line of ``--version``: part of every key under which machine state is cached."""
    result = subprocess.run([QEMU, "--version"], capture_output=True, text=True, check=True, timeout=30)
    return result.stdout.splitlines()[0]


def start(machine: Machine) -> None:
    """Start QEMU in the background, in its own session and without our standard streams."""
    try:
        result = subprocess.run(
            [QEMU, *machine.arguments()],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"`{QEMU}` did not start within {START_SECONDS:.0f} s") from None
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if "warning:" not in line]
        reason = lines[-1] if lines else f"exit status {result.returncode}"
        raise CannotJudge(f"`{QEMU}` did not start: {reason.removeprefix(QEMU + ': ')}")


def pid_of(pid_file: Path) -> int | None:
    """The pid of the QEMU that wrote ``pid_file``, or None when it is gone."""
    try:
        pid = int(pid_file.read_text())
    except (OSError, ValueError):
        return None
    return pid if _owns(pid, str(pid_file)) else None


def all_under(directory: Path) -> list[int]:
    """Every QEMU whose pid file is under ``directory``, including those that are not (yet) in our state."""
    prefix = str(directory) + "/"
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit() and _owns(int(path.name), prefix)]


def _owns(pid: int, pid_file_prefix: str) -> bool:
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    if not arguments[0].endswith(QEMU) or "-pidfile" not in arguments:
        return False
    return arguments[arguments.index("-pidfile") + 1].startswith(pid_file_prefix)


def end(pid: int) -> None:
    """End one of our processes and wait until it is gone: SIGTERM first, so that QEMU closes its files."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if wait_gone(pid, TERMINATE_SECONDS):
            return
    raise CannotJudge(f"process `{pid}` does not end", f"kill -9 {pid}")


def wait_gone(pid: int, seconds: float) -> bool:
    """Wait until a process has ended; False when it still runs after ``seconds``."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _running(pid):
            return True
        time.sleep(0.02)
    return False


def _running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    # The state follows the name in parentheses; a zombie holds no file and no memory any more.
    return stat.rpartition(")")[2].split()[0] != "Z"


def pick_port(taken: set[int]) -> int:
    """A TCP port on the loopback address that is free now."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port not in taken:
            return port


def has_multicast() -> bool:
    """Whether a multicast group can be joined on the loopback address: not in every container."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            group = socket.inet_aton("239.0.0.1") + socket.inet_aton("127.0.0.1")
            probe.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
        except OSError:
            return False
    return True


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """A context in which a second Ctrl-C does not interrupt the clean-up."""
    try:
        before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    except ValueError:  # not the main thread: no signal reaches us there anyway
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
