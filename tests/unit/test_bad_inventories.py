"""Inventories that were damaged, made up or are no files: every command with `-i` refuses them in one line, at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from damaged import bounded_memory, cut, no_hang
from doors import refused_well
from hosts_commands import ON_HOSTS
from tunetool.cli.main import cli
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.fleet import playbook
from tunetool.fleet.playbook import Playbook, find_playbook, list_hosts

pytest.importorskip("ansible_runner", reason="Ansible's control side needs Python 3.11")
SOUND = "  hosts (3):\n    node1\n    node-2.example\n    node3\n"
NO_FILES = {
    "a FIFO": "neither a file nor a directory",
    "/dev/zero": "neither a file nor a directory",
    "below a file": "Not a directory",
    "a name that is too long": "File name too long",
    "nothing": "does not exist",
}


@pytest.fixture
def no_files(tmp_path: Path) -> dict[str, Path]:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "file").write_text("node1\n")
    return {
        "a FIFO": tmp_path / "fifo",
        "/dev/zero": Path("/dev/zero"),
        "below a file": tmp_path / "file/hosts",
        "a name that is too long": tmp_path / ("x" * 300),
        "nothing": tmp_path / "nothing",
    }


@pytest.mark.parametrize("command", ON_HOSTS, ids=" ".join)
def test_what_is_no_file_is_refused_by_every_command(command: tuple[str, ...], no_files: dict[str, Path]) -> None:
    for name, path in no_files.items():
        given_words = [*command, *ON_HOSTS[command], "-i", str(path)]
        with no_hang():
            done = CliRunner().invoke(cli, given_words, standalone_mode=False)
        assert isinstance(done.exception, UsageProblem), (name, done.exception)
        refused_well(done.exception, hinted=True)
        assert str(path) in done.exception.message
        assert NO_FILES[name] in done.exception.message


def printable(error: TunetoolError) -> None:
    assert f"{error.message} {error.hint}".isprintable()


def listed(stdout: str, stderr: str, status: int) -> list[str]:
    """The hosts, where Ansible answers so."""
    done = subprocess.CompletedProcess(["ansible"], status, stdout, stderr)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(playbook, "captured", lambda *_, **__: done)
        return list_hosts(Path("hosts.yml"), None, Playbook("verify", {}))


@given(
    st.one_of(cut(SOUND.encode()).map(lambda content: content.decode(errors="replace")), st.text(max_size=60)),
    st.sampled_from(["", "[ERROR]: Unable to parse \x1b[31mhosts.yml\n", "ERROR \0\n" * 3]),
    st.sampled_from([0, 0, 0, 4, -9]),
)
def test_whatever_ansible_lists_it_is_hosts_or_refused(stdout: str, stderr: str, status: int) -> None:
    with no_hang(), bounded_memory():
        try:
            hosts = listed(stdout, stderr, status)
        except TunetoolError as error:
            refused_well(error, hinted=True)
            printable(error)
            return
    assert status == 0
    assert hosts
    for host in hosts:
        assert host.isprintable()
        assert not host.startswith("-")


def test_what_ansible_lists_is_read() -> None:
    assert listed(SOUND, "", 0) == ["node1", "node-2.example", "node3"]


def test_an_ansible_that_does_not_start_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(playbook, "_path", lambda: str(tmp_path))
    with pytest.raises(CannotJudge, match="`ansible` does not start: No such file or directory") as caught:
        list_hosts(tmp_path, None, Playbook("verify", {}))
    refused_well(caught.value, hinted=True)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        bytes(range(256)) * 20,
        b"all: {hosts: " + b"[" * 3000,
        b"all: {hosts: [node1]}\n",
        b'all: {hosts: {"node1\\e[2J": {}}}\n',
        b'all: {hosts: {"--version": {}}}\n',
    ],
    ids=["nothing", "all bytes", "deep", "a list", "an escape", "an option"],
)
def test_ansible_itself_reads_what_is_damaged(content: bytes, tmp_path: Path) -> None:
    inventory = tmp_path / "hosts.yml"
    inventory.write_bytes(content)
    with no_hang(), pytest.raises(UsageProblem) as caught:
        list_hosts(inventory, None, find_playbook("verify"))
    refused_well(caught.value, hinted=True)
    assert str(inventory) in caught.value.message
    printable(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "cause"),
    [
        ("tabs.yml", "all:\n\thosts:\n\t\tnode1:\n", "cannot be read: line 2: YAML parsing failed: Tabs are usually"),
        ("colon.yml", "all:\n  hosts: node1: node2\n", "cannot be read: line 2: YAML parsing failed"),
        ("hosts", "[gpu\nnode1\n", "cannot be read: "),
    ],
)
def test_what_ansible_says_of_a_file_is_said(name: str, text: str, cause: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsageProblem) as caught:
        list_hosts(path, None, find_playbook("verify"))
    refused_well(caught.value, hinted=True)
    assert f"`{path}` {cause}" in caught.value.message
    assert "--list-hosts" in str(caught.value.hint)
