"""What is wiped is what was looked at: a drive keeps its name from the last look to the last write, and has no user."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_drift import raid_array

from builders import nvme_drive
from hidden_files import nobody_hides
from programs import need_program
from skips import no_loops
from tunetool.bench.drives import made, volume
from tunetool.bench.drives.layouts import LAYOUTS
from tunetool.bench.drives.volume import BareDrive
from tunetool.errors import CannotJudge
from tunetool.node.common.commands import run
from tunetool.node.common.drift import Ledger
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import drive_contents, held_drives
from tunetool.node.machine.device_users import users_of
from tunetool.node.machine.drive_contents import contents_hash
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.held_drives import held
from tunetool.node.removal import apply as removal
from tunetool.node.removal import wipe_drives
from tunetool.node.removal.wipe_drives import refuse_unless_wipeable

WIPED = "somebody's drive"


class Stopped(Exception):
    """The step that would write."""


@pytest.fixture
def drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    """A loop device in the place of the NVMe drive `S1`."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    need_program("losetup", "wipefs")
    monkeypatch.setattr(users_of, "__defaults__", (0.5,))
    monkeypatch.setattr(drive_contents.use_problems, "__defaults__", (0.5,))
    image = tmp_path / "image"
    with image.open("w") as stream:
        stream.truncate(64 * 2**20)
    path = run(["losetup", "--find", "--show", str(image)]).stdout.strip()
    one = nvme_drive(1, name=Path(path).name)
    here(monkeypatch, one)
    with nobody_hides():
        yield one
    run(["losetup", "--detach", path])


def here(monkeypatch: pytest.MonkeyPatch, *drives: Drive) -> None:
    for module in ("array.create", "machine.held_drives"):
        monkeypatch.setattr(f"tunetool.node.{module}.read_drives", lambda: list(drives))


def is_held(drive: Drive) -> bool:
    number = Path(drive.path).stat().st_rdev
    for handle in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if handle.stat().st_rdev == number:
                return True
    return False


def writing(drive: Drive, did: list[bool]) -> Any:
    """A step that writes, which only says whether the drive is held."""

    def step(*_: object, **__: object) -> None:
        did.append(is_held(drive))
        raise Stopped

    return step


def test_a_name_that_another_drive_has_by_now_is_not_held(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with held([drive]):
        assert is_held(drive)
    assert not is_held(drive)
    here(monkeypatch, replace(drive, serial=WIPED))
    with pytest.raises(Refusal, match=f"drive `S1` .* is `{WIPED}` by now"), held([drive]):
        pass
    here(monkeypatch)
    with pytest.raises(Refusal, match=r"drive `S1` .* is `gone` by now"), held([drive]):
        pass
    with (
        pytest.raises(Refusal, match=r"drive `S1` .* cannot be opened: No such file"),
        held([replace(drive, name="gone")]),
    ):
        pass
    assert not is_held(drive)


def test_a_node_that_leads_to_another_device_is_not_held(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_drives, "read_text", lambda path: "259:7")
    with pytest.raises(Refusal, match=f"is `259:7` in the kernel, and `{drive.path}` is another device"), held([drive]):
        pass


def test_a_drive_written_by_ever_new_processes_is_not_wiped(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of them is there long enough to be waited for, and none writes where the hash looks."""
    seen = contents_hash(drive)

    def hashed(one: Drive) -> str:
        command = ["dd", "if=/dev/zero", f"of={one.path}", "bs=1M", "seek=30", "count=1", "conv=fsync", "status=none"]
        subprocess.run(command, check=True)
        return contents_hash(one)

    monkeypatch.setattr(wipe_drives, "contents_hash", hashed)
    with pytest.raises(Refusal, match=r"drive `S1` .* was written while it was read: .*make a new plan"):
        refuse_unless_wipeable([drive], {"S1": seen})


def test_a_drive_that_somebody_opened_meanwhile_is_not_wiped(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = contents_hash(drive)
    running: list[subprocess.Popen[bytes]] = []

    def hashed(one: Drive) -> str:
        program = "import sys; f = open(sys.argv[1], 'rb'); print(flush=True); sys.stdin.read()"
        argv = [sys.executable, "-c", program, one.path]
        running.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        assert running[0].stdout is not None
        assert running[0].stdout.readline()
        return seen

    monkeypatch.setattr(wipe_drives, "contents_hash", hashed)
    try:
        with pytest.raises(Refusal, match=r"drive `S1` .* in use: process .* has it open"):
            refuse_unless_wipeable([drive], {"S1": seen})
    finally:
        with running[0]:
            assert running[0].stdin is not None
            running[0].stdin.close()


def applied(drive: Drive, monkeypatch: pytest.MonkeyPatch, did: list[bool]) -> None:
    """raid_array over that drive, which a plan lets it wipe."""
    raid = raid_array()
    monkeypatch.setattr(raid, "wipe", writing(drive, did))
    monkeypatch.setattr(raid, "forget_volume", lambda: None)
    monkeypatch.setattr(raid, "not_writable", list)
    module = SimpleNamespace(change_begins=lambda: None)
    wanted = raid.Wanted("nvme_raid0", "raid0", 2**20, (drive.name,))
    # Ansible's copy of the modules has its own names.
    for door in (raid.held, raid.members_by_serial):
        names = door.__wrapped__.__globals__ if hasattr(door, "__wrapped__") else door.__globals__
        monkeypatch.setitem(names, "read_drives", vars(held_drives)["read_drives"])
    try:
        raid.make(module, raid.Facts(wanted, (drive,), (drive,), {}, [], {}), {"S1": contents_hash(drive)})
    except raid.Refusal as error:
        raise Refusal(str(error)) from error


def torn_down(drive: Drive, monkeypatch: pytest.MonkeyPatch, did: list[bool]) -> None:
    monkeypatch.setattr(removal, "wipe", writing(drive, did))
    monkeypatch.setattr(removal, "run", lambda *_, **__: None)
    found: Any = SimpleNamespace(members=[drive], incoming=None, holds=[], arrays=[], erase="none", ways=())
    removal.Job(found, SimpleNamespace(name="nvme_raid0"), "teardown", "", Ledger(None, acting=True)).wipe()  # type: ignore[arg-type]


def benched(drive: Drive, monkeypatch: pytest.MonkeyPatch, did: list[bool]) -> None:
    monkeypatch.setattr(volume, "_mounted", writing(drive, did))
    monkeypatch.setattr(made, "undone", lambda entry: None)
    monkeypatch.setattr(made.Made, "_tell", lambda self: None)
    with volume.volume(LAYOUTS["xfs-per-drive"], [BareDrive(drive)], made.Made(pytest.fail), Path("/")):
        pass


def cleared(drive: Drive, monkeypatch: pytest.MonkeyPatch, did: list[bool]) -> None:
    monkeypatch.setattr(made, "read_drives", vars(held_drives)["read_drives"])
    monkeypatch.setattr(made, "clear_labels", writing(drive, did))
    entry = {"kind": "labels", "drives": [BareDrive(drive).noted], "uuids": [], "given_back": [], "seen": ["S1"]}
    if problem := made.undone(entry):
        raise CannotJudge(problem)


@pytest.mark.parametrize("job", [applied, torn_down, benched, cleared])
def test_the_drive_is_held_while_it_is_written(drive: Drive, monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    did: list[bool] = []
    with pytest.raises(Stopped):
        job(drive, monkeypatch, did)
    assert did == [True]
    assert not is_held(drive)


def test_a_drive_that_cannot_be_erased_by_now_is_not_wiped(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[bool] = []
    monkeypatch.setattr(removal.erasure, "decide", lambda drives, wish, so_far: ([], ["drive `S1` cannot. hint: X"]))
    with pytest.raises(Refusal, match=r"drive `S1` cannot\. hint: X"):
        torn_down(drive, monkeypatch, did)
    assert did == []


@pytest.mark.parametrize("job", [applied, torn_down, benched, cleared])
def test_a_drive_that_took_the_name_is_not_written(drive: Drive, monkeypatch: pytest.MonkeyPatch, job: Any) -> None:
    """It came after the drives were listed, and before they were held."""
    did: list[bool] = []
    monkeypatch.setattr(held_drives, "read_drives", lambda: [replace(drive, serial=WIPED)])
    if job is cleared:
        monkeypatch.setattr(made, "_present", lambda known: drive)
    with pytest.raises((Refusal, CannotJudge), match=f"is `{WIPED}` by now"):
        job(drive, monkeypatch, did)
    assert did == []


def test_an_array_with_a_doomed_ones_name_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    one = nvme_drive(1, idle_arrays=("md127",))
    ran: list[list[str]] = []
    monkeypatch.setattr(wipe_drives, "run", lambda argv, **_: ran.append(argv))
    monkeypatch.setattr(wipe_drives, "read_arrays", list)
    monkeypatch.setattr(wipe_drives, "read_drives", lambda: [one, nvme_drive(9)])
    monkeypatch.setattr(wipe_drives, "disks_under", lambda root, array: {"nvme9n1"})
    with pytest.raises(Refusal, match="a drive is in array `md127` with drives that may not be wiped: `S9`"):
        wipe_drives.wipe([one])
    assert ran == []
