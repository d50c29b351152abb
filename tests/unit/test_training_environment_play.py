"""The training environment through Ansible: files that are sent to a node, and ops that one node compiled for others."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

import tiny_wheels
import training_module
from calls import call
from programs import need_program
from waiting import until

# Each run of Ansible takes seconds, and most of them build an environment.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Fleet:
    """This machine as a node, with a wheelhouse of tiny wheels on the control machine."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.directory = base / "opt"
        self.log = base / "log"
        self.cache = base / "cache"
        self.source = base / "source"
        self.house = base / "house"
        tiny_wheels.control_machine(base, [f"{sys.version_info.major}.{sys.version_info.minor}"])

    def play(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        task = {
            "source": str(self.source),
            "archive": str(self.base / "tool.tar"),
            "tool_key": "1",
            "wheelhouse": str(self.house),
            "directory": str(self.directory),
            "base_python": sys.executable,
            "accelerator": "cpu",
            "ops": ["async_io"],
            "cache_dir": str(self.cache),
            "manifest": str(self.base / "node.json"),
            **more,
        }
        tasks = [{"name": "Make it", "tunetool.node.training_environment": training_module.as_task(task)}]
        play = [{"name": "Make it", "hosts": "all", "gather_facts": False, "tasks": tasks}]
        (self.base / "play.yml").write_text(json.dumps(play))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return call(
            *(str(Path(sys.executable).with_name("ansible-playbook")), str(self.base / "play.yml")),
            *("-i", "localhost,", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}", *arguments),
            cwd=ROOT,
            env={
                **environment,
                "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
                "PIP_CONFIG_FILE": os.devnull,
                "TINY_LOG": str(self.log),
            },
            timeout=600,
        )

    def builds(self) -> int:
        return self.log.read_text().count("build")


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    if os.geteuid() != 0:
        pytest.skip("what is sent belongs to root: needs root")
    need_program("cc")
    return Fleet(tmp_path)


@pytest.mark.parametrize("pipelining", ["true", "false"])
def test_a_node_is_sent_what_it_lacks_and_its_equal_gets_its_ops(fleet: Fleet, pipelining: str) -> None:
    way = ("-e", f"ansible_pipelining={pipelining}")
    checked = fleet.play("--check", "--diff", *way)
    assert checked.returncode == 0, checked.stdout
    assert "changed=1" in checked.stdout
    assert '+  "source": "built"' in checked.stdout
    assert not fleet.directory.exists()
    done = fleet.play(*way)
    assert done.returncode == 0, done.stdout
    assert (fleet.directory / "current/bin/python").exists()
    assert fleet.builds() == 1
    [kept] = fleet.cache.glob("*.tar")
    again = fleet.play(*way)
    assert "changed=0" in again.stdout, again.stdout
    # Another node of this kind: the same paths, nothing on it.
    shutil.rmtree(fleet.directory)
    done = fleet.play(*way)
    assert done.returncode == 0, done.stdout
    assert fleet.builds() == 1
    # An archive that was damaged on the control machine does not stop the run.
    kept.write_bytes(b"no tar")
    shutil.rmtree(fleet.directory)
    done = fleet.play(*way)
    assert done.returncode == 0, done.stdout
    assert fleet.builds() == 2


def test_no_node_waits_while_an_equal_one_proves(fleet: Fleet) -> None:
    done = fleet.play(ops=[])
    assert done.returncode == 0, done.stdout
    assert "build" not in fleet.log.read_text()
    assert not fleet.cache.exists()
    shutil.rmtree(fleet.directory)
    done = fleet.play()
    assert done.returncode == 0, done.stdout
    shutil.rmtree(fleet.directory)
    [kept] = fleet.cache.glob("*.tar")
    steps = fleet.log.read_text().count("step")
    seen: list[str] = []

    def look() -> None:
        """Whether the lock of this kind of node is free while the node proves."""
        until(lambda: fleet.log.read_text().count("step") > steps)
        with kept.with_suffix(".lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                seen.append("held")
            else:
                seen.append("free")

    thread = threading.Thread(target=look)
    thread.start()
    done = fleet.play()
    thread.join()
    assert done.returncode == 0, done.stdout
    assert seen == ["free"]
    assert fleet.builds() == 1


def test_a_wheel_damaged_on_the_control_machine_is_not_sent(fleet: Fleet) -> None:
    wheel = fleet.house / "torch-2.13.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[40] ^= 1
    wheel.write_bytes(data)
    done = fleet.play()
    assert done.returncode == 2
    assert f"`{wheel}` has the hash" in done.stdout
    assert not (fleet.directory / "wheels" / wheel.name).exists()


def test_a_large_transfer_that_was_cut_off_goes_on_where_it_was(fleet: Fleet) -> None:
    size = 70 * 2**20
    path = tiny_wheels.wheel(fleet.house, "numpy", {"numpy/__init__.py": "", "numpy/data.bin": os.urandom(size)})
    document = json.loads((fleet.house / "wheelhouse.json").read_text())
    entry = tiny_wheels.entry(path)
    document["files"][entry.pop("name")] = entry
    (fleet.house / "wheelhouse.json").write_text(json.dumps(document))
    part = fleet.directory / "wheels" / f"{path.name}.part"
    part.parent.mkdir(parents=True)
    # These are not the first bytes of the file: they end up in the result, which the node then refuses.
    part.write_bytes(b"x" * 100)
    way = ("-e", "ansible_pipelining=true")
    done = fleet.play(*way)
    assert done.returncode == 2
    assert f"`{part.with_suffix('')}` has the hash" in done.stdout
    # The node refused and removed it: the next run sends the whole file.
    done = fleet.play(*way)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"wheelhouse": "/nowhere"}, "`/nowhere/wheelhouse.json` cannot be read"),
        ({"source": "/nowhere"}, "`/nowhere/constraints.txt`: No such file or directory"),
    ],
)
def test_what_is_not_on_the_control_machine_is_named(fleet: Fleet, more: dict[str, str], message: str) -> None:
    done = fleet.play(**more)
    assert done.returncode == 2
    assert message in done.stdout
    assert "hint: " in done.stdout
