"""A lab of its own for these tests: its nodes, state and inventory never meet those of `make rehearse`."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from calls import call
from tunetool.lab.guest import marker as marker_bytes

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
POINT = "/mnt/nvme_raid0"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.node)


@dataclass(frozen=True)
class Done:
    """The result of a command; ``text`` has both streams, for messages that may be on either."""

    code: int
    stdout: str
    text: str


@dataclass(frozen=True)
class Lab:
    """The commands a user types, on this lab."""

    state: Path
    inventory: Path
    variables: Mapping[str, str] = field(default_factory=dict)
    """Of the environment, beside those of every lab."""

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "TUNETOOL_LAB_DIR": str(self.state),
            "ANSIBLE_NOCOLOR": "1",
            "NO_COLOR": "1",
            "COLUMNS": "200",
            **self.variables,
        }

    def run(self, *command: str, timeout: float = 3600) -> Done:
        done = call(*command, cwd=ROOT, env=self.environment, timeout=timeout, stdin=subprocess.DEVNULL)
        print(f"$ {' '.join(command)}  -> {done.returncode}\n{done.stdout}\n{done.stderr}")
        return Done(done.returncode, done.stdout, done.stdout + done.stderr)

    def tool(self, *arguments: str) -> Done:
        return self.run("tunetool", *arguments)

    def lab(self, *arguments: str) -> Done:
        done = self.tool("lab", *arguments)
        assert done.code == 0, done.text
        return done

    def site(self, *arguments: str, timeout: float = 3600) -> Done:
        return self.run("ansible-playbook", "site.yml", "-i", str(self.inventory), *arguments, timeout=timeout)

    def verify(self, *arguments: str) -> Done:
        return self.tool("verify", "-i", str(self.inventory), "--runs-dir", str(self.state / "runs"), *arguments)

    def ssh(self, node: str, command: str) -> str:
        done = self.tool("lab", "ssh", node, "--", command)
        assert done.code == 0, done.text
        return done.stdout.strip()

    def reset(self, node: str, *arguments: str) -> None:
        self.lab("reset", node, *arguments)
        self.refresh()

    def reboot(self, node: str, *arguments: str) -> None:
        self.lab("reboot", node, *arguments)
        self.refresh()

    def refresh(self) -> None:
        """Write the inventory again: a node keeps its port unless another program took it."""
        self.lab("inventory", "--output", str(self.inventory / "hosts.yml"))

    def build_output(self) -> str:
        """The output of the `site.yml` that built the node which `built` restores."""
        return (self.state / "build-output.txt").read_text()

    def record(self) -> dict[str, Any]:
        """node1's own record of the last `verify`, as the fleet's record keeps it."""
        newest = max((self.state / "runs").glob("*-fleet-*/hosts/node1.json"), key=lambda path: path.stat().st_mtime)
        document: dict[str, Any] = json.loads(newest.read_text())
        return document


@contextlib.contextmanager
def started(
    tmp_path_factory: pytest.TempPathFactory, *options: str, like: str = "lab", **variables: str
) -> Iterator[Lab]:
    """Nodes that `lab up` starts with ``options``, which are always removed afterwards.

    ``like``: the inventory with their variables; ``variables``: of the environment.
    """
    inventory = tmp_path_factory.mktemp("inventory")
    (inventory / "group_vars").symlink_to(ROOT / "inventory" / like / "group_vars")
    lab = Lab(tmp_path_factory.mktemp("lab"), inventory, variables)
    try:
        lab.lab("up", *options)
        lab.refresh()
        yield lab
    finally:
        lab.tool("lab", "down")


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """One node that runs during the whole session and is always removed after it."""
    with started(tmp_path_factory, "--nodes", "1", "--os", os.environ.get("TUNETOOL_LAB_OS", "debian12")) as lab:
        yield lab


@pytest.fixture
def marker(lab: Lab) -> Iterator[None]:
    """Assert that after the test the ninth drive is mounted and its marker unchanged."""
    yield
    expected = hashlib.sha256(marker_bytes("LAB1SYS")).hexdigest()
    text = lab.ssh("node1", "sha256sum < /srv/system/MARKER; findmnt -no SOURCE /srv/system")
    assert text.split()[0] == expected
    assert text.split()[-1].startswith("/dev/nvme")


@pytest.fixture
def blank(lab: Lab) -> Lab:
    lab.reset("node1")
    return lab


@pytest.fixture(scope="session")
def built_once(lab: Lab) -> Lab:
    """`site.yml` on a blank node, saved for every test that starts from there."""
    lab.reset("node1")
    done = lab.site()
    assert done.code == 0, done.text
    (lab.state / "build-output.txt").write_text(done.stdout)
    lab.lab("save", "node1", "built")
    return lab


@pytest.fixture
def built(built_once: Lab) -> Lab:
    """A node as `site.yml` builds it, with its drives and without faults."""
    built_once.reset("node1", "--to", "built")
    return built_once


def checksums(lab: Lab) -> str:
    """Checksums of the first and last MiB of every data drive, where all labels are, ordered by serial."""
    return lab.ssh(
        "node1",
        "lsblk -dno SERIAL,NAME | grep LAB.N | sort | while read s n; do echo $s $( (head -c 1M /dev/$n; "
        "tail -c 1M /dev/$n) | md5sum); done",
    )


def reboots_well(lab: Lab) -> None:
    """Reboot node1, and assert that everything is as its manifest says: the volume is mounted, and no unit failed."""
    lab.reboot("node1")
    lab.ssh("node1", "systemctl is-system-running --wait || true")
    assert lab.ssh("node1", "systemctl --failed --no-legend") == ""
    # On the node: it has its program, and the fleet's own way is shown elsewhere.
    judged = lab.ssh("node1", "tunetool verify --level config --runs-dir /tmp/runs 2>&1 || true")
    assert "PASS" in judged, judged


def groups_of(groups: str) -> tuple[str, str]:
    """Options of a node whose drives make several volumes, without the program: a run checks it, and nothing measures."""
    return "-e", json.dumps({"raid_array_groups": groups, "tunetool_install": False})


def build(lab: Lab, groups: str, *arguments: str) -> str:
    """Run site.yml for such a node; what it prints."""
    done = lab.site(*groups_of(groups), *arguments)
    assert done.code == 0, done.text
    return done.stdout


def play(lab: Lab, groups: str, name: str, *arguments: str) -> str:
    """Run another playbook for such a node; what it prints."""
    playbook = f"playbooks/{name}.yml"
    done = lab.run("ansible-playbook", playbook, "-i", str(lab.inventory), *groups_of(groups), *arguments)
    assert done.code == 0, done.text
    return done.text


def row(output: str, serial: str) -> str:
    """The table's line for a drive."""
    return next(line for line in output.splitlines() if re.search(rf"\b{serial}\b", line) and "nvme" in line)


def changed_tasks(output: str) -> list[str]:
    """Names of tasks that changed something, from ansible-playbook's output."""
    task, changed = "", []
    for line in output.splitlines():
        if line.startswith("TASK ["):
            task = line[6 : line.rindex("]")]
        elif line.startswith("changed:"):
            changed.append(task)
    return changed
