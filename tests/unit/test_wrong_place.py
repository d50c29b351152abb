"""The bare mount point's flag and the services' drop-ins: encoding, detection and writing."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.volume import immutable_flag, unit_dropins
from tunetool.node.volume.immutable_flag import FS_IMMUTABLE_FL, Directory, Unsupported


def test_the_requests_are_those_of_the_kernel_s_header() -> None:
    # As strace shows them for lsattr and chattr on x86-64 and arm64.
    assert struct.calcsize("l") != 8 or (immutable_flag.FS_IOC_GETFLAGS, immutable_flag.FS_IOC_SETFLAGS) == (
        0x80086601,
        0x40086602,
    )


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_one_bit_changes_and_no_other(flags: int, wanted: bool) -> None:
    assert immutable_flag.decode_flags(immutable_flag.encode_flags(flags)) == flags
    after = immutable_flag.with_immutable(flags, wanted)
    assert bool(after & FS_IMMUTABLE_FL) == wanted
    assert (after ^ flags) & ~FS_IMMUTABLE_FL == 0


def test_a_directory_is_looked_at(tmp_path: Path) -> None:
    assert immutable_flag.look(str(tmp_path / "none")) == Directory(False)
    (tmp_path / "b").touch()
    (tmp_path / "a").touch()
    try:
        assert immutable_flag.look(str(tmp_path)) == Directory(True, False, ("a", "b"))
    except Unsupported as error:
        pytest.skip(str(error))


def test_what_has_no_such_flag_says_so() -> None:
    with pytest.raises(Unsupported, match="no such flag"):
        immutable_flag.is_immutable("/proc")


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A directory on its own mount, on which the flag works."""
    point = tmp_path / "point"
    point.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() != 0 or libc.mount(b"none", os.fsencode(point), b"tmpfs", 0, None) != 0:
        pytest.skip("needs root and mount(2)")
    try:
        immutable_flag.look_beneath(str(point))
    except Unsupported as error:
        libc.umount2(os.fsencode(point), 0)
        pytest.skip(str(error))
    yield point
    try:
        immutable_flag.set_immutable_beneath(str(point), False)
    finally:
        libc.umount2(os.fsencode(point), 0)


def test_the_hidden_directory_is_reached_and_the_mount_stays(mounted: Path) -> None:
    (mounted / "on-the-volume").touch()
    path = str(mounted)
    assert immutable_flag.look_beneath(path) == Directory(True, False, ())
    immutable_flag.set_immutable_beneath(path, True)
    assert immutable_flag.look_beneath(path) == Directory(True, True, ())
    assert os.path.ismount(path)
    assert [entry.name for entry in mounted.iterdir()] == ["on-the-volume"]
    ctypes.CDLL(None).umount2(os.fsencode(path), 0)
    assert immutable_flag.is_immutable(path)
    with pytest.raises(PermissionError):
        (mounted / "x").touch()
    ctypes.CDLL(None).mount(b"none", os.fsencode(path), b"tmpfs", 0, None)


def test_drop_ins_follow_the_list(tmp_path: Path) -> None:
    def apply(*units: str) -> list[str]:
        changes = unit_dropins.changes(units, ["/mnt/nvme_raid0"], str(tmp_path))
        for change in changes:
            unit_dropins.apply(change)
        return [Path(change.path).parent.name for change in changes]

    assert apply("slurmd.service", "containerd.service") == ["containerd.service.d", "slurmd.service.d"]
    text = (tmp_path / "slurmd.service.d/60-tunetool-scratch.conf").read_text()
    assert text.splitlines()[1:] == ["[Unit]", "RequiresMountsFor=/mnt/nvme_raid0"]
    assert apply("slurmd.service", "containerd.service") == []
    (tmp_path / "containerd.service.d/50-owner.conf").write_text("[Service]\n")
    assert apply("slurmd.service") == ["containerd.service.d"]
    assert apply() == ["slurmd.service.d"]
    assert [path.name for path in tmp_path.iterdir()] == ["containerd.service.d"]


def test_a_file_of_our_name_that_is_not_ours_stays(tmp_path: Path) -> None:
    other = tmp_path / "slurmd.service.d/60-tunetool-scratch.conf"
    other.parent.mkdir()
    other.write_text("[Unit]\n")
    assert unit_dropins.changes([], ["/mnt/x"], str(tmp_path)) == []
    with pytest.raises(unit_dropins.ForeignDropIn):
        unit_dropins.changes(["slurmd.service"], ["/mnt/x"], str(tmp_path))


@pytest.mark.parametrize(
    ("point", "line"),
    [("/mnt/a", "/mnt/a"), ("/mnt/50%", "/mnt/50%%"), ("/mnt/a b", '"/mnt/a b"'), ('/mnt/"', '"/mnt/\\""')],
)
def test_systemd_reads_the_mount_point_as_it_is(point: str, line: str) -> None:
    assert unit_dropins.render([point]).endswith(f"\nRequiresMountsFor={line}\n")


@pytest.mark.parametrize("unit", ["slurmd.service", "docker.socket", "a@b.service", "x-y_z.1.timer"])
def test_names_of_units(unit: str) -> None:
    assert unit_dropins.units_problem([unit]) is None


@pytest.mark.parametrize("unit", ["slurmd", "", "../x.service", "a b.service", "-.service", "x.mount", "a.service\n"])
def test_what_is_no_unit(unit: str) -> None:
    assert "hint:" in str(unit_dropins.units_problem(["slurmd.service", unit]))
