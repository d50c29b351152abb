"""Staging many small files: other processes copy them, to the same tree, and none of them stays."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from staged import beside, failed, stage, verify, view
from tunetool.errors import CannotJudge, ExitCode
from tunetool.stage import moving
from tunetool.stage.moving import Plan, move
from tunetool.stage.tree import files_of, scan

MANY = 200


def sums(tree: Path) -> object:
    """What the manifest of a staged tree says of each entry."""
    return json.loads((tree.parent / f".{tree.name}.tunetool-stage.json").read_text())["entries"]


def children() -> set[str]:
    """Processes of this one that still run, or were not waited for."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """More files than one batch has, with names and sizes of all kinds, among them ones that are not small."""
    folder = tmp_path / "source"
    folder.mkdir()
    for number in range(MANY):
        inner = folder / f"d{number % 3}"
        inner.mkdir(exist_ok=True)
        (inner / f"f{number}").write_bytes(os.urandom(number * 7))
    (folder / "large").write_bytes(os.urandom(3 * 2**20))
    (folder / "line\nbreak").write_bytes(b"1")
    (Path(os.fsdecode(os.fsencode(folder) + b"/not-utf8-\xff"))).write_bytes(b"2")
    (folder / "d0/f0").chmod(0o751)
    os.utime(folder / "d0/f0", ns=(10**18 + 7, 10**18 + 7))
    return folder


@pytest.fixture
def few_suffice(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes start for a single small file; the list gets how many were started."""
    started: list[int] = []
    real = moving.start_helpers

    def start(*arguments: Any) -> list[moving.Helper]:
        made = real(*arguments)
        started.append(len(made))
        return made

    monkeypatch.setattr(moving, "LEAST_FILES", 1)
    monkeypatch.setattr("tunetool.stage.moving.start_helpers", start)
    return started


@pytest.mark.parametrize("checksum", ["xxh3_64", "sha256"])
def test_the_copy_and_its_manifest_are_those_of_one_process(
    source: Path, tmp_path: Path, checksum: str, few_suffice: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    assert stage(source, tmp_path / "by-many", tmp_path / "runs", checksum=checksum).code == ExitCode.OK
    assert verify(tmp_path / "by-many", tmp_path / "runs").code == ExitCode.OK
    assert len(few_suffice) == 2
    assert min(few_suffice) >= 2
    assert children() <= before
    monkeypatch.setattr(moving, "LEAST_FILES", 10**6)
    assert stage(source, tmp_path / "by-one", tmp_path / "runs", checksum=checksum).code == ExitCode.OK
    assert few_suffice[2:] == [0]
    many, one = tmp_path / "by-many", tmp_path / "by-one"
    assert view(many) == view(one) == view(source)
    status = (many / "d0/f0").stat()
    assert (status.st_mode & 0o777, status.st_mtime_ns) == (0o751, 10**18 + 7)
    assert sums(many) == sums(one)
    (many / "d1/f1").write_bytes(b"another")
    monkeypatch.setattr(moving, "LEAST_FILES", 1)
    assert verify(many, tmp_path / "runs").code == ExitCode.FALLS_SHORT
    assert few_suffice[-1] >= 2


def test_a_file_that_changed_is_named(source: Path, tmp_path: Path, few_suffice: list[int]) -> None:
    entries = files_of(scan(source))
    (source / "d2/f77").write_bytes(b"longer or shorter")
    (tmp_path / "copy").mkdir()
    for name in ("d0", "d1", "d2"):
        (tmp_path / "copy" / name).mkdir()
    with pytest.raises(CannotJudge, match=r"d2/f77` changed while it was read") as caught:
        move(entries, Plan(tmp_path / "copy", "xxh3_64", 4), lambda _: None)
    assert caught.value.hint == "stage a source at rest"


def test_a_process_that_dies_is_named_and_nothing_is_left(
    source: Path, tmp_path: Path, few_suffice: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    child = tmp_path / "child.py"
    child.write_text("import os, signal\ndef answer(order):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    monkeypatch.setattr(moving, "_CHILD", child)
    reason = failed(stage(source, tmp_path / "copy", tmp_path / "runs"))
    assert "a process that copies small files was ended by SIGKILL" in reason
    assert not (tmp_path / "copy").exists()
    assert beside(tmp_path / "copy") == []
    assert children() <= before


def test_ctrl_c_ends_the_processes(
    source: Path, tmp_path: Path, few_suffice: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    child = tmp_path / "child.py"
    child.write_text("import time\ndef answer(order):\n    time.sleep(1000)\n")
    monkeypatch.setattr(moving, "_CHILD", child)
    seen: list[Sequence[str]] = []

    def press(_: int) -> None:
        seen.append(sorted(children() - before))
        os.kill(os.getpid(), signal.SIGINT)

    entries = files_of(scan(source))
    with pytest.raises(KeyboardInterrupt):
        move(entries, Plan(None, "xxh3_64", 4), press)
    assert len(seen[0]) >= 2
    assert children() <= before


def test_where_no_process_may_start_the_threads_copy(
    source: Path, tmp_path: Path, few_suffice: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "no-python"))
    assert stage(source, tmp_path / "copy", tmp_path / "runs").code == ExitCode.OK
    assert few_suffice == [0]
    assert view(tmp_path / "copy") == view(source)


def test_a_few_files_and_a_single_thread_start_none(source: Path, few_suffice: list[int]) -> None:
    entries = files_of(scan(source))
    plans = [Plan(None, "xxh3_64", threads) for threads in (1, 4)]
    alone, together = (move(entries, plan, lambda _: None).digests for plan in plans)
    assert alone == together
    assert few_suffice[0] == 0
    assert few_suffice[1] >= 2
