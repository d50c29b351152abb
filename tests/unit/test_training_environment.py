"""The module for the training environment of a node: real venvs of tiny wheels, real processes, no network."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

import tiny_wheels
from machines import RECORDED
from programs import need_program
from tunetool.node.common import manifest as manifests
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.training_part import check_training
from tunetool.node.training import accelerator, environment, lock, wheel_files
from waiting import until

ROOT = Path(__file__).parents[2]
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
DRIVER = """
import functools, json, sys, types
from pathlib import Path
from ansible.module_utils.testing import patch_module_args
order = json.loads(Path(sys.argv[1]).read_text())
from ansible_collections.tunetool.node.plugins.module_utils.play import convergence
from ansible_collections.tunetool.node.plugins.modules import training_environment as module
convergence.only_one = functools.partial(convergence.only_one, order["lock_file"])
if "driver" in order:
    # A machine with eight GPUs and this driver.
    module.read_pci = lambda: {str(number): types.SimpleNamespace(kind=module.GPU) for number in range(8)}
    module.read_driver = lambda: (order["driver"], None)
with patch_module_args(order["arguments"]):
    module.main()
"""
"""The module as Ansible runs it, with a lock of the test instead of the node's."""


class Node:
    """A directory in place of a node's /opt/tunetool-training, and wheels that were sent to it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.directory = base / "opt"
        self.wheels = base / "wheels"
        self.manifest = base / "node.json"
        self.log = base / "log"
        self.environment = {**os.environ, "PYTHONPATH": str(ROOT / ".ansible/collections"), "TINY_LOG": str(self.log)}
        self.tool = [tiny_wheels.entry(path) for path in tiny_wheels.tool(self.wheels)]
        self.libraries = tiny_wheels.libraries(self.wheels)

    def arguments(self, **more: Any) -> dict[str, Any]:
        if "wheelhouse_manifest" not in more:
            more["wheelhouse_manifest"] = self.document(more.get("lock", tiny_wheels.LOCK))
        return {
            "directory": str(self.directory),
            "base_python": sys.executable,
            "accelerator": "cpu",
            "ops": ["async_io", "utils"],
            "lock": tiny_wheels.LOCK,
            "tool_files": self.tool,
            "tool_key": "1",
            "received": str(self.wheels),
            "manifest": str(self.manifest),
            **more,
        }

    def document(self, lock: str) -> dict[str, Any]:
        """The manifest of a wheelhouse with the present libraries."""
        entries = [tiny_wheels.entry(path) for path in self.libraries]
        return {
            "schema": "tunetool.wheelhouse/1",
            "lock_sha256": hashlib.sha256(lock.encode()).hexdigest(),
            "sets": [
                {
                    "python": VERSION,
                    "machine": os.uname().machine,
                    "build": "cpu",
                    "trainers": ["deepspeed", "lightning"],
                    "files": [each["name"] for each in entries],
                }
            ],
            "files": {each["name"]: {key: each[key] for key in each if key != "name"} for each in entries},
        }

    def start(self, check: bool = False, **more: Any) -> subprocess.Popen[str]:
        order = self.base / "order.json"
        machine = {"driver": more.pop("driver")} if "driver" in more else {}
        arguments = {**self.arguments(**more), "_ansible_check_mode": check}
        order.write_text(json.dumps({"arguments": arguments, "lock_file": str(self.base / "lock"), **machine}))
        return subprocess.Popen(
            [sys.executable, "-c", DRIVER, str(order)],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def call(self, check: bool = False, **more: Any) -> dict[str, Any]:
        out, err = self.start(check, **more).communicate(timeout=600)
        lines = [line for line in out.splitlines() if line.startswith("{")]
        assert lines, err
        result: dict[str, Any] = json.loads(lines[-1])
        return result

    def made(self, **more: Any) -> dict[str, Any]:
        result = self.call(**more)
        assert not result.get("failed"), result["msg"]
        return result

    @property
    def current(self) -> Path:
        return self.directory / "current"

    def environments(self) -> list[str]:
        base = self.directory / "environments"
        return sorted(path.name for path in base.iterdir()) if base.exists() else []

    def state(self) -> dict[str, bytes | str]:
        """Every file and link with its content, to show that nothing changed."""
        content: dict[str, bytes | str] = {}
        for path in sorted(self.directory.rglob("*")):
            if path.is_symlink():
                content[str(path)] = str(path.readlink())
            elif path.is_file():
                content[str(path)] = path.read_bytes()
        return content


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    need_program("cc")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return Node(tmp_path)


def with_manifest(node: Node) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
    manifests.write(document, str(node.manifest))
    return document


def test_it_is_made_proven_and_named_in_the_manifest_and_a_second_run_does_nothing(node: Node) -> None:
    document = with_manifest(node)
    result = node.made()
    assert result["changed"]
    part = result["training"]
    assert part["python"] == str(node.current / "bin/python")
    assert part["packages"]["torch"] == "2.13.0"
    assert (part["source"], part["accelerator"]) == ("built", "cpu")
    assert part["ops"] == {"async_io": "ready", "utils": "missing: exit status 1: error: no compiler for `utils`"}
    assert part["environment"] == {"TORCH_EXTENSIONS_DIR": part["ops_directory"]}
    assert manifests.load(str(node.manifest)) == {**document, "training": part}
    # Two ranks, one step each.
    assert node.log.read_text().splitlines() == ["build async_io", "build utils", "step", "step"]
    before = node.state()
    again = node.made()
    assert (again["changed"], again["training"]) == (False, part)
    assert node.state() == before
    assert len(node.log.read_text().splitlines()) == 4


def test_all_modules_are_compiled_at_once_unless_the_node_is_too_slow_for_that(node: Node) -> None:
    def compiled() -> list[str]:
        """What nothing has imported yet."""
        return [path.name for path in node.current.resolve().rglob("unused*.pyc")]

    unused = node.libraries[0]
    with zipfile.ZipFile(unused, "a") as wheel:
        wheel.writestr("unused_module.py", "x = 1\n")
    node.made(compile=False)
    assert compiled() == []
    # It is the same environment: nothing is built again for it.
    assert node.made(compile=True)["changed"] is False
    shutil.rmtree(node.directory)
    node.made()
    assert len(compiled()) == 1


def test_check_mode_says_what_would_be_made_and_makes_nothing(node: Node) -> None:
    result = node.made(check=True)
    assert result["changed"]
    assert result["diff"]["before"] == ""
    planned = json.loads(result["diff"]["after"])
    assert planned["packages"] == {"torch": "2.13.0", "deepspeed": "0.19.8"}
    assert planned["python"] == str(node.current / "bin/python")
    assert not node.directory.exists()
    node.made()
    assert not node.made(check=True)["changed"]


def test_the_lock_has_the_extras_that_it_is_used_with() -> None:
    tomllib = pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
    text = (ROOT / "pyproject.toml").read_text()
    project = tomllib.loads(text)["project"]
    extras = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    for name, expected in extras.items():
        assert lock.requirements(text, name) == expected
    plain = lock.whole(tiny_wheels.LOCK, text)
    assert plain.startswith(tiny_wheels.LOCK)
    assert lock.pin(plain, "torch") == "2.13.0"
    changed = lock.whole(tiny_wheels.LOCK, text.replace('"peft>=0.17"', '"peft>=0.18"'))
    assert lock.digest(changed) != lock.digest(plain)
    # What only develops tunetool makes no other environment.
    assert lock.whole(tiny_wheels.LOCK, text.replace('"ruff>=0.8"', '"ruff>=0.9"')) == plain
    with pytest.raises(Refusal, match=r"pyproject.toml has no `finetune`"):
        lock.whole(tiny_wheels.LOCK, text.replace("\nfinetune = [", "\nother = ["))


def test_check_mode_names_the_wheels_that_the_node_lacks(node: Node) -> None:
    arguments = node.arguments()
    (node.wheels / "peft-1.0-py3-none-any.whl").unlink()
    assert node.made(check=True, **arguments)["send"] == ["peft-1.0-py3-none-any.whl"]


@pytest.mark.slow
def test_a_changed_lock_is_built_beside_and_a_running_job_keeps_its_files(node: Node, tmp_path: Path) -> None:
    node.libraries = tiny_wheels.libraries(node.wheels, more={"peft": "AGE = 1"})
    node.made()
    go = tmp_path / "go"
    script = (
        "import pathlib, subprocess, sys, time\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.05)\n"
        "import peft\n"
        "child = subprocess.run([sys.executable, '-c', 'import peft; print(peft.AGE)'], stdout=subprocess.PIPE)\n"
        "print(peft.AGE, child.stdout.decode().strip())\n"
    )
    with subprocess.Popen([str(node.current / "bin/python"), "-c", script], stdout=subprocess.PIPE, text=True) as job:
        try:
            first = node.environments()
            for age in (2, 3, 4):
                node.libraries = tiny_wheels.libraries(node.wheels, more={"peft": f"AGE = {age}"})
                assert node.made()["changed"]
            # The job's, the one before, and the current one.
            assert len(node.environments()) == 3
            assert set(first) < set(node.environments())
            shown = subprocess.run(
                [str(node.current / "bin/python"), "-c", "import peft; print(peft.AGE)"],
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            assert shown.stdout.strip() == "4"
            go.touch()
            assert job.communicate(timeout=120)[0].split() == ["1", "1"]
        finally:
            job.kill()
    node.libraries = tiny_wheels.libraries(node.wheels, more={"peft": "AGE = 5"})
    node.made()
    assert len(node.environments()) == 2
    assert not set(first) & set(node.environments())


def test_a_wheel_with_another_hash_is_refused_by_name_and_what_is_in_use_stays(node: Node) -> None:
    node.made()
    before = node.state()
    node.libraries = tiny_wheels.libraries(node.wheels, more={"peft": "AGE = 2"})
    arguments = node.arguments()
    wheel = node.wheels / "peft-1.0-py3-none-any.whl"
    data = bytearray(wheel.read_bytes())
    data[50] ^= 1
    wheel.write_bytes(data)
    result = node.call(**arguments)
    assert result["failed"]
    assert f"`{wheel}` has the hash" in result["msg"]
    assert "hint: " in result["msg"]
    assert node.state() == before


@pytest.mark.parametrize(
    ("behaviour", "message"),
    [
        (
            "idle",
            "DeepSpeed cannot train over 2 ranks (gloo): exit status 1: error: DeepSpeed's step changed no parameter",
        ),
        pytest.param(
            "hang",
            "DeepSpeed cannot train over 2 ranks (gloo): it did not end within 20 s",
            marks=pytest.mark.slow,  # it waits for the limit
        ),
    ],
)
def test_an_environment_whose_proof_fails_is_not_used(node: Node, behaviour: str, message: str) -> None:
    document = with_manifest(node)
    part = node.made()["training"]
    target = node.current.readlink()
    node.libraries = tiny_wheels.libraries(node.wheels, behaviour)
    result = node.call(proof_timeout=20)
    assert message in result["msg"]
    assert "hint: " in result["msg"]
    assert "\n" not in result["msg"]
    assert node.current.readlink() == target
    assert manifests.load(str(node.manifest)) == {**document, "training": part}
    # Later runs do not count it as proven.
    assert message in node.call(proof_timeout=20)["msg"]


def test_a_library_that_cannot_be_imported_is_named(node: Node) -> None:
    node.libraries = tiny_wheels.libraries(node.wheels, more={"accelerate": "import nothing_of_that_name"})
    result = node.call()
    assert "`import accelerate`: ModuleNotFoundError" in result["msg"]
    assert not node.current.exists()


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["while pip installs", "before the switch"])
def test_a_run_that_was_killed_leaves_the_old_one_in_use_and_the_next_run_mends(node: Node, moment: str) -> None:
    node.made()
    target = node.current.readlink()
    waiting = node.base / "waiting"
    waiting.touch()
    node.environment["TINY_WAIT"] = str(waiting)
    steps = node.log.read_text().count("step")
    node.libraries = tiny_wheels.libraries(node.wheels, "wait")
    run = node.start()
    deadline = time.monotonic() + 300
    while True:
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()
        new = [path for path in (node.directory / "environments").iterdir() if path.name != target.name]
        if moment == "before the switch":
            if node.log.read_text().count("step") > steps:
                break
        elif new and list(new[0].glob("lib/python3*/site-packages/*.dist-info")):
            break
        time.sleep(0.02)
    run.kill()
    run.communicate()
    waiting.unlink()
    assert node.current.readlink() == target
    check = subprocess.run([str(node.current / "bin/python"), "-c", "import torch, peft"], check=False)
    assert check.returncode == 0
    assert node.made()["changed"]
    assert node.current.readlink() != target
    assert not node.made()["changed"]


def test_a_disk_without_room_is_refused_before_anything_is_made(node: Node) -> None:
    arguments = node.arguments()
    arguments["wheelhouse_manifest"]["files"]["torch-2.13.0-py3-none-any.whl"]["unpacked_bytes"] = 2**60
    for check in (True, False):
        result = node.call(check=check, **arguments)
        assert "free and the environment takes" in result["msg"]
        assert "`training_environment_directory`" in result["msg"]
        assert node.environments() == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root and mount(2)")
def test_a_disk_that_fills_up_leaves_nothing(node: Node) -> None:
    node.directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=12m", "none", str(node.directory)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("needs root and mount(2)")
    try:
        # Random bytes, which need space on every file system; the manifest does not list them.
        name = "numpy"
        path = tiny_wheels.wheel(node.wheels, name, {"numpy/__init__.py": "", "numpy/data.bin": os.urandom(16 * 2**20)})
        arguments = node.arguments()
        arguments["wheelhouse_manifest"]["files"][path.name]["unpacked_bytes"] = 1000
        result = node.call(**arguments)
        assert f"`{node.directory}` is full. hint: free space there" in result["msg"]
        assert node.environments() == []
        assert not node.current.exists()
    finally:
        subprocess.run(["umount", str(node.directory)], check=True)


def test_wheels_that_were_sent_together_are_taken(node: Node) -> None:
    arguments = node.arguments(received="")
    bundle = node.directory / "wheels/sent.tar"
    bundle.parent.mkdir(parents=True)
    wheel_files.pack(str(bundle), [str(path) for path in sorted(node.wheels.glob("*.whl"))])
    # What is looked at first has them all still to come.
    assert "peft-1.0-py3-none-any.whl" in node.made(check=True, **arguments, bundle=str(bundle))["send"]
    assert node.made(**arguments, bundle=str(bundle))["changed"]
    assert not bundle.exists()
    assert not node.made(**arguments)["changed"]


@pytest.mark.parametrize("damaged", ["cut", "another file"])
def test_what_was_sent_together_and_is_no_archive_of_wheels_is_refused(node: Node, damaged: str) -> None:
    bundle = node.directory / "wheels/sent.tar"
    bundle.parent.mkdir(parents=True)
    if damaged == "cut":
        wheel_files.pack(str(bundle), [str(node.wheels / "peft-1.0-py3-none-any.whl")])
        bundle.write_bytes(bundle.read_bytes()[:100])
    else:
        with tarfile.open(bundle, "w") as tar:
            tar.add(__file__, "../elsewhere.whl")
    result = node.call(bundle=str(bundle))
    assert f"`{bundle}` {'is damaged' if damaged == 'cut' else 'holds `../elsewhere.whl`'}" in result["msg"]
    assert "hint: " in result["msg"]
    assert not bundle.exists()
    assert not (node.directory / "elsewhere.whl").exists()


def test_a_file_that_was_lost_is_named_and_the_next_run_builds_again(node: Node) -> None:
    document = with_manifest(node)
    node.made()
    document = manifests.load(str(node.manifest))
    assert check_training(document).status == "pass"
    venv = node.current.resolve()
    (site,) = venv.glob("lib/python3*/site-packages")
    aside = node.base / "aside"
    for name, words in {
        "peft/__init__.py": "is gone",
        "peft-1.0.dist-info": "is gone or damaged",
        "../../../pyvenv.cfg": "is gone",
        "_tunetool_pinned.pth": "is gone",
    }.items():
        (site / name).rename(aside)
        found = check_training(document)
        assert (found.id, found.status) == ("training.environment", "fail")
        assert f"`{os.path.normpath(site / name)}" in found.found
        assert words in found.found
        assert "`tunetool provision`" in found.remedy
        aside.rename(site / name)
    # What Python compiles again by itself is no loss.
    for path in site.rglob("__pycache__"):
        shutil.rmtree(path)
    assert check_training(document).status == "pass"
    torch = site / "torch/__init__.py"
    torch.write_bytes(torch.read_bytes()[:-1])
    assert check_training(document).found == f"`{torch}` has another size than when it was installed"
    (site / "peft/__init__.py").unlink()
    assert "(and 1 more files)" in check_training(document).found
    assert node.made(check=True)["changed"]
    with subprocess.Popen([str(node.current / "bin/python"), "-c", "import time; time.sleep(600)"]) as job:
        try:
            until(lambda: locked(venv / "environment.json"), "the job's lock", job)
            result = node.call()
            assert "a job still runs in this environment" in result["msg"]
            assert str(site) in result["msg"]
        finally:
            job.kill()
    assert node.made()["changed"]
    assert check_training(document).status == "pass"
    assert not node.made()["changed"]


def locked(path: Path) -> bool:
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_another_tunetool_is_another_environment_with_the_same_ops(node: Node) -> None:
    first = node.made()
    assert node.log.read_text().count("build") == 2
    second = node.made(tool_key="2")
    assert second["changed"]
    assert len(node.environments()) == 2
    assert second["training"]["ops_directory"] == first["training"]["ops_directory"]
    assert node.log.read_text().count("build") == 2


def test_an_index_that_does_not_answer_is_named_without_its_password(node: Node) -> None:
    url = "http://name:secret@127.0.0.1:9/simple"
    result = node.call(wheelhouse_manifest=None, index_url=url)
    assert "the index `http://127.0.0.1:9/simple` does not give what the lock asks for" in result["msg"]
    assert "secret" not in result["msg"]
    assert node.environments() == []


def test_an_environment_of_the_owners_is_checked_and_left_as_it_is(node: Node) -> None:
    node.made()
    environment = node.base / "own"
    (node.current.resolve()).rename(environment)
    python = environment / "bin/python"
    before = {path: path.stat().st_mtime_ns for path in environment.rglob("*") if "__pycache__" not in str(path)}
    program = node.base / "tunetool"
    program.write_text(f'#!/bin/sh\nexec {python} -m tunetool "$@"\n')
    program.chmod(0o755)
    part = node.made(python=str(python), program=str(program), wheelhouse_manifest=None, tool_files=[])["training"]
    assert (part["python"], part["source"]) == (str(python), "named")
    assert part["ops"]["async_io"] == "ready"
    after = {path: path.stat().st_mtime_ns for path in environment.rglob("*") if "__pycache__" not in str(path)}
    assert {path for path in before if before[path] != after.get(path)} <= {environment / "lib"}
    result = node.call(python="/nowhere/python", wheelhouse_manifest=None)
    assert "`/nowhere/python` is not an interpreter on this node" in result["msg"]


def test_ops_of_an_equal_node_are_taken_and_not_compiled(node: Node) -> None:
    # An op other than `utils` cannot be compiled: an incomplete set is not shared.
    ops = {"ops": ["async_io", "gds"]}
    first = node.made(**ops)
    archive = node.base / "ops.tar"
    (Path(first["ops_archive"])).rename(archive)
    subprocess.run(["rm", "-rf", str(node.directory)], check=True)
    node.log.unlink()
    second = node.made(**ops, ops_archive=str(archive))
    assert "build" not in node.log.read_text()
    assert second["training"] == first["training"]
    assert second["ops_archive"] == ""


def test_ops_that_were_damaged_or_are_of_another_machine_are_refused(node: Node) -> None:
    ops = {"ops": ["async_io", "gds"]}
    first = node.made(**ops)
    archive = Path(first["ops_archive"])
    data = bytearray(archive.read_bytes())
    at = data.index(b"\x7fELF")
    data[at + 100] ^= 1
    damaged = node.base / "damaged.tar"
    damaged.write_bytes(data)
    whole = node.base / "whole.tar"
    archive.rename(whole)
    for path, change, message in (
        (damaged, {}, "another hash than when it was built"),
        (whole, {"ops": ["async_io"]}, "was built for another kind of machine"),
    ):
        subprocess.run(["rm", "-rf", first["training"]["ops_directory"]], check=True)
        result = node.call(**{**ops, **change}, ops_archive=str(path))
        assert message in result["msg"]
        assert not Path(first["training"]["ops_directory"]).exists()


def test_an_op_for_another_cpu_is_named_as_that(node: Node) -> None:
    node.environment["TINY_TRAP"] = "1"
    result = node.call()
    assert "DeepSpeed's op `async_io` cannot be loaded: it died of SIGILL" in result["msg"]
    assert "built for another CPU" in result["msg"]
    assert not node.current.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lock": tiny_wheels.LOCK + "more==1\n", "wheelhouse_manifest": "as it was"}, "was filled from another lock"),
        ({"accelerator": "cuda"}, "no NVIDIA GPU is on the PCI bus"),
        ({"base_python": "/nowhere/python"}, "`/nowhere/python` is not installed"),
    ],
)
def test_what_cannot_be_is_refused_with_a_hint(node: Node, change: dict[str, Any], message: str) -> None:
    if "wheelhouse_manifest" in change:
        change = {**change, "wheelhouse_manifest": node.arguments()["wheelhouse_manifest"]}
    result = node.call(**change)
    assert result["failed"]
    assert message in result["msg"]
    assert "hint: " in result["msg"]
    assert not node.directory.exists()


def test_a_wheelhouse_without_this_python_names_the_command(node: Node) -> None:
    arguments = node.arguments()
    arguments["wheelhouse_manifest"]["sets"][0]["python"] = "3.9"
    result = node.call(**arguments)
    assert f"tunetool build-wheelhouse DIR --python-version {VERSION}" in result["msg"]


@pytest.mark.parametrize(
    ("driver", "tag", "default"),
    [
        ("580.65.06", "cu130", True),
        ("595.10", "cu130", True),
        ("570.124.06", "cu126", False),
        ("525.60.13", "cu126", False),
    ],
)
def test_the_driver_chooses_the_build_of_torch(driver: str, tag: str, default: bool) -> None:
    build = accelerator.choose("auto", 8, driver, "2.13.0", "13.0")
    assert (build.tag, build.default) == (tag, default)


def test_a_driver_that_is_too_old_is_named_with_the_newest_torch_that_fits() -> None:
    with pytest.raises(
        Refusal, match=r"`470\.57\.02` is too old for torch 2\.13\.0.*driver 525\.60\.13.*2\.7 \(CUDA 11\.8\)"
    ):
        accelerator.choose("auto", 8, "470.57.02", "2.13.0", "13.0")
    with pytest.raises(Refusal, match=r"no torch from 2\.5 on fits"):
        accelerator.choose("auto", 8, "390.157", "2.13.0", "13.0")
    with pytest.raises(Refusal, match="no NVIDIA driver is loaded, and 8 GPUs"):
        accelerator.choose("auto", 8, None, "2.13.0", "13.0")


@pytest.mark.parametrize(
    ("driver", "more", "messages"),
    [
        # None runs on it: the driver that is needed, and the newest torch that this one runs.
        ("470.57.02", {}, ["driver `470.57.02` is too old for torch 2.13.0", "525.60.13", "2.7 (CUDA 11.8)"]),
        # Another build of the same torch does, which is not at hand.
        ("535.54.03", {}, ["no set for Python", "--build cu126"]),
        (
            "535.54.03",
            {"wheelhouse_manifest": None},
            ["driver `535.54.03` needs torch 2.13.0 for CUDA 12.6", "`training_environment_torch_index_url`"],
        ),
    ],
)
def test_a_node_whose_driver_is_too_old_is_refused_before_anything_is_made(
    node: Node, driver: str, more: dict[str, Any], messages: list[str]
) -> None:
    lock_ = tiny_wheels.LOCK + "cuda-toolkit==13.0.3\n"
    for check in (True, False):
        result = node.call(check=check, accelerator="auto", lock=lock_, driver=driver, **more)
        assert result["failed"]
        assert "\n" not in result["msg"]
        for message in [*messages, "hint: "]:
            assert message in result["msg"]
    assert not node.directory.exists()


def test_a_node_without_a_gpu_takes_the_cpus_build() -> None:
    assert accelerator.choose("auto", 0, None, "2.13.0", "13.0").tag == "cpu"
    assert accelerator.choose("cpu", 8, "580.65.06", "2.13.0", "13.0").tag == "cpu"


def test_a_mapped_file_is_seen_whatever_characters_its_name_has(tmp_path: Path) -> None:
    maps = tmp_path / "proc/4242/maps"
    maps.parent.mkdir(parents=True)
    names = ("/opt/env/lib/a\u2028b\x0cc.so", "/opt/env/lib/d.so")
    maps.write_text("".join(f"7f00-7f01 r-xp 0000 08:01 42 {name}\n" for name in names), encoding="utf-8")
    assert environment.used_files("/opt/env", str(tmp_path)) == sorted(names)
