"""A file system that mkfs did not finish is distinguished from one that somebody may have used."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_drift import wishes

from hidden_files import nobody_hides
from programs import need_program
from skips import no_loops
from tunetool.node.array.create import note_as_made, note_formatting
from tunetool.node.array.md_arrays import Array
from tunetool.node.common.commands import run
from tunetool.node.common.drift import Ledger, settle
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine.device_users import users_of
from tunetool.node.machine.file_system import BUILT
from tunetool.node.machine.unlabelled import XFS, look, probes
from tunetool.node.volume.apply import Volume

# The start of the superblock as mkfs.xfs 6.1.0 left it, killed half-way. Byte 126 is its mark.
KILLED = bytes.fromhex(
    "5846534200001000000000000080000000000000000000000000000000000000"
    "800049a5f227402fabd0952c149521fc0000000000400040ffffffffffffffff"
    "ffffffffffffffffffffffffffffffff000000010007ff000000001100000000"
    "00004000b5a50200020000086e766d655f726169643000000c09090313000119"
).ljust(512, b"\0")
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
FINISHED = KILLED[:126] + b"\0" + KILLED[127:]


@pytest.mark.parametrize(
    ("content", "label", "expected"),
    [
        (KILLED, "nvme_raid0", True),
        (FINISHED, "nvme_raid0", False),
        (KILLED, "data", False),
        (KILLED, "nvme_raid", False),
        (bytes(512), "nvme_raid0", False),
        (bytes(512), "", False),
        (KILLED[:127], "nvme_raid0", False),
        (b"", "", False),
        (b"xfsb" + KILLED[4:], "nvme_raid0", False),
    ],
)
def test_only_our_own_unfinished_file_system_is_given_up(content: bytes, label: str, expected: bool, tmp_path: Path):
    device = tmp_path / "md127"
    device.write_bytes(content)
    assert BUILT.half_made(str(device), label) is expected


CUT = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

static int count;

static ssize_t written(const char *name, int fd, const void *bytes, size_t size, off_t at) {
    ssize_t (*real)(int, const void *, size_t, off_t) = dlsym(RTLD_NEXT, name);
    struct stat status;
    if (!fstat(fd, &status) && S_ISBLK(status.st_mode) && ++count == atoi(getenv("CUT"))) {
        real(fd, bytes, size / 2 / 512 * 512, at);
        raise(SIGKILL);
    }
    return real(fd, bytes, size, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t size, off_t at) { return written("pwrite", fd, bytes, size, at); }
ssize_t pwrite64(int fd, const void *bytes, size_t size, off_t at) { return written("pwrite64", fd, bytes, size, at); }
__attribute__((destructor)) static void end(void) { fprintf(stderr, "%d\n", count); }
"""
"""Kills the process at its CUT-th write to a device, half of which is done."""


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Array]:
    """A loop device in the place of an array of 4 GiB."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    image = tmp_path / "image"
    with image.open("w") as stream:
        stream.truncate(4 * 2**30)
    name = Path(run(["losetup", "--find", "--show", str(image)]).stdout.strip()).name
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / name).symlink_to(f"/dev/{name}")
    with nobody_hides():
        yield Array(name, "0", "nvme_raid0", "raid0", 2**20, 8, "clean", (), "7:999")
    run(["losetup", "--detach", f"/dev/{name}"])


@pytest.mark.parametrize("at", [0, 700_000, 4 * 2**30 - 5000])
def test_an_array_with_data_and_no_label_gets_no_file_system(device: Array, tmp_path: Path, at: int) -> None:
    """As one that somebody made by hand, and that was adopted: a database or LUKS without a header may lie on it."""
    write(device, at, b"somebody's results")
    before = (tmp_path / "image").stat().st_blocks
    with pytest.raises(Refusal, match=r"array `nvme_raid0` holds data without a label at .*nothing was made over it"):
        settle(lambda ledger: Volume(wishes()["filesystem"], ledger, device, str(tmp_path)).make(), None, False)
    assert (tmp_path / "image").stat().st_blocks == before


def without_udev(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here, and its settling is no part of this."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/udevadm").write_text("#!/bin/sh\n")
    (tmp_path / "bin/udevadm").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")


def made(device: Array, root: Path, **wanted: object) -> None:
    values = {**wishes()["filesystem"], **wanted}
    settle(lambda ledger: Volume(values, ledger, device, str(root)).make(), None, False)


def write(device: Array, at: int, data: bytes) -> None:
    with Path(device.path).open("r+b") as stream:
        stream.seek(at)
        stream.write(data)


def holds(device: Array, at: int, data: bytes) -> bool:
    with Path(device.path).open("rb") as stream:
        stream.seek(at)
        return stream.read(len(data)) == data


def test_data_deep_in_an_array_of_somebody_else_is_kept(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_udev(tmp_path, monkeypatch)
    write(device, 2**30, b"somebody's results")
    with pytest.raises(Refusal, match="holds data without a label at 1 GiB"):
        made(device, tmp_path)
    with pytest.raises(Refusal, match="was not made here, and holds no file system"):
        made(device, tmp_path, adopt=True)
    noted = tmp_path / "etc/tunetool/array.begun"
    noted.parent.mkdir(parents=True)
    # Of another array; of a run that was cut off, or an older version: nobody knows what it held when it was made.
    for text in ("another", device.uuid):
        noted.write_text(f"{text}\n")
        with pytest.raises(Refusal, match="holds data without a label at 1 GiB"):
            made(device, tmp_path)
    with pytest.raises(Refusal, match="holds data without a label at 1 GiB"):
        made(device, tmp_path, new_array=True)
    assert holds(device, 2**30, b"somebody's results")


def test_what_a_plan_gave_up_lies_deep_in_the_new_array(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_udev(tmp_path, monkeypatch)
    write(device, 2**30, b"what a plan gave up")
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    made(device, tmp_path, adopt=True)
    assert not (tmp_path / "etc/tunetool/array.begun").exists()
    assert holds(device, 0, b"XFSB")


@pytest.mark.parametrize("old", [b"", b"what a plan gave up"])
@pytest.mark.parametrize("new_array", [False, True])
def test_raw_data_on_an_array_that_was_made_here_is_kept(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: bytes, new_array: bool
) -> None:
    """As between `--tags drives,array` and the rest. In the same boot any write counts, wherever it lies."""
    without_udev(tmp_path, monkeypatch)
    write(device, 2**30, old)
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    note = tmp_path / "etc/tunetool/array.begun"
    text = note.read_text()
    between = next(at for at in range(2**20, 2**30, 4096) if at not in probes(4 * 2**30))
    write(device, between, b"somebody's results")
    with pytest.raises(Refusal, match=r"array `nvme_raid0` was written since it was made, before it had a file system"):
        made(device, tmp_path, new_array=new_array)
    # After a reboot no counter tells: what lies there does.
    note.write_text(text.replace(BOOT, "another"))
    assert holds(device, between, b"somebody's results")
    write(device, 2**31, b"somebody's results")
    with pytest.raises(Refusal, match=r"does not hold what it held when it was made.*`blkdiscard .* makes it blank"):
        made(device, tmp_path, new_array=new_array)
    assert holds(device, 2**31, b"somebody's results")


def old_groups(device: Array) -> bytes:
    """What is left of an XFS whose first superblock was wiped, as in an array over the survivors of a dead drive; the
    superblock of its second group."""
    subprocess.run(["mkfs.xfs", "-f", device.path], check=True, capture_output=True)
    for at in (0, 4 * 2**30 - 2**20):
        write(device, at, bytes(2**20))
    piece = look(device.path, deep=False)
    assert piece is not None
    assert piece.kind == XFS
    with Path(device.path).open("rb") as stream:
        stream.seek(piece.offset)
        return stream.read(512)


def group_offset(device: Array) -> int:
    piece = look(device.path, deep=False)
    assert piece is not None
    return piece.offset


def test_groups_of_a_file_system_that_was_given_up_are_no_data(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drive is replaced: the old array cannot be read, so its file system cannot be wiped, and the new one shows it."""
    need_program("mkfs.xfs")
    without_udev(tmp_path, monkeypatch)
    old_groups(device)
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    made(device, tmp_path, new_array=True)
    assert holds(device, 0, b"XFSB")


def test_the_groups_of_a_file_system_that_came_since_are_kept(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_program("mkfs.xfs")
    without_udev(tmp_path, monkeypatch)
    group = old_groups(device)
    at = group_offset(device)
    write(device, at, bytes(512))
    while (piece := look(device.path, deep=False)) is not None:
        write(device, piece.offset, bytes(512))
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    note = tmp_path / "etc/tunetool/array.begun"
    note.write_text(note.read_text().replace(BOOT, "another"))
    write(device, at, group)
    with pytest.raises(Refusal, match="does not hold what it held when it was made"):
        made(device, tmp_path, new_array=True)
    assert holds(device, at, group)


def test_an_mkfs_over_old_groups_that_was_cut_off_is_done_again(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_program("mkfs.xfs")
    without_udev(tmp_path, monkeypatch)
    old_groups(device)
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    note_formatting(str(device.uuid), str(tmp_path))
    made(device, tmp_path)
    assert holds(device, 0, b"XFSB")


def test_an_mkfs_that_was_cut_off_before_its_label_is_done_again(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It discards and writes first: nothing is as it was noted."""
    without_udev(tmp_path, monkeypatch)
    write(device, 2**30, b"what a plan gave up")
    note_as_made(str(device.uuid), device.device, str(tmp_path))
    with monkeypatch.context() as patch:

        def cut(*_: object) -> None:
            write(device, 2**30, bytes(4096))
            raise KeyboardInterrupt

        patch.setattr("tunetool.node.volume.apply.BUILT.mkfs", cut)
        with pytest.raises(KeyboardInterrupt):
            made(device, tmp_path)
    made(device, tmp_path)
    assert holds(device, 0, b"XFSB")


def test_an_array_that_a_process_has_open_gets_no_file_system(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(users_of, "__defaults__", (0.5,))
    holder = subprocess.Popen(
        ["sh", "-c", 'exec 3<>"$1"; echo open; read -r line', "sh", device.path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(Refusal, match=f"`nvme_raid0` is in use: process {holder.pid} `sh` has it open"):
            settle(lambda ledger: Volume(wishes()["filesystem"], ledger, device, str(tmp_path)).make(), None, False)
        holder.communicate()


def test_an_mkfs_that_is_killed_at_any_write_is_done_again(
    device: Array, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_program("mkfs.xfs", "losetup", "cc")
    (tmp_path / "cut.c").write_text(CUT)
    run(["cc", "-shared", "-fPIC", "-o", str(tmp_path / "cut.so"), str(tmp_path / "cut.c"), "-ldl"])
    without_udev(tmp_path, monkeypatch)

    def mkfs(cut: int) -> subprocess.CompletedProcess[str]:
        """As the build calls it."""
        argv = ["mkfs.xfs", *BUILT.shape(BUILT.geometry(2**20, 8), "nvme_raid0"), device.path]
        environment = {**os.environ, "LD_PRELOAD": str(tmp_path / "cut.so"), "CUT": str(cut)}
        return subprocess.run(argv, env=environment, capture_output=True, text=True, check=False)

    def build(ledger: Ledger) -> None:
        Volume(wishes()["filesystem"], ledger, device, str(tmp_path)).make()

    def blank() -> None:
        (tmp_path / "image").write_bytes(b"")
        os.truncate(tmp_path / "image", 4 * 2**30)

    whole = mkfs(0)
    assert whole.returncode == 0, whole.stderr
    writes = int(whole.stderr.splitlines()[-1])
    half = 0
    for cut in (2, 3, 4, writes // 2, writes - 2, writes):
        blank()
        assert mkfs(cut).returncode == -9, cut
        half += BUILT.half_made(device.path, "nvme_raid0")
        before = settle(build, None, False)[1]
        assert "file system on nvme_raid0" in str(before.diff), cut
        assert run(["xfs_repair", "-n", device.path]).returncode == 0
        assert run(["xfs_db", "-r", "-c", "sb 0", "-c", "p inprogress", device.path]).stdout == "inprogress = 0\n"
        assert settle(build, None, False)[1].diff == [], cut
    assert half == 4, "before the third write, nothing says that an XFS was to be there"
