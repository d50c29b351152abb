"""A restored node that is incomplete is restored again; after some tries there is an error."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import pytest

from tunetool.errors import CannotJudge
from tunetool.lab import faults, fleet, node, qemu, saved, ssh
from tunetool.lab.machine import Drive
from tunetool.lab.qemu import QemuEnded
from tunetool.lab.quiesce import DriveUse
from tunetool.lab.snapshot import Snapshot
from tunetool.lab.state import Fault, Lab, NodeState

TEMPLATE = NodeState("node0", 0, "debian12", Path("/cache/image"), 2**31, "tcg", 11, 8, 2**32, 0)


class Script:
    """Replaces the ssh command that waits in the guest."""

    def kill(self) -> None:
        pass

    def communicate(self) -> None:
        pass


@pytest.mark.parametrize(("failures", "works"), [(0, True), (1, True), (2, True), (3, False)])
@pytest.mark.parametrize("noticed_by", ["qemu", "guest", "crash"])
def test_a_node_that_is_incomplete_or_crashed_is_restored_again(
    noticed_by: str, failures: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restored, ended = [], []

    def start(lab: Lab, state: NodeState, *_: object) -> None:
        lab.node_dir(state.name).mkdir(exist_ok=True)
        restored.append(state)
        if noticed_by == "qemu" and len(restored) <= failures:
            raise node.NotReady("`node1` does not notice drive `LAB1NV1`")
        if noticed_by == "crash" and len(restored) <= failures:
            raise QemuEnded("QEMU ended while `node1.qmp` was in use")

    def finish(state: NodeState, script: Script) -> str:
        if len(restored) <= failures:
            raise node.NotReady("`node1`: drive LAB1NV1 does not appear")
        return "/dev/nvme0n1"

    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(node, "start_restored", start)
    monkeypatch.setattr(node, "start_preparing", lambda lab, state, *_: Script())
    monkeypatch.setattr(node, "finish_preparing", finish)
    monkeypatch.setattr(node, "end", lambda lab, name: ended.append(name))
    lab = Lab(tmp_path / "state")
    lab.prepare()
    source = saved.Source(Snapshot(tmp_path), TEMPLATE)
    if works:
        (started,) = fleet._start(lab, source, ["node1"], lambda text: None, 0.0, port=2222)
        assert started.node.ssh_port == 2222
        assert len(restored) == failures + 1
        assert len(ended) == failures
    else:
        with pytest.raises((node.NotReady, QemuEnded)):
            fleet._start(lab, source, ["node1"], lambda text: None, 0.0, port=2222)
        assert ended[-1] == "node1"


@pytest.mark.parametrize(("crashes", "works"), [(0, True), (1, True), (fleet.BOOT_ATTEMPTS, False)])
def test_a_node_that_crashed_at_boot_is_booted_again(
    crashes: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots: list[NodeState] = []
    lines: list[str] = []

    def start(lab: Lab, state: NodeState) -> None:
        boots.append(state)
        if len(boots) <= crashes:
            raise ssh.EndedWhileBooting("QEMU of `node1` ended while it booted", "tunetool lab up")

    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr("tunetool.lab.programs.require", lambda *_: None)
    monkeypatch.setattr(node, "start_booted", start)
    monkeypatch.setattr(node, "start_preparing", lambda lab, state, *_: Script())
    monkeypatch.setattr(node, "finish_preparing", lambda state, script: fleet.SYSTEM_DEVICE)
    lab = Lab(tmp_path / "state")
    lab.prepare()
    lab.node_dir("node1").mkdir(parents=True)
    lab.write(replace(TEMPLATE, name="node1", index=1))
    if works:
        fleet.reboot(lab, "node1", lines.append)
        assert len(boots) == crashes + 1
        assert sum("ended while it booted" in line for line in lines) == crashes
    else:
        with pytest.raises(ssh.EndedWhileBooting, match="ended while it booted"):
            fleet.reboot(lab, "node1", lines.append)
        assert len(boots) == fleet.BOOT_ATTEMPTS


@pytest.mark.parametrize(("crashes", "works"), [(0, True), (1, True), (fleet.PULL_ATTEMPTS, False)])
def test_a_node_that_crashed_in_a_save_is_booted_and_saved(
    crashes: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots: list[DriveUse | None] = []
    lines: list[str] = []
    tries: list[str] = []
    found = DriveUse(arrays=("md127",))

    def take(lab: Lab, state: NodeState, found: DriveUse, wanted: str, say: saved.Say) -> saved.Saved:
        tries.append(wanted)
        if len(tries) <= crashes:
            raise QemuEnded("QEMU ended while `node1.qmp` was in use", "tunetool lab status")
        return saved.Saved(tmp_path, state, found)

    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(saved, "look", lambda lab, state: found)
    monkeypatch.setattr(saved, "take", take)
    monkeypatch.setattr(node, "start_booted", lambda lab, state: None)
    monkeypatch.setattr(node, "start_preparing", lambda lab, state, drive_use: boots.append(drive_use) or Script())
    monkeypatch.setattr(node, "finish_preparing", lambda state, script: fleet.SYSTEM_DEVICE)
    lab = Lab(tmp_path / "state")
    lab.prepare()
    state = replace(TEMPLATE, name="node1", index=1)
    if works:
        assert fleet._take(lab, state, "built", lines.append).node is state
        assert sum("the memory of the node is lost" in line for line in lines) == crashes
    else:
        with pytest.raises(CannotJudge, match="QEMU ended"):
            fleet._take(lab, state, "built", lines.append)
    assert len(tries) == min(crashes + 1, fleet.PULL_ATTEMPTS)
    # What was mounted by hand is mounted again.
    assert boots == [found] * (len(tries) - 1)


@pytest.mark.parametrize(("crashes", "works"), [(0, True), (1, True), (fleet.PULL_ATTEMPTS, False)])
def test_a_node_that_crashed_in_a_pull_is_booted_and_pulled(
    crashes: int, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots: list[list[str]] = []
    lines: list[str] = []
    tries: list[str] = []

    def detach(lab: Lab, state: NodeState, qmp: object, drives: list[Drive]) -> None:
        tries.append(drives[0].serial)
        if len(tries) <= crashes:
            monkeypatch.setattr(node, "alive", lambda lab, name: False)
            raise QemuEnded("QEMU ended while `node1.qmp` was in use", "tunetool lab status")

    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(faults, "Qmp", lambda path: contextlib.nullcontext())
    monkeypatch.setattr(node, "alive", lambda lab, name: True)
    monkeypatch.setattr(node, "detach", detach)
    monkeypatch.setattr(node, "start_booted", lambda lab, state: boots.append([each.serial for each in state.drives]))
    monkeypatch.setattr(node, "start_preparing", lambda lab, state, drive_use: Script())
    monkeypatch.setattr(node, "finish_preparing", lambda state, script: fleet.SYSTEM_DEVICE)
    lab = Lab(tmp_path / "state")
    lab.prepare()
    lab.node_dir("node1").mkdir(parents=True)
    drives = [Drive(serial, tmp_path / serial, 2**30, port) for port, serial in enumerate(("LAB1SYS", "LAB1NV1"))]
    drives[1].path.touch()
    limited = [Fault("slow-drive", "LAB1NV1")]
    lab.write(replace(TEMPLATE, name="node1", index=1, drives=drives, faults=limited))
    if works:
        assert fleet.inject(lab, "node1", "remove-drive", "LAB1NV1", lines.append) == Fault("remove-drive", "LAB1NV1")
        assert sum("will be pulled from a booted node" in line for line in lines) == crashes
        after = lab.read("node1")
        assert [each.serial for each in after.drives] == ["LAB1SYS"]
        # The limit ended with the QEMU that crashed.
        kept = [] if crashes else limited
        assert after.faults == [*kept, Fault("remove-drive", "LAB1NV1")]
    else:
        with pytest.raises(CannotJudge, match="QEMU ended"):
            fleet.inject(lab, "node1", "remove-drive", "LAB1NV1", lines.append)
    assert tries == ["LAB1NV1"] * min(crashes + 1, fleet.PULL_ATTEMPTS)
    assert boots == [["LAB1SYS", "LAB1NV1"]] * (len(tries) - 1)


def test_a_node_that_runs_and_cannot_be_saved_is_not_booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def take(*_: object) -> saved.Saved:
        raise CannotJudge("`node1`: umount: /mnt: target is busy.")

    lab = Lab(tmp_path / "state")
    monkeypatch.setattr(saved, "look", lambda lab, state: DriveUse())
    monkeypatch.setattr(saved, "take", take)
    monkeypatch.setattr(qemu, "pid_of", lambda path: os.getpid())
    with pytest.raises(CannotJudge, match="busy"):
        fleet._take(lab, replace(TEMPLATE, name="node1", index=1), "built", pytest.fail)
