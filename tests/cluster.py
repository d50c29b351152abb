"""A cluster on one machine, for tests of what runs on many nodes: the fixture `cluster` of tests/finetune/conftest.py.

Two nodes and a control node, as namespaces with their own network, host name, processes, /dev/shm, /tmp and /run, joined
by a bridge; this machine reaches them over it as well. Each runs its own sshd. Their root is this machine's, so that
the checkout and its Python are at the same paths; what they write there stays in their memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from cluster_layer import NoLayer, layer
from programs import need_program
from tunetool.measure.worker import die_with_parent
from waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[1]
NODES = ("node1", "node2")
CONTROL = "control"
"""The node of Slurm's controller, where users would log in. It is in no inventory."""
_PROGRAM = str(Path(__file__).with_name("cluster_node.py"))
_FIRST = 10
_THIS_MACHINE = 1
_INVENTED = "10.213"
_PROGRAMS = ("ip", "tc", "mount", "umount", "pivot_root", "nsenter", "ssh", "ssh-keygen")
_SSHD = """
Port 22
HostKey /etc/ssh/cluster_host_key
AuthorizedKeysFile /root/.ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
StrictModes no
UsePAM no
MaxStartups 100
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
"""
_PASSED_ON = ("XDG_CACHE_HOME", "LANG", "OMP_NUM_THREADS")


@dataclass
class Node:
    """One node. ``pid`` is its first process, as this machine counts."""

    name: str
    address: str
    pid: int
    keeper: subprocess.Popen[str] = field(repr=False)
    groups: list[Path] = field(default_factory=list)


class Cluster:
    """Made by ``cluster_of_two``. ``shared`` is one directory on the real disk, at the same path on every node."""

    def __init__(self, folder: Path, programs: Path, third: int, nodes: Sequence[str]) -> None:
        self.folder, self.shared = folder, folder / "shared"
        self.key, self.known_hosts, self.inventory = folder / "key", folder / "known_hosts", folder / "inventory.yml"
        self._programs, self._third, self._names = programs, third, nodes
        self._link = f"tunetool{third}"
        self.nodes: dict[str, Node] = {}
        self.shared.mkdir()
        for name in ("key", "host_key"):
            _run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "tests", "-f", str(folder / name)])
        host_key = " ".join((folder / "host_key.pub").read_text().split()[:2])
        everyone = [CONTROL, *nodes]
        self.known_hosts.write_text("".join(f"{name},{self.address(name)} {host_key}\n" for name in everyone))
        self.inventory.write_text(json.dumps(self._inventory(), indent=2))

    def address(self, name: str) -> str:
        """The IPv4 address of a node."""
        return f"{_INVENTED}.{self._third}.{self._number(name)}"

    def _number(self, name: str) -> int:
        """The last number of its address."""
        return _FIRST + [CONTROL, *self._names].index(name)

    def run(
        self,
        node: str,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout: float = PATIENCE,
        check: bool = True,
        stdin: str | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a node in ``/`` until it ends. With ``check`` a status other than 0 fails the test."""
        done = subprocess.run(
            self._argv(node, argv),
            env=self._environment(env),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            **({"input": stdin} if stdin is not None else {"stdin": subprocess.DEVNULL}),
        )
        if check and done.returncode:
            raise AssertionError(f"{node}: {' '.join(argv)}: {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def start(
        self, node: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None, log: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on a node. The process passes SIGINT and SIGTERM on to it, and ends with its exit status.

        ``log`` takes what it prints; without one it is a pipe.
        """
        with Path(log or os.devnull).open("w") as stream:
            return subprocess.Popen(
                self._argv(node, argv),
                env=self._environment(env),
                stdin=subprocess.DEVNULL,
                stdout=stream if log else subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
                preexec_fn=die_with_parent,  # noqa: PLW1509  (tests run no threads)
            )

    def commands(self, node: str, names: Sequence[str]) -> Path:
        """A directory for PATH with programs of a node, which this machine can call like its own."""
        folder = self.folder / f"bin-{node}"
        folder.mkdir()
        for name in names:
            program = folder / name
            program.write_text(f'#!/bin/sh\nexec {shlex.join(self._argv(node, [name]))} "$@"\n')
            program.chmod(0o755)
        return folder

    def processes(self, node: str, needle: str) -> list[str]:
        """The command lines of processes on a node that contain ``needle``."""
        listed = self.run(node, ["ps", "-e", "-o", "args="]).stdout.splitlines()
        return [line for line in listed if needle in line and not line.startswith("ps -e")]

    def limit_network(self, rate: str | None) -> None:
        """Limit what each node sends to ``rate`` (tc(8): ``1gbit``); None: no limit."""
        for name in self._names:
            self.run(name, ["tc", "qdisc", "del", "dev", "eth0", "root"], check=False)
            if rate is not None:
                # The bucket has room for the bytes of a timer tick, and for a segment that the veth passes on as a whole.
                shape = ["tbf", "rate", rate, "burst", "256kb", "latency", "50ms"]
                self.run(name, ["tc", "qdisc", "add", "dev", "eth0", "root", *shape])

    def throttle(self, path: Path, bytes_per_second: int | None) -> None:
        """Limit each node's reads and writes of the disk under ``path`` to that number of bytes per second; None: no limit."""
        disk = whole_disk(path)
        for name in self._names:
            for group in self.nodes[name].groups:
                if (group / "io.max").exists():
                    most = "max" if bytes_per_second is None else bytes_per_second
                    (group / "io.max").write_text(f"{disk} rbps={most} wbps={most}")
                    break
                if (group / "blkio.throttle.read_bps_device").exists():
                    for direction in ("read", "write"):
                        file = group / f"blkio.throttle.{direction}_bps_device"
                        file.write_text(f"{disk} {bytes_per_second or 0}")
                    break
            else:
                pytest.skip("no cgroup of this machine limits the disk: neither blkio (v1) nor io (v2)")

    def kill_node(self, name: str) -> None:
        """Simulate a power failure: the link falls silent first, so that no peer gets a message; then the node is gone."""
        node = self.nodes.pop(name)
        _ip(node.pid, ["link set eth0 down"])
        self._end(node)
        # The kernel removes its link too, but only after a while.
        self.run(CONTROL, ["ip", "link", "del", name], check=False)

    def start_node(self, name: str) -> None:
        """Start a node in its first state, also after ``kill_node``. Files that the old node had in memory are lost."""
        work = self.folder / name
        work.mkdir(exist_ok=True)
        groups = _groups(name)
        spec = {
            "name": name,
            "work": str(work),
            "layer": str(self._programs),
            "binds": {**{str(path): False for path in _apart()}, str(self.shared): True},
            "files": self._files(name),
            "links": {"/opt/tunetool": sys.prefix},
            "groups": [str(group) for group in groups],
        }
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", _PROGRAM, "node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509  (tests run no threads)
        )
        node = self.nodes[name] = Node(name, self.address(name), 0, keeper, groups)
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        with keeper.stdin as stream:  # not as an argument, which `ps` would show with its keys
            json.dump(spec, stream)
        answer = json.loads(keeper.stdout.readline() or '{"error": "its keeper died"}')
        if "error" in answer:
            raise NoCluster(answer["error"])
        node.pid = answer["pid"]
        self._connect(node)
        self.run(name, ["/usr/sbin/sshd", "-f", "/etc/ssh/cluster_config"])
        _wait_for(node.address, 22)

    def close(self) -> None:
        """End every node. The kernel takes their processes, mounts and links with them."""
        while self.nodes:
            self._end(self.nodes.popitem()[1])
        subprocess.run(["ip", "link", "del", self._link], capture_output=True, check=False)

    def _end(self, node: Node) -> None:
        node.keeper.terminate()
        node.keeper.wait()
        if node.keeper.stdout is not None:
            node.keeper.stdout.close()

    def _argv(self, node: str, argv: Sequence[str]) -> list[str]:
        where = self.nodes[node]
        groups = [str(group) for group in where.groups]
        return [sys.executable, "-I", "-S", _PROGRAM, "enter", str(where.pid), *groups, "--", *argv]

    def _environment(self, more: Mapping[str, str] | None) -> dict[str, str]:
        passed = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"HOME": "/root", "USER": "root", "PATH": path, **passed, **(more or {})}

    def _connect(self, node: Node) -> None:
        """Make the network: the control node is the bridge, and this machine is a neighbour like the nodes."""
        bits = f"{node.address}/24"
        inside = ["link set lo up"]
        if node.name == CONTROL:
            _ip(None, [f"link add {self._link} type veth peer name machine netns {node.pid}"])
            mine = f"{_INVENTED}.{self._third}.{_THIS_MACHINE}"
            _ip(None, [f"addr add {mine}/24 dev {self._link}", f"link set {self._link} up"])
            inside += ["link add eth0 type bridge", "link set machine master eth0", "link set machine up"]
        else:
            bridge = self.nodes[CONTROL].pid
            _ip(bridge, [f"link add {node.name} type veth peer name eth0 netns {node.pid}"])
            _ip(bridge, [f"link set {node.name} master eth0", f"link set {node.name} up"])
        # It is the same after a restart, since neighbours remember it.
        inside.append(f"link set eth0 address 02:00:{self._third:02x}:00:00:{self._number(node.name):02x}")
        _ip(node.pid, [*inside, f"addr add {bits} dev eth0", "link set eth0 up"])

    def _files(self, name: str) -> dict[str, tuple[str, int]]:
        hosts = "127.0.0.1 localhost\n" + "".join(f"{self.address(each)} {each}\n" for each in [CONTROL, *self._names])
        accounts = Path("/etc/passwd").read_text()
        if "\nsshd:" not in accounts:
            accounts += "sshd:x:991:65534::/run/sshd:/usr/sbin/nologin\n"
        return {
            "/etc/hostname": (f"{name}\n", 0o644),
            "/etc/machine-id": (f"{self._third:08x}{self._number(name):024x}\n", 0o444),
            "/etc/hosts": (hosts, 0o644),
            "/etc/passwd": (accounts, 0o644),
            "/etc/ssh/cluster_config": (_SSHD, 0o644),
            "/etc/ssh/cluster_host_key": ((self.folder / "host_key").read_text(), 0o600),
            "/run/sshd/.made": ("", 0o644),
            "/root/.ssh/authorized_keys": ((self.folder / "key.pub").read_text(), 0o600),
            "/root/.ssh/id_ed25519": ((self.folder / "key").read_text(), 0o600),
            "/root/.ssh/known_hosts": (self.known_hosts.read_text(), 0o644),
        }

    def _inventory(self) -> dict[str, object]:
        common = {
            "ansible_user": "root",
            "ansible_ssh_private_key_file": str(self.key),
            # The user's own settings are left out: they could lead elsewhere.
            "ansible_ssh_common_args": f"-F none -o UserKnownHostsFile={self.known_hosts}",
            "ansible_python_interpreter": sys.executable,
        }
        hosts = {name: {"ansible_host": self.address(name)} for name in self._names}
        return {"all": {"vars": common, "hosts": hosts}}


class NoCluster(Exception):
    """Namespaces of this kind cannot be made here; the message says why."""


@contextlib.contextmanager
def cluster_of_two(folder: Path, nodes: Sequence[str] = NODES) -> Iterator[Cluster]:
    """A cluster with its files in ``folder``; everything is removed afterwards. Skips the test if it cannot be made."""
    if os.geteuid() != 0:
        pytest.skip("the two-node cluster needs root: namespaces, veth and sshd")
    need_program(*_PROGRAMS)
    try:
        programs = layer()
    except NoLayer as error:
        pytest.skip(str(error))
    with _subnet() as third:
        cluster = Cluster(folder, programs, third, nodes)
        try:
            try:
                for name in [CONTROL, *nodes]:
                    cluster.start_node(name)
            except NoCluster as error:
                pytest.skip(f"no nodes can be made here: {error}")
            yield cluster
        finally:
            cluster.close()


def whole_disk(path: Path) -> str:
    """MAJOR:MINOR of the disk under a path, where limits of cgroups are set: a partition has none of its own."""
    number = path.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not device.exists():
        pytest.skip(f"`{path}` lies on no disk: set TMPDIR to one")
    if (device / "partition").exists():
        device = device.resolve().parent
    return (device / "dev").read_text().strip()


@contextlib.contextmanager
def _subnet() -> Iterator[int]:
    """The third number of a /24 network that is free, and reserved against other tests on this machine."""
    taken = _run(["ip", "-4", "route", "show", "table", "all"])
    start = os.getpid() % 200
    for third in (*range(start, 200), *range(start)):
        # A name in the abstract namespace of sockets ends with its process.
        with socket.socket(socket.AF_UNIX) as lock:
            try:
                lock.bind(f"\0tunetool-tests-{_INVENTED}.{third}")
            except OSError:
                continue
            if f"{_INVENTED}.{third}." not in taken:
                yield third
                return
    pytest.skip(f"no free network in {_INVENTED}.0.0/16")


def _apart() -> list[Path]:
    """Paths that a node needs and would not see: below its own memory, or on another file system than the root."""
    # A checkout's .venv may be a link: the node sees it with ROOT, and needs what it leads to.
    wanted = {ROOT, Path(sys.prefix).resolve(), Path(sys.base_prefix), Path(sys.executable).resolve().parent}
    wanted.add(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"))
    hidden = ("/tmp/", "/run/", "/dev/")
    root = Path("/").stat().st_dev
    return sorted(
        path for path in wanted if path.is_dir() and (str(path).startswith(hidden) or path.stat().st_dev != root)
    )


def _groups(name: str) -> list[Path]:
    """Control groups of a node, in which the disk can be limited, of either version."""
    groups = []
    for parent in (Path("/sys/fs/cgroup/blkio"), Path("/sys/fs/cgroup")):
        group = parent / f"tunetool-{os.getpid()}-{name}"
        v2 = (parent / "cgroup.controllers").exists()
        if not v2 and parent.name != "blkio":
            continue
        with contextlib.suppress(OSError):
            if v2:
                (parent / "cgroup.subtree_control").write_text("+io")
            group.mkdir()
            groups.append(group)
    return groups


def _wait_for(address: str, port: int) -> None:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError(f"{address}:{port} does not answer within {PATIENCE:g} s")


def _ip(pid: int | None, commands: Sequence[str]) -> None:
    where = ["nsenter", f"--net=/proc/{pid}/ns/net"] if pid is not None else []
    _run([*where, "ip", "-batch", "-"], "\n".join(commands) + "\n")


def _run(argv: Sequence[str], stdin: str = "") -> str:
    done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        raise NoCluster(f"`{' '.join(argv)}`: {done.stderr.strip()}")
    return done.stdout
