"""Contents that libblkid does not see, on sparse files with real file systems."""

from __future__ import annotations

import itertools
import os
import struct
import uuid
from pathlib import Path

import pytest

from builders import nvme_drive
from calls import ROOT
from programs import need_program
from tunetool.node.array.adopt_or_wipe import Consent
from tunetool.node.array.create import refuse_unless_blank
from tunetool.node.array.drive_decisions import REFUSE, WIPE, Criteria
from tunetool.node.array.drive_selection import select
from tunetool.node.common.commands import run
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import unlabelled
from tunetool.node.machine.drive_contents import Signature, contents_hash, parse_signatures, read_contents
from tunetool.node.machine.unlabelled import (
    BTRFS,
    DATA,
    PROBE,
    XFS,
    Piece,
    clear_between,
    clear_ends,
    look,
    probes,
    written,
    xfs_groups,
)
from tunetool.node.removal.wipe_drives import clear_labels

MIB, GIB, TIB = 2**20, 2**30, 2**40


def drive(path: Path, size: int = 4 * GIB) -> Path:
    with path.open("w") as stream:
        stream.truncate(size)
    return path


def put(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(data)


def clear(path: str) -> None:
    clear_between(path)
    clear_ends(path)


def libblkid(path: Path) -> list[Signature]:
    return parse_signatures(run(["wipefs", "--no-act", "--json", str(path)]).stdout)


@pytest.mark.parametrize("size", [4 * GIB, 3_840_755_982_336, 15_360_950_534_144])
@pytest.mark.parametrize("options", [[], ["-d", "agcount=17"], ["-d", "su=128k,sw=1"], ["-d", "agcount=24"]])
@pytest.mark.parametrize("gone", ["the magic", "the first MiB"])
def test_a_real_xfs_without_its_first_superblock_is_seen(
    tmp_path: Path, size: int, options: list[str], gone: str
) -> None:
    need_program("mkfs.xfs")
    path = drive(tmp_path / "drive", size)
    known = str(uuid.uuid4())
    # The smallest log: that of a large file system is 2 GiB of zeros, which a sparse file really holds.
    run(["mkfs.xfs", "-q", "-K", "-l", "size=64m", "-m", f"uuid={known}", *options, str(path)])
    put(path, 0, bytes(4 if gone == "the magic" else MIB))
    assert libblkid(path) == []
    for deep in (False, True):
        piece = look(str(path), deep)
        assert piece is not None
        assert (piece.kind, piece.uuid) == (XFS, known)
    clear(str(path))
    assert look(str(path), True) is None
    path.unlink()


def btrfs(known: uuid.UUID, offset: int) -> bytes:
    """A superblock as btrfs(5) lays it out: checksum, file system's UUID, its own offset, flags, magic."""
    return bytes(32) + known.bytes + struct.pack("<QQ", offset, 1) + b"_BHRfS_M" + bytes(PROBE - 72)


@pytest.mark.parametrize(("copy", "size"), [(64 * MIB, GIB), (256 * GIB, 300 * GIB)])
def test_a_btrfs_without_its_first_superblock_is_seen(tmp_path: Path, copy: int, size: int) -> None:
    path, known = drive(tmp_path / "drive", size), uuid.uuid4()
    put(path, copy, btrfs(known, copy))
    assert libblkid(path) == []
    assert look(str(path), False) == Piece(BTRFS, copy, str(known))
    clear(str(path))
    assert look(str(path), True) is None
    # The same bytes elsewhere are a file that somebody kept, not a file system.
    put(path, copy, btrfs(known, 2**16))
    assert look(str(path), False) is None


def test_data_of_no_known_kind_is_seen_where_it_is_probed(tmp_path: Path) -> None:
    path = drive(tmp_path / "drive")
    assert look(str(path), True) is None
    put(path, 128 * MIB, b"somebody's results")
    assert look(str(path), False) is None
    assert look(str(path), True) == Piece(DATA, 128 * MIB)
    clear(str(path))
    assert look(str(path), True) is None


@pytest.mark.parametrize("size", [4 * GIB, 3_840_755_982_336, 3 * MIB, 2 * MIB, MIB // 2 + 4096])
def test_one_byte_in_the_first_or_last_mib_is_seen(tmp_path: Path, size: int) -> None:
    first = [0, 511, 4096, 64 * 1024, 512 * 1024, MIB - 1]
    for offset in {at for near in first for at in (near, size - 1 - near) if 0 <= at < size}:
        path = drive(tmp_path / "drive", size)
        put(path, offset, b"x")
        # At boot, too: such a drive did not come back blank.
        assert look(str(path), False) == look(str(path), True) == Piece(DATA, offset // PROBE * PROBE)
        clear_between(str(path))
        assert look(str(path), True) is not None, "by this a plan knows the drive again"
        clear_ends(str(path))
        assert look(str(path), True) is None


@pytest.mark.parametrize("bad", [300 * 1024, 4 * GIB - 400 * 1024, 256 * MIB])
def test_a_block_that_cannot_be_read_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int) -> None:
    """A read that meets one ends early without an error, and data behind it would not be seen."""
    one = nvme_drive(1, name=os.path.relpath(drive(tmp_path / "nvme1n1"), "/dev"))
    pread = os.pread

    def until_the_bad_block(handle: int, length: int, offset: int) -> bytes:
        if offset <= bad < offset + length:
            if offset == bad:
                raise OSError(5, "Input/output error")
            length = bad - offset
        return pread(handle, length, offset)

    monkeypatch.setattr(unlabelled.os, "pread", until_the_bad_block)
    contents, unreadable = read_contents([one], deep=True)
    assert one.name not in contents
    assert unreadable[one.name].endswith("cannot be read: Input/output error")


def test_a_tar_at_the_beginning_is_data(tmp_path: Path) -> None:
    path = drive(tmp_path / "drive")
    (tmp_path / "kept").write_text("results")
    archive = tmp_path / "kept.tar"
    run(["tar", "--create", "--file", str(archive), "--directory", str(tmp_path), "kept"])
    put(path, 0, archive.read_bytes())
    assert libblkid(path) == []
    assert look(str(path), False) == Piece(DATA, 0)


def test_never_md_says_how_much_is_looked_at() -> None:
    size = 3_840_755_982_336
    places = [MIB, *probes(size), size - MIB]
    widest = max(after - before for before, after in itertools.pairwise(places)) + PROBE
    words = " ".join((ROOT / "docs/concepts/never.md").read_text().split())
    assert f"{2 * MIB / 1e6 + len(probes(size)) * PROBE / 1e6:.1f} MB of a drive of 3.84 TB" in words
    assert f"in one piece of {-(-widest // 10**6)} MB" in words


@pytest.mark.parametrize("pattern", [b"\0", b"\xff"])
def test_what_a_drive_returns_for_discarded_blocks_is_nothing(tmp_path: Path, pattern: bytes) -> None:
    assert not written(pattern * PROBE)
    assert written(pattern * (PROBE - 1) + b"\1")
    path = drive(tmp_path / "drive", 64 * MIB)
    path.write_bytes(pattern * (64 * MIB))
    assert look(str(path), True) is None


@pytest.mark.parametrize("size", [0, 512, MIB, 2 * MIB + PROBE, 3 * MIB, 4 * GIB, 3_840_755_982_336, 30 * TIB])
def test_probes_lie_on_the_drive_and_outside_its_known_parts(size: int) -> None:
    assert all(at >= MIB and at + PROBE <= size - MIB and at % PROBE == 0 for at in probes(size))
    assert all(at > 0 and at + 4096 <= size and at % 4096 == 0 for at in xfs_groups(size))
    assert len(probes(size)) < 5000, "about a second"
    assert bool(probes(size)) == (size >= 2 * MIB + PROBE)


def test_a_blank_drive_of_libblkid_is_refused_without_a_plan(tmp_path: Path) -> None:
    need_program("mkfs.xfs")
    path = drive(tmp_path / "nvme1n1")
    run(["mkfs.xfs", "-q", "-K", str(path)])
    put(path, 0, bytes(4))
    one = nvme_drive(1, name=os.path.relpath(path, "/dev"))
    contents, unreadable = read_contents([one])
    assert unreadable == {}
    (row,) = select([one], contents, Criteria(1), "nvme_raid0").decisions
    assert row.verdict == REFUSE
    assert row.reason.startswith(f"holds {XFS} at 1 GiB UUID ")
    with pytest.raises(Refusal, match=f"drive `S1` .* holds {XFS} at 1 GiB UUID .*nothing was changed"):
        refuse_unless_blank([one])
    seen = contents_hash(one)
    consent = Consent(wipes={"S1": seen}, hashes={one.name: seen})
    (row,) = select([one], contents, Criteria(1), "nvme_raid0", consent=consent).decisions
    assert row.verdict == WIPE
    clear_between(one.path)
    # After an interruption here the same plan would go on.
    assert contents_hash(one) == seen
    clear_labels([one])
    refuse_unless_blank([one], deep=True)
    assert read_contents([one], deep=True) == ({one.name: []}, {})


def test_data_without_a_label_counts_only_for_site_yml(tmp_path: Path) -> None:
    path = drive(tmp_path / "nvme1n1")
    put(path, GIB, b"somebody's results")
    one = nvme_drive(1, name=os.path.relpath(path, "/dev"))
    # A boot in ephemeral mode has no plan, and its owner said that the drives keep nothing.
    assert read_contents([one])[0] == {one.name: []}
    refuse_unless_blank([one])
    (signature,) = read_contents([one], deep=True)[0][one.name]
    assert str(signature) == "data without a label at 1 GiB"
    with pytest.raises(Refusal, match="holds data without a label at 1 GiB"):
        refuse_unless_blank([one], deep=True)


def test_a_drive_whose_contents_cannot_be_read_is_never_blank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def broken(path: str, deep: bool) -> None:
        raise OSError(5, "Input/output error")

    one = nvme_drive(1, name=os.path.relpath(drive(tmp_path / "nvme1n1"), "/dev"))
    monkeypatch.setattr(unlabelled, "look", broken)
    contents, unreadable = read_contents([one])
    assert one.name not in contents
    assert unreadable[one.name].endswith("cannot be read: Input/output error")


def test_clearing_writes_only_there(tmp_path: Path) -> None:
    path = drive(tmp_path / "drive", 64 * MIB)
    path.write_bytes(os.urandom(64 * MIB))
    before = path.read_bytes()
    clear_between(str(path))
    after = path.read_bytes()
    places = probes(64 * MIB)
    for at in range(0, 64 * MIB, PROBE):
        assert after[at : at + PROBE] == (bytes(PROBE) if at in places else before[at : at + PROBE])
    assert len(after) == len(before)
    clear_ends(str(path))
    ended = path.read_bytes()
    assert ended == bytes(MIB) + after[MIB:-MIB] + bytes(MIB)
    assert unlabelled.look(str(path), True) is None
