"""Directories of jobs on a real XFS, with hostile users: made, limited, removed, and nothing else with them."""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from programs import need_program
from tunetool.inspect.collect import inspect
from tunetool.inspect.source import Source
from tunetool.node.common.commands import CommandError, Result, run
from tunetool.node.common.drift import Ledger
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.settings_file import SettingsError
from tunetool.node.job_scratch import kernel, program, scratch_units, settings, slurm_jobs
from tunetool.node.job_scratch.directories import ATTRIBUTE, REMOVED, Directories, Quota
from tunetool.node.job_scratch.program import metrics, sweep_ended
from tunetool.node.plan.plan_file import TEARDOWN
from tunetool.node.removal.apply import Job
from tunetool.node.volume import program_units
from tunetool.node.volume.unit_dropins import ForeignDropIn
from tunetool.report.inspection import screen
from waiting import until

PROGRAM = "/opt/tunetool/bin/tunetool"
ALICE, BOB = 30001, 30002
FOR_EVER = 600.0
SIZE = 320 << 20


class Limits:
    """In place of a kernel's: what was set, and what counts."""

    def __init__(self, enforced: bool = True) -> None:
        self.enforced, self.set = enforced, dict[int, tuple[int, int]]()
        self.counted = dict[int, int]()
        self.broken = False

    def limit(self, project: int, size: int, files: int) -> None:
        if self.broken:
            raise OSError(5, "Input/output error")
        self.set[project] = (size, files)

    def used(self, project: int) -> int:
        return self.counted.get(project, 0)

    def unused(self, project: int) -> bool:
        return not self.used(project)


class Volume:
    """A real XFS and the directories on it."""

    def __init__(self, point: Path) -> None:
        self.point, self.jobs, self.limits = point, point / "jobs", Limits()

    def open(self) -> Directories:
        return Directories(str(self.point), str(self.jobs), lambda _: self.limits)  # type: ignore[arg-type,return-value]

    def make(self, job: str, uid: int = ALICE, limit: int = 0, slurm: bool = True) -> Path:
        with self.open() as directories:
            return Path(directories.make(job, uid, uid, limit, slurm))

    def remove(self, job: str) -> None:
        """Remove it with all that it holds."""
        with self.open() as directories:
            assert directories.remove(job)
            assert directories.empty(time.monotonic() + FOR_EVER) == []
            assert directories.removing() == 0
        assert not (self.jobs / f"job-{job}").exists()


def mounted(tmp_path: Path, options: str) -> Iterator[Path]:
    need_program("mkfs.xfs", "losetup", "mount")
    image, point = tmp_path / "image", tmp_path / "point"
    point.mkdir()
    # Users have to reach it.
    for above in (tmp_path, *list(tmp_path.parents)[:3]):
        with suppress(OSError):
            above.chmod(above.stat().st_mode | 0o011)
    with image.open("w") as stream:
        stream.truncate(SIZE)
    run(["mkfs.xfs", "-q", str(image)])
    try:
        run(["mount", "-o", f"loop,{options}", str(image), str(point)])
    except CommandError as error:
        kind = "needs XFS" if "prjquota" not in options else "this kernel has no project quota of XFS"
        pytest.skip(f"{kind if os.geteuid() == 0 else 'needs root and loop devices'}: {error}")
    try:
        yield point
    finally:
        run(["umount", "--lazy", str(point)])


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    for point in mounted(tmp_path, "noatime"):
        yield Volume(point)


def as_user(uid: int, act: Callable[[], object]) -> str:
    """What a user's process raised, in words; empty if nothing."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        words = ""
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            act()
        except BaseException as error:
            words = type(error).__name__
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as stream:
        return stream.read()


def test_a_job_gets_a_directory_that_is_its_users_alone(volume: Volume) -> None:
    before = os.umask(0o077)
    try:
        path = volume.make("12")
    finally:
        os.umask(before)
    assert path == volume.jobs / "job-12"
    status = path.stat()
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (ALICE, ALICE, 0o700)
    assert as_user(ALICE, lambda: (path / "file").write_text("mine")) == ""
    acts: tuple[Callable[[], object], ...] = (
        (path / "file").read_text,
        lambda: list(path.iterdir()),
        lambda: list(volume.jobs.iterdir()),
        lambda: list((volume.jobs / REMOVED).iterdir()),
        (volume.jobs / "job-13").mkdir,
        lambda: path.rename(volume.jobs / "job-14"),
    )
    for act in acts:
        assert as_user(BOB, act) == "PermissionError"
    # Its own user neither exchanges it nor changes what it is for.
    own: tuple[Callable[[], object], ...] = (
        lambda: path.rename(volume.jobs / "job-14"),
        path.rmdir,
        lambda: os.setxattr(path, ATTRIBUTE, b"{}"),
    )
    assert [as_user(ALICE, act) for act in own] == ["PermissionError"] * len(own)
    volume.remove("12")


def test_a_second_call_for_a_job_keeps_what_it_has(volume: Volume) -> None:
    path = volume.make("12")
    (path / "file").touch()
    assert volume.make("12") == path
    assert (path / "file").exists()
    # The number came back for another user: Slurm lost its state.
    assert volume.make("12", BOB) == path
    assert path.stat().st_uid == BOB
    assert list(path.iterdir()) == []
    volume.remove("12")


def test_what_a_hostile_user_leaves_goes_and_nothing_else(volume: Volume, tmp_path: Path) -> None:
    outside = volume.point / "precious"
    outside.mkdir()
    (outside / "file").write_text("kept")
    os.chown(outside, BOB, BOB)
    other = volume.make("13", BOB)
    (other / "file").write_text("kept")
    path = volume.make("12")

    def fill() -> None:
        os.chdir(path)
        Path("link").symlink_to(outside)
        Path("link to a file").symlink_to(outside / "file")
        Path("another job").symlink_to(other)
        Path("shared").mkdir()
        Path("shared/up").symlink_to("../..")
        os.mkfifo("fifo")
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind("socket")
        for name in (b"\xff\n\x1b[0m", "\N{SNOWMAN}".encode(), b"-rf *", b"a" * 255):
            Path(os.fsdecode(name)).touch()
        os.link("-rf *", "shared/twice")
        Path("closed").mkdir()
        Path("closed/file").touch()
        Path("closed").chmod(0)
        for _ in range(400):
            Path("d" * 100).mkdir()
            os.chdir("d" * 100)
        Path("deep").touch()

    assert as_user(ALICE, fill) == ""
    volume.remove("12")
    assert (outside / "file").read_text() == (other / "file").read_text() == "kept"


def test_flags_of_a_job_of_roots_do_not_keep_its_files(volume: Volume) -> None:
    need_program("chattr")
    path = volume.make("12", 0)
    (path / "directory/below").mkdir(parents=True)
    for name in ("directory/below/fixed", "log"):
        (path / name).touch()
    for flag, name in (
        ("+i", "directory/below/fixed"),
        ("+a", "log"),
        ("+i", "directory/below"),
        ("+i", "directory"),
        ("+i", ""),
    ):
        run(["chattr", flag, str(path / name)])
    volume.remove("12")


def test_mounts_of_a_job_go_and_what_they_show_stays(volume: Volume) -> None:
    outside = volume.point / "precious"
    outside.mkdir()
    (outside / "file").write_text("kept")
    path = volume.make("12")
    for name in ("a/bind", "a/memory"):
        (path / name).mkdir(parents=True)
    (path / "a/one").touch()
    # The same file system: nothing but the mount itself tells it.
    run(["mount", "--bind", str(outside), str(path / "a/bind")])
    run(["mount", "-t", "tmpfs", "none", str(path / "a/memory")])
    run(["mount", "--bind", str(outside / "file"), str(path / "a/one")])
    libc = ctypes.CDLL(None)
    for _ in range(1100):
        # More than Python nests calls.
        assert libc.mount(bytes(outside), bytes(path), None, 4096, None) == 0
    with volume.open() as directories:
        # A sweep has to know of it, but nobody unmounts what a running job uses.
        assert [record.job for record in directories.records()] == ["12"]
        assert volume.make("12") == path
        assert (path / "file").exists()
        sweep_ended(directories, lambda _: True)
        assert not path.exists()
        # By a process that was in it.
        (aside,) = (volume.jobs / REMOVED).iterdir()
        run(["mount", "--bind", str(outside), str(aside)])
        assert directories.empty(time.monotonic() + FOR_EVER) == []
        assert directories.removing() == 0
    assert (outside / "file").read_text() == "kept"


def test_a_run_ends_in_time_and_the_next_one_goes_on(volume: Volume) -> None:
    path = volume.make("12")
    for number in range(30):
        (path / f"{number}/below").mkdir(parents=True)
    ticks = iter(range(10_000))
    with volume.open() as directories:
        directories.remove("12")
        assert directories.empty(20, lambda: next(ticks)) == []
        assert directories.removing() == 1
        (container,) = (volume.jobs / REMOVED).iterdir()
        # Directories that were nested are moved up, which is half of the work.
        assert 1 < len(list(container.iterdir())) < 30
        assert directories.empty(10_000, lambda: next(ticks)) == []
        assert directories.removing() == 0


def test_a_process_that_stays_inside_holds_up_nothing(volume: Volume) -> None:
    path = volume.make("12")
    script = "cd $0 && echo in && read line; mkdir late 2>/dev/null; touch late/file; ls -d /proc/self/cwd/.. >&2"
    with subprocess.Popen(
        ["sh", "-c", script, str(path)],
        user=ALICE,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as inside:
        assert inside.stdout is not None
        assert inside.stdout.readline() == b"in\n"
        with volume.open() as directories:
            directories.remove("12")
            assert volume.make("12").exists()
            inside.communicate(b"go\n", timeout=60)
            assert directories.empty(time.monotonic() + FOR_EVER) == []
            assert directories.removing() == 0
    volume.remove("12")


def test_processes_that_write_on_hold_up_no_other_job(volume: Volume) -> None:
    def write_on(path: Path) -> None:
        os.chdir(path)
        os.setresuid(ALICE, ALICE, ALICE)
        for number in itertools.count():
            with suppress(OSError):
                Path(str(number)).mkdir()

    jobs = ("1", "2")
    inside = []
    try:
        for job in jobs:
            path = volume.make(job)
            pid = os.fork()
            if not pid:
                write_on(path)
            inside.append(pid)
            until((path / "0").exists, "its first directory")
        with volume.open() as directories:
            for job in jobs:
                directories.remove(job)
            assert directories.empty(time.monotonic() + 30) == []
            assert directories.removing() == 0
    finally:
        for pid in inside:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_one_with_many_files_holds_up_no_other_job(volume: Volume) -> None:
    for job in "123":
        path = volume.make(job)
        for number in range(200 if job == "2" else 1):
            (path / str(number)).touch()
    clock = itertools.count(step=0.5)
    with volume.open() as directories:
        for job in "123":
            directories.remove(job)
        assert directories.empty(60, lambda: next(clock)) == []
        assert directories.removing() == 1


def test_a_full_volume_is_emptied(volume: Volume) -> None:
    path, last = volume.make("12"), volume.make("13")

    def spread(above: Path, *numbers: int) -> None:
        for number in range(numbers[0] if numbers else 0):
            (above / str(number)).mkdir()
            spread(above / str(number), *numbers[1:])

    def fill() -> None:
        size, number = 64 << 20, 0
        while size >= 4096:
            number += 1
            try:
                with (last / str(number)).open("wb") as stream:
                    os.posix_fallocate(stream.fileno(), 0, size)
            except OSError:
                size //= 2
        while True:
            number += 1
            (last / f"{number}{'x' * 200}").mkdir()

    # Directories alone, whose removal makes no room until the lowest ones go.
    assert as_user(ALICE, lambda: spread(path, 40, 10, 10, 1)) == ""
    assert as_user(ALICE, fill) == "OSError"
    with pytest.raises(OSError, match="No space left"):
        volume.make("14")
    with volume.open() as directories:
        for job in ("12", "13"):
            assert directories.remove(job)
            assert directories.empty(time.monotonic() + FOR_EVER) == []
            assert directories.removing() == 0
    volume.make("14")


def test_a_limit_is_set_before_the_user_has_the_directory(volume: Volume) -> None:
    path = volume.make("12", limit=100 << 20)
    with volume.open() as directories:
        (record,) = directories.records()
        volume.limits.counted[record.project] = 4096
        (held,) = directories.held()
        assert (held.used, held.record.limit, held.record.uid) == (4096, 100 << 20, ALICE)
        size, files = volume.limits.set[record.project]
        assert size == 100 << 20
        assert 1024 <= files < os.statvfs(volume.point).f_files
        text = metrics(directories)
    assert f'job="12",user="{ALICE}"}} 4096\n' in text
    assert f'job="12",user="{ALICE}"}} {100 << 20}\n' in text
    assert "tunetool_scratch_removing" in text
    # What he makes counts for the project; the kernel lets him count his own files for any other.
    (path / "directory").mkdir()
    handle = os.open(path / "directory", os.O_RDONLY)
    flags, project = kernel._attributes(handle)[0], kernel._attributes(handle)[3]
    os.close(handle)
    assert (flags & kernel.PROJECT_INHERITED, project) == (kernel.PROJECT_INHERITED, record.project)
    another = volume.make("13", BOB, limit=100 << 20)
    handle = os.open(path, os.O_RDONLY)
    assert as_user(ALICE, lambda: kernel.set_project(handle, 7)) == ""
    os.close(handle)
    volume.limits.counted.clear()
    volume.remove("12")
    # Only the limit that was set for it is gone.
    assert volume.limits.set[record.project] == (0, 0)
    assert 7 not in volume.limits.set
    assert sum(size for size, _ in volume.limits.set.values()) == 100 << 20
    # Nor does he learn another job's.
    assert as_user(ALICE, lambda: os.open(another, os.O_RDONLY)) == "PermissionError"


def test_a_limit_stays_while_anything_counts_for_it(volume: Volume) -> None:
    limit = 100 << 20
    volume.make("12", limit=limit)
    with volume.open() as directories:
        (record,) = directories.records()
        # As a deleted file that a process has open.
        volume.limits.counted[record.project] = 4096
        directories.remove("12")
        assert directories.empty(time.monotonic() + FOR_EVER) == []
        assert directories.removing() == 0
    assert volume.limits.set[record.project][0] == limit


def test_a_cut_make_takes_no_limit_from_a_running_job(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    class Killed(BaseException):
        pass

    def cut(name: str, *arguments: Any, **places: int) -> None:
        act(name, *arguments, **places)
        raise Killed

    for place in ("mkdir", "rename", "rmdir", "setxattr", "fchown"):
        act = getattr(os, place)
        before = os.umask(0o077)
        with monkeypatch.context() as patch, suppress(Killed):
            patch.setattr(os, place, cut)
            with volume.open() as directories:
                directories.make(place, ALICE, ALICE, 1 << 20, slurm=True)
        os.umask(before)
        with volume.open() as directories:
            assert directories.empty(time.monotonic() + FOR_EVER) == []
            assert directories.removing() == 0
            limits = {record.project: 1 << 20 for record in directories.records()}
        assert {project: size for project, (size, _) in volume.limits.set.items() if size} == limits
    assert len(limits) == 2
    assert volume.jobs.stat().st_mode & 0o777 == 0o711


def test_a_failed_make_leaves_no_directory_and_no_remains(volume: Volume) -> None:
    volume.limits.broken = True
    with pytest.raises(OSError, match="Input/output"):
        volume.make("12", limit=1 << 20)
    assert not (volume.jobs / "job-12").exists()
    volume.limits.broken = False
    with volume.open() as directories:
        assert directories.records() == []
        assert directories.empty(time.monotonic() + FOR_EVER) == []
        assert directories.removing() == 0


def test_a_volume_that_cannot_limit_is_refused_with_a_hint(volume: Volume) -> None:
    with Directories(str(volume.point), str(volume.jobs)) as directories:
        with pytest.raises(Refusal, match=r"without `prjquota`.* hint: unmount it"):
            directories.make("12", ALICE, ALICE, 1 << 20, slurm=True)
        directories.make("12", ALICE, ALICE, 0, slurm=True)
        (held,) = directories.held()
        assert held.used is None
    volume.remove("12")


def test_names_and_places_of_others_are_refused(volume: Volume, tmp_path: Path) -> None:
    with volume.open() as directories:
        for job in ("", "..", "a/b", ".removed", "a\n", "1 2", "x" * 65):
            with pytest.raises(Refusal, match="is no job"):
                directories.make(job, ALICE, ALICE, 0, slurm=True)
        for number, theirs in enumerate((Path.touch, Path.mkdir, lambda path: path.symlink_to(tmp_path))):
            theirs(volume.jobs / f"job-{number}")  # type: ignore[no-untyped-call]
            for act in (lambda job: directories.make(job, ALICE, ALICE, 0, True), directories.remove):
                with pytest.raises(Refusal, match="is not tunetool's"):
                    act(str(number))
        assert directories.records() == []
    for prepare in (
        lambda: volume.jobs.symlink_to(tmp_path),
        lambda: (volume.jobs.mkdir(), os.chown(volume.jobs, ALICE, ALICE)),
        lambda: (volume.jobs.mkdir(), volume.jobs.chmod(0o777)),
        lambda: volume.point.chmod(0o777),
    ):
        volume.jobs.rename(volume.point / f"old-{time.monotonic_ns()}")
        prepare()  # type: ignore[no-untyped-call]
        with pytest.raises(Refusal, match="hint: "):
            volume.open()
    with pytest.raises(Refusal, match="is not mounted"):
        Directories(str(tmp_path), str(tmp_path / "jobs"))


def test_only_directories_of_jobs_that_ended_are_swept(volume: Volume) -> None:
    for job in ("1", "2", "3"):
        volume.make(job)
    volume.make("by-hand", slurm=False)
    before = volume.make("old", slurm=False)
    note = json.loads(os.getxattr(before, ATTRIBUTE))
    os.setxattr(before, ATTRIBUTE, json.dumps({**note, "boot": "another"}).encode())

    def over(job: str) -> bool:
        if job == "3":
            # It ended, and begins again on this node just now.
            volume.make("3")
        return job in ("2", "3")

    with volume.open() as directories:
        sweep_ended(directories, over)
        assert [record.job for record in directories.records()] == ["1", "3", "by-hand"]


@pytest.mark.parametrize(
    ("answer", "over"),
    [
        (CommandError("`squeue` failed: slurm_load_jobs error: Invalid job id specified"), True),
        ("COMPLETED\n", True),
        ("NODE_FAIL\n", True),
        ("RUNNING\n", False),
        ("COMPLETING\n", False),
        ("PENDING\n", False),
        ("SOMETHING_NEW\n", False),
        ("COMPLETED\nRUNNING\n", False),
        ("", False),
    ],
)
def test_without_slurms_word_no_job_has_ended(answer: str | CommandError, over: bool) -> None:
    def call(argv: object) -> Result:
        if isinstance(answer, CommandError):
            raise answer
        return Result(0, answer, "")

    assert slurm_jobs.is_over("12", call) is over


@pytest.mark.parametrize("words", ["`squeue` failed: Unable to contact slurm controller", "`squeue` is not installed"])
def test_a_slurm_that_is_silent_is_asked_once_and_named(
    volume: Volume, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    for job in ("1", "2", "3"):
        volume.make(job)
    by_hand = volume.make("4", slurm=False)
    note = json.loads(os.getxattr(by_hand, ATTRIBUTE))
    os.setxattr(by_hand, ATTRIBUTE, json.dumps({**note, "boot": "another"}).encode())
    asked = []

    def call(argv: object) -> Result:
        asked.append(argv)
        raise CommandError(words)

    with volume.open() as directories:
        sweep_ended(directories, lambda job: slurm_jobs.is_over(job, call))
        assert [record.job for record in directories.records()] == ["1", "2", "3"]
    assert len(asked) == 1
    said = capsys.readouterr().out
    assert words in said
    assert said.count("\n") == 2


def test_one_directory_that_cannot_be_removed_keeps_no_other(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for job in ("1", "2"):
        volume.make(job)
    # An administrator keeps what a job left.
    volume.make("3").rename(volume.jobs / "job-3.kept")
    act = os.rename

    def rename(name: str, *arguments: Any, **places: int) -> None:
        if name == "job-1":
            raise OSError(5, "Input/output error")
        act(name, *arguments, **places)

    with volume.open() as directories:
        monkeypatch.setattr(os, "rename", rename)
        sweep_ended(directories, lambda _: True)
        assert [record.job for record in directories.records()] == ["1"]
    assert capsys.readouterr().out.splitlines() == [
        "stays: job `1`: `the volume`: Input/output error. hint: see `dmesg`",
        "job `2` has ended: its directory is removed",
    ]
    assert (volume.jobs / "job-3.kept").exists()


@pytest.mark.parametrize(
    ("shown", "size"),
    [("0\n", ""), ("300M\n", "300MiB"), ("1.50T\n1.50T\n", "1.50TiB"), ("x\n", ""), ("", "")],
)
def test_the_jobs_request_is_its_tmp(shown: str, size: str) -> None:
    asked: list[str] = []

    def call(argv: Sequence[str]) -> Result:
        asked.extend(argv)
        return Result(0, shown, "")

    assert slurm_jobs.requested("12", call) == size
    # No other field: the user chooses his job's name, and a bad size drains the node.
    assert "--format=%d" in asked


def test_one_command_serves_any_scheduler(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {
        "mount_point": str(volume.point),
        "directory": str(volume.jobs),
        "limit": "",
        "by_request": False,
        "textfile_directory": str(volume.point),
    }
    monkeypatch.setattr(program, "load", lambda: given)
    assert program.main(["make", "77.server", "--user", str(ALICE)]) == 0
    path = volume.jobs / "job-77.server"
    assert capsys.readouterr().out == f"{path}\n"
    assert program.main(["list"]) == 0
    assert capsys.readouterr().out == f"job 77.server of {ALICE}: unknown, no limit\n"
    assert program.main(["remove", "77.server", "--seconds", "60"]) == 0
    assert program.main(["sweep"]) == 0
    assert list(volume.jobs.iterdir()) == [volume.jobs / REMOVED]
    assert "tunetool_scratch_removing" in (volume.point / "tunetool-scratch.prom").read_text()
    wrong = {
        ("make", "1", "--user", "nobody-here"): "`nobody-here` is no user of this node. hint: ",
        ("make", "1", "--user", "4294967295"): "`4294967295` is no number of a user or a group. hint: ",
        ("make", "1", "--user", "99999999999"): "`99999999999` is no number of a user or a group. hint: ",
        ("make", "1", "--user", "\N{SUPERSCRIPT TWO}"): "`\\xb2` is no number of a user or a group. hint: ",
        ("make", "1", "--user", str(ALICE), "--limit", "much"): "hint: a share such as `25%`",
        ("make", "1", "--user", str(ALICE), "--limit", "5%"): "without `prjquota`",
    }
    capsys.readouterr()
    for arguments, words in wrong.items():
        assert program.main(list(arguments)) == program.FAILED
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert words in said
        assert said.count("\n") == 1


def test_inspect_shows_who_holds_how_much(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mount_point": str(volume.point), "directory": str(volume.jobs)}
    monkeypatch.setattr(program, "load", lambda: given)
    assert program.jobs_of_node() == []
    # It only reads.
    assert not volume.jobs.exists()
    volume.make("12")
    shown = inspect(Source("/", live=True))
    assert [job.model_dump() for job in shown.jobs] == [
        {"job": "12", "user": str(ALICE), "bytes": None, "limit_bytes": None}
    ]
    assert f"jobs        12 of {ALICE}: unknown, no limit\n" in screen(shown)
    assert inspect(Source(str(volume.point))).jobs == []


def test_a_teardown_names_the_jobs_that_have_directories(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    # Nothing of the job need be open at that moment.
    given = {"mount_point": str(volume.point), "directory": str(volume.jobs)}
    monkeypatch.setattr(program, "load", lambda: given)
    volume.make("12")

    def occupants(point: Path) -> list[str]:
        removal: Any = SimpleNamespace(arrays=[], places=())
        whole: Any = SimpleNamespace(mount_point=str(point), filesystem_uuid=None, uuid=None)
        return Job(removal, whole, TEARDOWN, "", Ledger(None, acting=True)).occupants()

    (line,) = occupants(volume.point)
    assert line.startswith(f"job `12` of {ALICE} has its directory there")
    assert occupants(volume.point / "another") == []
    volume.remove("12")
    assert occupants(volume.point) == []


def test_a_failed_prolog_drains_its_node_and_an_epilog_never(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drained: list[tuple[str, str]] = []
    monkeypatch.setattr(slurm_jobs, "drain", lambda node, words: drained.append((node, words)))
    given = {
        "mount_point": str(volume.point / "gone"),
        "directory": str(volume.point / "gone/jobs"),
        "limit": "",
        "by_request": False,
        "textfile_directory": "",
    }
    monkeypatch.setattr(program, "load", lambda: given)
    job = {"SLURM_JOB_ID": "12", "SLURM_JOB_UID": str(ALICE), "SLURMD_NODENAME": "node1"}
    assert program.by_slurm({**job, "SLURM_SCRIPT_CONTEXT": "epilog_slurmd"}) == 0
    assert drained == []
    assert program.by_slurm({**job, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd"}) == program.FAILED
    ((node, words),) = drained
    assert node == "node1"
    assert "gone` is not mounted. hint: " in words
    assert words in capsys.readouterr().err
    assert program.by_slurm(job) == 2
    drained.clear()
    assert program.by_slurm({**job, "SLURM_SCRIPT_CONTEXT": "prolog_slurmd", "SLURM_JOB_UID": "?"}) == program.FAILED
    assert "hint: " in drained[0][1]


def test_words_for_slurm_are_plain() -> None:
    calls: list[list[str]] = []
    slurm_jobs.drain("node1", 'a "quote"\n\N{SNOWMAN}', lambda argv: calls.append(list(argv)) or Result(0, "", ""))
    assert calls == [["scontrol", "update", "NodeName=node1", "State=DRAIN", "Reason=tunetool scratch: a ?quote???"]]


def test_files_come_and_go(tmp_path: Path) -> None:
    wanted = scratch_units.files(PROGRAM, "{}\n", "/mnt/a b", "/mnt/a b/jobs")

    def converge(files: dict[str, str]) -> int:
        needed = scratch_units.changes(files, PROGRAM, str(tmp_path))
        for each in needed:
            program_units.put(each)
        return len(needed)

    assert [converge(files) for files in ({}, wanted, wanted)] == [0, len(wanted), 0]
    assert scratch_units.installed(str(tmp_path))
    starter = tmp_path / "opt/tunetool/bin/tunetool-scratch"
    assert os.access(starter, os.X_OK)
    # One that does not start would drain each node that a job comes to.
    starter.chmod(0o644)
    assert [converge(wanted), converge(wanted)] == [1, 0]
    assert starter.stat().st_mode & 0o777 == 0o755
    assert [converge({}), converge({})] == [len(wanted), 0]
    assert not scratch_units.installed(str(tmp_path))
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []
    for path in ("etc/systemd/system/tunetool-scratch.service", "opt/tunetool/bin/tunetool-scratch"):
        theirs = tmp_path / path
        theirs.parent.mkdir(parents=True, exist_ok=True)
        theirs.write_text("theirs\n")
        assert converge({}) == 0
        with pytest.raises(ForeignDropIn):
            converge(wanted)
        theirs.unlink()


def test_systemd_accepts_the_units_of_the_sweep(tmp_path: Path) -> None:
    need_program("systemd-analyze")
    starter = tmp_path / "opt/bin/tunetool-scratch"
    for path, text in scratch_units.files(str(starter.with_name("tunetool")), "", "/", "/jobs").items():
        place = starter if path == str(starter) else tmp_path / Path(path).name
        if not text.startswith("-> "):
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(text)
    starter.chmod(0o755)
    done = subprocess.run(
        ["systemd-analyze", "verify", *(tmp_path / name for name in (scratch_units.SERVICE, scratch_units.TIMER))],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if "tunetool-scratch" in line] == []
    # What somebody has unmounted is not mounted again every 5 minutes.
    assert "RequiresMountsFor" not in (tmp_path / scratch_units.SERVICE).read_text()


@pytest.mark.parametrize(
    ("context", "arguments", "said"),
    [
        ("prolog_task", [], "export TUNETOOL_SCRATCH={jobs}/job-12\n"),
        ("prolog_slurmd", [], "-I -m tunetool.node.job_scratch.program\n"),
        ("prolog_task", ["make", "12"], "-I -m tunetool.node.job_scratch.program make 12\n"),
    ],
)
def test_the_starter_tells_a_task_its_directory(tmp_path: Path, context: str, arguments: list[str], said: str) -> None:
    jobs, program_path = tmp_path / "jobs", tmp_path / "a b'c/bin/tunetool"
    (jobs / "job-12").mkdir(parents=True)
    program_path.parent.mkdir(parents=True)
    program_path.touch()
    python = program_path.with_name("python")
    python.write_text("#!/bin/sh\necho $@\n")
    python.chmod(0o755)
    starter = Path(scratch_units.starter_path(str(program_path)))
    starter.write_text(scratch_units.files(str(program_path), "", str(tmp_path), str(jobs))[str(starter)])
    environment = {"SLURM_SCRIPT_CONTEXT": context, "SLURM_JOB_ID": "12"}
    done = subprocess.run(["sh", starter, *arguments], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == said.format(jobs=jobs)
    # A job without a directory, as one that began before the role was on.
    environment = {"SLURM_SCRIPT_CONTEXT": "prolog_task", "SLURM_JOB_ID": "13"}
    done = subprocess.run(["sh", starter], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == ""


def test_without_the_program_the_prolog_fails_not_the_epilog(tmp_path: Path) -> None:
    program_path = tmp_path / "bin/tunetool"
    starter = tmp_path / "starter"
    text = scratch_units.files(str(program_path), "", str(tmp_path), str(tmp_path))
    starter.write_text(text[scratch_units.starter_path(str(program_path))])
    for made in (tmp_path, program_path.parent):
        made.mkdir(exist_ok=True)
        for context, status in (("epilog_slurmd", 0), ("prolog_slurmd", 3)):
            environment = {"SLURM_SCRIPT_CONTEXT": context, "SLURM_JOB_ID": "12"}
            done = subprocess.run(["sh", starter], env=environment, capture_output=True, text=True, check=False)
            assert done.returncode == status
            assert "hint: " in done.stderr
            assert done.stderr.count("\n") == 1


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    with pytest.raises(SettingsError, match=r"jobs get no directories here\. hint: set `job_scratch_enabled: true`"):
        settings.load(str(path))
    given = {"directory": "/mnt//s/jobs/", "limit": "10%", "by_request": True, "textfile_directory": ""}
    path.write_text(settings.dump(given, "/mnt/s/"))
    read = settings.load(str(path))
    assert {**given, "directory": "/mnt/s/jobs", "mount_point": "/mnt/s", "schema": settings.SCHEMA_NAME} == read
    for text in ("{", "[]", path.read_text().replace("true", '"yes"'), path.read_text().replace("limit", "most")):
        path.write_text(text)
        with pytest.raises(SettingsError, match=r"hint: run `tunetool provision` for this node"):
            settings.load(str(path))
    assert [settings.limit_bytes(text, 1 << 40) for text in ("", "25%", "500GiB", "9PB")] == [
        0,
        1 << 38,
        500 << 30,
        1 << 40,
    ]


@pytest.fixture
def limiting(tmp_path: Path) -> Iterator[Path]:
    yield from mounted(tmp_path, "prjquota")


def test_the_kernel_keeps_a_job_to_its_limit(limiting: Path) -> None:
    limit = 20 << 20

    def fill(path: Path) -> None:
        with (path / "file").open("wb", buffering=0) as stream:
            for _ in range(30):
                stream.write(bytes(1 << 20))

    with Directories(str(limiting), str(limiting / "jobs"), Quota) as directories:
        paths = [Path(directories.make(job, uid, uid, limit, True)) for job, uid in (("1", ALICE), ("2", BOB))]
        assert as_user(ALICE, lambda: fill(paths[0])) == "OSError"
        assert as_user(BOB, lambda: (paths[1] / "file").write_bytes(bytes(10 << 20))) == ""
        used = {held.record.job: held.used for held in directories.held()}
        assert limit - (2 << 20) <= (used["1"] or 0) <= limit
        assert 10 << 20 <= (used["2"] or 0) < limit
        assert os.statvfs(paths[0]).f_blocks * os.statvfs(paths[0]).f_frsize == limit
        projects = [held.record.project for held in directories.held()]
        for job in ("1", "2"):
            directories.remove(job)
        assert directories.empty(time.monotonic() + FOR_EVER) == []
        handle = os.open(limiting, os.O_RDONLY)
        assert [kernel.used(handle, project) for project in projects] == [(0, 0)] * 2
        os.close(handle)


def test_a_mount_is_not_taken_for_a_directory(volume: Volume) -> None:
    (volume.point / "over").mkdir()
    run(["mount", "--bind", str(volume.point), str(volume.point / "over")])
    handle = os.open(volume.point, os.O_RDONLY)
    try:
        with pytest.raises(OSError, match="cross-device"):
            kernel.open_inside(handle, "over")
        kernel.detach(handle, "over")
        with pytest.raises(OSError, match="Invalid argument"):
            kernel.detach(handle, "over")
        os.close(kernel.open_inside(handle, "over"))
    finally:
        os.close(handle)
    assert ctypes.sizeof(ctypes.c_long) * 14 == kernel.QUOTA.size
