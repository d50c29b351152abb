"""A byte of an array on its members, compared with a RAID0 that is laid out byte by byte in memory."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.measure.ladder.file_extents import Extent
from tunetool.measure.ladder.source import NoRawData, choose, compared_places, largest
from tunetool.node.array.stripe import NoStripe, Range, Stripe, read_stripe

MIB = 2**20


class Simulated:
    """A RAID0 written as md writes it: chunk after chunk, member after member, behind each one's data offset."""

    def __init__(self, chunk: int, offsets: list[int], content: bytes) -> None:
        self.stripe = Stripe(chunk, tuple(f"nvme{n}n1" for n in range(len(offsets))), tuple(offsets))
        self.content = content
        self.members = [bytearray(b"\xff" * offset) for offset in offsets]
        for number, start in enumerate(range(0, len(content), chunk)):
            self.members[number % len(offsets)] += content[start : start + chunk]

    def read(self, part: Range) -> bytes:
        return bytes(self.members[part.member][part.offset : part.offset + part.length])


@st.composite
def arrays(draw: st.DrawFn) -> tuple[Simulated, int, int]:
    chunk = draw(st.sampled_from([1, 3, 4, 16, 64]))
    offsets = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    content = draw(st.binary(min_size=1, max_size=chunk * len(offsets) * 5))
    start = draw(st.integers(0, len(content) - 1))
    return Simulated(chunk, offsets, content), start, draw(st.integers(1, len(content) - start))


@given(arrays())
def test_every_byte_is_found_where_it_was_written(case: tuple[Simulated, int, int]) -> None:
    array, start, length = case
    for address in range(start, start + length):
        slot, offset = array.stripe.locate(address)
        assert array.members[slot][offset] == array.content[address]


@given(arrays())
def test_ranges_hold_exactly_the_bytes_of_the_run(case: tuple[Simulated, int, int]) -> None:
    array, start, length = case
    ranges = array.stripe.ranges(start, length)
    assert len({part.member for part in ranges}) == len(ranges)
    covered = {(part.member, offset) for part in ranges for offset in range(part.offset, part.offset + part.length)}
    assert covered == {array.stripe.locate(address) for address in range(start, start + length)}
    assert sum(part.length for part in ranges) == length


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(1, 90)), max_size=12), st.integers(1, 4))
def test_the_largest_ranges_are_whole_mib_inside_what_there_is(parts: list[tuple[int, int]], most: int) -> None:
    unit = MIB // 8
    apart, reached = [], 0
    for gap, length in parts:
        apart.append(((reached + gap) * unit, length * unit))
        reached += gap + length
    chosen = largest(apart, most)
    assert len(chosen) <= most
    assert chosen == sorted(chosen)
    owned = {byte for offset, length in apart for byte in range(offset, offset + length, unit)}
    for offset, length in chosen:
        assert offset % MIB == length % MIB == 0
        assert length
        assert owned.issuperset(range(offset, offset + length, unit))


def stripe(members: int = 8) -> Stripe:
    return Stripe(MIB, tuple(f"nvme{n}n1" for n in range(members)), (129 * MIB,) * members)


def test_what_is_read_of_each_drive_is_a_file_s() -> None:
    extents = {"a": [Extent(0, 512 * MIB, 256 * MIB)], "b": [Extent(0, 900 * MIB, 100 * MIB)]}
    raw = choose(stripe(), "md127", extents)
    assert list(raw.members) == [f"nvme{n}n1" for n in range(8)]
    for slot, spans in enumerate(raw.members.values()):
        assert sum(span.length for span in spans) >= 40 * MIB
        for span in spans:
            # Back from the member to the array: it must lie in one of the files.
            for offset in range(span.offset, span.offset + span.length, MIB):
                address = ((offset - 129 * MIB) // MIB * 8 + slot) * MIB
                assert any(
                    e.physical <= address < e.physical + e.length for of_file in extents.values() for e in of_file
                )
    assert [(span.device, span.offset) for span in raw.array] == [("md127", 512 * MIB), ("md127", 900 * MIB)]
    compared = compared_places(raw)
    assert {slot for _, _, slot, _ in compared} == set(range(8))
    for path, logical, slot, offset in compared:
        (extent,) = extents[path]
        assert stripe().locate(extent.physical + logical) == (slot, offset)


@pytest.mark.parametrize("length", [MIB, 40 * MIB, 63 * MIB])
def test_files_that_are_too_small(length: int) -> None:
    with pytest.raises(NoRawData, match="too small"):
        choose(stripe(), "md127", {"a": [Extent(0, 5 * MIB, length)]})


def test_fragments_below_a_mib_are_no_range() -> None:
    shreds = [Extent(n * MIB // 2, n * 3 * MIB, MIB // 2) for n in range(1000)]
    with pytest.raises(NoRawData, match="too small"):
        choose(stripe(), "md127", {"a": shreds})


def array(root: Path, level: str = "raid0", sizes: tuple[int, ...] = (4096, 4096)) -> str:
    md = root / "sys/block/md127/md"
    md.mkdir(parents=True)
    for name, text in {"level": level, "chunk_size": str(MIB), "raid_disks": str(len(sizes))}.items():
        (md / name).write_text(text + "\n")
    for slot, size in enumerate(sizes):
        member = md / f"dev-nvme{slot + 1}n1"
        member.mkdir()
        device = root / f"sys/devices/nvme{slot + 1}n1"
        device.mkdir(parents=True)
        (member / "block").symlink_to(device)
        (member / "offset").write_text("264192\n")
        (member / "size").write_text(f"{size * 1024}\n")
        (md / f"rd{slot}").symlink_to(member.name)
    return str(root)


def test_an_array_is_read_from_sysfs(tmp_path: Path) -> None:
    stripe = read_stripe("md127", array(tmp_path))
    assert stripe == Stripe(MIB, ("nvme1n1", "nvme2n1"), (264192 * 512, 264192 * 512))


def test_what_is_no_stripe(tmp_path: Path) -> None:
    with pytest.raises(NoStripe, match="no md array"):
        read_stripe("dm-0", str(tmp_path))
    with pytest.raises(NoStripe, match="raid5, not raid0"):
        read_stripe("md127", array(tmp_path / "a", level="raid5"))
    with pytest.raises(NoStripe, match="unequal size"):
        read_stripe("md127", array(tmp_path / "b", sizes=(4096, 4100)))
    gone = array(tmp_path / "c")
    (tmp_path / "c/sys/block/md127/md/rd1").unlink()
    with pytest.raises(NoStripe, match="member 1"):
        read_stripe("md127", gone)
