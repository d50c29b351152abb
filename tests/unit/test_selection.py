"""The choice of drives, and the table's entry for each drive."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builders import nvme_drive
from tunetool.node.array.drive_decisions import IGNORE, KEEP, REFUSE, Criteria, table
from tunetool.node.array.drive_selection import Selection, select
from tunetool.node.machine.drive_contents import Signature, UnreadableDevice, parse_signatures
from tunetool.node.machine.drives import Drive, Link
from tunetool.node.machine.nvme_admin import Formats, LbaFormat, with_capacity

SIZE = 3_840_755_982_336
CRITERIA = Criteria(count=8, size_bytes=3_840_000_000_000, transport="pcie")
NAME = "nvme_raid0"


def drive(number: int, **changes: object) -> Drive:
    plain = nvme_drive(
        number,
        serial=f"S{number:03}",
        model="SAMSUNG MZWLO3T8HCLS-00A07",
        firmware="OPPA3B5Q",
        size_bytes=SIZE,
        numa_node=number // 4,
        link=Link(32.0, 4, 32.0, 4),
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


EIGHT = [drive(number) for number in range(1, 9)]
BOOT = drive(0, uses=("mounted at `/` (partition nvme0n1p2)",), partitions=("nvme0n1p1", "nvme0n1p2"))


def pick(
    drives: list[Drive],
    signatures: dict[str, list[Signature]] | None = None,
    criteria: Criteria = CRITERIA,
    unreadable: dict[str, str] | None = None,
) -> Selection:
    return select(drives, signatures or {}, criteria, NAME, unreadable)


def verdict(selection: Selection, serial: str) -> tuple[str, str]:
    row = next(row for row in selection.decisions if row.drive.serial == serial)
    return row.verdict, row.reason


def member(name: str, array: str = f"node1:{NAME}") -> Signature:
    return Signature(name, "linux_raid_member", array, "2d1e0b40-129b-6514-0000-000000000000")


def test_eight_blank_drives_are_taken_and_the_boot_drive_not() -> None:
    selection = pick([BOOT, *EIGHT])
    assert [row.serial for row in selection.selected] == [row.serial for row in EIGHT]
    assert verdict(selection, "S000") == (REFUSE, "mounted at `/` (partition nvme0n1p2)")


def test_seven_drives_are_refused_with_a_table_of_all() -> None:
    selection = pick([BOOT, *EIGHT[:7]])
    assert selection.selected == ()
    assert selection.problem == "8 drives asked for, 7 usable"
    text = table(selection.decisions)
    assert all(row.serial in text for row in [BOOT, *EIGHT[:7]])


def test_a_host_without_nvme_is_sent_to_no_reasons() -> None:
    selection = pick([])
    assert selection.problem == "8 drives asked for, 0 usable"
    assert "this host has no NVMe drive" in (selection.hint or "")
    assert "beside each drive" not in (selection.hint or "")


def test_nine_usable_drives_are_ambiguous() -> None:
    selection = pick([*EIGHT, drive(9)])
    assert selection.selected == ()
    assert selection.problem == "8 drives asked for, 9 match"
    assert "nvme_drives_serials" in (selection.hint or "")


def test_serials_single_out_eight_of_nine() -> None:
    wanted = Criteria(count=8, serials=tuple(row.serial for row in EIGHT))
    selection = pick([drive(9), *EIGHT], criteria=wanted)
    assert [row.serial for row in selection.selected] == [row.serial for row in EIGHT]
    assert verdict(selection, "S009")[0] == IGNORE


def test_a_serial_that_is_not_there_is_named() -> None:
    wanted = Criteria(count=8, serials=(*(row.serial for row in EIGHT[:7]), "GONE"))
    assert pick(EIGHT, criteria=wanted).problem == "serials not present: `GONE`"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"uses": ("mounted at `/data`",)}, "mounted at `/data`"),
        ({"uses": ("active swap",)}, "active swap"),
        ({"uses": ("member of `md0`",)}, "member of `md0`"),
        ({"partitions": ("nvme3n1p1",)}, "has partitions nvme3n1p1"),
        ({"serial": ""}, "has no serial number"),
        (
            {"serial": "S004"},
            "serial `S004` is on 2 drives, which may be paths to one: no NGUID, EUI-64 or address tells them apart",
        ),
    ],
)
def test_a_drive_with_a_problem_is_refused(changes: dict[str, object], reason: str) -> None:
    drives = [replace(row, **changes) if row.name == "nvme3n1" else row for row in EIGHT]  # type: ignore[arg-type]
    selection = pick(drives)
    assert selection.selected == ()
    row = next(row for row in selection.decisions if row.drive.name == "nvme3n1")
    assert (row.verdict, row.reason) == (REFUSE, reason)


@pytest.mark.parametrize(
    "kind",
    ["ext4", "xfs", "btrfs", "LVM2_member", "zfs_member", "crypto_LUKS", "swap", "gpt", "dos", "ddf_raid_member"],
)
def test_a_drive_that_holds_anything_is_refused(kind: str) -> None:
    selection = pick(EIGHT, {"nvme3n1": [Signature("nvme3n1", kind, "data", None)]})
    assert selection.selected == ()
    assert verdict(selection, "S003") == (REFUSE, f"holds {kind} label `data`")


def test_a_label_that_lies_there_many_times_is_said_once() -> None:
    many = [Signature("nvme3n1", "zfs_member", "tank", "77", hex(1024 * slot)) for slot in range(256)]
    selection = pick(EIGHT, {"nvme3n1": [*many, Signature("nvme3n1", "dos", None, None)]})
    assert verdict(selection, "S003") == (REFUSE, "holds zfs_member label `tank` UUID 77, dos")


def test_what_a_partition_holds_is_said_with_its_name() -> None:
    drives = [replace(row, partitions=("nvme3n1p1",)) if row.serial == "S003" else row for row in EIGHT]
    selection = pick(drives, {"nvme3n1": [Signature("nvme3n1p1", "xfs", None, "abc")]})
    assert verdict(selection, "S003") == (REFUSE, "holds xfs UUID abc (on nvme3n1p1)")


def test_a_drive_that_cannot_be_read_is_never_blank() -> None:
    selection = pick(EIGHT, unreadable={"nvme3n1": "cannot be read: input/output error"})
    assert selection.selected == ()
    assert verdict(selection, "S003")[0] == REFUSE


def test_a_member_that_another_array_claims_too_is_refused() -> None:
    selection = pick(EIGHT, {row.name: [member(row.name), member(row.name, "node1:old")] for row in EIGHT})
    assert verdict(selection, "S003")[0] == REFUSE
    assert "label `node1:old`" in verdict(selection, "S003")[1]


def test_members_of_our_array_are_kept_even_while_mounted() -> None:
    drives = [replace(row, uses=("member of `md127`", "mounted at `/mnt/nvme_raid0` (through md127)")) for row in EIGHT]
    selection = pick([BOOT, *drives], {row.name: [member(row.name)] for row in drives})
    assert len(selection.selected) == 8
    assert {row.verdict for row in selection.decisions if row.drive.serial != "S000"} == {KEEP}


def test_members_of_a_foreign_array_are_refused() -> None:
    selection = pick(EIGHT, {"nvme3n1": [member("nvme3n1", "other:data")]})
    assert verdict(selection, "S003")[0] == REFUSE


def test_our_name_does_not_excuse_a_second_signature() -> None:
    selection = pick(EIGHT, {"nvme3n1": [member("nvme3n1"), Signature("nvme3n1", "ext4", None, None)]})
    assert verdict(selection, "S003") == (REFUSE, "holds ext4")


def test_a_spare_is_left_alone_when_the_array_is_complete() -> None:
    selection = pick([*EIGHT, drive(9)], {row.name: [member(row.name)] for row in EIGHT})
    assert [row.serial for row in selection.selected] == [row.serial for row in EIGHT]
    assert verdict(selection, "S009")[0] == IGNORE


def test_a_drive_of_another_size_is_named_where_a_size_is_asked() -> None:
    drives = [replace(row, size_bytes=SIZE // 2) if row.serial == "S003" else row for row in EIGHT]
    selection = pick(drives)
    assert selection.selected == ()
    assert verdict(selection, "S003") == (IGNORE, "size 1.92 TB is not 3.84 TB")


QEMU = (LbaFormat(0, 512, 0), LbaFormat(1, 512, 8), LbaFormat(4, 4096, 0), LbaFormat(5, 4096, 8))


def odd(changes: dict[str, object], formats: dict[str, Formats], others: int = 512) -> str:
    """The reason for the third of eight drives in a run that is refused."""
    drives = [replace(row, lba_bytes=others) for row in EIGHT]
    drives[2] = replace(drives[2], **changes)  # type: ignore[arg-type]
    selection = select(drives, {}, CRITERIA, NAME, formats=formats)
    assert selection.selected == ()
    verdict_, reason = verdict(selection, "S003")
    assert verdict_ == REFUSE
    return reason


@pytest.mark.parametrize(
    ("changes", "others", "said", "index"),
    [
        ({"lba_bytes": 4096}, 512, "logical block of 4096 bytes, the others' have 512: ", 0),
        ({"lba_bytes": 512}, 4096, "logical block of 512 bytes, the others' have 4096: ", 4),
        ({"metadata_bytes": 8}, 512, "is formatted with 8 metadata bytes per block: ", 0),
        # Its blocks would differ again.
        ({"lba_bytes": 4096, "metadata_bytes": 8}, 512, "is formatted with 8 metadata bytes per block: ", 0),
        ({"lba_bytes": 512, "metadata_bytes": 8}, 4096, "is formatted with 8 metadata bytes per block: ", 4),
        # The space of metadata does not make it a drive of another size.
        ({"metadata_bytes": 8, "size_bytes": SIZE * 512 // 520}, 512, "is formatted with 8 metadata bytes", 0),
    ],
)
def test_odd_blocks_are_refused_with_the_line_that_mends_them(
    changes: dict[str, object], others: int, said: str, index: int
) -> None:
    formats = {"nvme3n1": Formats(QEMU, QEMU[1], 8)}
    reason = odd(changes, formats, others)
    assert reason.startswith(said)
    assert reason.endswith(f"`nvme format /dev/nvme3n1 --lbaf={index}` mends it and erases the drive")
    assert odd(changes, {}, others).endswith(
        f"N being the one of {others} bytes without metadata, mends it and erases the drive"
    )
    assert odd(changes, {"nvme3n1": Formats(QEMU[1:2], QEMU[1], 8)}, others).endswith(
        f"it offers no format of {others} bytes without metadata: replace it"
    )


def test_a_drive_with_unusable_metadata_is_not_of_another_size() -> None:
    blank = drive(3, size_bytes=0)
    formats = Formats(QEMU, QEMU[3], SIZE // 4104)
    seen = with_capacity(blank, formats)
    assert (seen.lba_bytes, seen.metadata_bytes) == (4096, 8)
    drives = [seen if row.serial == "S003" else row for row in EIGHT]
    selection = select(drives, {}, CRITERIA, NAME, formats={"nvme3n1": formats})
    assert verdict(selection, "S003") == (
        REFUSE,
        "is formatted with 8 metadata bytes per block: `nvme format /dev/nvme3n1 --lbaf=0` mends it and erases the drive",
    )
    # The value in sysfs counts.
    assert with_capacity(EIGHT[0], formats) == EIGHT[0]
    assert with_capacity(blank, None) == blank


def test_a_drive_with_metadata_says_what_it_holds() -> None:
    drives = [replace(row, metadata_bytes=8) if row.serial == "S003" else row for row in EIGHT]
    selection = pick(drives, {"nvme3n1": [Signature("nvme3n1", "ext4", None, None)]})
    assert verdict(selection, "S003")[1].startswith("holds ext4; is formatted with 8 metadata bytes")


def test_eight_drives_of_4096_are_alike() -> None:
    assert len(pick([replace(row, lba_bytes=4096) for row in EIGHT]).selected) == 8


@pytest.mark.parametrize(("field", "value"), [("size_bytes", SIZE - 512), ("lba_bytes", 4096)])
def test_unequal_members_are_refused_by_serial(field: str, value: int) -> None:
    drives = [replace(row, **{field: value}) if row.serial == "S003" else row for row in EIGHT]  # type: ignore[arg-type]
    selection = pick(drives, criteria=Criteria(count=8))
    assert selection.selected == ()
    assert selection.problem == "the drives are not alike: `S003`"
    assert verdict(selection, "S003")[0] == REFUSE


def test_model_is_a_glob_and_case_counts() -> None:
    assert len(pick(EIGHT, criteria=Criteria(count=8, model="SAMSUNG MZWLO3T8*")).selected) == 8
    assert pick(EIGHT, criteria=Criteria(count=8, model="samsung*")).selected == ()


@given(
    st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.integers(min_value=0, max_value=11)), max_size=12
    ),
    st.integers(min_value=1, max_value=12),
)
def test_nothing_in_use_or_with_contents_is_ever_selected(rows: list[tuple[bool, bool, bool, int]], count: int) -> None:
    drives, signatures = [], {}
    for number, (used, holds, split, serial) in enumerate(rows):
        drives.append(
            drive(
                number,
                serial=f"S{serial}",
                uses=("mounted at `/x`",) if used else (),
                partitions=("p1",) if split else (),
            )
        )
        if holds:
            signatures[f"nvme{number}n1"] = [Signature(f"nvme{number}n1", "ext4", None, None)]
    selection = pick(drives, signatures, Criteria(count=count))
    serials = [row.serial for row in selection.selected]
    assert len(serials) == len(set(serials))
    assert len(serials) in (0, count)
    for chosen in selection.selected:
        assert not chosen.uses
        assert not chosen.partitions
        assert chosen.name not in signatures


def test_wipefs_output_is_read() -> None:
    text = """{"signatures": [
      {"device": "/dev/nvme3n1", "offset": "0x438", "type": "ext4", "uuid": "11", "label": null},
      {"device": "nvme4n1p1", "offset": "0x1000", "type": "linux_raid_member", "uuid": "22", "label": "n:r"}]}"""
    assert parse_signatures(text) == [
        Signature("nvme3n1", "ext4", None, "11", "0x438"),
        Signature("nvme4n1p1", "linux_raid_member", "n:r", "22", "0x1000"),
    ]
    assert parse_signatures("\n") == []


@pytest.mark.parametrize("text", ["garbage", "{}", '{"signatures": [{}]}', '{"signatures": 3}'])
def test_what_wipefs_never_prints_is_no_blank_drive(text: str) -> None:
    with pytest.raises(UnreadableDevice):
        parse_signatures(text)
