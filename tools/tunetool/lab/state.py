"""What runs: one directory and one JSON file per node, and a lock so that two calls never collide."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from tunetool import user_directories
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.lab import qemu
from tunetool.lab.machine import Boot, Drive, Machine
from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.files import replace_file

_NODE_NAME = re.compile(r"^node[1-9][0-9]*$")


class _HasDirectory(Protocol):
    @property
    def directory(self) -> Path: ...


class InDirectory:
    """``root = InDirectory("root.img")`` in a class: an object's ``root`` is that path below its ``directory``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: _HasDirectory, _: type | None = None) -> Path:
        """The path below the directory of ``owner``."""
        return owner.directory / self._name


@dataclass
class Fault:
    """A fault that was injected and not yet reset."""

    kind: str
    serial: str


@dataclass
class NodeState:
    """One node as it was started. ``drives`` lists the system drive, ``nvme0n1``, first."""

    name: str
    index: int
    os_name: str
    image: Path
    memory: int
    accel: str
    ports: int
    drive_count: int
    drive_size: int
    ssh_port: int
    pid: int = 0
    started_ticks: int = 0
    booted_from: str = "snapshot"
    offline: bool = False
    """Whether its network ends at the other nodes."""
    numa: bool = False
    """Whether the slots of its drives are those of its NUMA nodes."""
    drives: list[Drive] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def system_serial(self) -> str:
        """The serial of the system drive, which tunetool must not touch."""
        return system_serial(self.index)

    @property
    def key(self) -> Path:
        """The private ssh key for root."""
        return self.image / "id_ed25519"

    def drive(self, serial: str) -> Drive:
        """The attached drive with this serial."""
        for drive in self.drives:
            if drive.serial == serial:
                return drive
        known = ", ".join(f"`{drive.serial}`" for drive in self.drives)
        raise UsageProblem(f"`{serial}` is not a drive of `{self.name}`", f"it has {known or 'no drives'}")


def data_serial(node: int, number: int) -> str:
    """``LAB1NV3``: the third data drive of the first node. No two nodes share a serial."""
    return f"LAB{node}NV{number}"


def system_serial(node: int) -> str:
    """``LAB1SYS``: the first node's ninth drive."""
    return f"LAB{node}SYS"


def cache_dir() -> Path:
    """Images and snapshots, kept between labs."""
    return user_directories.cache() / "lab"


def state_dir() -> Path:
    """Everything about running nodes; ``down`` removes it. ``TUNETOOL_LAB_DIR`` puts a second lab elsewhere."""
    chosen = os.environ.get("TUNETOOL_LAB_DIR")
    if chosen:
        return Path(chosen).absolute()
    return user_directories.state() / "lab"


class Lab:
    """The state directory of one lab."""

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory or state_dir()

    @property
    def sockets(self) -> Path:
        """Where unix sockets live: their paths may have 107 characters, which a state directory can exceed."""
        digest = hashlib.sha256(str(self.directory).encode()).hexdigest()[:8]
        return Path(tempfile.gettempdir()) / f"tunetool-lab-{os.getuid()}-{digest}"

    known_hosts = InDirectory("known_hosts")
    """The lab's own known hosts, so that its nodes do not get into the user's ``~/.ssh``."""
    generated_file = InDirectory("generated.json")
    """Lists the inventories that were written, for ``down`` to remove."""

    @property
    def link(self) -> str:
        """The multicast group and port that join the nodes of this lab and no others."""
        digest = hashlib.sha256(str(self.directory).encode()).digest()
        # Ports below those that the kernel gives out by itself.
        return f"239.{digest[0]}.{digest[1]}.{digest[2]}:{20000 + int.from_bytes(digest[3:5], 'big') % 10000}"

    def node_dir(self, name: str) -> Path:
        """Directory of one node."""
        return self.directory / name

    def saved_dir(self, name: str) -> Path:
        """The saved states of one node: not in its directory, which goes with every reset."""
        return self.directory / "saved" / name

    def qmp_socket(self, name: str) -> Path:
        """Socket of the node's QEMU monitor."""
        return self.sockets / f"{name}.qmp"

    def pid_file(self, name: str) -> Path:
        """Pid file, written by QEMU itself, so that it exists even if our own process was killed."""
        return self.node_dir(name) / "qemu.pid"

    def machine(self, node: NodeState, disk: Path, boot: Boot) -> Machine:
        """The node's QEMU, powered on, without its drives."""
        return Machine(
            name=f"tunetool-lab-{node.name}",
            memory=node.memory,
            accel=node.accel,
            ports=node.ports,
            disk=disk,
            disk_format="qcow2",
            ssh_port=node.ssh_port,
            qmp_socket=self.qmp_socket(node.name),
            pid_file=self.pid_file(node.name),
            serial_log=self.node_dir(node.name) / "serial.log",
            link=self.link if qemu.has_multicast() else "",
            offline=node.offline,
            numa=node.numa,
            boot=boot,
        )

    def prepare(self) -> None:
        """Create the directories, private to the user: a process that reaches a socket controls the node."""
        self.directory.mkdir(parents=True, exist_ok=True)
        try:
            self.sockets.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise CannotJudge(f"`{self.sockets}` is in the way", "remove it") from None
        status = self.sockets.lstat()
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise CannotJudge(f"`{self.sockets}` belongs to another user", "remove it, or set TMPDIR")

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lab: a second call that changes it stops with `busy` at once."""
        self.prepare()
        with file_lock(self.sockets / "lock"):
            yield

    def names(self) -> list[str]:
        """The nodes that have a directory, complete or not, by number."""
        if not self.directory.is_dir():
            return []
        names = [path.name for path in self.directory.iterdir() if _NODE_NAME.match(path.name)]
        return sorted(names, key=lambda name: int(name[4:]))

    def nodes(self) -> list[NodeState]:
        """Every node whose state can be read."""
        return [self.read(name) for name in self.names() if (self.node_dir(name) / "node.json").exists()]

    def read(self, name: str) -> NodeState:
        """One node's state. Raises ``UsageProblem`` for an unknown name."""
        path = self.node_dir(name) / "node.json"
        if not _NODE_NAME.match(name) or not path.exists():
            known = ", ".join(f"`{known}`" for known in self.names())
            raise UsageProblem(
                f"`{name}` is not a node of this lab", f"there is {known}" if known else "start one: tunetool lab up"
            )
        try:
            return decode_node(json.loads(path.read_text()))
        except (ValueError, KeyError, TypeError) as error:
            raise CannotJudge(f"`{path}` cannot be read: {error}", f"tunetool lab down {name}") from error

    def write(self, node: NodeState) -> None:
        """Record a node, atomically."""
        text = json.dumps(asdict(node), default=str, indent=2) + "\n"
        replace_file(str(self.node_dir(node.name) / "node.json"), text, sync=False)

    def remove_node(self, name: str) -> None:
        """Remove a node and its files. Its QEMU must have ended."""
        shutil.rmtree(self.node_dir(name), ignore_errors=True)
        self.qmp_socket(name).unlink(missing_ok=True)
        shutil.rmtree(self.sockets / f"cm-{name}", ignore_errors=True)

    def remove(self) -> None:
        """Remove the whole lab."""
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.rmtree(self.sockets, ignore_errors=True)


@contextlib.contextmanager
def file_lock(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[None]:
    """An exclusive lock that ends with the process, however that ends.

    If another process holds it: raises `busy`, or with ``on_wait`` calls that and waits.
    """
    with FileLock.file(path, 0o600) as lock:
        if not lock.take(patience=0):
            if on_wait is None:
                raise CannotJudge(
                    "busy: another `tunetool lab` is changing this lab",
                    "wait for it, or set TUNETOOL_LAB_DIR to use your own lab",
                )
            on_wait()
            lock.take()
        yield


def decode_node(data: dict[str, Any]) -> NodeState:
    """A node's state from its JSON."""
    data["image"] = Path(data["image"])
    data["drives"] = [Drive(**{**drive, "path": Path(drive["path"])}) for drive in data["drives"]]
    data["faults"] = [Fault(**fault) for fault in data["faults"]]
    return NodeState(**data)
