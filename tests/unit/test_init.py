"""``tunetool init``: the inventory that it writes is that of the examples, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import calls
from calls import ROOT, TUNETOOL
from tunetool.cli.accept import text_of
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.fleet import new_inventory
from tunetool.fleet.collection import Collection
from tunetool.fleet.new_inventory import write_inventory
from waiting import PATIENCE

yaml = pytest.importorskip("yaml")

ROLES = sorted(path.name for path in (ROOT / "roles").iterdir() if path.is_dir())
WRITTEN = {".gitignore", "hosts.yml", "group_vars/all.yml"}
OF_LAB = WRITTEN - {"hosts.yml"}
"""For virtual nodes: `tunetool lab up` knows their addresses, and writes hosts.yml."""
KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from tunetool.fleet import new_inventory
copyfile = shutil.copyfile
def copy(source, target):
    copyfile(source, target)
    os.kill(os.getpid(), signal.SIGKILL)
shutil.copyfile = copy
new_inventory.write_inventory(Path(sys.argv[1]), "h100")
"""


def init(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return calls.call(*TUNETOOL, "init", *arguments, cwd=cwd)


def files_of(directory: Path) -> set[str]:
    return {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("profile", ["h100", "h200"])
def test_what_is_written_is_the_example(profile: str, tmp_path: Path) -> None:
    done = init("my cluster", "--profile", profile, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    made = tmp_path / "my cluster"
    assert files_of(made) == WRITTEN | {"goals.toml"}
    for name in WRITTEN - {".gitignore"}:
        assert (made / name).read_bytes() == (ROOT / "inventory" / profile / name).read_bytes()
    assert (made / "goals.toml").read_text() == text_of("fleet")
    assert [path.name for path in tmp_path.iterdir()] == ["my cluster"]
    assert done.stdout.splitlines()[-1].endswith("`tunetool provision -i 'my cluster' --check`")


@pytest.mark.parametrize("directory", ["inventory/lab", "virtual nodes"])
def test_an_inventory_of_virtual_nodes_waits_for_their_addresses(directory: str, tmp_path: Path) -> None:
    done = init(directory, "--profile", "lab", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    made = tmp_path / directory
    assert files_of(made) == OF_LAB
    assert (made / "group_vars/all.yml").read_bytes() == (ROOT / "inventory/lab/group_vars/all.yml").read_bytes()
    # The lab writes there by itself where it looks for an inventory; elsewhere it has to be asked.
    last = done.stdout.splitlines()[-1]
    assert last.startswith("next: `tunetool lab up`, ")
    assert ("`tunetool lab inventory --output 'virtual nodes/hosts.yml'`" in last) is (directory == "virtual nodes")
    assert last.endswith(f"then `tunetool provision -i {shlex.quote(directory)} --check`")


def test_the_addresses_of_other_virtual_nodes_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A clone whose lab is up has them in the example itself.
    example = tmp_path / "clone/inventory/lab"
    shutil.copytree(ROOT / "inventory/lab/group_vars", example / "group_vars")
    (example / "hosts.yml").write_text("lab: {hosts: {node1: {ansible_port: 1}}}")
    monkeypatch.setattr(new_inventory, "find_collection", lambda: Collection(tmp_path / "clone", clone=True))
    new_inventory.write_inventory(tmp_path / "mine", "lab")
    assert files_of(tmp_path / "mine") == OF_LAB


@pytest.mark.parametrize("profile", ["h100", "h200", "lab"])
def test_every_value_has_its_reason_without_a_clone(profile: str) -> None:
    example = ROOT / "inventory" / profile
    names = OF_LAB if profile == "lab" else WRITTEN
    text = "".join((example / name).read_text() for name in names - {".gitignore"})
    assert not re.findall(r"docs/|README\.md(?! of each role)|CHANGELOG|\.\./", text)
    assert all((ROOT / "roles" / role / "README.md").is_file() for role in ROLES)
    for words in re.findall(r"`tunetool ([^`]*)`", re.sub(r"\n\s*# ", " ", text)):
        command: click.Command | None = cli
        for word in words.split():
            if isinstance(command, click.Group):
                command = command.get_command(click.Context(command), word)
                assert command is not None, words
            elif word.startswith("-") and word != "--":
                assert any(word in each.opts for each in command.params), words
            else:
                break
    lines = (example / "group_vars/all.yml").read_text().splitlines()
    for number, line in enumerate(lines):
        if re.match(r"\w", line):
            above = next(each for each in reversed(lines[:number]) if not re.match(r"\w", each))
            assert re.match(r"# (?!---)", above), line


def test_every_example_can_be_asked_for(tmp_path: Path) -> None:
    # That of `make rehearse-training` needs what only a clone has.
    examples = {path.name for path in (ROOT / "inventory").iterdir()} - {"lab-training"}
    done = init("x", "--profile", "none", cwd=tmp_path)
    assert done.returncode == 2
    assert examples == set(re.findall(r"'(\w+)'", done.stderr.partition("is not one of")[2]))


def test_a_directory_that_appears_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copyfile = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        copyfile(source, target)
        (tmp_path / "new/theirs").mkdir(parents=True, exist_ok=True)

    monkeypatch.setattr(shutil, "copyfile", copy)
    with pytest.raises(UsageProblem, match="exists"):
        write_inventory(tmp_path / "new", "h100")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["theirs"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]


@pytest.mark.any_python  # the oldest Python has no ansible-core
def test_ansible_takes_no_goal_for_a_group(tmp_path: Path) -> None:
    assert init("mine", cwd=tmp_path).returncode == 0
    listed = calls.call(
        Path(sys.executable).with_name("ansible-inventory"), "-i", tmp_path / "mine", "--list",
        env={**os.environ, "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg")}, cwd=ROOT,
    )  # fmt: skip
    assert "goal" not in listed.stderr
    assert not {"values", "goal"} & json.loads(listed.stdout).keys()


def test_missing_directories_above_are_made(tmp_path: Path) -> None:
    # As every guide writes it, also where there is no clone and so no inventory/.
    assert init("inventory/mycluster", cwd=tmp_path).returncode == 0
    assert files_of(tmp_path) == {f"inventory/mycluster/{name}" for name in (*WRITTEN, "goals.toml")}


def test_an_interrupted_call_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "copyfile", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_inventory(tmp_path / "mycluster", "h100")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_call_leaves_nothing_and_the_next_one_writes(tmp_path: Path) -> None:
    directory = tmp_path / "mycluster"
    done = subprocess.run([sys.executable, "-c", KILLED, str(directory)], check=False, timeout=PATIENCE)
    assert done.returncode == -9
    assert not directory.exists()
    assert init("mycluster", cwd=tmp_path).returncode == 0
    assert files_of(directory) == WRITTEN | {"goals.toml"}


@pytest.mark.parametrize("profile", ["h100", "h200"])
def test_provisioning_accepts_every_variable(profile: str, tmp_path: Path) -> None:
    pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")
    made = tmp_path / "mycluster"
    assert init("mycluster", "--profile", profile, cwd=tmp_path).returncode == 0
    play = {"hosts": "all", "gather_facts": False, "tasks": [{"tunetool.node.validate_variables": {}}]}
    (tmp_path / "validate.yml").write_text(yaml.safe_dump([play]))
    done = ansible("ansible-playbook", "-i", str(made), str(tmp_path / "validate.yml"))
    assert done.returncode == 0, done.stdout
    # As somebody edits it: the hosts by rack, in place of the plain list.
    text = (made / "hosts.yml").read_text()
    lines = [
        line.replace("      # ", "      ", 1) if line.startswith("      # ") else line for line in text.splitlines()
    ]
    start = lines.index("      Racks as groups, so that `--limit rack1` takes one rack:")
    (made / "hosts.yml").write_text("\n".join([*lines[: start - 2], *lines[start + 1 :]]))
    listed = ansible("ansible-inventory", "-i", str(made), "--list")
    groups = json.loads(listed.stdout)
    assert groups["rack1"]["hosts"] == [f"{profile}-001.example.com", f"{profile}-002.example.com"]
    assert groups[profile]["children"] == ["rack1", "rack2"]
    assert groups["_meta"]["hostvars"][f"{profile}-004.example.com"]["nvme_drives_count"] == 8


def ansible(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=ROOT,
        env={**os.environ, "ANSIBLE_NOCOLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
