"""A control machine without a clone and without a network: the wheel of `make dist` is installed from a directory of wheels
in a Debian 12 container that has Python alone, and builds an inventory, plays, and the nodes' wheels from there.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import container
import dist
import fresh
from tunetool.node.common.node_wheel import COLLECTION
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
PYTHON_VERSION = "3.11"
"""Debian 12's."""
HOUSE = "/srv/house"
VENV = "/opt/control"


@dataclass(frozen=True)
class Machine:
    """The container."""

    runtime: str
    name: str

    def run(self, *argv: str, content: bytes = b"") -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [self.runtime, "exec", "--interactive", self.name, *argv],
            input=content,
            capture_output=True,
            timeout=PATIENCE,
            check=False,
        )
        return subprocess.CompletedProcess(argv, done.returncode, done.stdout.decode(), done.stderr.decode())

    def output(self, *argv: str, content: bytes = b"") -> str:
        done = self.run(*argv, content=content)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, and all that it needs on a control machine and on nodes."""
    directory = tmp_path_factory.mktemp("house")
    dist.build(directory, ["wheel"])
    (wheel,) = directory.iterdir()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    python = ["--only-binary=:all:", "--implementation", "cp", "--python-version", PYTHON_VERSION]
    locked = ["--constraint", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, "download", "--dest", str(directory), *python, *locked, f"{wheel}[control,node]"], check=True)
    return directory


@pytest.fixture(scope="module")
def machine(house: Path) -> Iterator[Machine]:
    runtime = container.find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    image = container.made_image(runtime, fresh.SYSTEM, "fresh", fresh.PACKAGES)
    # Another checkout on this machine has a container of its own.
    made = Machine(runtime, f"tunetool-wheel-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]}")
    container.down(runtime, made.name)
    try:
        container.start(runtime, image, made.name, "none", ("sleep", "infinity"))
        archive = io.BytesIO()
        with tarfile.open(fileobj=archive, mode="w") as tar:
            tar.add(house, HOUSE.lstrip("/"))
        made.output("tar", "-x", "-C", "/", content=archive.getvalue())
        made.output("python3", "-m", "venv", VENV)
        made.output(f"{VENV}/bin/pip", "install", "--quiet", "--no-index", "--find-links", HOUSE, "tunetool[control]")
        yield made
    finally:
        container.down(runtime, made.name)


@pytest.fixture(scope="module")
def control(house: Path) -> Iterator[list[str]]:
    """The command that starts the image of the Containerfile, built without an index; a command for it goes behind."""
    runtime = container.find_runtime(os.environ.get("TUNETOOL_CONTAINER_RUNTIME", ""))
    base = container.made_image(runtime, fresh.SYSTEM, "control", (*fresh.PACKAGES, "openssh-client"))
    before, after = fresh.way_to_run(runtime, base)
    image = f"tunetool-control-{hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]}"
    arguments = {"BASE": base, "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/tmp/dist"}
    build = [
        *(runtime, "build", f"--tag={image}", f"--file={ROOT / 'Containerfile'}"),
        # No container for each step: not every build machine lets podman start one in its build. Its steps then have
        # this machine's network, which neither apt (the base has it all) nor pip uses.
        *(["--isolation=chroot"] if runtime == "podman" else ["--network=none"]),
        *(f"--build-arg={key}={value}" for key, value in arguments.items()),
    ]
    try:
        done = container.call([*build, str(house)], PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        yield [runtime, *before, "run", "--rm", "--network=none", "--label=tunetool=test", *after, image]
    finally:
        container.call([runtime, "rmi", "--force", image])


@pytest.mark.slow  # its base and its steps take a minute; the other tests install the same wheel
def test_the_control_machines_image_lacks_nothing_to_provision(control: list[str]) -> None:
    done = container.call([*control, "doctor", "provision", "--json", "-"], PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(done.stdout)["commands"] == {"provision": {"lacks": []}}
    # What a node needs is another matter, and has its line.
    lacking = container.call([*control, "doctor", "verify"], PATIENCE)
    assert lacking.returncode == 1
    assert "apt-get install --no-install-recommends fio" in lacking.stdout
    *run, image = control
    script = "pwd && tunetool init mycluster >/dev/null && ansible-inventory -i mycluster --list"
    listed = container.call([*run, "--entrypoint=", image, "sh", "-c", script], PATIENCE).stdout.partition("\n")
    assert listed[0] == "/work"
    assert len(json.loads(listed[2])["h100"]["hosts"]) == 4


def test_an_inventory_and_a_play_without_a_clone(machine: Machine) -> None:
    tunetool = f"{VENV}/bin/tunetool"
    # As pipx has it: none of the environment's programs is on PATH.
    assert machine.run("sh", "-c", "command -v ansible-playbook").returncode != 0
    machine.output("sh", "-c", f"cd /root && {tunetool} init mycluster")
    machine.output("sh", "-c", "test -s /root/mycluster/hosts.yml && test -s /root/mycluster/.gitignore")
    again = machine.run("sh", "-c", f"cd /root && {tunetool} init mycluster")
    assert (again.returncode, again.stderr.splitlines()[0]) == (2, "error: `mycluster` exists")
    # The container itself is the node. It has too few drives, and --check changes nothing.
    here = {"ansible_connection": "local", "ansible_become": False, "nvme_drives_count": 999}
    call = f"cd /root && {tunetool} provision -i mycluster --limit 'h100-001*' --check -- -e '{json.dumps(here)}'"
    done = machine.run("sh", "-c", call)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "999 drives asked for, " in " ".join(done.stdout.split())
    assert "REFUSED" in done.stdout


def test_a_missing_library_s_hint_names_the_wheels(machine: Machine) -> None:
    # From a directory of wheels: pip keeps no address then, and the packages themselves are named.
    done = machine.run(f"{VENV}/bin/python", "-c", "import tunetool.origin as o; print(o.install_hint('checkpoint'))")
    assert done.stdout.startswith(f"`{VENV}/bin/python -m pip install ")
    assert "torch>=2.5" in done.stdout


def test_the_wheels_for_nodes_are_made_without_an_index(machine: Machine) -> None:
    site = machine.output("sh", "-c", f"echo {VENV}/lib/python*/site-packages").strip()
    arguments = {"source": f"{site}/{COLLECTION}", "python_versions": [PYTHON_VERSION], "cache_dir": "/root/archives"}
    # Ansible in the same environment finds the collection without any setting.
    done = machine.output(
        *("env", "PIP_NO_INDEX=1", f"PIP_FIND_LINKS={HOUSE}", "ANSIBLE_LOCALHOST_WARNING=False"),
        *(f"{VENV}/bin/ansible", "localhost", "-m", "tunetool.node.wheelhouse", "-a", json.dumps(arguments)),
    )
    assert '"built": true' in done
    names = machine.output("sh", "-c", "tar -tf /root/archives/wheelhouse-*.tar").splitlines()
    assert {name.partition("-")[0] for name in names} >= {"tunetool", "click", "pydantic_core", "pip", "xxhash"}
    assert not any(name.startswith("ansible") for name in names)
    listed = machine.output(
        "sh", "-c", "cd /root && tar -xf archives/wheelhouse-*.tar && python3 -m zipfile -l tunetool-*.whl"
    )
    assert "tunetool/record.py" in listed
    assert "ansible_collections" not in listed
