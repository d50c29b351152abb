"""QEMU: its processes, started detached, recognised by their own command line and ended by pid; whether KVM really
works under it; and its monitor (QMP).

A pid alone may be reused by something else, so nothing is signalled unless its command line names the pid
file that only this node's QEMU has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge
from tunetool.lab.machine import Machine
from tunetool.node.common.commands import captured, run
from tunetool.node.common.files import replace_file
from tunetool.node.common.waiting import try_for, wait_for

QEMU = "qemu-system-x86_64"
START_SECONDS = 60.0
TERMINATE_SECONDS = 10.0


def qemu_version() -> str:
    """The first line of ``--version``: part of every key under which machine state is cached."""
    return run([QEMU, "--version"], timeout=30).stdout.splitlines()[0]


def start(machine: Machine) -> None:
    """Start QEMU in the background, in its own session and without our standard streams."""
    try:
        result = captured([QEMU, *machine.arguments()], START_SECONDS, start_new_session=True)
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
    return wait_for(lambda: not _running(pid), seconds, 0.02)


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


PROBE_SECONDS = 6.0
KVM_DEVICE = Path("/dev/kvm")

_PROBE_MACHINE = "-machine q35 -accel kvm -cpu host -m 256M -nodefaults -no-user-config -display none -no-reboot"
_PROBE_ARGUMENTS = [*_PROBE_MACHINE.split(), "-append", "console=ttyS0 earlyprintk=ttyS0 panic=-1"]


def accelerator(kernel: Path, cache: Path, say: Callable[[str], None]) -> str:
    """``kvm`` if a kernel boots under it, else ``tcg``: /dev/kvm can exist and be useless, as it is under nested
    virtualisation. The answer is cached per host kernel and QEMU version."""
    if not os.access(KVM_DEVICE, os.R_OK | os.W_OK):
        if KVM_DEVICE.exists():
            say(f"{KVM_DEVICE} is closed to you (group kvm?): nodes will be several times slower")
        return "tcg"
    remembered = cache / "kvm.json"
    key = hashlib.sha256("\0".join([platform.node(), platform.release(), qemu_version()]).encode()).hexdigest()
    try:
        known = json.loads(remembered.read_text())
        if known["key"] == key and known["accel"] in ("kvm", "tcg"):
            return str(known["accel"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    accel = "kvm" if _boots(kernel) else "tcg"
    replace_file(str(remembered), json.dumps({"key": key, "accel": accel}) + "\n", sync=False)
    return accel


def _boots(kernel: Path) -> bool:
    # A first line on the serial console proves that the guest ran through decompression, where nested KVM hangs.
    with tempfile.TemporaryDirectory(prefix="tunetool-kvm-") as directory:
        serial = Path(directory) / "serial"
        process = subprocess.Popen(
            [QEMU, *_PROBE_ARGUMENTS, "-serial", f"file:{serial}", "-kernel", str(kernel)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

        def said() -> bool:
            return serial.exists() and b"Linux version" in serial.read_bytes()

        try:
            wait_for(lambda: said() or process.poll() is not None, PROBE_SECONDS)
            return said()
        finally:
            process.kill()
            process.wait()


CONNECT_SECONDS = 30.0
COMMAND_SECONDS = 60.0


class QemuEnded(CannotJudge):
    """QEMU ended while it was spoken to: it crashed, or somebody ended it."""


class Qmp:
    """A connection to one QEMU. Use it as a context manager: QEMU serves one client at a time."""

    def __init__(self, path: Path, connect_seconds: float = CONNECT_SECONDS) -> None:
        self._path = path
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self._socket = _connect(path, connect_seconds)
        self._receive(time.monotonic() + COMMAND_SECONDS)  # the greeting
        self.command("qmp_capabilities")

    def __enter__(self) -> Qmp:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection, so that the next client can connect."""
        self._socket.close()

    def command(
        self, name: str, arguments: Mapping[str, object] | None = None, timeout: float = COMMAND_SECONDS
    ) -> Any:
        """Run one command and return its result. Raises an error with QEMU's message."""
        self._send(name, arguments or {}, None)
        return self._answer(name, timeout)

    def pass_file(self, name: str, descriptor: int) -> None:
        """Pass an open file to QEMU, which can then open it as ``fd:name``."""
        self._send("getfd", {"fdname": name}, descriptor)
        self._answer("getfd", COMMAND_SECONDS)

    def wait_event(self, name: str, timeout: float, **data: object) -> dict[str, Any]:
        """The data of the next event ``name`` whose data holds every item of ``data``."""
        deadline = time.monotonic() + timeout
        while True:
            for event in self._events:
                values: dict[str, Any] = event.get("data", {})
                if event["event"] == name and all(values.get(key) == value for key, value in data.items()):
                    self._events.remove(event)
                    return values
            message = self._receive(deadline)
            if "event" in message:
                self._events.append(message)

    def _send(self, name: str, arguments: Mapping[str, object], descriptor: int | None) -> None:
        message: dict[str, object] = {"execute": name}
        if arguments:
            message["arguments"] = dict(arguments)
        line = json.dumps(message).encode() + b"\n"
        try:
            if descriptor is None:
                self._socket.sendall(line)
            else:
                socket.send_fds(self._socket, [line], [descriptor])
        except OSError as error:
            raise self._gone() from error

    def _answer(self, name: str, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        while True:
            message = self._receive(deadline)
            if "event" in message:
                self._events.append(message)
            elif "error" in message:
                raise CannotJudge(f"QEMU refused `{name}`: {message['error'].get('desc', 'no reason given')}")
            elif "return" in message:
                return message["return"]

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0:
                raise CannotJudge(f"QEMU did not answer on `{self._path}`", "tunetool lab status")
            self._socket.settimeout(seconds_left)
            try:
                chunk = self._socket.recv(65536)
            except TimeoutError:
                continue
            except OSError as error:
                raise self._gone() from error
            if not chunk:
                raise self._gone()
            self._buffer += chunk
        line, self._buffer = self._buffer.split(b"\n", 1)
        message: dict[str, Any] = json.loads(line)
        return message

    def _gone(self) -> QemuEnded:
        return QemuEnded(f"QEMU ended while `{self._path}` was in use", "tunetool lab status")


def _connect(path: Path, seconds: float) -> socket.socket:
    def connected() -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(seconds)
            connection.connect(str(path))
        except OSError:
            connection.close()
            raise
        return connection

    try:
        return try_for(connected, OSError, seconds, 0.05)
    except OSError as error:
        raise CannotJudge(f"`{path}`: {error.strerror or error}", "tunetool lab status") from error
