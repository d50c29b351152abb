"""`tunetool bench drives` on loop devices and on the disk under the temporary directory: figures with proof, and nothing
left behind."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from hidden_files import nobody_hides
from judged import proven, undisturbed
from pythons import bare_python
from skips import no_loops, no_xfs
from tunetool.bench.drives import volume as volume_module
from tunetool.bench.drives.layouts import LAYOUTS
from tunetool.bench.drives.made import Made, loops_over, undone
from tunetool.bench.drives.request import Request
from tunetool.bench.drives.run import bench as bench_drives
from tunetool.bench.drives.volume import BareDrive, virtual_drives, volume
from tunetool.errors import CannotJudge
from tunetool.measure import tester
from tunetool.measure.aio import Probe
from tunetool.measure.fio import find_fio
from tunetool.measure.ladder.calls import raw_reads
from tunetool.measure.ladder.source import Span
from tunetool.node.array.create import refuse_unless_blank
from tunetool.node.machine.mounts import read_mounts
from tunetool.record import Record
from tunetool.report.progress import PlainProgress

pytest_plugins = ["disks"]

SIZE = 400 << 20
"""Of a virtual drive; mkfs.xfs takes no less than 300 MB."""


def request(target: Path, runs: Path, **fields: object) -> Request:
    """As short as a sample can be: no test is about a speed."""
    small = {"engines": ("fio-libaio",), "duration": 0.2, "rounds": 1, "runs_dir": runs, "allow_busy": True}
    return Request(target=target, **{**small, **fields})  # type: ignore[arg-type]


def virtual(target: Path, runs: Path, **fields: object) -> Request:
    return request(target, runs, **{"virtual": 2, "virtual_bytes": SIZE, **fields})


def command(target: Path, runs: Path, *arguments: object) -> list[str]:
    given = ["--target", target, "--runs-dir", runs, "--allow-busy", "--engines", "fio-libaio", *arguments]
    return [*TUNETOOL, "bench", "drives", *map(str, given)]


def mounts_below(directory: Path) -> list[str]:
    return [mount.mount_point for mount in read_mounts("/") if mount.mount_point.startswith(f"{directory}/")]


def loops_below(directory: Path) -> list[str]:
    backed = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    return [text for text in backed if text.startswith(f"{directory}/")]


@pytest.fixture
def place(disk: Path) -> Iterator[Path]:
    """An empty directory on a disk, on which loop devices may be made; nothing of them is left after the test."""
    if no_loops():
        pytest.skip("needs root and loop devices")
    if no_xfs():
        pytest.skip("needs XFS")
    with nobody_hides():
        yield disk
    assert (mounts_below(disk), loops_below(disk)) == ([], [])


def only(record: Record | None) -> Record:
    assert record is not None
    return record


def test_virtual_layouts_are_measured_and_taken_down(place: Path, tmp_path: Path) -> None:
    (place / "theirs").write_text("keep")
    layouts = ["xfs-per-drive", "ext4-per-drive"]
    wanted = virtual(place, tmp_path / "runs", layouts=["raid0-xfs", *layouts], counts=[1, 2])
    result = bench_drives(wanted, PlainProgress())
    record = only(result.record)
    assert record.verdict is not None
    # The loop devices are this run's alone: nobody else moves bytes through them.
    assert (record.verdict.status, record.verdict.reasons) == ("pass", [])
    by_name = {each.name.removeprefix("scaling."): each for each in record.measurements}
    for layout in layouts:
        for drives in (1, 2):
            for direction in ("read", "write"):
                figure = by_name[f"{layout}.{drives}.fio-libaio.{direction}.bandwidth"]
                proven(figure, alone=True)
                assert figure.evidence is not None
                assert len(str(figure.evidence.device).split(", ")) == drives
                assert figure.parameters["serials"] == ", ".join(f"virtual-{number}" for number in range(1, drives + 1))
                assert 0 < float(figure.parameters["least_drive_share"]) <= 1
                assert figure.medium.startswith("loop device on disk" if drives == 1 else "2 x loop device on disk")
                assert float(figure.parameters["tester_ceiling"]) > 0
        assert by_name[f"{layout}.2.fio-libaio.read.efficiency"].value > 0
    assert by_name["xfs-per-drive.2.fio-libaio.write.xfs_over_ext4"].parameters["pairs"] == 1
    checks = {check.id: check.status for check in record.checks}
    assert checks.pop("scaling.taken-down") == "pass"
    # A kernel without md, or a machine without mdadm: the array is left out with its reason.
    has_array = any(each.parameters["layout"] == "raid0-xfs" for each in record.measurements)
    assert checks == ({} if has_array else {"scaling.layout.raid0-xfs": "skip"})
    assert [entry.name for entry in place.iterdir()] == ["theirs"]
    assert "1 drive 2 drives" in " ".join(call(*TUNETOOL, "report", "show", result.path.parent).stdout.split())  # type: ignore[union-attr]


def test_deepspeeds_handle_moves_and_compares_every_byte(place: Path, tmp_path: Path, ready: Probe) -> None:
    fields = {"engines": ("deepspeed-*",), "layouts": ["xfs-per-drive"], "counts": [2], "python": Path(ready.python)}
    record = only(bench_drives(virtual(place, tmp_path / "runs", **fields), PlainProgress()).record)
    assert record.verdict is not None
    assert record.verdict.status == "pass", record.verdict
    bandwidths = [each for each in record.measurements if each.quantity == "bandwidth"]
    assert sorted(str(each.parameters["direction"]) for each in bandwidths) == ["read", "write"]
    for figure in bandwidths:
        proven(figure, alone=True)
        assert figure.engine.startswith("aio_handle (deepspeed ")
    if not ready.cuda:
        without = {check.id: check.status for check in record.checks}
        assert without["scaling.engine.deepspeed-cuda"] == without["scaling.engine.deepspeed-gds"] == "skip"


def test_a_failure_within_a_run_is_a_record_and_leaves_nothing(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # An fio that cannot write its files: the drives are smaller than what it is to write.
    wrong = replace(virtual(place, tmp_path / "runs", layouts=["ext4-per-drive"], counts=[1]))
    monkeypatch.setattr("tunetool.bench.drives.calls.JOBS_A_DRIVE", 16)
    result = bench_drives(wrong, PlainProgress())
    record = only(result.record)
    assert result.code == 3
    assert record.verdict is not None
    assert record.verdict.status == "error"
    assert "No space left on device" in record.verdict.reasons[0]
    assert {check.id: check.status for check in record.checks} == {"scaling.taken-down": "pass"}
    assert list(place.iterdir()) == []


def test_an_ordinary_user_gets_skips_and_no_pass(disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tunetool.bench.drives.preflight.os.geteuid", lambda: 1000)
    result = bench_drives(virtual(disk, tmp_path / "runs", layouts=["xfs-per-drive"]), PlainProgress())
    record = only(result.record)
    assert result.code == 3
    (check,) = record.checks
    assert (check.id, check.status) == ("scaling.layout.xfs-per-drive", "skip")
    assert record.verdict is not None
    assert record.verdict.reasons == [f"nothing was measured: {check.found}"]
    assert list(disk.iterdir()) == []


def test_without_an_engine_no_drive_is_made_or_written(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tunetool.bench.drives.run.virtual_drives", lambda *_: pytest.fail("drives are made"))
    fields = {"engines": ("deepspeed-cpu",), "layouts": ["ext4-per-drive"], "python": Path(bare_python(tmp_path))}
    result = bench_drives(virtual(disk, tmp_path / "runs", **fields), PlainProgress())
    record = only(result.record)
    assert result.code == 3
    assert record.verdict is not None
    assert record.verdict.reasons[0].startswith("nothing was measured: torch is not installed")
    assert list(disk.iterdir()) == []


# -- drives that are not blank


@pytest.fixture
def two(place: Path) -> Iterator[tuple[Made, list[BareDrive]]]:
    problems: list[str] = []
    with Made(problems.append) as made:
        yield made, virtual_drives(made, place, 2, SIZE)
    assert problems == []
    for image in place.glob("*.img"):
        image.unlink()


def unchanged(drive: BareDrive) -> bytes:
    """The beginning of a drive, past the page cache's copy."""
    subprocess.run(["blockdev", "--flushbufs", drive.drive.path], check=True)
    with Path(drive.drive.path).open("rb") as stream:
        return stream.read(1 << 20)


@pytest.mark.parametrize("held", ["ext4", "second superblock", "data", "in use"])
def test_a_drive_that_holds_anything_is_refused_with_all_others(
    two: tuple[Made, list[BareDrive]], place: Path, held: str
) -> None:
    made, drives = two
    victim = drives[1]
    words = {
        "ext4": "holds ext4",
        "second superblock": "xfs without its first superblock",
        "data": "data without a label",
        "in use": "in use",
    }[held]
    handle = -1
    if held == "ext4":
        subprocess.run(["mkfs.ext4", "-q", victim.drive.path], check=True)
    elif held == "second superblock":
        subprocess.run(["mkfs.xfs", "-q", victim.drive.path], check=True)
        subprocess.run(["wipefs", "--all", "--quiet", victim.drive.path], check=True)
    elif held == "data":
        with Path(victim.drive.path).open("r+b") as stream:
            stream.seek(64 << 20)
            stream.write(b"data" * 1024)
    else:
        handle = os.open(victim.drive.path, os.O_RDONLY | os.O_EXCL)
    before = [unchanged(drive) for drive in drives]
    try:
        with (
            pytest.raises(CannotJudge, match=rf"drive `virtual-2` .*{words}"),
            volume(LAYOUTS["xfs-per-drive"], drives, made, place),
        ):
            pytest.fail("it was taken")
    finally:
        if handle >= 0:
            os.close(handle)
    assert [unchanged(drive) for drive in drives] == before
    assert mounts_below(place) == []


def test_a_drive_is_blank_again_whatever_was_made(two: tuple[Made, list[BareDrive]], place: Path) -> None:
    made, drives = two
    # Each begins with the look that refuses what is not blank: what one leaves, the next one finds.
    for layout in ("xfs-per-drive", "ext4-per-drive", "xfs-per-drive"):
        with volume(LAYOUTS[layout], drives, made, place) as opened:
            for directory in opened.directories:
                (directory / "data").write_bytes(os.urandom(32 << 20))
    assert mounts_below(place) == []


def test_what_somebody_else_put_on_a_drive_meanwhile_stays(place: Path) -> None:
    problems: list[str] = []
    with Made(problems.append) as made:
        (drive,) = virtual_drives(made, place, 1, SIZE)
        with volume(LAYOUTS["ext4-per-drive"], [drive], made, place) as opened:
            subprocess.run(["umount", *opened.directories], check=True)
            subprocess.run(["wipefs", "--all", "--quiet", drive.drive.path], check=True)
            subprocess.run(["mkfs.xfs", "-q", "-f", drive.drive.path], check=True)
        (problem,) = problems
        assert "holds xfs UUID" in problem
        assert "which this run did not make: it was left as it is" in problem
        assert b"XFSB" in unchanged(drive)[:4]
    assert loops_over(str(drive.file)) == []
    assert drive.file is not None
    drive.file.unlink()


@pytest.mark.parametrize("layout", ["ext4-per-drive", "xfs-per-drive"])
def test_what_comes_to_a_drive_meanwhile_stays(place: Path, monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    run = volume_module.run
    problems: list[str] = []
    with Made(problems.append) as made:
        first, second = virtual_drives(made, place, 2, SIZE)

        def and_meanwhile(argv: Sequence[str], **settings: Any) -> Any:
            done = run(argv, **settings)
            if argv[0].startswith("mkfs.") and first.drive.path in argv:
                subprocess.run(["mkfs.xfs", "-q", second.drive.path], check=True)
            return done

        monkeypatch.setattr(volume_module, "run", and_meanwhile)
        with (
            pytest.raises(CannotJudge, match=r"drive `virtual-2` .*holds xfs"),
            volume(LAYOUTS[layout], [first, second], made, place),
        ):
            pytest.fail("it was taken")
        (problem,) = problems
        assert "`virtual-2` holds xfs" in problem
        assert unchanged(second)[:4] == b"XFSB"
        # The other drive is cleared nevertheless.
        refuse_unless_blank([first.drive], deep=True)
    for image in place.glob("*.img"):
        image.unlink()


def test_udev_looks_again_at_a_drive_when_its_labels_are_gone(
    two: tuple[Made, list[BareDrive]], place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, drives = two
    # There is no udev here: this keeps what is asked of it, and what a look would find at that moment.
    (tmp_path / "bin").mkdir()
    udevadm = tmp_path / "bin" / "udevadm"
    asked = tmp_path / "asked"
    udevadm.write_text(
        f'#!/bin/sh\ncase $1 in trigger) shift 2; for each; do echo "$each $(blkid -p -o value -s TYPE $each)"; done;; '
        f"*) echo $1;; esac >> {asked}\n"
    )
    udevadm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{udevadm.parent}:{os.environ['PATH']}")
    with volume(LAYOUTS["ext4-per-drive"], drives, made, place):
        asked.unlink()
    # Before it clears, it waits for udev once more; what counts is that the look comes last, and finds no label.
    *before, first, second, last = asked.read_text().splitlines()
    assert set(before) <= {"settle"}
    assert [first, second, last] == [*(f"{each.drive.path} " for each in drives), "settle"]


def test_a_drive_that_was_given_back_is_not_written_again(two: tuple[Made, list[BareDrive]], place: Path) -> None:
    made, (drive, _) = two
    with volume(LAYOUTS["ext4-per-drive"], [drive], made, place):
        entry = next(entry for entry in made.entries if entry["kind"] == "labels")
    with Path(drive.drive.path).open("r+b") as stream:
        stream.seek(64 << 20)
        stream.write(b"data" * 1024)
    # As the process does that takes things down after a kill: it looks twice.
    assert undone(entry) is None
    with Path(drive.drive.path).open("rb") as stream:
        stream.seek(64 << 20)
        assert stream.read(4) == b"data"


@pytest.mark.parametrize("name", ["line\nbreaks\rin it", "tab\t and blank ", os.fsdecode(b"no \xff text")])
def test_a_directory_of_any_name_gets_drives_that_go(place: Path, name: str) -> None:
    directory = place / name
    directory.mkdir()
    problems: list[str] = []
    with Made(problems.append) as made:
        (drive,) = virtual_drives(made, directory, 1, SIZE)
        with volume(LAYOUTS["ext4-per-drive"], [drive], made, directory) as opened:
            (mounted,) = opened.directories
            assert mounted.is_mount()
        assert not mounted.is_mount()
    assert problems == []
    assert drive.file is not None
    left = subprocess.run(["losetup", "--associated", drive.file], check=True, capture_output=True)
    assert left.stdout == b""
    shutil.rmtree(directory)


def test_a_mount_in_a_directory_named_by_a_link_is_taken_down(two: tuple[Made, list[BareDrive]], place: Path) -> None:
    made, (drive, _) = two
    (place / "there").mkdir()
    (place / "link").symlink_to("there")
    with volume(LAYOUTS["ext4-per-drive"], [drive], made, place / "link") as opened:
        (opened.directories[0] / "data").write_text("of the run")
        assert mounts_below(place) != []
    assert mounts_below(place) == []
    assert list((place / "there").iterdir()) == []


# -- a standing file system


def test_a_standing_disk_is_measured_through_files_alone(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    size = 64 << 20
    result = bench_drives(request(disk, tmp_path / "runs", bytes_per_drive=size), PlainProgress())
    record = only(result.record)
    undisturbed(int(result.code), record)
    assert {each.parameters["layout"] for each in record.measurements if each.quantity == "bandwidth"} >= {
        "array-files"
    }
    for figure in record.measurements:
        if figure.name.startswith("scaling."):
            proven(figure)
    (check,) = [check for check in record.checks if check.id == "scaling.layout.drives-raw"]
    assert "raw rungs need an md RAID0" in check.found
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]


def test_raw_reads_have_a_null_target_too(disk: Path) -> None:
    fio = find_fio(dict(os.environ))
    spans = [Span("drive", 0, 1 << 23), Span("drive", 1 << 24, 1 << 23)]
    argv = [word.replace("/dev/drive", str(disk / "drive")) for word in raw_reads(fio, [("raw", spans)], 1.0)]
    outcomes = tester.Load(fio, argv, "read", 1.0, disk, os.environ).sample_ceiling(lambda: None)
    assert len(outcomes) == tester.SAMPLES
    assert all(outcome.claimed_bytes > 0 for outcome in outcomes)
    assert list(disk.iterdir()) == []


def test_without_torch_fio_measures(disk: Path, tmp_path: Path) -> None:
    given = ("--python", bare_python(tmp_path), "--engines", "fio-libaio,deepspeed-cpu", "--dry-run")
    done = call(*command(disk, tmp_path / "runs", *given))
    assert done.returncode == 0, done.stderr
    assert "engine.deepspeed-cpu: left out: torch is not installed" in done.stderr
    assert "by fio-libaio\n" in done.stderr


def test_a_handle_that_does_not_work_here_is_left_out(
    place: Path, tmp_path: Path, ready: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As cuFile does where it takes no file of this file system: the process runs, and the first transfer fails.
    monkeypatch.setattr("tunetool.bench.drives.handle.FILE", "no/such/directory")
    wanted = virtual(
        place,
        tmp_path / "runs",
        **{"engines": ("fio-libaio", "deepspeed-cpu"), "layouts": ["xfs-per-drive"], "counts": [1]},
        python=str(ready.python),
    )
    result = bench_drives(wanted, PlainProgress())
    record = only(result.record)
    assert result.code == 0
    checks = {check.id: check.status for check in record.checks}
    assert checks == {"scaling.engine.deepspeed-cpu": "skip", "scaling.taken-down": "pass"}
    assert {each.parameters["io_engine"] for each in record.measurements} == {"fio-libaio"}
