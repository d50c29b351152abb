"""A volume that no job can use is no PASS: read-only, frozen, shut down, full, silent; on a real XFS over a loop device."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from calls import call
from machines import RECORDED
from programs import need_program
from tunetool.health.check import check
from tunetool.health.results import Files, current
from tunetool.measure.session import Run
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common import manifest as manifests
from tunetool.node.common import temporary
from tunetool.node.common.check_result import Check
from tunetool.node.common.commands import CommandError, run
from tunetool.node.health.settings import dump
from tunetool.node.machine.mounts import Mount
from tunetool.node.volume import write_read_probe
from tunetool.node.volume.named_volume import describe_volume
from tunetool.node.volume.offload_check import check_offload
from tunetool.node.volume.volume_answers import check_answers, check_drives
from tunetool.node.volume.write_read_probe import Answer, Question, ask, ask_all
from tunetool.report.progress import PlainProgress
from tunetool.verify.request import Request
from tunetool.verify.run import verify
from waiting import gone

BUILT: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
QUIET = {"hugepages": [], "shm_bytes": None, "memlock": None}
SILENCE = 1.0
"""Seconds. What a frozen file system holds never comes back, so any patience ends alike."""


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A directory that each user may enter, as pytest's are not."""
    directory = Path(tempfile.mkdtemp(dir="/tmp"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def volume(tmp_path: Path, open_to_all: Path) -> Iterator[Path]:
    """A real XFS, mounted, which no test can leave frozen."""
    need_program("mkfs.xfs", "xfs_io", "losetup", "mount", "fsfreeze")
    image, point = tmp_path / "image", open_to_all / "point"
    point.mkdir()
    with image.open("w") as stream:
        stream.truncate(320 << 20)
    run(["mkfs.xfs", "-q", str(image)])
    try:
        device = run(["losetup", "--find", "--show", str(image)]).stdout.strip()
    except CommandError as error:
        pytest.skip(f"needs root and loop devices: {error}")
    try:
        run(["mount", device, str(point)])
    except CommandError as error:
        run(["losetup", "--detach", device])
        pytest.skip(f"needs XFS: {error}")
    (point / "offload").mkdir()
    try:
        yield point
    finally:
        run(["fsfreeze", "--unfreeze", str(point)], accept=range(256))
        gone(*hanging(point))
        run(["umount", str(point)])
        run(["losetup", "--detach", device])


def hanging(point: Path) -> list[int]:
    """The processes that still ask the volume: each holds its lock."""
    lock = "probe" + str(point).replace("/", "-").replace("_", "-") + ".lock"
    found = set()
    for handle in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if str(handle.readlink()).endswith(lock):
                found.add(int(handle.parts[2]))
    return sorted(found)


def manifest_of(point: Path) -> dict[str, Any]:
    document = {**BUILT, "array": None, "filesystem": describe_volume(str(point)), "memory": QUIET, "expect": {}}
    return {**document, "offload_dir": str(point / "offload"), "gds": {"mode": "off", "reasons": []}}


def checks_of(point: Path, **settings: Any) -> dict[str, Check]:
    return {each.id: each for each in run_checks(manifest_of(point), **settings)}


def names(point: Path) -> list[str]:
    return sorted(each.name for each in point.iterdir())


def moved(point: Path) -> tuple[int, int]:
    """Bytes that the device counts as read and as written."""
    device = run(["findmnt", "-no", "SOURCE", str(point)]).stdout.strip()
    counts = (Path("/sys/block") / Path(device).name / "stat").read_text().split()
    return int(counts[2]) * 512, int(counts[6]) * 512


def test_a_volume_that_takes_data_passes_by_its_counters(volume: Path) -> None:
    read, written = moved(volume)
    checks = checks_of(volume)
    assert checks["filesystem.writable"].status == checks["offload.directory"].status == "pass"
    answers = checks["filesystem.answers"]
    assert (answers.status, answers.found) == ("pass", "1 MiB written and read back past the page cache")
    after = moved(volume)
    assert after[0] - read >= 1 << 20
    assert after[1] - written >= 1 << 20
    assert names(volume) == ["offload"]


@pytest.mark.parametrize("options", ["remount,ro", "remount,bind,ro"], ids=["file system", "mount"])
def test_a_volume_remounted_read_only_fails(volume: Path, options: str) -> None:
    run(["mount", "-o", options, str(volume)])
    checks = checks_of(volume)
    assert checks["filesystem.writable"].status == "fail"
    assert "mounted read-only" in checks["filesystem.writable"].found
    assert "kernel's log" in checks["filesystem.writable"].remedy
    assert checks["filesystem.answers"].status == "skip"
    run(["mount", "-o", options.replace("ro", "rw"), str(volume)])
    assert checks_of(volume)["filesystem.writable"].status == "pass"


def test_a_directory_of_the_volume_over_its_mount_point_fails(volume: Path) -> None:
    manifest = manifest_of(volume)
    (volume / "sub/offload").mkdir(parents=True)
    run(["mount", "--bind", str(volume / "sub"), str(volume)])
    try:
        checks = {each.id: each for each in run_checks(manifest)}
    finally:
        run(["umount", str(volume)])
    mounted = checks["filesystem.mounted"]
    assert (mounted.status, "its directory `/sub`, not `/`" in mounted.found) == ("fail", True)
    assert f"`umount {volume}`" in mounted.remedy
    assert names(volume / "sub") == ["offload"]


def test_another_directory_over_the_offload_directory_fails(volume: Path) -> None:
    (volume / "other").mkdir()
    offload = str(volume / "offload")
    for name, status in (("offload", "pass"), ("other", "fail")):
        run(["mount", "--bind", str(volume / name), offload])
        try:
            check = checks_of(volume)["offload.directory"]
        finally:
            run(["umount", offload])
        assert check.status == status
    assert "directory `/other` of" in check.found
    assert check.remedy == f"run `umount {offload}`"


def test_an_offload_directory_that_no_job_can_write_fails(volume: Path) -> None:
    offload = volume / "offload"
    offload.chmod(0o1777)
    built = {**manifest_of(volume), "offload": {"uid": 0, "gid": 0, "mode": "1777"}}
    assert manifests.validate(built) == []

    def judged() -> Check:
        return next(each for each in run_checks(built) if each.id == "offload.directory")

    assert (judged().status, judged().found) == ("pass", "a directory, root:root 1777")
    offload.chmod(0o700)
    check = judged()
    assert (check.status, check.found) == ("fail", "a directory, root:root 0700")
    assert check.expected == f"`{offload}`, root:root 1777"
    assert check.remedy == f"run `tunetool provision`, or `chown 0:0 {offload}` and `chmod 1777 {offload}`"
    # Manifests of earlier versions say nothing of it.
    assert checks_of(volume)["offload.directory"].status == "pass"
    offload.chmod(0o1777)
    os.chown(offload, 4242, -1)
    assert judged().found == "a directory, 4242:root 1777"
    os.chown(offload, 0, -1)
    assert judged().status == "pass"


def test_an_offload_directory_that_no_job_reaches_fails(volume: Path) -> None:
    offload = volume / "offload"
    built = manifest_of(volume)

    def status(uid: int, mode: int, top: int, owner: int = 0, group: int | None = None) -> str:
        offload.chmod(mode)
        os.chown(offload, uid, uid)
        volume.chmod(top)
        os.chown(volume, owner, owner if group is None else group)
        asked = {"uid": uid, "gid": uid, "mode": f"{mode:04o}"}
        check = next(each for each in run_checks({**built, "offload": asked}) if each.id == "offload.directory")
        if check.status == "fail":
            assert check.found == f"no job reaches it: `{volume}` above it is root:root {top:04o}"
            assert check.remedy == f"run `chmod a+x {volume}`"
        return check.status

    assert [status(4242, 0o755, 0o700), status(0, 0o1777, 0o700)] == ["fail", "fail"]
    # As a umask of 027 makes it: nobody else is in root's group.
    assert [status(4242, 0o755, 0o750), status(0, 0o1777, 0o750)] == ["fail", "fail"]
    # Its own user's, another group's, and root's directory for root alone.
    passing = [status(4242, 0o755, 0o700, 4242), status(4242, 0o755, 0o750, group=4243), status(0, 0o755, 0o700)]
    passing += [status(0, 0o1777, 0o755), status(0, 0o1777, 0o750, group=4243), status(0, 0o770, 0o750)]
    assert passing == ["pass"] * 6
    # Whom a list lets through is not looked up.
    if shutil.which("setfacl"):
        run(["setfacl", "-m", "u:4242:rx", str(volume)])
        assert status(0, 0o1777, 0o750) == "pass"


def test_directories_above_the_mount_point_let_jobs_through_too(volume: Path) -> None:
    volume.parent.chmod(0o700)
    (volume / "offload").chmod(0o1777)
    built = {**manifest_of(volume), "offload": {"uid": 0, "gid": 0, "mode": "1777"}}
    check = next(each for each in run_checks(built) if each.id == "offload.directory")
    assert (check.status, check.found) == ("fail", f"no job reaches it: `{volume.parent}` above it is root:root 0700")
    volume.parent.chmod(0o711)
    assert next(each for each in run_checks(built) if each.id == "offload.directory").status == "pass"


def test_an_offload_directory_that_leads_off_the_volume_fails(volume: Path, tmp_path: Path) -> None:
    (volume / "offload").rmdir()
    for target, status in ((volume / "inner", "pass"), (tmp_path / "outer", "fail")):
        target.mkdir()
        (volume / "offload").symlink_to(target)
        check = checks_of(volume)["offload.directory"]
        assert check.status == status
        (volume / "offload").unlink()
    assert check.found == f"it leads to `{tmp_path / 'outer'}`, on another file system"


def test_a_frozen_volume_fails_and_no_check_waits_for_it(volume: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    manifests.write(manifest_of(volume), str(path))
    run(["fsfreeze", "--freeze", str(volume)])
    command = [sys.executable, "-m", "tunetool", "verify", "--level", "config", "--manifest", str(path)]
    # A child that kept the output open would hold whoever reads it.
    done = call(*command, "--runs-dir", str(tmp_path / "runs"), timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "the volume did not answer for 10 s (make a directory)" in " ".join(done.stdout.split())

    before = hanging(volume)
    assert len(before) == 1
    answers = checks_of(volume, asker=partial(ask_all, patience=SILENCE))["filesystem.answers"]
    assert answers.status == "fail"
    assert "still waits, and no second one is started (make a directory)" in answers.found
    assert "fsfreeze --unfreeze" in answers.remedy
    assert hanging(volume) == before

    run(["fsfreeze", "--unfreeze", str(volume)])
    gone(*before)
    assert checks_of(volume)["filesystem.answers"].status == "pass"
    assert names(volume) == ["offload"]


def test_silent_volumes_are_asked_together(tmp_path: Path) -> None:
    """A read of a pipe that nobody writes never comes back, as one of a dead drive."""
    os.mkfifo(tmp_path / "dead")
    questions = []
    for at in range(8):
        (tmp_path / f"drive{at}").mkdir()
        drive = "/dev/null" if at == 3 else str(tmp_path / "dead")
        questions.append(Question(str(tmp_path / f"drive{at}"), write=False, drives=((f"S{at}", drive),)))
    began = time.monotonic()
    answers = ask_all(questions, 2.0, str(tmp_path))
    assert time.monotonic() - began < 4 * 2, "seven one after the other take 14 s"
    assert [each.silent_drives for each in answers] == [() if at == 3 else (f"S{at}",) for at in range(8)]


def test_a_volume_that_is_shut_down_is_called_so(volume: Path, tmp_path: Path) -> None:
    files = Files(tmp_path / "node")
    files.settings.parent.mkdir(parents=True)
    files.settings.write_text(dump(900, 0, "", []))
    manifests.write(manifest_of(volume), str(files.manifest))
    run(["xfs_io", "-x", "-c", "shutdown -f", str(volume)])
    settings = {"period_seconds": 900, "measure_seconds": 0, "textfile_directory": "", "ignored_checks": []}
    assert check(settings, files) == "fail"
    assert current(files).reasons == ["filesystem.answers: XFS is shut down: every access fails with an I/O error"]
    checks = checks_of(volume)
    assert checks["offload.directory"].status == "unknown"
    assert "XFS is shut down" in checks["offload.directory"].found
    remedy = checks["filesystem.answers"].remedy
    assert f"unmount `{volume}`, mount it again" in remedy
    assert "kernel's log" in remedy


def test_a_full_volume_is_called_full_and_not_dead(volume: Path) -> None:
    size = 64 << 20
    with (volume / "offload/full").open("wb") as stream:
        while size >= 4096:
            try:
                os.posix_fallocate(stream.fileno(), stream.seek(0, os.SEEK_END), size)
            except OSError:
                size //= 2
    answers = checks_of(volume)["filesystem.answers"]
    assert (answers.status, answers.found.split(",")[0]) == ("unknown", "it is full")
    with (volume / "offload/full").open("r+b") as stream:
        # Room for the directory and the file, and for nothing of a job.
        os.truncate(stream.fileno(), os.fstat(stream.fileno()).st_size - (320 << 10))
    eight_drives = ask(Question(str(volume), None, pieces=8, step=1 << 20))
    assert (eight_drives.error, eight_drives.written) == (errno.ENOSPC, 0)
    (volume / "offload/full").unlink()
    assert checks_of(volume)["filesystem.answers"].status == "pass"


@pytest.mark.parametrize("letter", ["i", "a"], ids=["immutable", "append-only"])
@pytest.mark.parametrize(
    ("name", "check"), [(".", "filesystem.answers"), ("offload", "offload.directory")], ids=["top", "offload"]
)
def test_a_flag_that_forbids_writes_to_root_fails_with_its_cure(
    volume: Path, name: str, check: str, letter: str
) -> None:
    where = volume / name
    run(["chattr", f"+{letter}", str(where)])
    try:
        checks = checks_of(volume)
    finally:
        run(["chattr", f"-{letter}", str(where)])
    assert checks[check].status == "fail"
    assert "root neither: Operation not permitted (make a directory" in checks[check].found
    assert checks[check].remedy == f"run `chattr -{letter} {where}`"
    assert names(volume) == ["offload"]
    assert names(volume / "offload") == []
    assert checks_of(volume)[check].status == "pass"


def test_a_flag_on_a_built_volume_is_named_as_well(volume: Path) -> None:
    run(["chattr", "+i", str(volume)])
    try:
        answer = ask(Question(str(volume)))
    finally:
        run(["chattr", "-i", str(volume)])
    assert (answer.error, answer.flag) == (errno.EPERM, "i")
    for ours in (True, False):
        check = check_answers(Question(str(volume), ours=ours), answer, "xfs", "")
        assert (check.status, check.remedy) == ("fail", f"run `chattr -i {volume}`")


def test_a_mount_whose_directory_was_removed_fails(volume: Path, tmp_path: Path) -> None:
    point = tmp_path / "bound"
    point.mkdir()
    (volume / "src").mkdir()
    run(["mount", "--bind", str(volume / "src"), str(point)])
    try:
        before = {**manifest_of(point), "offload_dir": str(point)}
        (volume / "src").rmdir()
        after = {**manifest_of(point), "offload_dir": str(point)}
        answer = ask(Question(str(point), str(point), ours=False))
        for manifest in (before, after):
            mounted = {each.id: each for each in run_checks(manifest)}["filesystem.mounted"]
            assert mounted.status == "fail"
            assert "its directory `/src` was removed: nobody can write there" in mounted.found
            assert mounted.remedy == f"run `umount {point}`, and mount a directory that is there"
    finally:
        run(["umount", str(point)])
    check = check_answers(Question(str(point), ours=False), answer, "xfs", "")
    assert (check.status, check.found.split(":")[0]) == ("fail", "the directory that was mounted is gone")


def test_root_who_has_no_rights_on_a_network_is_no_fault() -> None:
    for number, fs_type, status in (
        (errno.EPERM, "nfs4", "skip"),
        (errno.EACCES, "nfs4", "skip"),
        (errno.ENOENT, "fuse.it", "skip"),
        (errno.EPERM, "xfs", "fail"),
        (errno.ENOENT, "ext4", "fail"),
    ):
        answer = Answer(error=number, error_at="make a directory")
        assert check_answers(Question("/v", ours=False), answer, fs_type, "").status == status
        assert check_answers(Question("/v", ours=True), answer, "xfs", "").status == "fail"


def no_room(monkeypatch: pytest.MonkeyPatch, number: int, left: int) -> None:
    """Of the new directories, the first ``left`` are made, and no other: as by a quota, or by a job that fills a volume."""
    made = 0

    def new_directory(prefix: str, directory: str) -> tuple[int, str]:
        nonlocal made
        made += 1
        if made > left or (left > 1 and directory.startswith("/proc/self/fd/")):
            raise OSError(number, os.strerror(number))
        return temporary.new_directory(prefix, directory)

    monkeypatch.setattr(write_read_probe, "new_directory", new_directory)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_quota_of_the_offload_directory_that_is_used_up_fails(
    volume: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    offload = volume / "offload"
    no_room(monkeypatch, number, left=9)
    checks = checks_of(volume)
    assert checks["filesystem.answers"].status == "pass"
    check = checks["offload.directory"]
    assert check.status == "fail"
    assert check.found == (
        "a quota of this directory is used up; the volume has room: "
        f"{os.strerror(number)} (make a directory in `{offload}`)"
    )
    assert f"`lsattr -pd {offload}`" in check.remedy
    assert f"`xfs_quota -x -c 'report -pg -bi' {volume}`" in check.remedy
    assert names(volume) == ["offload"]


def test_a_volume_full_at_this_moment_is_full_and_has_no_quota(volume: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_room(monkeypatch, errno.ENOSPC, left=1)
    checks = checks_of(volume)
    assert (checks["filesystem.answers"].status, checks["offload.directory"].status) == ("unknown", "pass")
    assert checks["filesystem.answers"].found.startswith("it is full")


def test_a_volume_without_inodes_is_not_called_full(volume: Path) -> None:
    over = volume / "offload"
    run(["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "tmpfs", str(over)])
    try:
        question = Question(str(over))
        check = check_answers(question, ask(question), "tmpfs", "")
    finally:
        run(["umount", str(over)])
    assert check.status == "unknown"
    assert check.found.startswith("it has room and no inode left (`df -i`), so nothing could be written: ")


def test_root_may_write_nothing_in_a_directory_on_a_network() -> None:
    mount = Mount("0:50", "/v", "/", "nfs4", "server:/v", ("rw",))
    answer = Answer(
        is_directory=True, directory_error=errno.EACCES, directory_error_at="make a directory in `/v/offload`"
    )
    manifest = {**BUILT, "array": None, "offload_dir": "/v/offload", "offload": None}
    check = check_offload(manifest, mount, answer, "/nowhere")
    assert (check.status, "root cannot write there: Permission denied" in check.found) == ("skip", True)
    local = check_offload(manifest, replace(mount, fs_type="xfs"), replace(answer, directory_error=errno.EPERM), "/no")
    assert local.status == "fail"


def test_what_a_killed_check_left_in_the_offload_directory_goes(volume: Path) -> None:
    offload = volume / "offload"
    for name, contents in (("abcd_123", "probe"), ("abcd_124", "data")):
        (offload / f".tunetool-probe-{name}").mkdir(mode=0o700)
        (offload / f".tunetool-probe-{name}" / contents).write_bytes(bytes(4096))
    (offload / ".tunetool-probe-abcd_125").mkdir(mode=0o700)
    (offload / ".tunetool-probe-theirs12").mkdir(mode=0o700)
    os.chown(offload / ".tunetool-probe-theirs12", 4242, -1)
    (offload / ".tunetool-probe").mkdir()
    checks = checks_of(volume, asker=lambda questions: [ask(replace(question, ours=True)) for question in questions])
    assert checks["offload.directory"].status == "pass"
    assert names(offload) == [".tunetool-probe", ".tunetool-probe-abcd_124", ".tunetool-probe-theirs12"]
    assert names(offload / ".tunetool-probe-abcd_124") == ["data"]


def test_what_a_killed_check_left_goes_and_no_others(volume: Path) -> None:
    for name in (".tunetool-probe", ".tunetool-probe-abc", "data"):
        (volume / name).mkdir()
    question = Question(str(volume), None)
    left = volume / ".tunetool-probe-abcd_123"
    left.mkdir(mode=0o700)
    (left / "probe").write_bytes(bytes(4096))
    assert ask(question).written
    assert names(volume) == [".tunetool-probe", ".tunetool-probe-abc", "data", "offload"]


def test_a_user_is_told_that_nothing_was_written(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    volume.chmod(0o777)
    before = volume.stat().st_mtime_ns
    # All that pytest made: with several workers one directory more.
    for above in tmp_path, *tmp_path.parents:
        if above.is_relative_to(tempfile.gettempdir()) and above != Path(tempfile.gettempdir()):
            above.chmod(0o755)
    answers = as_a_user(volume)["filesystem.answers"]
    assert (answers.status, "only root may write there" in answers.found) == ("skip", True)
    assert volume.stat().st_mtime_ns == before
    volume.chmod(0o700)
    checks = as_a_user(volume)
    assert (checks["filesystem.answers"].status, checks["offload.directory"].status) == ("skip", "unknown")
    assert "Permission denied" in checks["offload.directory"].found


def as_a_user(point: Path) -> dict[str, Check]:
    manifest = manifest_of(point)
    os.seteuid(65534)
    try:
        return {each.id: each for each in run_checks(manifest)}
    finally:
        os.seteuid(0)


def test_a_dry_run_writes_nothing_to_the_volume(volume: Path, tmp_path: Path) -> None:
    path = tmp_path / "node.json"
    manifests.write(manifest_of(volume), str(path))
    before = volume.stat().st_mtime_ns
    request = Request(level="config", manifest=path, run=Run(runs_dir=tmp_path / "runs", dry_run=True))
    verify(request, PlainProgress())
    assert volume.stat().st_mtime_ns == before
    checks_of(volume)
    assert volume.stat().st_mtime_ns > before


def test_a_drive_that_is_silent_and_one_that_fails_are_named(volume: Path, tmp_path: Path) -> None:
    silent = tmp_path / "silent"
    os.mkfifo(silent)
    well = volume / "drive"
    well.write_bytes(bytes(1 << 20))
    drives = (("S1", str(silent)), ("S2", str(tmp_path / "gone")), ("S3", str(well)))
    question = Question(str(tmp_path), str(tmp_path), write=False, drives=drives)
    answer = ask(question, SILENCE, str(tmp_path))
    assert (answer.silent_at, answer.is_directory) == ("", True)
    drive = check_drives(question, answer)
    assert drive.status == "fail"
    assert drive.found == "`S1` did not answer for 10 s; `S2`: No such file or directory"
