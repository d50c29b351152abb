"""Staging on hosts of an inventory: through Ansible's real way, on hosts that are this machine."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from staged import view
from tunetool.cli.stage import command
from tunetool.errors import UsageProblem
from tunetool.record import read

pytest.importorskip("ansible_runner")
PREFIX = Path(sys.executable).parent.parent


def call(*arguments: object) -> int:
    return int(command.main([str(each) for each in arguments], standalone_mode=False))


@pytest.mark.skipif(not (PREFIX / "bin/tunetool").exists(), reason="tunetool is not installed as a program here")
def test_every_host_has_the_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, runs = tmp_path / "source", tmp_path / "runs"
    (source / "sub").mkdir(parents=True)
    (source / "sub/data").write_bytes(os.urandom(100_000))
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(
        f"all:\n  vars: {{ansible_connection: local, ansible_python_interpreter: {sys.executable}, "
        f"tunetool_prefix: {PREFIX}}}\n  hosts: {{n1: {{}}, n2: {{}}}}\n"
    )
    common = ("-i", inventory, "--no-become", "--runs-dir", runs)
    # Both hosts are asked for one DST here: the second waits for the first, and finds the copy.
    assert call(source, tmp_path / "copy", *common) == 0
    assert view(tmp_path / "copy") == view(source)
    record = read(next(runs.glob("*-fleet-*")))
    assert [(host.host, host.status) for host in record.hosts or []] == [("n1", "pass"), ("n2", "pass")]
    assert [figure.name for figure in record.measurements] == ["stage.copy"]
    assert "n1" in capsys.readouterr().out
    (tmp_path / "copy/sub/data").write_bytes(b"x" * 100_000)
    assert call("verify", tmp_path / "copy", *common) == 1
    shown = capsys.readouterr().out
    assert "`sub/data` does not have the xxh3_64 of the manifest" in " ".join(shown.split())
    assert shown.rstrip().endswith("FAIL")
    # An invalid call on the host counts as one that could not be carried out there.
    assert call(source, tmp_path / "copy", *common) == 3
    assert "`--replace`" in " ".join(capsys.readouterr().out.split())


def test_paths_of_other_hosts_are_absolute(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: {}}}\n")
    for arguments in (("here", "/dev/shm/x"), ("/data", "there")):
        with pytest.raises(UsageProblem, match="is not absolute"):
            call(*arguments, "-i", tmp_path / "hosts.yml")


def test_one_host_is_one_host(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "hosts.yml").write_text("all: {hosts: {n1: {}}}\n")
    assert call("/data", "/dev/shm/x", "-i", tmp_path / "hosts.yml", "--dry-run") == 0
    assert "1 host, 1 at once: n1" in capsys.readouterr().err
