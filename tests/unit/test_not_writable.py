"""Directories that a build writes after its drives: looked at before the first drive is touched."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_drift import raid_array
from test_obstacles import blank, found, snapshot

from builders import nvme_drive
from skips import no_mounts, not_root
from tunetool.node.audit.before_changes import not_writable
from tunetool.node.common.drift import Ledger
from tunetool.node.machine.writable import failed_write

__all__ = ["blank"]
MS_RDONLY, MS_REMOUNT = 1, 32
LIBC = ctypes.CDLL(None, use_errno=True)
IMAGE = 3 * 2**20


@pytest.fixture
def etc(blank: Path) -> Iterator[Callable[[str, str], None]]:
    """Mounts a file system of its own at a directory of the node, with what it held."""
    if not_root() or no_mounts():
        pytest.skip("needs root and mount(2)")
    made: list[bytes] = []

    def mount(directory: str, options: str) -> None:
        point = os.fsencode(blank / directory)
        (blank / directory).mkdir(exist_ok=True)
        kept = {path.relative_to(blank / directory): path.read_bytes() for path in _files(blank / directory)}
        assert LIBC.mount(b"none", point, b"tmpfs", 0, os.fsencode(options.replace("ro", "size=1g"))) == 0
        made.append(point)
        for path, content in kept.items():
            (blank / directory / path).parent.mkdir(parents=True, exist_ok=True)
            (blank / directory / path).write_bytes(content)
        if options == "ro":
            assert LIBC.mount(b"none", point, None, MS_REMOUNT | MS_RDONLY, None) == 0

    yield mount
    for point in reversed(made):
        LIBC.umount2(point, 2)


def _files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]


def test_a_read_only_etc_is_one_obstacle(blank: Path, etc: Callable[[str, str], None]) -> None:
    etc("etc", "ro")
    before = snapshot(blank)
    said = [line for line in found(blank) if "cannot be written" in line]
    assert len(said) == 1
    for name in ("/etc/mdadm.conf", "/etc/fstab", "/etc/tunetool/node.json", "/etc/systemd/system"):
        assert name in said[0]
    assert f"`{blank}/etc` is read-only. hint: see in `dmesg` why, then `mount -o remount,rw {blank}/etc`" in said[0]
    assert snapshot(blank) == before


def test_a_full_etc_is_one_obstacle(blank: Path, etc: Callable[[str, str], None]) -> None:
    etc("etc", "size=64k")
    (said,) = (line for line in found(blank) if "cannot be written" in line)
    assert f"`{blank}/etc` has " in said
    assert " KiB free, and 1024 KiB are needed. hint: make room on" in said


def test_without_inodes_nothing_can_be_written(blank: Path, etc: Callable[[str, str], None]) -> None:
    etc("etc", "nr_inodes=40")
    for number in range(40):
        try:
            (blank / f"etc/filler{number}").touch()
        except OSError:
            break
    assert any("has room for 0 more files" in line for line in found(blank))


def test_a_boot_without_room_for_an_image_is_one(blank: Path, etc: Callable[[str, str], None]) -> None:
    for path in ("lib/modules/6.1", "boot", "usr/sbin", "var/tmp"):
        (blank / path).mkdir(parents=True, exist_ok=True)
    (blank / "usr/sbin/update-initramfs").touch()
    (blank / "boot/initrd.img-6.1").write_bytes(bytes(IMAGE))
    (blank / "lib/modules/6.0").mkdir()
    (blank / "boot/initrd.img-6.0").symlink_to("gone")
    assert not_writable(str(blank)) == []
    etc("boot", "size=5m")
    (said,) = not_writable(str(blank))
    assert said.startswith(f"`/boot/initrd` cannot be written: `{blank}/boot` has 2048 KiB free, and 4096 KiB")


def module(monkeypatch: pytest.MonkeyPatch, closed: list[str]) -> tuple[Any, list[str]]:
    """raid_array over two blank drives, and the steps that it did."""
    raid = raid_array()
    drives = [nvme_drive(number) for number in (1, 2)]
    did: list[str] = []
    for name in ("forget_volume", "wipe", "create", "refuse_unless_wipeable"):
        monkeypatch.setattr(raid, name, lambda *_, name=name: did.append(name))
    for name, fake in {
        "examine": lambda names: {},
        "read_arrays": lambda: [],
        "read_drives": lambda: drives,
        "members_by_serial": lambda serials: drives,
        "built_manifest": lambda: None,
        "refuse_unless_blank": lambda *_, **__: None,
        "contents_text": lambda doomed: "",
        "clear_beginning_of": lambda array, wiped: None,
        "note_as_made": lambda *_: None,
        "held": lambda members: contextlib.nullcontext(),
        "begin": lambda uuid: "u",
        "not_writable": lambda: closed,
    }.items():
        monkeypatch.setattr(raid, name, fake)
    return raid, did


def test_the_array_is_not_made_where_the_rest_cannot_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    raid, did = module(monkeypatch, ["`/etc/fstab` cannot be written: X. hint: Y"])
    array = {"name": "nvme_raid0", "level": "raid0", "chunk": "1MiB"}
    params = {**array, "serials": ["S1", "S2"], "wipes": [], "adopt": False}
    fake = SimpleNamespace(params=params, check_mode=False, get_bin_path=lambda name: name)
    with pytest.raises(raid.Refusal, match=r"cannot be written: X\. hint: Y"):
        raid.converge(fake)
    assert did == []


def test_a_failure_after_the_array_says_changed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raid, did = module(monkeypatch, [])
    array = SimpleNamespace(
        uuid="u", level="raid0", chunk_bytes=2**20, members=("nvme1n1", "nvme2n1"), device="md0", path="/dev/md0"
    )
    monkeypatch.setattr(raid, "settled", lambda uuid: array)

    def closed(path: str, text: str) -> None:
        raise OSError(30, "Read-only file system", "/etc/mdadm/.mdadm.conf.tunetool-abcdefgh")

    monkeypatch.setattr(raid, "replace_file", closed)
    frame = importlib.import_module("ansible_collections.tunetool.node.plugins.module_utils.play.convergence")
    monkeypatch.setattr(frame, "only_one", contextlib.nullcontext)
    answer = answer_of(raid, capsys)
    assert did == ["forget_volume", "create"]
    assert (answer["failed"], answer["changed"]) == (True, True)
    assert answer["msg"].startswith(
        "array `nvme_raid0`: `/etc/mdadm/mdadm.conf`: Read-only file system. hint: see in `dmesg` why, then `mount"
    )
    monkeypatch.setattr(raid, "not_writable", lambda: ["`/etc` cannot be written. hint: x"])
    assert answer_of(raid, capsys).get("changed", False) is False


def answer_of(raid: Any, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a run of the module prints as its result."""
    testing = importlib.import_module("ansible.module_utils.testing")
    given = {"serials": ["S1", "S2"], "settings": {"name": "nvme_raid0"}}
    with testing.patch_module_args(given), pytest.raises(SystemExit):
        raid.main()
    return json.loads(capsys.readouterr().out)


def test_a_ledger_tells_of_each_change_before_it_is_made() -> None:
    begun: list[int] = []
    looking = Ledger(None, False, lambda: begun.append(1))
    assert looking.note("file", "a", "b") is False
    acting = Ledger(None, True, lambda: begun.append(2))
    assert acting.note("file", "a", "a") is False
    assert begun == []
    assert acting.note("file", "a", "b") is True
    assert begun == [2]


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(28, "No space left on device", "/boot/x"), "hint: make room on"),
        (OSError(1, "Operation not permitted", "/etc/fstab"), "hint: `lsattr -d /etc` shows"),
        (OSError(5, "Input/output error", "/etc/fstab"), "hint: see in `dmesg`"),
    ],
)
def test_an_error_of_a_write_has_its_cure(error: OSError, words: str) -> None:
    said = failed_write(error)
    assert f"`{error.filename}`: {error.strerror}. {words}" in said
    assert "\n" not in said


def test_a_mount_that_does_not_answer_is_an_obstacle_too(blank: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: str) -> None:
        raise OSError(116, "Stale file handle", path)

    monkeypatch.setattr(os, "statvfs", stale)
    assert any(
        "cannot be written: " in line and "Stale file handle. hint: " in line for line in not_writable(str(blank))
    )
