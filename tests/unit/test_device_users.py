"""A drive that something uses is never taken: neither mount, nor swap, nor holder shows a program, a loop or a target."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from builders import nvme_drive
from programs import need_program
from skips import no_loops
from tunetool.node.array import create
from tunetool.node.array.adopt_or_wipe import Consent
from tunetool.node.array.create import refuse_unless_blank
from tunetool.node.array.drive_decisions import REFUSE, TAKE, Criteria
from tunetool.node.array.drive_selection import select
from tunetool.node.common.commands import run
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import device_users, drive_contents
from tunetool.node.machine.device_users import users_of
from tunetool.node.machine.drive_contents import Signature, contents_hash, read_contents
from tunetool.node.machine.drives import Drive
from tunetool.node.removal.wipe_drives import refuse_unless_wipeable

TABLES = {
    "own table": """
import ctypes, os, sys, threading
opened = threading.Event()
def work():
    ctypes.CDLL(None).unshare(0x400)
    os.open(sys.argv[1], os.O_RDWR)
    opened.set()
    threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
opened.wait()
print("open", flush=True)
sys.stdin.read()
""",
    "ring": """
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 1, ctypes.create_string_buffer(120))
if ring < 0:
    print("none", flush=True)
    sys.exit()
handle = os.open(sys.argv[1], os.O_RDWR)
assert libc.syscall(427, ring, 2, (ctypes.c_int * 1)(handle), 1) == 0
os.close(handle)
print("open", flush=True)
sys.stdin.read()
""",
    "ring without its descriptor": """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
ring = libc.syscall(425, 1, ctypes.create_string_buffer(120))
if ring < 0:
    print("none", flush=True)
    sys.exit()
libc.mmap.restype = ctypes.c_void_p
assert libc.mmap(None, ctypes.c_size_t(4096), 1, 1, ring, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
handle = os.open(sys.argv[1], os.O_RDWR)
assert libc.syscall(427, ring, 2, (ctypes.c_int * 1)(handle), 1) == 0
os.close(handle)
os.close(ring)
print("open", flush=True)
sys.stdin.read()
""",
    "mapping by another name": """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
node = sys.argv[2]
os.mknod(node, 0o060600, os.stat(sys.argv[1]).st_rdev)
handle = os.open(node, os.O_RDWR)
assert libc.mmap(None, ctypes.c_size_t(4096), 3, 1, handle, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
os.close(handle)
os.unlink(node)
print("open", flush=True)
sys.stdin.read()
""",
}
"""A thread with files of its own, and a file that only a ring of io_uring keeps (its system calls have no name here)."""
OPENS = """
import mmap, os, sys
handle = os.open(sys.argv[1], getattr(os, sys.argv[2]))
if sys.argv[3] == "map":
    mapped = mmap.mmap(handle, 4096, prot=mmap.PROT_READ)
    os.close(handle)
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Drive]:
    """A blank loop device in the place of an NVMe drive."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    need_program("losetup", "wipefs")
    image = tmp_path / "image"
    with image.open("w") as stream:
        stream.truncate(64 * 2**20)
    path = run(["losetup", "--find", "--show", str(image)]).stdout.strip()
    yield nvme_drive(1, name=Path(path).name)
    run(["losetup", "--detach", path])


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has a device open here keeps it open: there is nothing to wait for."""
    monkeypatch.setattr(users_of, "__defaults__", (0.5,))
    monkeypatch.setattr(drive_contents.use_problems, "__defaults__", (0.5,))


def program(path: str, flags: str, how: str = "open") -> subprocess.Popen[bytes]:
    running = subprocess.Popen(
        [sys.executable, "-c", OPENS, path, flags, how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert running.stdout is not None
    assert running.stdout.readline() == b"open\n"
    return running


def refused_everywhere(drive: Drive, words: str) -> None:
    """By the selection, right before md writes, and right before a plan wipes: no plan overrides it."""
    contents, unreadable = read_contents([drive], deep=True)
    seen = contents_hash(drive)
    consent = Consent(wipes={"S1": seen}, hashes={drive.name: seen})
    (row,) = select([drive], contents, Criteria(1), "nvme_raid0", unreadable, consent).decisions
    assert (row.verdict, row.reason) == (REFUSE, words)
    with pytest.raises(Refusal, match=f"drive `S1` .*{words}.*nothing was changed"):
        refuse_unless_blank([drive], deep=True)
    with pytest.raises(Refusal, match=words):
        refuse_unless_wipeable([drive], {"S1": seen})


@pytest.mark.parametrize("flags", ["O_RDWR", "O_RDONLY"])
@pytest.mark.parametrize("how", ["open", "map"])
def test_a_drive_that_a_process_has_open_is_refused(drive: Drive, flags: str, how: str) -> None:
    with program(drive.path, flags, how) as running:
        refused_everywhere(drive, f"in use: process {running.pid} `{comm(running)}` has it open")
        assert running.stdin is not None
        running.stdin.close()
    contents, unreadable = read_contents([drive], deep=True)
    (row,) = select([drive], contents, Criteria(1), "nvme_raid0", unreadable).decisions
    assert row.verdict == TAKE
    refuse_unless_blank([drive], deep=True)


@pytest.mark.parametrize("printed", ["    0: {}\n", "    0: /dev/{}\n"])
def test_a_ring_prints_a_name_or_the_end_of_one(drive: Drive, tmp_path: Path, printed: str) -> None:
    """As Linux 6.1 and newer ones do."""
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "fdinfo/5").write_text("pos:\t0\nUserFiles:\t1\n" + printed.format(drive.name) + "UserBufs:\t0\n")
    numbers = device_users._numbers([drive.name])
    assert device_users._registered(str(tmp_path / "fd/5"), numbers) == list(numbers)


@pytest.mark.parametrize("kind", list(TABLES))
def test_a_drive_that_is_open_by_a_way_round_is_refused(drive: Drive, kind: str, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", TABLES[kind], drive.path, str(tmp_path / "disk-of-a-guest")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        said = running.stdout.readline()
        # Some kernels have no io_uring, or deny it: then nobody can hold a drive by it.
        what = "has a ring of io_uring that does not show its files" if "without" in kind else "has it open"
        expected = {drive.name: f"process {running.pid} `{comm(running)}` {what}"}
        assert users_of([drive.name]) == ({} if said == b"none\n" else expected)
        assert running.stdin is not None
        running.stdin.close()


def test_a_writer_that_closes_while_it_is_waited_for_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    with program(drive.path, "O_RDWR") as running:

        def writes_and_closes(seconds: float) -> None:
            with Path(drive.path).open("r+b") as stream:
                stream.write(b"results")
            assert running.stdin is not None
            running.stdin.close()
            running.wait()

        monkeypatch.setattr(drive_contents.use_problems, "__defaults__", (10.0,))
        monkeypatch.setattr(device_users, "_sleep", writes_and_closes)
        with pytest.raises(Refusal, match="holds data without a label at 0 B"):
            refuse_unless_blank([drive], deep=True)


def test_a_write_while_the_drive_is_read_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the place that was read already, by a program that is gone before anybody asks for it."""
    read_unlabelled = create.read_unlabelled

    def read_and_written(name: str, deep: bool) -> list[Signature]:
        found = read_unlabelled(name, deep)
        with Path(drive.path).open("r+b") as stream:
            stream.write(b"results")
            stream.flush()
            os.fsync(stream.fileno())
        return found

    monkeypatch.setattr(create, "read_unlabelled", read_and_written)
    with pytest.raises(Refusal, match="was written while it was read"):
        refuse_unless_blank([drive], deep=True)


def comm(running: subprocess.Popen[bytes]) -> str:
    return Path(f"/proc/{running.pid}/comm").read_text().strip()


def test_a_device_node_of_another_name_is_the_same_drive(drive: Drive, tmp_path: Path) -> None:
    number = Path(drive.path).stat().st_rdev
    node = tmp_path / "disk-of-a-guest"
    os.mknod(node, 0o600 | 0o060000, number)
    with program(str(node), "O_RDWR") as running:
        node.unlink()
        assert users_of([drive.name]) == {drive.name: f"process {running.pid} `{comm(running)}` has it open"}
        assert running.stdin is not None
        running.stdin.close()


def test_a_loop_device_over_a_drive_uses_it(drive: Drive, tmp_path: Path) -> None:
    # The loop's own record of its file is a path that is gone, or another's; the number of the device is right.
    node = tmp_path / "node"
    os.mknod(node, 0o600 | 0o060000, Path(drive.path).stat().st_rdev)
    above = run(["losetup", "--find", "--show", "--offset", "1048576", str(node)]).stdout.strip()
    node.unlink()
    try:
        refused_everywhere(drive, f"in use: loop device `{Path(above).name}` lies on it")
    finally:
        run(["losetup", "--detach", above])
    assert users_of([drive.name]) == {}


def test_who_opens_a_drive_for_a_moment_is_waited_for(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """As udev does with every new drive."""
    with program(drive.path, "O_RDWR") as running:

        def closes(seconds: float) -> None:
            assert running.stdin is not None
            running.stdin.close()
            running.wait()

        monkeypatch.setattr(device_users, "_sleep", closes)
        assert users_of([drive.name], 10.0) == {}


def test_a_process_that_came_later_is_no_user_yet(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program after another that opens a drive for a moment is udev at work."""
    first = program(drive.path, "O_RDONLY")
    started = [first]

    def next_one(seconds: float) -> None:
        started.append(program(drive.path, "O_RDONLY"))
        last = started[-2]
        assert last.stdin is not None
        last.stdin.close()
        last.wait()

    monkeypatch.setattr(device_users, "_sleep", next_one)
    try:
        assert users_of([drive.name], 10.0) == {}
    finally:
        for running in started:
            with running:
                assert running.stdin is not None
                running.stdin.close()
