"""A node without a network: the role builds the training environment from a wheelhouse, in a Debian 12 container.

torch, DeepSpeed and all others are the real ones. The wheelhouse and the image are made once and stay in the user's
cache; so do DeepSpeed's ops, which the role itself keeps for machines of one kind. They take minutes to compile the
first time, so only the slow test asks for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import container
import skips
from calls import call
from machines import RECORDED
from tunetool.user_directories import cache
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
SYSTEM = "debian12"
PYTHON_VERSION = "3.11"
DIRECTORY = "/opt/tunetool-training"
MANIFEST = "/etc/tunetool/node.json"
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)
except OSError as error:
    sys.exit(str(error))
"""


@dataclass(frozen=True)
class Node:
    """The container, and Ansible's way to it."""

    runtime: str
    name: str
    house: Path
    work: Path

    def run(self, *argv: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        return call(self.runtime, "exec", "--interactive", self.name, *argv, input=stdin)

    def output(self, *argv: str, stdin: str = "") -> str:
        done = self.run(*argv, stdin=stdin)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def role(self, *options: str, ops: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """The role, as site.yml runs it. ``ops``: DeepSpeed's, to be compiled."""
        variables = {
            "ansible_connection": "container",
            "ansible_container_runtime": self.runtime,
            "ansible_python_interpreter": "/usr/bin/python3",
            "ansible_remote_tmp": "/tmp/ansible",
            "training_environment_enabled": True,
            "training_environment_wheelhouse": str(self.house),
            "training_environment_ops": list(ops),
            # Half a minute for modules that nothing here imports.
            "training_environment_compile": False,
            # The archive that molecule's containers were given.
            "tunetool_python_versions": ["3.11", "3.13"],
        }
        task = {"name": "Make it", "ansible.builtin.import_role": {"name": "tunetool.node.training_environment"}}
        play = [{"name": "Make it", "hosts": "all", "gather_facts": False, "vars": variables, "tasks": [task]}]
        (self.work / "play.yml").write_text(json.dumps(play))
        return call(
            *(str(Path(sys.executable).with_name("ansible-playbook")), str(self.work / "play.yml")),
            *("-i", f"{self.name},", *options),
            cwd=ROOT,
            env={
                **os.environ,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "ANSIBLE_CONNECTION_PLUGINS": str(ROOT / "molecule/default/connection_plugins"),
                "ANSIBLE_NOCOLOR": "1",
            },
            timeout=12 * PATIENCE,
        )

    def part(self) -> dict[str, Any]:
        """The manifest's part `training`."""
        document: dict[str, Any] = json.loads(self.output("cat", MANIFEST))
        part: dict[str, Any] = document.get("training") or {}
        return part

    def check(self) -> dict[str, str]:
        """What `tunetool verify` says of the environment. The manifest's array is not there: it ends with 1."""
        done = self.run(f"{DIRECTORY}/current/bin/tunetool", "verify", "--level", "config", "--json", "-")
        assert done.returncode == 1, done.stderr
        checks: list[dict[str, str]] = json.loads(done.stdout)["checks"]
        return next(check for check in checks if check["id"] == "training.environment")


@pytest.fixture(scope="module")
def wheelhouse() -> Path:
    """The lock's wheels for the container, fetched once: a second call asks no index."""
    if skips.without_deepspeed():
        pytest.skip("torch is not installed: none without CUDA for this machine")
    if skips.a_gpu():
        pytest.skip("there is a GPU here: this test is about the CPU's build")
    # That of the virtual nodes of `make rehearse-training` and of tests/lab, which are of the same kind.
    directory = cache() / "lab-wheels"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tunetool", "build-wheelhouse", str(directory)),
            *("--python-version", PYTHON_VERSION, "--build", "cpu", "--source", str(ROOT)),
        ],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return directory


@pytest.fixture(scope="module")
def node(wheelhouse: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    runtime = container.find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    image = container.made_image(runtime, SYSTEM, "training", ("python3", *container.COMPILERS))
    # Another checkout on this machine has a container of its own.
    name = f"tunetool-offline-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]}"
    made = Node(runtime, name, wheelhouse, tmp_path_factory.mktemp("offline"))
    container.down(runtime, name)
    try:
        container.start(runtime, image, name, "none", ("sleep", "infinity"))
        # A node that site.yml has built so far.
        manifest = (RECORDED / "built-manifest.json").read_text()
        made.output("sh", "-c", f"mkdir -p $(dirname {MANIFEST}) && cat > {MANIFEST}", stdin=manifest)
        yield made
    finally:
        container.down(runtime, name)


def test_the_environment_is_built_without_a_network(node: Node) -> None:
    no_way_out(node)
    checked = node.role("--check", "--diff")
    assert checked.returncode == 0, checked.stdout
    assert "changed=1" in checked.stdout
    assert '+  "source": "built"' in checked.stdout
    assert node.run("test", "-e", DIRECTORY).returncode != 0
    done = node.role()
    assert done.returncode == 0, done.stdout
    part = node.part()
    assert part["python"] == f"{DIRECTORY}/current/bin/python"
    assert (part["source"], part["accelerator"]) == ("built", "cpu")
    assert part["ops"] == {}
    assert {"torch", "deepspeed", "tunetool", "transformers", "peft"} <= part["packages"].keys()
    assert part["packages"]["torch"].endswith("+cpu")
    assert node.check()["status"] == "pass"
    for options in ((), ("--check",)):
        again = node.role(*options)
        assert again.returncode == 0, again.stdout
        assert "changed=0" in again.stdout, again.stdout


def no_way_out(node: Node) -> None:
    """The container has a network of its own, in which nothing is but its loopback."""
    assert node.output("readlink", "/proc/self/ns/net").strip() != str(Path("/proc/self/ns/net").readlink())
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        # This machine reaches itself there, the container reaches nobody; and no route leads to any other machine.
        assert subprocess.run([sys.executable, "-c", CONNECT, "127.0.0.1", str(port)], check=False).returncode == 0
        for address, words in (("127.0.0.1", "Connection refused"), ("192.0.2.1", "Network is unreachable")):
            refused = node.run("python3", "-c", CONNECT, address, str(port))
            assert refused.returncode == 1
            assert words in refused.stderr


def test_a_lost_file_and_a_wheel_with_another_hash_are_named(node: Node) -> None:
    site = f"{DIRECTORY}/current/lib/python{PYTHON_VERSION}/site-packages"
    lost = node.output("readlink", "-f", f"{site}/torch/nn/functional.py").strip()
    node.output("mv", lost, "/root/aside")
    found = node.check()
    assert (found["status"], found["found"]) == ("fail", f"`{lost}` is gone")
    assert "`tunetool provision`" in found["remedy"]
    checked = node.role("--check")
    assert "changed=1" in checked.stdout, checked.stdout
    (wheel,) = node.output("sh", "-c", f"ls {DIRECTORY}/wheels/peft-*.whl").split()
    node.output("dd", "if=/dev/zero", f"of={wheel}", "bs=1", "count=9", "seek=9000", "conv=notrunc")
    before = node.part()
    refused = node.role()
    assert refused.returncode == 2, refused.stdout
    assert f"`{wheel}` has the hash" in refused.stdout
    # It is not taken for the right one by its size again, and what is in use stays.
    assert node.run("test", "-e", wheel).returncode != 0
    assert node.part() == before
    node.output("mv", "/root/aside", lost)
    assert node.check()["status"] == "pass"
    assert "changed=0" in node.role("--check").stdout


@pytest.mark.slow  # C++ is compiled for minutes the first time
def test_ops_are_compiled_beside_what_is_there(node: Node) -> None:
    ops = ("async_io", "utils")
    if not node.part():
        built = node.role()
        assert built.returncode == 0, built.stdout
    done = node.role(ops=ops)
    assert done.returncode == 0, done.stdout
    assert node.part()["ops"] == dict.fromkeys(ops, "ready")
    assert node.check()["status"] == "pass"
    again = node.role(ops=ops)
    assert "changed=0" in again.stdout, again.stdout
