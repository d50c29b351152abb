"""A drive that something uses is never taken: neither mount, nor swap, nor holder shows a program, a loop or a target."""

from __future__ import annotations

import glob
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from builders import nvme_drive
from hidden_files import hidden_from_others, nobody_hides
from programs import need_program
from skips import no_loops
from tunetool.node.array import create
from tunetool.node.array.adopt_or_wipe import Consent
from tunetool.node.array.create import refuse_unless_blank
from tunetool.node.array.drive_decisions import REFUSE, TAKE, Criteria
from tunetool.node.array.drive_selection import select
from tunetool.node.common.commands import run
from tunetool.node.common.files import entries_of, exact_text, read_text
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
    "ring without its descriptor beside another": """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
rings = [libc.syscall(425, 1, ctypes.create_string_buffer(120)) for _ in range(2)]
if rings[0] < 0:
    print("none", flush=True)
    sys.exit()
for ring in rings:
    assert libc.mmap(None, ctypes.c_size_t(4096), 1, 1, ring, ctypes.c_long(0)) != ctypes.c_void_p(-1).value
handle = os.open(sys.argv[1], os.O_RDWR)
assert libc.syscall(427, rings[1], 2, (ctypes.c_int * 1)(handle), 1) == 0
os.close(handle)
os.close(rings[1])
print("open", flush=True)
sys.stdin.read()
""",
    "mapping whose first thread ended": """
import ctypes, mmap, os, platform, sys, threading
handle = os.open(sys.argv[1], os.O_RDWR)
mapped = mmap.mmap(handle, 4096)
os.close(handle)
for each in os.listdir("/proc/self/fd"):
    if int(each) > 2 and os.path.exists("/proc/self/fd/" + each):
        os.close(int(each))
def work():
    while open("/proc/%d/stat" % os.getpid()).read().rpartition(")")[2].split()[0] != "Z":
        pass
    print("open", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=work).start()
ctypes.CDLL(None).syscall(60 if platform.machine() == "x86_64" else 93, 0)
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
def alone(request: pytest.FixtureRequest) -> Iterator[None]:
    """Beside other tests that look for the users of a drive, as long as this one shows them what it has open."""
    kind = request.node.callspec.params.get("kind", "") if hasattr(request.node, "callspec") else ""
    with hidden_from_others() if "without" in kind else nobody_hides():
        yield


@pytest.fixture
def drive(tmp_path: Path, alone: None) -> Iterator[Drive]:
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


def test_a_drive_that_takes_no_writes_is_refused_before_others(drive: Drive) -> None:
    """By write protection of its namespace, or at its end of life. It opens, and it reads."""
    run(["blockdev", "--setro", drive.path])
    refused_everywhere(drive, f"read-only: the kernel refuses every write to `{drive.path}`")
    run(["blockdev", "--setrw", drive.path])
    refuse_unless_blank([drive], deep=True)


@pytest.mark.parametrize("printed", ["    0: {}\n", "    0: /dev/{}\n"])
def test_a_ring_prints_a_name_or_the_end_of_one(drive: Drive, tmp_path: Path, printed: str) -> None:
    """As Linux 6.1 and newer ones do."""
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "fdinfo/5").write_text("pos:\t0\nUserFiles:\t1\n" + printed.format(drive.name) + "UserBufs:\t0\n")
    numbers = device_users._numbers([drive.name])
    assert device_users._registered(str(tmp_path / "fd/5"), numbers) == list(numbers)


NUMBERS = {(True, 259, 3): "nvme4n1", (False, 240, 1): "nvme4n1", (True, 259, 5): "nvme5n1"}
EMPTY_PLACES = "".join(f"{place:5}: <none>\n" for place in range(2))


@pytest.mark.parametrize(
    ("printed", "drives"),
    [
        ("UserFiles:\t0\nUserBufs:\t1\n    0: 0x0/4096\n", set()),
        ("UserFiles:\t1\n    0: ng4n1\nUserBufs:\t0\n", {"nvme4n1"}),
        ("UserFiles:\t1\n    0: /dev/ng4n1\nUserBufs:\t0\n", {"nvme4n1"}),
        ("UserFiles:\t1\n    0: /dev/nvme5n1\\040(deleted)\nUserBufs:\t0\n", {"nvme5n1"}),
        ("UserFiles:\t2\n" + EMPTY_PLACES + "UserBufs:\t0\n", set()),
        # New kernels leave out empty places.
        ("UserFiles:\t8\n    7: /dev/nvme5n1\nUserBufs:\t0\n", {"nvme5n1"}),
        # Somebody held the ring's lock: older kernels, and newer ones.
        ("UserFiles:\t1\nUserBufs:\t0\n", None),
        ("PollList:\nCqOverflowList:\n", None),
        # A long name, on older kernels.
        ("UserFiles:\t1\n    0: \nUserBufs:\t0\n", None),
    ],
)
def test_a_ring_that_does_not_show_its_files_is_told(tmp_path: Path, printed: str, drives: set[str] | None) -> None:
    (tmp_path / "fdinfo").mkdir()
    (tmp_path / "fdinfo/5").write_text("pos:\t0\nSqMask:\t0x0\n" + printed)
    found = device_users._registered(str(tmp_path / "fd/5"), NUMBERS)
    assert (None if found is None else {NUMBERS[each] for each in found if each in NUMBERS}) == drives


def test_a_ring_that_was_locked_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["PollList:\n", "UserFiles:\t1\n    0: /dev/nvme5n1\n"]
    monkeypatch.setattr(device_users, "exact_text", lambda path: texts.pop(0))
    assert (True, 259, 5) in (device_users._registered(str(tmp_path / "fd/5"), NUMBERS) or [])


@pytest.mark.parametrize("name", ["nvme4n1", "nvme4c0n1"])
def test_a_namespaces_character_device_is_the_same_drive(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All paths of a namespace have one, under native multipath."""
    sysfs = {f"/sys/class/block/{name}/dev": "259:3", "/sys/class/nvme-generic/ng4n1/dev": "240:1"}
    monkeypatch.setattr(device_users, "read_text", sysfs.get)
    assert device_users._numbers([name]) == {(True, 259, 3): name, (False, 240, 1): name}


def test_a_character_device_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    null = Path("/dev/null").stat().st_rdev
    for target, drives in (("/dev/ng5n1", {"nvme5n1"}), ("/dev/null", set())):
        found = device_users._open_numbers("/dev/null", target, NUMBERS)
        assert found[0] == (False, os.major(null), os.minor(null))
        assert {NUMBERS[each] for each in found if each in NUMBERS} == drives


NVMET = "/sys/kernel/config/nvmet/subsystems/s/namespaces/1/"
LIO = "/sys/kernel/config/target/core/fileio_0/disk/info"
INFO = (
    "Status: %s  Max Queue Depth: 0  SectorSize: 512  HwMaxSectors: 16384\n"
    "        TCM FILEIO ID: 0        File: %s  Size: 1048576  Mode: O_DSYNC Async: 0\n"
)


@pytest.mark.parametrize("kind", ["nvmet", "lio"])
@pytest.mark.parametrize(
    ("path", "active", "words"),
    [
        ("{drive}", True, "exports it"),
        ("{files}/image", True, None),
        ("{files}/image of a disk", True, None),
        ("{files}/gone", True, "exports `{files}/gone`, which is gone and may have been this drive"),
        ("{files}/gone", False, None),
        ("{files}", True, "exports `{files}`, which is no block device any more and may have been this drive"),
        ("nvme9n1", True, "exports `nvme9n1`, which is a relative path and may have been this drive"),
        (
            "{nodes}/plain",
            True,
            "exports `{nodes}/plain`, which is no block device any more and may have been this drive",
        ),
        (
            "{files}/link",
            True,
            "exports `{files}/link`, which is no block device any more and may have been this drive",
        ),
        ("{nodes}/plain", False, None),
    ],
)
def test_a_target_whose_path_does_not_tell_uses_every_drive(
    drive: Drive, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, path: str, active: bool, words: str | None
) -> None:
    for name in ("image", "image of a disk"):
        (tmp_path / name).touch()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as nodes:
        (Path(nodes) / "plain").touch()
        (tmp_path / "link").symlink_to(Path(nodes) / "plain")
        places = {"drive": drive.path, "files": str(tmp_path), "nodes": nodes}
        shown = path.format(**places)
        configfs = {
            "nvmet": {NVMET + "device_path": shown + "\n", NVMET + "enable": f"{active:d}\n"},
            "lio": {LIO: INFO % ("ACTIVATED" if active else "DEACTIVATED", shown)},
        }[kind]
        listed = glob.glob
        monkeypatch.setattr(
            glob, "glob", lambda pattern: [each for each in configfs if fnmatch(each, pattern)] or listed(pattern)
        )
        monkeypatch.setattr(device_users, "exact_text", lambda path: configfs.get(path) or exact_text(path))
        monkeypatch.setattr(device_users, "read_text", lambda path: configfs.get(path, "").strip() or read_text(path))
        who = "NVMe target `s`" if kind == "nvmet" else "SCSI target `fileio_0`"
        assert users_of([drive.name]) == ({} if words is None else {drive.name: f"{who} {words.format(**places)}"})


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


MOVES = """
import os, sys
handle = os.open(sys.argv[1], os.O_RDWR)
print("open", flush=True)
for line in sys.stdin:
    moved = os.dup(handle)
    os.close(handle)
    handle = moved
    print("moved", flush=True)
"""


def test_a_drive_opened_by_one_process_after_another_is_in_use(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    started = [program(drive.path, "O_RDONLY")]

    def next_one(seconds: float) -> None:
        started.append(program(drive.path, "O_RDONLY"))
        last = started[-2]
        assert last.stdin is not None
        last.stdin.close()
        last.wait()

    monkeypatch.setattr(device_users, "_sleep", next_one)
    try:
        found = users_of([drive.name])
        assert len(started) > 1
        assert found == {drive.name: f"process {started[-1].pid} `{comm(started[-1])}` has it open"}
    finally:
        for running in started:
            with running:
                assert running.stdin is not None
                running.stdin.close()


def test_a_process_that_came_after_a_pause_is_no_user_yet(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """One program after another that opens a drive for a moment is udev at work."""
    asked = []

    def processes(numbers: dict[object, str]) -> list[device_users._Open]:
        asked.append(1)
        return [] if len(asked) in (2, 3) else [device_users._Open(drive.name, len(asked), "fd 3", "(udev-worker)")]

    monkeypatch.setattr(device_users, "_processes", processes)
    assert users_of([drive.name], 10.0) == {}


def test_a_user_that_one_look_misses_is_asked_again(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def processes(numbers: dict[object, str]) -> list[device_users._Open]:
        asked.append(1)
        return [] if len(asked) == 2 else [device_users._Open(drive.name, 7, "fd 3", "hops")]

    monkeypatch.setattr(device_users, "_processes", processes)
    assert users_of([drive.name]) == {drive.name: "process 7 `hops` has it open"}


def test_a_descriptor_that_moves_while_the_table_is_read_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = [sys.executable, "-c", MOVES, drive.path]
    listed: list[str] = []
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        assert running.stdout.readline() == b"open\n"

        def moved(path: str) -> list[str]:
            found = entries_of(path)
            if path == f"/proc/{running.pid}/task/{running.pid}/fd":
                listed.append(path)
                if len(listed) == 1:
                    assert running.stdin is not None
                    assert running.stdout is not None
                    running.stdin.write(b"\n")
                    running.stdin.flush()
                    assert running.stdout.readline() == b"moved\n"
            return found

        monkeypatch.setattr(device_users, "entries_of", moved)
        assert [each.pid for each in device_users._processes(device_users._numbers([drive.name]))] == [running.pid]
        running.stdin.close()


def test_a_child_that_is_made_while_processes_are_listed_is_seen(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list does not have it, and its parent is gone."""
    parent = program(drive.path, "O_RDONLY")
    children: list[subprocess.Popen[bytes]] = []

    def forked(path: str) -> list[str]:
        found = entries_of(path)
        if path == "/proc" and not children:
            children.append(program(drive.path, "O_RDONLY"))
            assert parent.stdin is not None
            parent.stdin.close()
            parent.wait()
        return found

    monkeypatch.setattr(device_users, "entries_of", forked)
    try:
        found = list(device_users._processes(device_users._numbers([drive.name])))
        assert [each.pid for each in found] == [children[0].pid]
    finally:
        for running in (parent, *children):
            with running:
                assert running.stdin is not None
                running.stdin.close()
