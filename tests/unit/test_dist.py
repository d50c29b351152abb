"""The wheel carries the collection, and is enough without a clone.

The wheel is built once; what is installed from it takes its dependencies from this Python.
"""

from __future__ import annotations

import ctypes
import email
import importlib
import importlib.metadata
import json
import os
import re
import shutil
import site
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterator
from email.message import Message
from pathlib import Path

import pytest

import dist
import reference
from programs import need_program
from tunetool.node.common import node_wheel
from tunetool.node.common.commands import CommandError
from tunetool.node.common.node_wheel import package_wheel
from waiting import PATIENCE

ROOT = Path(__file__).parents[2]
INSIDE = f"{node_wheel.COLLECTION}/"
REFERENCE = [*reference.MADE, "docs/reference/manifest.schema.json", "docs/reference/record.schema.json"]
"""Pages of the documents that whoever has no clone gets."""
MOST_BYTES = 2_300_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of `make dist`."""
    directory = tmp_path_factory.mktemp("dist")
    dist.build(directory, ["wheel"])
    (built,) = directory.iterdir()
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The environment's directory, after pip has installed the wheel there."""
    venv = tmp_path_factory.mktemp("control machine") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    packages = packages_of(venv)
    (packages / "others.pth").write_text("".join(f"{path}\n" for path in site.getsitepackages()))
    pip = [str(venv / "bin/python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--ignore-installed", str(wheel)], check=True)
    return venv


def packages_of(venv: Path) -> Path:
    return venv / f"lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"


def call(venv: Path, *arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The installed program, from a directory that is no clone."""
    kept = {
        name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("ANSIBLE_")
    }
    # ansible-playbook is that of this Python, which does not see what the environment holds.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [str(venv / "bin/tunetool"), *arguments],
        cwd=cwd,
        env={**kept, "PATH": path, "ANSIBLE_NOCOLOR": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def tree(root: Path) -> Iterator[str]:
    for path in sorted(root.rglob("*")):
        if (
            path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
        ):  # a checkout may have compiled it
            yield path.relative_to(root).as_posix()


def test_the_wheel_holds_package_and_collection_alone(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert len(names) == len(archive.namelist()) - 5
    expected = {
        f"tunetool/{name}" for name in tree(ROOT / "tools/tunetool") if not name.startswith(("node/", "templates/"))
    }
    expected.add("tunetool/node/__init__.py")  # leads to the collection
    expected |= {f"tunetool/templates/{name}" for name in tree(ROOT / "templates")}
    for folder in (
        "inventory/h100",
        "inventory/h200",
        "inventory/lab/group_vars",
        "meta",
        "playbooks",
        "plugins",
        "roles",
    ):
        expected |= {f"{INSIDE}{folder}/{name}" for name in tree(ROOT / folder)}
    at_the_root = ("ansible.cfg", "constraints.txt", "hatch_build.py", "pyproject.toml", "site.yml")
    expected |= {f"{INSIDE}{name}" for name in at_the_root}
    expected |= {f"{INSIDE}{name}" for name in REFERENCE}
    assert names == expected
    assert wheel.stat().st_size < MOST_BYTES


def test_a_wheel_for_one_machine_also_has_the_compiled_reading(wheel: Path, tmp_path: Path) -> None:
    need_program("cc")
    dist.build(tmp_path, ["wheel"], compiled=True)
    names = {}
    for built in tmp_path.iterdir():
        with zipfile.ZipFile(built) as archive:
            names[built.name] = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = wheel.name.replace("-any", f"-{sysconfig.get_platform().replace('-', '_')}")
    library = "tunetool/checkpoint/libread_loop.so"
    assert set(names) == {wheel.name, compiled}
    assert names[compiled] - names[wheel.name] == {library}
    with zipfile.ZipFile(tmp_path / compiled) as archive:
        assert ctypes.CDLL(archive.extract(library, tmp_path / "out")).tunetool_read_loop_version() > 0


def test_the_wheels_reference_is_that_of_commands_and_roles(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        pages = {name: archive.read(f"{INSIDE}{name}").decode() for name in REFERENCE}
    assert {name for name, text in pages.items() if not text.strip()} == set()
    assert "## tunetool bench checkpoint\n" in pages["docs/reference/commands.md"]
    assert "| `raid_array_adopt` |" in pages["docs/reference/roles.md"]
    titles = {name: json.loads(text)["title"] for name, text in pages.items() if name.endswith(".json")}
    assert len(set(titles.values())) == 4


def test_the_collections_archive_has_reference_and_changelog(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")
    dist.build_collection(tmp_path)
    assert [name for name in [*reference.MADE, "changelogs"] if (ROOT / name).exists()] == []
    (archive,) = tmp_path.iterdir()
    with tarfile.open(archive) as tar:
        member = tar.extractfile("changelogs/changelog.yaml")
        assert member is not None
        document = yaml.safe_load(member.read())
        assert set(REFERENCE) <= set(tar.getnames())
    text = (ROOT / "CHANGELOG.md").read_text()
    version = yaml.safe_load((ROOT / "galaxy.yml").read_text())["version"]
    assert set(document) == {"ancestor", "releases"}
    # antsibull-changelog refuses a release without them.
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\d", each["release_date"]) for each in document["releases"].values())
    assert set(document["releases"]) == set(re.findall(r"^## (\S+)", text, re.MULTILINE)) == {version}
    entries = [
        each for release in document["releases"].values() for kind in release["changes"].values() for each in kind
    ]
    assert len(entries) == len(re.findall(r"^- ", text, re.MULTILINE)) > 20
    assert not any(each.count("``") % 2 or "](" in each or "\n" in each for each in entries)


def test_an_editable_install_has_no_part_of_the_collection() -> None:
    # Ansible would take it for an installed collection, and look no further.
    assert not (Path(sysconfig.get_paths()["purelib"]) / "ansible_collections/tunetool/node/ansible.cfg").exists()


def test_the_nodes_wheel_is_the_same_from_what_is_installed(wheel: Path, installed: Path, tmp_path: Path) -> None:
    # What package_wheel makes of sources, after pip has built them.
    of_sources = Path(shutil.copy(wheel, tmp_path))
    node_wheel.without_collection(str(of_sources))
    (tmp_path / "carried").mkdir()
    carried = packages_of(installed) / node_wheel.COLLECTION
    wheels = [of_sources, Path(package_wheel(str(carried), str(tmp_path / "carried")))]
    assert wheels[0].name == wheels[1].name
    contents = []
    for path in wheels:
        with zipfile.ZipFile(path) as archive:
            assert archive.testzip() is None
            contents.append({name: archive.read(name) for name in archive.namelist()})
            assert not any("ansible" in name and not name.startswith("tunetool/") for name in archive.namelist())
    assert contents[0] == contents[1]
    assert wheels[0].read_bytes() == wheels[1].read_bytes()
    shared = {f"tunetool/node/{name}" for name in tree(ROOT / "plugins/module_utils")}
    assert {name for name in contents[0] if name.startswith("tunetool/node/")} == shared
    with zipfile.ZipFile(wheel) as archive:
        kept = [
            name
            for name in archive.namelist()
            if name.startswith("tunetool/") and not name.startswith("tunetool/node/")
        ]
        assert {name for name in contents[0] if ".dist-info/" not in name} == {*kept, *shared}
    # pip checks a wheel's RECORD, and a node's tunetool starts from it.
    target = tmp_path / "node"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-index", "--no-deps", "--target", str(target), str(wheels[1])], check=True)
    assert not (target / "ansible_collections").exists()
    done = subprocess.run(
        [sys.executable, "-m", "tunetool", "--version"],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "tunetool" in done.stdout


def test_a_damaged_installation_is_named(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    carried = tmp_path / node_wheel.COLLECTION
    (tmp_path / "tunetool/record.py").unlink()
    with pytest.raises(CommandError, match=r"tunetool/record\.py` of the installed tunetool is gone"):
        package_wheel(str(carried), str(tmp_path))
    (next(tmp_path.glob("*.dist-info")) / "RECORD").unlink()
    with pytest.raises(CommandError, match="neither the sources of tunetool nor one installed tunetool"):
        package_wheel(str(carried), str(tmp_path))


@pytest.fixture
def control() -> None:
    """A Python that Ansible's control side runs on."""
    pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")


def test_init_and_provision_use_what_is_carried(control: None, installed: Path, tmp_path: Path) -> None:
    before = {name: (packages_of(installed) / name).stat().st_mtime_ns for name in tree(packages_of(installed))}
    # Another version of the collection, which Ansible finds first without our settings.
    other = tmp_path / "home/.ansible/collections" / node_wheel.COLLECTION / "playbooks"
    other.mkdir(parents=True)
    (other / "provision.yml").write_text("- hosts: all\n  gather_facts: false\n  tasks: []\n")
    assert call(installed, "init", "mycluster", cwd=tmp_path).returncode == 0
    # This machine stands in for the first host, and has fewer drives than that.
    here = {"ansible_python_interpreter": sys.executable, "ansible_become": False, "nvme_drives_count": 999}
    done = call(
        installed,
        *(
            "provision",
            "-i",
            "mycluster",
            "--limit",
            "h100-001*",
            "--check",
            "--",
            "-c",
            "local",
            "-e",
            json.dumps(here),
        ),
        cwd=tmp_path,
        HOME=str(tmp_path / "home"),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "999 drives asked for, " in " ".join(done.stdout.split())
    assert re.search(r"^h100-001\.example\.com +REFUSED ", done.stdout, re.MULTILINE)
    after = {name: (packages_of(installed) / name).stat().st_mtime_ns for name in tree(packages_of(installed))}
    assert after == before


def test_every_carried_playbook_finds_what_it_imports(control: None, installed: Path, tmp_path: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "playbooks").glob("*.yml"))
    program = [Path(sys.executable).parent / "ansible-playbook", "--syntax-check", "-i", "localhost,"]
    done = subprocess.run(
        [*program, *(f"tunetool.node.{name}" for name in names)],
        cwd=tmp_path,
        env={**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(packages_of(installed)), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    carried = packages_of(installed) / node_wheel.COLLECTION / "playbooks"
    assert re.findall(r"^playbook: (.*)", done.stdout, re.MULTILINE) == [str(carried / f"{name}.yml") for name in names]


def test_virtual_nodes_need_no_clone(installed: Path, tmp_path: Path) -> None:
    done = call(installed, "init", "inventory/lab", "--profile", "lab", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # `lab up` writes hosts.yml where this directory is; it takes minutes, tools/dev/newcomer.py goes that way whole.
    assert [*tree(tmp_path / "inventory/lab")] == [".gitignore", "group_vars/all.yml"]
    done = call(installed, "lab", "status", cwd=tmp_path, TUNETOOL_LAB_DIR=str(tmp_path / "lab"))
    assert (done.returncode, done.stdout) == (0, "no nodes\n")


def test_the_key_of_the_nodes_wheels_is_of_what_is_installed(
    installed: Path, monkeypatch: pytest.MonkeyPatch, control: None
) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ansible/collections"), *sys.path])
    module = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.wheelhouse")
    carried = packages_of(installed) / node_wheel.COLLECTION
    names = {os.path.relpath(path, packages_of(installed)) for path in module.input_files(str(carried))}
    assert f"{INSIDE}plugins/module_utils/machine/drives.py" in names
    assert f"{INSIDE}constraints.txt" in names
    assert not any("direct_url" in name or name.startswith(f"{INSIDE}roles") for name in names)
    assert len(module.key_of(str(carried), ["3.11"], ["x86_64"])) == 16


def test_the_lock_of_training_environments_is_the_carried_one(installed: Path, tmp_path: Path) -> None:
    # An index that does not answer: the call ends where it needs the first package.
    done = call(
        installed,
        *("build-wheelhouse", str(tmp_path / "wheels"), "--build", "cpu"),
        *("--index-url", "http://127.0.0.1:9/simple"),
        cwd=tmp_path,
        PIP_CONFIG_FILE=os.devnull,
        PIP_RETRIES="0",
    )
    assert done.returncode == 3, done.stderr
    assert "is not a copy of the collection" not in done.stderr
    assert "building tunetool's wheel" in done.stderr
    assert "tunetool's wheel cannot be built" not in done.stderr


def described(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (each for each in archive.namelist() if each.endswith(".dist-info/METADATA"))
        return email.message_from_string(archive.read(name).decode())


def test_the_package_names_no_address_that_is_not_there(wheel: Path) -> None:
    said = described(wheel)
    assert said["Author"] == said["Maintainer"] == "The tunetool authors"
    assert said["License-Expression"] == "Apache-2.0"
    assert said["Description-Content-Type"] == "text/markdown"
    assert len(said["Keywords"].split(",")) > 5
    assert len(said.get_all("Classifier", [])) > 10
    galaxy = (ROOT / "galaxy.yml").read_text()
    given = re.findall(r"^(?:homepage|repository|documentation|issues): *(https?://\S+)", galaxy, re.MULTILINE)
    assert [each.split(", ")[1] for each in said.get_all("Project-URL", [])] == given


def test_the_package_s_addresses_are_those_of_galaxy(tmp_path: Path) -> None:
    hook = tmp_path / "clone"
    hook.mkdir()
    (hook / "galaxy.yml").write_text((ROOT / "galaxy.yml").read_text() + "repository: https://example.org/a/tunetool\n")
    program = (
        "import sys, hatch_build, json; found = {}; "
        "hatch_build.Addresses(sys.argv[1], {}).update(found); print(json.dumps(found))"
    )
    tools = tmp_path / "tools"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--target", str(tools), *dist.backend()], check=True)
    done = subprocess.run(
        [sys.executable, "-c", program, str(hook)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tools), str(ROOT)])},
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == {"urls": {"Repository": "https://example.org/a/tunetool"}}


@pytest.mark.any_python
@pytest.mark.parametrize("python", ["3.10", "3.11"])
def test_no_python_gets_the_extra_control_without_ansible(wheel: Path, python: str) -> None:
    from packaging.requirements import Requirement
    from packaging.specifiers import SpecifierSet

    wanted = [Requirement(each) for each in described(wheel).get_all("Requires-Dist", [])]
    surroundings = {"python_version": python, "extra": "control"}
    chosen = [each.name for each in wanted if each.marker is None or each.marker.evaluate(surroundings)]
    assert "ansible-core" in chosen
    # What pip refuses 3.10 by.
    asked = importlib.metadata.metadata("ansible-core")["Requires-Python"]
    assert SpecifierSet(asked).contains(python) == (python == "3.11")
