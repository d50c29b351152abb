"""The table of loss on two virtual nodes: each has its own kernel, network and volume of eight drives, and ends like one
that loses power. tests/finetune/test_losses.py has every row, in namespaces."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from conftest import POINT, Lab, started

pytest.importorskip("torch", reason="the checkpoints are torch's own")

from losses import PART, PROGRAM, TWO, Call, Job, replicate, save, values
from tunetool.lab import qemu, ssh, state
from tunetool.lab.qemu import Qmp
from tunetool.system_packages import find
from waiting import until

pytestmark = pytest.mark.slow
SCRATCH = f"{POINT}/run"
HOUR = 3600.0
"""A limit against what hangs: an import of torch takes a minute or two here."""
_SSH = ("ssh", "-o", "StrictHostKeyChecking=accept-new", "-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
_PYTHON = "/opt/tunetool/venv-*/bin/python"
_SET_UP = """
printf '127.0.0.1 localhost\\n10.0.3.1 node1\\n10.0.3.2 node2\\n' > /etc/hosts
(umask 077; printf '%s\\n' {key} > /root/.ssh/id_ed25519)
printf '%s' {program} > /root/rank_on_node.py
until [ -b /dev/vdb ]; do sleep 0.1; done
mkdir -p /opt/packages
mount -o ro /dev/vdb /opt/packages
for packages in /opt/tunetool/venv-*/lib/python3*/site-packages; do echo /opt/packages > $packages/lab.pth; done
"""


class VirtualNodes:
    """The lab's nodes. Packages that the image lacks, such as torch, come on one more disk, which nobody can write to."""

    def __init__(self, lab: Lab, packages: Path) -> None:
        self.lab, self.packages, self._state = lab, packages, state.Lab(lab.state)

    def start(self, node: str, argv: Sequence[str], *, env: Mapping[str, str]) -> subprocess.Popen[str]:
        words = ["env", *(f"{name}={value}" for name, value in env.items()), *argv]
        # The node's shell finds the directory of its Python.
        command = " ".join(word if word == _PYTHON else shlex.quote(word) for word in words)
        return subprocess.Popen(
            ssh.command(self._state, self._state.read(node), [command]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def sh(self, node: str, script: str) -> str:
        return ssh.run(self._state, self._state.read(node), script, HOUR).stdout

    def kill(self, node: str) -> None:
        """Power loss: QEMU has no time to tell anybody."""
        pid = qemu.pid_of(self._state.pid_file(node))
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert qemu.wait_gone(pid, 60)

    def replace(self, node: str) -> None:
        self.kill(node)
        self.blank(node)

    def blank(self, node: str) -> None:
        """A node as `site.yml` built it takes the place of one, with nothing on its volume."""
        self.lab.reset(node, "--to", "built")
        self.set_up(node)

    def link(self, node: str, *, up: bool) -> None:
        """Cut its cable to the other nodes, or mend it."""
        with Qmp(self._state.qmp_socket(node)) as qmp:
            qmp.command("set_link", {"name": "link", "up": up})

    def set_up(self, node: str) -> None:
        known = self._state.read(node)
        file = {"driver": "file", "filename": str(self.packages), "read-only": True}
        with Qmp(self._state.qmp_socket(node)) as qmp:
            qmp.command("blockdev-add", {"driver": "raw", "node-name": "packages", "read-only": True, "file": file})
            device = {"driver": "virtio-blk-pci", "id": "packages", "drive": "packages", "bus": f"rp{known.ports - 1}"}
            qmp.command("device_add", device)
        key, program = shlex.quote(known.key.read_text().strip()), shlex.quote(PROGRAM.read_text())
        self.sh(node, _SET_UP.format(key=key, program=program))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VirtualNodes]:
    """Two nodes that `site.yml` built, each saved as that."""
    with started(tmp_path_factory, "--nodes", "2", "--os", "debian12") as lab:
        done = lab.site()
        assert done.code == 0, done.text
        packages = lab.state / "packages.img"
        # Sparse. The modules of this Python load in the node's, which is of the same version.
        disk = ("-q", "-t", "ext4", "-O", "^has_journal", "-E", "lazy_itable_init=1")
        made = lab.run(find("mke2fs") or "mke2fs", *disk, "-d", sysconfig.get_path("purelib"), str(packages), "16G")
        assert made.code == 0, made.text
        nodes = VirtualNodes(lab, packages)
        for node in TWO:
            lab.lab("save", node, "built")
            nodes.set_up(node)
        yield nodes


@pytest.fixture
def job(two: VirtualNodes) -> Job:
    """A job on blank volumes."""
    for node in TWO:
        two.sh(node, f"pkill -f '[r]ank_on_node|[t]unetool.checkpoint' || true; rm -rf {SCRATCH}")
    rank = (_PYTHON, "/root/rank_on_node.py")
    env = {"GLOO_SOCKET_IFNAME": "eth1"}
    return Job(two, rank, SCRATCH, f"{POINT}/bulk", _SSH, env, patience=HOUR)


@pytest.mark.parametrize(("last", "step"), [((replicate(7),), 7), ((), 6)])
def test_a_lost_node_loses_what_was_not_replicated(
    job: Job, two: VirtualNodes, last: Sequence[Call], step: int
) -> None:
    job.run(TWO, save(6), replicate(6), save(7), *last)
    two.replace("node1")
    ranks = job.resume(f"a node lost {'after' if last else 'before'} the replication", TWO)
    assert (ranks[0]["step"], values(ranks)) == (step, [step, step])
    assert PART < ranks[0]["bytes"] < 1.1 * PART


@pytest.mark.parametrize("how", ["node", "link"])
def test_a_node_lost_in_replication_loses_one_interval(job: Job, two: VirtualNodes, how: str) -> None:
    ranks = job.start(TWO, save(6), replicate(6), save(7), replicate(7, [0], rate=2**17))
    torn = f"{SCRATCH}/.replicas/node1/.draining-step_7-*/__0_0.*"
    until(lambda: int(two.sh("node2", f"stat -c %s {torn} 2>/dev/null || echo 0")) > 2**18, "a part of it", ranks[0])
    if how == "link":
        two.link("node2", up=False)
        two.sh("node1", "while pgrep -f [c]heckpoint.replica_worker > /dev/null; do sleep 0.2; done")
    two.kill("node1")
    two.sh("node2", "pkill -f '[r]ank_on_node' || true")
    for rank in ranks:
        rank.communicate(timeout=HOUR)
    two.link("node2", up=True)
    two.blank("node1")
    what = (
        "the link cut in the middle of it, then the node lost" if how == "link" else "a node lost in the middle of it"
    )
    resumed = job.resume(what, TWO)
    assert (resumed[0]["step"], values(resumed)) == (6, [6, 6])
    assert "replica of `node1` on `node2`: its replication did not end" in resumed[0]["skipped"][0]
