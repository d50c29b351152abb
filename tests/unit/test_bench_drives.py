"""`bench drives` without a drive: layouts, wrong calls, figures, tables, the page, and what is taken down after a kill."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import builders
from parsed_page import pictures
from shown_records import on_screen
from tunetool.bench.drives import calls, figures, made, preflight, volume
from tunetool.bench.drives.layouts import CHUNK, LAYOUTS, counts, mkfs
from tunetool.bench.drives.request import Request
from tunetool.bench.drives.samples import Cell, Reading, Row
from tunetool.bench.drives.view import view
from tunetool.bench.drives.volume import BareDrive, as_they_are, stack_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import Direction
from tunetool.measure.evidence import Counted
from tunetool.measure.fio import Fio
from tunetool.measure.tester import without_storage
from tunetool.node.array import create
from tunetool.node.array.md_arrays import Array, Sync
from tunetool.node.common import manifest
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import held_drives
from tunetool.node.machine.block_stack import BlockStack, Counters
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import Drive
from tunetool.record import Record
from tunetool.report.kinds import write_any_page, write_page
from tunetool.verdict import CEILING, judge

GB = 10**9
FIO = Fio("/usr/bin/fio", "3.33")
UUID = "11111111-2222-3333-4444-555555555555"


def test_counts_are_powers_of_two_and_all() -> None:
    assert [counts(number) for number in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_file_systems_over_an_array_are_aligned_and_not_forced() -> None:
    xfs, ext4 = (mkfs(LAYOUTS[each], "/dev/md127", UUID, 8) for each in ("raid0-xfs", "raid0-ext4"))
    assert xfs[:5] == ["mkfs.xfs", "-q", "-K", "-d", f"su={CHUNK},sw=8"]
    assert "su=262144" in xfs, "more is no legal stripe unit of a log"
    assert "nodiscard,stride=256,stripe_width=2048" in ext4
    mirrored, alike = (mkfs(LAYOUTS[each], "/dev/md127", UUID, 8) for each in ("raid10-xfs", "raid1-xfs"))
    assert mirrored[3:5] == ["-d", f"su={CHUNK},sw=4"], "half of the drives hold distinct data"
    assert alike[3:5] == ["-d", "noalign"]
    single = [mkfs(LAYOUTS[each], "/dev/loop0", UUID, 1) for each in ("raid0-xfs", "ext4-per-drive")]
    for call in (xfs, ext4, mirrored, alike, *single):
        assert call[-1].startswith("/dev/")
        assert UUID in call[-2]
        # Forced, mkfs would overwrite what came there after the look.
        assert not {"-f", "-F"} & set(call)


def test_the_medium_says_what_was_made() -> None:
    raid, single = LAYOUTS["raid0-xfs"], LAYOUTS["ext4-per-drive"]
    assert raid.medium(4, "nvme") == "md RAID0 (4 x nvme), xfs"
    assert raid.medium(1, "nvme") == "nvme, xfs", "one drive makes no array"
    assert single.medium(4, "nvme") == "4 x nvme, ext4 on each"
    assert LAYOUTS["raid10-xfs"].medium(4, "nvme") == "md RAID10 (4 x nvme), xfs"
    assert [LAYOUTS[name].copies(4) for name in ("raid0-xfs", "raid10-xfs", "raid1-xfs", "xfs-per-drive")] == [
        1,
        2,
        4,
        1,
    ]


@pytest.mark.parametrize(
    ("layout", "asked", "clean"),
    [
        ("raid0-xfs", ["--level=raid0", "--chunk=1024K"], False),
        ("raid10-xfs", ["--level=raid10", "--chunk=1024K", "--layout=n2", "--bitmap=internal"], True),
        ("raid1-xfs", ["--level=raid1", "--bitmap=internal"], True),
    ],
)
def test_an_array_is_site_ymls_and_a_mirror_begins_clean(
    layout: str, asked: list[str], clean: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drives = [builders.nvme_drive(number) for number in range(4)]
    ran: list[list[str]] = []
    sync: list[Sync | None] = [None]

    def settled(member: str) -> Array:
        names = tuple(drive.name for drive in drives)
        return Array("md127", None, None, LAYOUTS[layout].level.name, 0, 4, "clean", names, sync=sync[0])  # type: ignore[union-attr]

    monkeypatch.setattr(create, "run", ran.append)
    monkeypatch.setattr(volume, "run", lambda argv, timeout=0: ran.append(argv))
    monkeypatch.setattr(volume, "settled", settled)
    monkeypatch.setattr(volume, "held", lambda members: contextlib.nullcontext())
    monkeypatch.setattr(volume, "as_they_are", lambda bare: drives)
    for name in ("refuse_unless_blank", "settle"):
        monkeypatch.setattr(volume, name, lambda *_, **__: None)
    monkeypatch.setattr(volume, "read_signatures", lambda names: [])
    undo = Recorded()
    monkeypatch.setattr(made, "undone", undo)
    monkeypatch.setattr(made.Made, "_tell", lambda self: None)
    bare = [BareDrive(drive) for drive in drives]
    things = made.Made(pytest.fail)
    with volume.volume(LAYOUTS[layout], bare, things, tmp_path) as opened:
        assert opened.array == "md127"
        assert [path.name for path in opened.directories] == ["part-1", "part-2", "part-3", "part-4"]
        (noted,) = [entry for entry in things.entries if entry["kind"] == "array"]
    mdadm = ran[0]
    assert [word for word in mdadm if word.split("=")[0] in ("--level", "--chunk", "--layout", "--bitmap")] == asked
    assert ("--assume-clean" in mdadm) == clean, "otherwise md makes copies alike during the measurement"
    (uuid,) = [word[len("--uuid=") :] for word in mdadm if word.startswith("--uuid=")]
    assert uuid.replace(":", "") in [each.replace("-", "") for each in noted["uuids"]]
    assert undo.undone == ["mount", "directory", "array", "labels"]
    # One that copies nevertheless is not measured, and taken down.
    sync[0] = Sync("resync")
    things = made.Made(pytest.fail)
    with pytest.raises(CannotJudge, match="does a `resync`"), volume.volume(LAYOUTS[layout], bare, things, tmp_path):
        pass
    assert undo.undone[-2:] == ["array", "labels"]


def test_files_of_all_drives_are_one_fio_with_a_null_target() -> None:
    job = calls.file_job("read", 2**24, 1.0, "io_uring")
    argv = calls.files(FIO, job, [Path("/mnt/a:b"), Path("/mnt/c")])
    assert argv[-4:] == ["--name=drive-1", "--directory=/mnt/a\\:b", "--name=drive-2", "--directory=/mnt/c"]
    assert not any(word.startswith("--name=") for word in argv[:-4])
    null = without_storage(argv, 1.0)
    # What comes after a job's name holds for that job alone.
    assert null.index("--ioengine=null") < null.index("--name=drive-1")
    assert "--ioengine=io_uring" not in null


@pytest.fixture
def on_a_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary directory lies on a drive, also where it is a container's overlay."""
    read = preflight.read_stack

    def one_drive(directory: str) -> BlockStack:
        stack = read(directory)
        if stack.in_memory or stack.leaves:
            return stack
        return stack_of([made.virtual_drive("sda", "SERIAL", 2**40)], "disk", Path(directory))

    monkeypatch.setattr(preflight, "read_stack", one_drive)


def request(**fields: Any) -> Request:
    return Request(**{"engines": ("fio-libaio",), **fields})


@pytest.mark.usefixtures("on_a_drive")
def test_only_root_makes_file_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotJudge, match="only root"):
        preflight.plan(request(serials=["S1"]), os.environ)
    # Of virtual drives every layout is left out, and its check says why.
    planned = preflight.plan(request(virtual=2, target=tmp_path, virtual_bytes=2**28), os.environ)
    assert planned.volumes == ()
    assert [check.status for check in planned.skipped] == ["skip"] * 3
    assert all("only root" in check.found for check in planned.skipped)


def blank_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known: Sequence[Drive] = (), **of_the_second: Any
) -> list[str]:
    """Drives that the reader of machines knows; the names of those that were asked whether they are blank."""
    drives = list(known) or [builders.nvme_drive(1), builders.nvme_drive(2, **of_the_second)]
    asked: list[str] = []
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("tunetool.node.array.create.read_drives", lambda: drives)
    monkeypatch.setattr(manifest, "MANIFEST_PATH", str(tmp_path / "node.json"))
    monkeypatch.setattr(manifest, "load", lambda: json.loads((tmp_path / "node.json").read_text()))

    def look(members: Sequence[Any], deep: bool = False) -> None:
        assert deep, "data without a label counts too"
        asked.extend(drive.serial for drive in members)

    monkeypatch.setattr(preflight, "refuse_unless_blank", look)
    return asked


def test_drives_are_taken_by_serial_when_blank_and_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = blank_machine(monkeypatch, tmp_path)
    monkeypatch.setattr(preflight, "find", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(preflight, "_loads", lambda module: True)
    planned = preflight.plan(request(serials=["S2", "S1"], layouts=["raid0-ext4", "xfs-per-drive"]), os.environ)
    assert [each.drive.serial for each in planned.drives] == ["S1", "S2"], "in the order of their slots"
    assert sorted(asked) == ["S1", "S2"]
    assert planned.volumes == (("raid0-ext4", 1), ("raid0-ext4", 2), ("xfs-per-drive", 1), ("xfs-per-drive", 2))
    said = " ".join(preflight.announcement(request(serials=["S1", "S2"]), planned))
    assert "makes file systems on `S1`, `S2`, which are blank" in said
    with pytest.raises(CannotJudge, match="serial `S9` is on 0 drives") as caught:
        preflight.plan(request(serials=["S9"]), os.environ)
    assert "tunetool inspect" in str(caught.value.hint)
    # A node whose volume is the owner's has a manifest without an array.
    (tmp_path / "node.json").write_text('{"array": null}')
    assert len(preflight.plan(request(serials=["S1", "S2"]), os.environ).drives) == 2
    (tmp_path / "node.json").write_text('{"array": {"members": [{"serial": "S2"}]}}')
    with pytest.raises(CannotJudge, match="S2"):
        preflight.plan(request(serials=["S1", "S2"]), os.environ)


def mirrors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, drives: Sequence[Drive], modules: str = "raid", **fields: Any
) -> preflight.Plan:
    """What is planned on a machine whose kernel has XFS and the modules that begin so."""
    blank_machine(monkeypatch, tmp_path, drives)
    monkeypatch.setattr(preflight, "find", lambda program: f"/sbin/{program}")
    monkeypatch.setattr(preflight, "read_text", lambda path: "Personalities : [raid0] \nunused devices: <none>")
    monkeypatch.setattr(preflight, "_loads", lambda module: module.startswith(("xfs", modules)))
    return preflight.plan(request(serials=[drive.serial for drive in drives], **fields), os.environ)


def blank_drives(count: int, **fields: Any) -> list[Drive]:
    return [builders.nvme_drive(number, **fields) for number in range(1, count + 1)]


def test_counts_that_a_mirror_cannot_have_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = mirrors(monkeypatch, tmp_path, blank_drives(5), layouts=["raid0-xfs", "raid10-xfs", "raid1-xfs"])
    assert planned.volumes == (
        *(("raid0-xfs", each) for each in (1, 2, 4, 5)),
        ("raid10-xfs", 4),
        *(("raid1-xfs", each) for each in (2, 4, 5)),
    )
    assert [(check.status, check.id.removeprefix("scaling.layout."), check.found) for check in planned.skipped] == [
        ("skip", "raid10-xfs.1", "RAID10 needs at least 4"),
        ("skip", "raid10-xfs.2", "RAID10 needs at least 4"),
        ("skip", "raid10-xfs.5", "RAID10 needs an even number"),
        ("skip", "raid1-xfs.1", "RAID1 needs at least 2"),
    ]
    said = preflight.announcement(request(serials=["S1"]), planned)
    assert "of files to each (of a mirror, 5 times that)" in said[0]
    assert "layout.raid10-xfs.5: left out: RAID10 needs an even number" in said


@pytest.mark.parametrize(
    ("drives", "asked", "counts", "problem", "hint"),
    [
        (2, "raid10-xfs", [], "over 2 drives: RAID10 needs at least 4", "name more drives, or another `--layout`"),
        (7, "raid10-xfs", [5], "over 5 drives: RAID10 needs an even number", "`--counts 6`"),
        (2, "raid1-xfs", [1], "over 1 drive: RAID1 needs at least 2", "`--counts 2`"),
    ],
)
def test_a_mirror_that_no_count_allows_is_a_wrong_call(
    drives: int,
    asked: str,
    counts: list[int],
    problem: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageProblem, match=f"`--layout {asked}` {problem}") as caught:
        mirrors(monkeypatch, tmp_path, blank_drives(drives), layouts=[asked], counts=counts)
    assert caught.value.hint == hint


def test_the_copies_of_a_mirror_fit_on_its_drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = blank_drives(8, size_bytes=2**31)
    room = {
        layout: 2 * mirrors(monkeypatch, tmp_path, drives, layouts=[layout], counts=[8]).file_bytes
        for layout in ("raid0-xfs", "raid10-xfs", "raid1-xfs")
    }
    for layout, each in room.items():
        assert each * LAYOUTS[layout].copies(8) <= 2**31 / 2, layout
    assert room["raid10-xfs"] == room["raid0-xfs"], "what is compared has equal files"


def test_a_level_that_the_kernel_lacks_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"layouts": ["raid0-xfs", "raid10-xfs"], "counts": [4]}
    planned = mirrors(monkeypatch, tmp_path, blank_drives(4), modules="raid456", **asked)
    assert planned.volumes == (("raid0-xfs", 4),), "raid0 is loaded already"
    assert [check.found for check in planned.skipped] == ["this kernel has no md RAID10"]
    alone = mirrors(monkeypatch, tmp_path, blank_drives(4), modules="raid456", layouts=["raid10-xfs"], counts=[4])
    said = preflight.announcement(request(serials=["S1"]), alone)
    assert said == ["makes and measures nothing", "layout.raid10-xfs: left out: this kernel has no md RAID10"]


def test_only_drives_that_are_used_are_announced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = mirrors(monkeypatch, tmp_path, blank_drives(5), layouts=["raid10-xfs"])
    assert "on `S1`, `S2`, `S3`, `S4`, which are blank" in preflight.announcement(request(serials=["S1"]), planned)[0]


@pytest.mark.usefixtures("on_a_drive")
def test_too_small_virtual_drives_are_named_by_their_option(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="there is room for 0 B") as caught:
        preflight.plan(request(virtual=2, target=tmp_path, virtual_bytes=0), os.environ)
    assert "`--virtual-size`: 268.4 MB or more" in str(caught.value.hint)


def test_a_member_of_the_node_s_own_array_is_never_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = blank_machine(monkeypatch, tmp_path)
    (tmp_path / "node.json").write_text(json.dumps({"array": {"members": [{"serial": "S2"}]}}))
    with pytest.raises(CannotJudge, match="drive `S2` is a member of this node's array"):
        preflight.plan(request(serials=["S1", "S2"]), os.environ)
    assert asked == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size_bytes": 2**33}, "the drives are not alike: size"),
        ({"lba_bytes": 4096}, "the drives are not alike: logical block"),
        ({"serial": "S1"}, "serial `S1` is on 2 drives"),
    ],
)
def test_unequal_drives_are_refused(
    fields: Mapping[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank_machine(monkeypatch, tmp_path, **fields)
    with pytest.raises(CannotJudge, match=words):
        preflight.plan(request(serials=["S1", "S2"]), os.environ)


# -- figures


def row(
    layout: str,
    drives: int,
    direction: Direction,
    speeds: Sequence[float],
    engine: str = "fio-libaio",
    on_drives: float | None = None,
) -> Row:
    """Readings of these GB/s; the first drive moves twice as much as each of the others. ``on_drives``: what the drives
    count for each claimed byte, if it is not what the layout's copies make of it."""
    members = [builders.nvme_drive(number) for number in range(drives)]
    copies = LAYOUTS[layout].copies(drives)
    array = "md127" if copies > 1 else None
    stack = stack_of(members, LAYOUTS[layout].medium(drives, "nvme"), mirror=array)
    due = on_drives or (copies if direction == "write" else 1)
    made_row = Row(Cell(layout, drives, engine, direction), stack, "fio 3.33", 2 * drives)
    for number, speed in enumerate(speeds, 1):
        claimed = round(speed * GB)
        moved = round(claimed * due)
        parts = [moved // (drives + 1)] * drives
        parts[0] = moved - sum(parts[1:])
        sectors = [part // 512 for part in parts]
        devices = {
            drive.name: Counters(1, count, 1, 1, count, 1, 1) for drive, count in zip(members, sectors, strict=True)
        }
        if array:
            devices[array] = Counters(1, claimed // 512, 1, 1, claimed // 512, 1, 1)
        counted = Counted(claimed, sum(devices[name].moved_bytes(direction) for name in stack.counts), devices)
        made_row.readings[number] = Reading(claimed, 1.0, counted, float(number), 0.1)
    return made_row


def rows_of(*made_rows: Row) -> dict[Cell, Row]:
    return {each.cell: each for each in made_rows}


STEADY = [2.0, 2.1, 1.9, 2.0, 2.1, 1.9]


def scaled(factor: float) -> list[float]:
    return [factor * speed for speed in STEADY]


def record_of(rows: Mapping[Cell, Row], mode: str = "blank", **fields: Any) -> Record:
    case = figures.case(rows, {"mode": mode, "sample_seconds": 2.0}, fields.pop("checks", []), [])
    more = {"kind": "bench.drives", "target": "S1, S2", "verdict": judge(case), **fields}
    return builders.record(*case.measurements, checks=list(case.checks), **more)


def full() -> dict[Cell, Row]:
    return rows_of(
        row("raid0-xfs", 1, "read", STEADY),
        row("raid0-xfs", 4, "read", scaled(3.0)),
        row("raid0-ext4", 4, "read", scaled(2.4)),
        row("raid0-xfs", 4, "write", scaled(1.0)),
        row("raid0-ext4", 4, "write", [3.0, 1.0, 3.0, 1.0, 3.0, 1.0]),
    )


def test_efficiency_is_the_share_of_drives_alone_in_a_round() -> None:
    by_name = {each.name: each for each in figures.measurements(full(), {})}
    share = by_name["scaling.raid0-xfs.4.fio-libaio.read.efficiency"]
    assert share.value == pytest.approx(0.75)
    assert share.parameters["decided"]
    assert share.parameters["against"] == "raid0-xfs.1.fio-libaio.read"
    assert "scaling.raid0-xfs.1.fio-libaio.read.efficiency" not in by_name
    bandwidth = by_name["scaling.raid0-xfs.4.fio-libaio.read.bandwidth"]
    assert bandwidth.value == pytest.approx(6 * GB)
    assert (bandwidth.parameters["least_drive_share"], bandwidth.parameters["most_drive_share"]) == (0.8, 1.6)
    assert bandwidth.evidence is not None
    assert bandwidth.evidence.ratio == pytest.approx(1.0)


def test_xfs_against_ext4_is_decided_or_not() -> None:
    by_name = {each.name: each for each in figures.measurements(full(), {})}
    read = by_name["scaling.raid0-xfs.4.fio-libaio.read.xfs_over_ext4"]
    assert read.value == pytest.approx(1.25)
    assert read.parameters["decided"]
    assert not by_name["scaling.raid0-xfs.4.fio-libaio.write.xfs_over_ext4"].parameters["decided"]
    few = rows_of(row("raid0-xfs", 4, "read", scaled(3.0)[:2]), row("raid0-ext4", 4, "read", scaled(2.4)[:2]))
    (ratio,) = [each for each in figures.measurements(few, {}) if each.quantity == "ratio"]
    assert not ratio.parameters["decided"], "two rounds are too few"


def test_bytes_that_a_drive_never_saw_prove_nothing() -> None:
    lost = row("xfs-per-drive", 2, "read", [2.0])
    reading = lost.readings[1]
    lost.readings[1] = Reading(2 * reading.claimed_bytes, 1.0, Counted(4 * GB, 2 * GB, {}), 1.0)
    lost.readings[1] = Reading(4 * GB, 1.0, Counted(4 * GB, 2 * GB, reading.counted.devices), 1.0)  # type: ignore[union-attr]
    verdict = judge(figures.case(rows_of(lost), {"mode": "blank"}, [], []))
    assert verdict.status == "unproven"
    assert "counted only 0.500" in verdict.reasons[0]


def mirrored(**on_drives: float) -> dict[Cell, Row]:
    """A RAID10 that reads as fast as a RAID0 and writes half of it, as single drives would let it."""
    return rows_of(
        *(row("raid0-xfs", 1, direction, STEADY) for direction in ("read", "write")),
        *(row("raid0-xfs", 4, direction, scaled(4.0)) for direction in ("read", "write")),
        row("raid10-xfs", 4, "read", scaled(4.0), on_drives=on_drives.get("read")),
        row("raid10-xfs", 4, "write", scaled(2.0), on_drives=on_drives.get("write")),
    )


def test_a_mirror_is_counted_on_its_array_and_its_drives() -> None:
    by_name = {each.name: each for each in figures.measurements(mirrored(), {})}
    for direction, ratio in (("read", 1.0), ("write", 2.0)):
        known = by_name[f"scaling.raid10-xfs.4.fio-libaio.{direction}.bandwidth"]
        assert known.evidence is not None
        assert (known.evidence.device, known.evidence.ratio) == ("md127", pytest.approx(1.0))
        assert (known.parameters["copies"], known.parameters["drive_bytes_ratio"]) == (2, ratio)
        assert (known.parameters["least_drive_share"], known.parameters["most_drive_share"]) == (0.8, 1.6)
    assert "copies" not in by_name["scaling.raid0-xfs.4.fio-libaio.write.bandwidth"].parameters
    share = by_name["scaling.raid10-xfs.4.fio-libaio.write.efficiency"]
    assert (share.value, share.parameters["against"]) == (pytest.approx(0.5), "raid0-xfs.1.fio-libaio.write")
    lost = by_name["scaling.raid10-xfs.4.fio-libaio.write.raid10_over_raid0"]
    assert (lost.value, lost.parameters["decided"]) == (pytest.approx(0.5), True)
    assert by_name["scaling.raid10-xfs.4.fio-libaio.read.raid10_over_raid0"].value == pytest.approx(1.0)


@pytest.mark.parametrize(("direction", "on_drives", "due"), [("write", 1.0, 2), ("read", 1.5, 1)])
def test_a_mirror_whose_drives_moved_something_else(direction: str, on_drives: float, due: int) -> None:
    assert judge(figures.case(mirrored(), {"mode": "blank"}, [], [])).status == "pass"
    verdict = judge(figures.case(mirrored(**{direction: on_drives}), {"mode": "blank"}, [], []))
    assert verdict.status == "unproven"
    (reason,) = verdict.reasons
    assert f"its drives counted {on_drives:.3f} bytes for each that was claimed, and {due} are due" in reason


def test_what_a_level_costs_is_said_with_its_setting() -> None:
    record = record_of(mirrored())
    text = shown(record)
    assert "raid10-xfs, fio-libaio - 4.00 50%" in text
    assert (
        "write: its array counted 1.0000 to 1.0000 of the bytes, its drives 2.0000 to 2.0000, 2 due: at most 50%"
        in text
    )
    assert "share something" not in text, "half is what the copies leave"
    (sentence,) = view(record).advice
    assert "RAID10 and RAID0 (`raid_array_level: 10` and `0`) differ by reads +0.0 %" in sentence
    assert "writes -50.0 %" in sentence
    assert sentence.endswith("so RAID0 is the faster where that is decided.")
    slow = {**mirrored(), **rows_of(row("raid10-xfs", 4, "write", scaled(1.5)))}
    assert "4 drives give 1.50 times one of 2 that the copies leave: they share something" in shown(record_of(slow))


def test_reads_of_a_mirror_that_md_does_not_share_out_evenly() -> None:
    slow = {**mirrored(), **rows_of(row("raid10-xfs", 4, "read", scaled(2.4)))}
    text = shown(record_of(slow))
    assert "4 drives give 2.40 times one: md read one of them up to 1.60 times as much as its part" in text
    assert "share something" not in text


def test_the_links_bind_a_mirrors_writes_at_half() -> None:
    known = record_of(mirrored())
    ceiling = builders.measurement(CEILING, 8.1 * GB)
    text = shown(known.model_copy(update={"measurements": [*known.measurements, ceiling]}))
    assert "raid10-xfs, fio-libaio, write: what binds is the drives' links, 99% of what they carry" in text


def test_nothing_measured_is_no_pass() -> None:
    left_out = preflight.skip("layout.raid0-xfs", "it is measured", "this kernel has no md RAID0", "")
    verdict = judge(figures.case({}, {}, [left_out], []))
    assert (verdict.status, verdict.reasons) == ("error", ["nothing was measured: this kernel has no md RAID0"])


def shown(record: Record) -> str:
    return " ".join(on_screen(record, None, 100).split())


def test_the_table_has_published_rows_and_advice() -> None:
    checks = [preflight.skip("engine.deepspeed-cuda", "it is measured", "torch sees no GPU", "use one")]
    text = shown(record_of(full(), checks=checks))
    assert "raid0-xfs, fio-libaio 2.00 6.00 75%" in text
    assert "8 x PCIe Gen5 48 26" in text
    assert "DeepNVMe" in text
    assert "deepspeed-cuda: left out, torch sees no GPU; use one" in text
    assert "4 drives give 3.00 times one: they share something" in text
    (sentence,) = view(record_of(full())).advice
    found = re.search(
        r"XFS and ext4 differ by reads \+25\.0 % \[\+2[45]\.\d % to \+25\.\d %\] over 4 drives (.*?);", sentence
    )
    assert found is not None
    assert found[1] == "(raid0-xfs, fio-libaio): decided"
    assert sentence.endswith(": not decided, so XFS is the faster where that is decided.")
    assert text.endswith("PASS")


@pytest.mark.parametrize(("links", "binds"), [(6.1, True), (60.0, False), (1.0, False)])
def test_the_links_bind_only_near_what_they_carry(links: float, binds: bool) -> None:
    known = record_of(full())
    ceiling = builders.measurement(CEILING, links * GB)
    text = shown(known.model_copy(update={"measurements": [*known.measurements, ceiling]}))
    assert ("raid0-xfs, fio-libaio, read: what binds is the drives' links, 98% of what they carry" in text) == binds


def test_advice_on_layouts_names_what_chooses_one() -> None:
    rows = rows_of(row("raid0-xfs", 4, "read", scaled(3.0)), row("xfs-per-drive", 4, "read", scaled(2.4)))
    (sentence,) = view(record_of(rows)).advice
    assert sentence.startswith(
        "advice: RAID0 and a file system on each drive (`raid_array_groups: all` and `drive`) differ by reads +25.0 %"
    )
    assert sentence.endswith("so RAID0 is the faster.")


def test_virtual_drives_give_no_advice_for_others() -> None:
    (sentence,) = view(record_of(full(), mode="virtual")).advice
    assert sentence.startswith("advice for virtual drives, which are files of one disk")
    assert view(record_of(rows_of(row("raid0-xfs", 1, "read", STEADY)))).advice == []


def test_the_page_has_a_plot_over_drives_with_its_text(tmp_path: Path) -> None:
    text = write_any_page(record_of(full()), tmp_path / "record.json").read_text()
    read, write = [each for each in pictures(text) if each.attrib.get("class") == "plot"]
    assert read.attrib["aria-label"].startswith("reads by number of drives, GB/s: ")
    assert "raid0-xfs, fio-libaio from 2.00 to 6.00" in read.attrib["aria-label"]
    assert "drives" in "".join(write.itertext())
    assert "6.00 (5.70 to 6.30 GB/s)" in text
    assert write_page(builders.record(kind="bench.drives"), tmp_path / "none.json") is None
    failed = record_of({}, checks=[preflight.skip("layout.raid0-xfs", "it is measured", "no md RAID0", "")])
    path = write_page(failed, tmp_path / "record.json")
    assert path is not None
    assert "nothing was measured: no md RAID0" in path.read_text(), "a page without figures says why there are none"


# -- what is taken down


class Recorded:
    """Entries that were undone, and those that cannot be."""

    def __init__(self, stuck: Callable[[Mapping[str, Any]], bool] = lambda entry: False) -> None:
        self.undone: list[str] = []
        self.stuck = stuck

    def __call__(self, entry: Mapping[str, Any]) -> str | None:
        if self.stuck(entry):
            return f"{entry['kind']} is stuck"
        self.undone.append(entry["kind"])
        return None


def test_what_cannot_be_taken_down_is_left_to_the_janitor(monkeypatch: pytest.MonkeyPatch) -> None:
    problems: list[str] = []
    undo = Recorded(stuck=lambda entry: entry["kind"] == "mount")
    monkeypatch.setattr(made, "undone", undo)
    # No entry of the run is of a kind that the real janitor knows.
    monkeypatch.setattr(made.Made, "_tell", lambda self: None)
    things = made.Made(problems.append)
    things.entries = [{"kind": "loop"}, {"kind": "mount"}]
    things.undo(0)
    assert (problems, undo.undone, things.entries) == (["mount is stuck"], ["loop"], [])
    assert [entry["kind"] for entry in things._failed] == ["mount"]


def test_a_label_of_somebody_else_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = builders.nvme_drive(1)
    monkeypatch.setattr(made, "read_drives", lambda: [drive])
    monkeypatch.setattr(made, "use_problems", lambda drives: {})
    cleared: list[str] = []
    monkeypatch.setattr(made, "clear_labels", lambda drives: cleared.extend(each.serial for each in drives))
    monkeypatch.setattr(made, "refuse_unless_blank", lambda drives, deep: None)
    monkeypatch.setattr(made, "held", lambda drives: contextlib.nullcontext())
    monkeypatch.setattr(held_drives, "use_problems", lambda drives, patience: {})
    monkeypatch.setattr(made, "settle", lambda written=(): None)
    entry = {"kind": "labels", "drives": [BareDrive(drive).noted], "uuids": [UUID], "given_back": []}

    def label(uuid: str | None) -> None:
        signature = Signature("nvme1n1", "xfs", None, uuid)
        monkeypatch.setattr(made, "read_signatures", lambda names: [signature])

    for uuid in ("99999999-2222-3333-4444-555555555555", None):
        label(uuid)
        problem = made.undone(entry)
        assert problem is not None
        assert "which this run did not make: it was left as it is" in problem
    assert cleared == []
    label(UUID.upper())
    assert made.undone(entry) is None
    assert cleared == ["S1"]
    monkeypatch.setattr(made, "read_drives", lambda: [drive, drive])
    assert "is on 2 drives" in str(made.undone(entry))
    monkeypatch.setattr(made, "read_drives", list)
    assert made.undone(entry) == "drive `S1` is gone: it may keep what this run made"


def test_data_that_nobody_labelled_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that was not yet written when somebody else wrote to it, which the run refuses: nothing on it is ours."""
    image = tmp_path / "nvme1n1"
    image.write_bytes(b"results".ljust(4 * 2**20, b"\0"))
    drive = builders.nvme_drive(1, name=os.path.relpath(image, "/dev"))
    monkeypatch.setattr(made, "read_drives", lambda: [drive])
    monkeypatch.setattr(held_drives, "read_drives", lambda: [drive])
    monkeypatch.setattr(made, "settle", lambda written=(): None)
    entry = {"kind": "labels", "drives": [BareDrive(drive).noted], "uuids": [UUID], "given_back": [], "seen": []}
    before = image.read_bytes()
    assert "holds data without a label at 0 B, and no label of this run: it was left" in str(made.undone(entry))
    assert image.read_bytes() == before
    # One whose label was ours is cleared to the end, also if the first try removed the label alone.
    entry["seen"].append("S1")
    assert made.undone(entry) is None
    assert image.read_bytes() == bytes(4 * 2**20)
    image.write_bytes(b"results".ljust(4 * 2**20, b"\0"))
    before = image.read_bytes()
    assert made.undone(entry) is None, "it was given back"
    assert image.read_bytes() == before


def test_somebody_elses_array_over_the_drives_is_not_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "md7/md").mkdir(parents=True)
    monkeypatch.setattr(made, "_SYS_BLOCK", tmp_path)
    monkeypatch.setattr(made, "disks_under", lambda root, device: {"nvme1n1", "nvme2n1"})
    ran: list[list[str]] = []
    monkeypatch.setattr(made, "run", ran.append)
    entry = {"kind": "array", "members": ["nvme1n1", "nvme2n1"], "uuids": [UUID]}

    def labels_of_the_members(uuid: str) -> None:
        # Nothing was made on the array itself yet.
        members = [Signature(name, "linux_raid_member", None, uuid) for name in ("nvme1n1", "nvme2n1")]
        monkeypatch.setattr(made, "read_signatures", lambda names: [each for each in members if each.device in names])

    labels_of_the_members("99999999-2222-3333-4444-555555555555")
    assert "which this run did not make: it was left as it is" in str(made.undone(entry))
    assert ran == []
    labels_of_the_members(UUID)
    assert made.undone(entry) is None
    assert ran[-1] == ["mdadm", "--stop", "/dev/md7"]


def test_a_drive_that_came_under_another_name_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    drives = [builders.nvme_drive(1), builders.nvme_drive(2)]
    bare = [BareDrive(drive) for drive in drives]
    monkeypatch.setattr("tunetool.node.array.create.read_drives", lambda: drives)
    assert as_they_are(bare) == drives
    # The second is where the first was: by its name it would be formatted in its place.
    swapped = [replace(drives[0], name="nvme2n1"), replace(drives[1], name="nvme1n1")]
    monkeypatch.setattr("tunetool.node.array.create.read_drives", lambda: swapped)
    with pytest.raises(Refusal, match="drive `S1` was `nvme1n1` and is `nvme2n1` now"):
        as_they_are(bare)
    used = [replace(drives[0], uses=("mounted at `/data`",)), drives[1]]
    monkeypatch.setattr("tunetool.node.array.create.read_drives", lambda: used)
    assert as_they_are(bare)[0].uses == ("mounted at `/data`",), "as it is now, not as it was before the run"
    monkeypatch.setattr("tunetool.node.array.create.read_drives", lambda: drives[:1])
    with pytest.raises(Refusal, match="serial `S2` is on 0 drives"):
        as_they_are(bare)
