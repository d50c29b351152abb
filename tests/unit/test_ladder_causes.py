"""Causes of a rung's loss: a row for each cause, and facts that must not be named as one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tunetool.measure.ladder.budget import EXPECTED
from tunetool.measure.ladder.causes import DriveFacts, Facts, SharedLink, Step, diagnose, slow_drives
from tunetool.measure.ladder.plan import steps
from tunetool.measure.metrics import METRICS
from tunetool.node.machine.drives import Link

GB, MIB = 10**9, 2**20
LINK = Link(16.0, 4, 16.0, 4)


def drive(number: int, **changes: Any) -> DriveFacts:
    return replace(DriveFacts(f"SER{number}", f"nvme{number}n1", 7.0 * GB, LINK, "none"), **changes)


DRIVES = tuple(drive(number) for number in range(8))
HEALTHY = Facts(DRIVES, (), 64, MIB, MIB, 8 * MIB, ("rw", "noatime", "logbufs=8", "logbsize=256k"))


def facts(number: int | None = None, *, of_all: dict[str, Any] | None = None, **changes: Any) -> Facts:
    """A healthy node, with one drive (or all of them) changed."""
    common = of_all or {}
    drives = tuple(replace(d, **(changes if d.serial == f"SER{number}" else common)) for d in DRIVES)
    return replace(HEALTHY, drives=drives)


def step(kind: str, **changes: Any) -> Step:
    return replace(Step("this rung", kind, 20.0 * GB, 0.5, "the one below"), **changes)


def shared(carries: float, *numbers: int) -> Facts:
    link = SharedLink("0000:40:01.0", carries * GB, "16 GT/s x8", [f"SER{number}" for number in numbers])
    return replace(HEALTHY, shared=(link,))


CASES = [
    # kind and its changes, facts, cause, words of what was found, words of the cure
    (
        "link",
        step("alone"),
        facts(3, alone=3.4 * GB, link=replace(LINK, current_width=2)),
        ["`SER3`", "x2", "x4 is possible"],
        "reseat",
    ),
    (
        "link",
        step("alone"),
        facts(3, alone=1.7 * GB, link=replace(LINK, current_speed_gts=2.5)),
        ["2.5 GT/s", "16 GT/s"],
        "reseat",
    ),
    ("slow-drive", step("alone"), facts(5, alone=0.5 * GB), ["`SER5`", "7% of the others"], "nvme smart-log"),
    (
        "slow-drive",
        step("array"),
        facts(5, alone=2.0 * GB),
        ["`SER5`", "29% of the others"],
        "tunetool.node.replace_drive",
    ),
    ("shared-link", step("together"), shared(15.75, 0, 1, 2, 3), ["4 drives", "`0000:40:01.0`", "x8"], "root ports"),
    (
        "shared-link",
        step("together", serials=["SER0", "SER1"]),
        shared(7.9, 0, 1, 2, 3),
        ["2 drives", "`SER0`, `SER1`"],
        "root ports",
    ),
    (
        "misalignment",
        step("filesystem"),
        replace(HEALTHY, stripe_unit_bytes=MIB // 2, stripe_width_bytes=4 * MIB),
        ["stripe unit 512 KiB", "chunks of 1 MiB over 8 drives"],
        "`raid_array_chunk`",
    ),
    (
        "misalignment",
        step("filesystem"),
        replace(HEALTHY, stripe_unit_bytes=None, stripe_width_bytes=None),
        ["no stripe unit"],
        "`raid_array_chunk`",
    ),
    (
        "misalignment",
        step("random"),
        replace(HEALTHY, stripe_width_bytes=7 * MIB),
        ["width 7 MiB"],
        "`raid_array_chunk`",
    ),
    ("scheduler", step("filesystem"), facts(2, scheduler="mq-deadline"), ["1 drives", "`mq-deadline`"], "echo none"),
    ("scheduler", step("array"), facts(of_all={"scheduler": "bfq"}), ["8 drives", "`bfq`"], "queue/scheduler"),
    (
        "mount-options",
        step("filesystem", direction="write"),
        replace(HEALTHY, mount_options=("rw", "discard")),
        ["`discard`", "fstrim"],
        "`scratch_filesystem_mount_options`",
    ),
    (
        "mount-options",
        step("filesystem"),
        replace(HEALTHY, mount_options=("rw", "strictatime")),
        ["`strictatime`", "every read"],
        "`scratch_filesystem_mount_options`",
    ),
    (
        "mount-options",
        step("filesystem", direction="write"),
        replace(HEALTHY, mount_options=("rw", "sync")),
        ["`sync`", "waits for the drives"],
        "`scratch_filesystem_mount_options`",
    ),
    ("cpu", step("filesystem", cores_used=61.0), HEALTHY, ["61 of 64 cores"], "governor"),
    ("cpu", step("together", cores_used=58.0), HEALTHY, ["58 of 64 cores"], "governor"),
    ("cpu", step("checkpoint", threads=1, files=1, cores_used=0.97), HEALTHY, ["one thread"], "one shard per rank"),
    (
        "one-inode",
        step("checkpoint", threads=1, files=1, cores_used=0.4, direction="write"),
        HEALTHY,
        ["one thread writes one file", "in turn"],
        "several files",
    ),
    (
        "one-inode",
        step("aio", files=1, cores_used=0.4, direction="write"),
        HEALTHY,
        ["one file", "writers of one file"],
        "several files",
    ),
    ("write-cache", step("sustained", direction="write", falling=True), HEALTHY, ["exhausted"], "smart-log"),
    ("unknown", step("filesystem"), HEALTHY, ["no link, drive, scheduler, mount option or core"], "dmesg"),
]


@pytest.mark.parametrize(("cause", "where", "known", "fragments", "remedy"), CASES)
def test_each_cause_is_named_with_its_cure(
    cause: str, where: Step, known: Facts, fragments: list[str], remedy: str
) -> None:
    loss = diagnose(where, known)
    assert loss.cause == cause
    for words in fragments:
        assert words in loss.found
    assert remedy in loss.remedy
    if where.kind != "alone":
        assert "50% of the one below" in loss.found


def test_every_cause_has_a_row() -> None:
    from tunetool.record import Loss

    assert {case[0] for case in CASES} == set(Loss.model_fields["cause"].annotation.__args__)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("where", "known"),
    [
        (step("alone"), facts(5, alone=6.0 * GB)),
        (step("together"), shared(63.0, 0, 1, 2, 3, 4, 5, 6, 7)),
        (step("together", serials=["SER6", "SER7"]), shared(7.9, 0, 1, 2, 3)),
        (step("filesystem", cores_used=40.0), HEALTHY),
        (step("sustained", direction="write"), HEALTHY),
        (step("sustained", direction="read", falling=True), HEALTHY),
        (step("filesystem"), replace(HEALTHY, chunk_bytes=None, stripe_unit_bytes=None)),
        (
            step("filesystem"),
            facts(of_all={"scheduler": None, "link": replace(LINK, current_speed_gts=None), "alone": None}),
        ),
        (step("checkpoint", threads=1, files=1, cores_used=0.3), HEALTHY),
        (step("filesystem"), replace(HEALTHY, mount_options=("rw", "discard", "sync"))),
        (step("engine"), replace(HEALTHY, mount_options=("rw", "strictatime"))),
        # Both rungs go through the same mount.
        (step("checkpoint"), replace(HEALTHY, mount_options=("rw", "strictatime"))),
        (step("sustained", direction="write"), replace(HEALTHY, mount_options=("rw", "discard"))),
    ],
)
def test_the_innocent_are_not_blamed(where: Step, known: Facts) -> None:
    assert diagnose(where, known).cause == "unknown"


def test_a_slow_drive_is_one_among_its_like() -> None:
    assert slow_drives([drive(0), drive(1, alone=None)]) == []
    assert slow_drives([]) == []
    (loss,) = slow_drives([drive(0), drive(1, alone=1.4 * GB), drive(2)])
    assert (loss[0].serial, round(loss[1], 2)) == ("SER1", 0.2)


def test_a_drive_that_jitters_is_not_slow() -> None:
    jitters = drive(1, alone=5.0 * GB, best=6.5 * GB)
    assert slow_drives([drive(0), jitters, drive(2), drive(3)]) == []
    losses = slow_drives([drive(0), drive(1, alone=4.0 * GB), drive(2, alone=0.1 * GB), drive(3), drive(4)])
    assert [each.serial for each, _ in losses] == ["SER2", "SER1"]


def test_every_kind_of_rung_can_be_diagnosed() -> None:
    kinds = {each.kind for each in steps([2, 4, 8])}
    names = {each.name for each in steps([])}
    assert {name for each in METRICS for name in (each.name, *each.below)} <= names
    for kind in kinds & EXPECTED.keys():
        diagnose(step(kind), HEALTHY)
    assert EXPECTED.keys() <= kinds
