"""Geometry, fstab, memory files and mounts: computing, parsing and rendering."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.audit.before_changes import in_the_way
from tunetool.node.common.commands import CommandError
from tunetool.node.common.file_lock import Locked, only_one
from tunetool.node.common.files import content, replace_file
from tunetool.node.machine.file_system import BUILT, Geometry
from tunetool.node.machine.fstab import FstabConflict, escape, foreign_entry, parse_fstab, with_entry
from tunetool.node.machine.memory import HugePages
from tunetool.node.machine.mounts import mount_at, mount_holding, parse_mountinfo, unescape
from tunetool.node.memory.persistent_files import render_limits, render_systemd, render_tmpfiles

XFS_INFO = """meta-data=/dev/md127               isize=512    agcount=16, agsize=523776 blks
         =                       sectsz=512   attr=2, projid32bit=1
         =                       crc=1        finobt=1, sparse=1, rmapbt=0
         =                       reflink=1    bigtime=1 inobtcount=1 nrext64=0
data     =                       bsize=4096   blocks=8380416, imaxpct=25
         =                       sunit=256    swidth=2048 blks
naming   =version 2              bsize=4096   ascii-ci=0, ftype=1
log      =internal log           bsize=4096   blocks=16384, version=2
         =                       sectsz=512   sunit=64 blks, lazy-count=1
realtime =none                   extsz=4096   blocks=0, rtextents=0
"""


def test_geometry_of_eight_members() -> None:
    assert BUILT.geometry(2**20, 8) == Geometry(2**20, 8, 256 * 1024)
    assert BUILT.geometry(2**17, 4) == Geometry(2**17, 4, 2**17)


def test_xfs_info_is_read_back() -> None:
    assert BUILT.parse_geometry(XFS_INFO) == BUILT.geometry(2**20, 8)
    assert BUILT.geometry(2**19, 4).apart(BUILT.parse_geometry(XFS_INFO)) == [
        ("data_stripe_unit", "512 KiB", "1 MiB"),
        ("data_stripe_width", "4 members", "8 members"),
    ]


def test_without_a_chunk_there_is_no_stripe() -> None:
    none = BUILT.geometry(0, 1)
    assert none == Geometry(0, 0, 4096)
    assert BUILT.shape(none, "x") == ["-d", "noalign", "-l", "su=4096", "-L", "x"]


def test_no_geometry_is_an_error() -> None:
    with pytest.raises(CommandError, match="no geometry"):
        BUILT.parse_geometry("xfs_info: not an XFS filesystem")


def test_mountinfo_shows_the_stripe_in_sectors() -> None:
    assert BUILT.mounted_stripe(("rw", "sunit=2048", "swidth=16384")) == (2**20, 2**23)
    assert BUILT.mounted_stripe(("rw", "noatime")) is None


MOUNTINFO = r"""22 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
30 22 0:25 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,size=524288k
40 22 9:127 / /mnt/nvme_raid0 rw,noatime - xfs /dev/md127 rw,attr2,logbufs=8,sunit=2048,swidth=16384,noquota
41 22 8:1 / /mnt/with\040blank rw - ext4 /dev/sda1 rw
42 40 0:50 / /mnt/nvme_raid0 rw - tmpfs tmpfs rw
"""


def test_a_later_mount_hides_the_earlier() -> None:
    mounts = parse_mountinfo(MOUNTINFO)
    top = mount_at("/mnt/nvme_raid0", mounts)
    assert top is not None
    assert top.fs_type == "tmpfs"
    assert mount_at("/mnt/with blank", mounts) is not None
    holding = mount_holding("/mnt/nvme_raid0x/file", mounts)
    assert holding is not None
    assert holding.mount_point == "/"


def test_fstab_gets_one_line_and_keeps_the_rest() -> None:
    before = "# static\nUUID=1 / ext4 defaults 0 1\n"
    after = with_entry(before, "UUID=2", "/mnt/nvme_raid0", "xfs", "noatime,nofail")
    assert after == before + "UUID=2 /mnt/nvme_raid0 xfs noatime,nofail 0 0\n"
    assert with_entry(after, "UUID=2", "/mnt/nvme_raid0", "xfs", "noatime,nofail") == after
    changed = with_entry(after, "UUID=2", "/mnt/nvme_raid0", "xfs", "nofail")
    assert changed == before + "UUID=2 /mnt/nvme_raid0 xfs nofail 0 0\n"


def test_somebody_elses_entry_is_not_replaced() -> None:
    with pytest.raises(FstabConflict, match="line 1 mounts `/dev/sdb1`"):
        with_entry("/dev/sdb1 /mnt/nvme_raid0 ext4 defaults 0 2\n", "UUID=2", "/mnt/nvme_raid0", "xfs", "nofail")
    twice = "UUID=2 /m xfs a 0 0\nUUID=2 /m xfs a 0 0\n"
    with pytest.raises(FstabConflict, match="twice"):
        with_entry(twice, "UUID=2", "/m", "xfs", "a")


def test_somebody_elses_entry_is_seen_before_ours_is_made(tmp_path: Path) -> None:
    text = '# /dev/sdb1 /m ext4\nUUID="2" /m xfs nofail 0 0\n/dev/sdb1 /m ext4 defaults 0 2\n'
    assert foreign_entry(text, "/m", ["UUID=2"]) == "/etc/fstab line 3 mounts `/dev/sdb1` at `/m`"
    assert foreign_entry(text, "/m", []) == "/etc/fstab line 2 mounts `UUID=2` at `/m`"
    assert foreign_entry(text, "/mnt", []) is None
    assert in_the_way("/m", str(tmp_path)) is None
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/fstab").write_text(text)
    assert in_the_way("/m", str(tmp_path)) == foreign_entry(text, "/m", [])


@given(st.text(alphabet="az09 \t\\#.-_é", min_size=1))
def test_a_mount_point_survives_fstab(name: str) -> None:
    path = "/mnt/x" + name
    entries = parse_fstab(with_entry("", "UUID=2", path, "xfs", "nofail"))
    assert unescape(escape(path)) == path
    assert [entry.mount_point for entry in entries] == [path]


def test_memory_files() -> None:
    pools = [HugePages(2048, 4096), HugePages(1048576, 8, 1)]
    assert render_tmpfiles(pools).splitlines()[1:] == [
        "w /sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages - - - - 4096",
        "w /sys/devices/system/node/node1/hugepages/hugepages-1048576kB/nr_hugepages - - - - 8",
    ]
    assert "root hard memlock unlimited\n" in render_limits("unlimited")
    assert render_systemd("unlimited").endswith("DefaultLimitMEMLOCK=infinity\n")
    assert render_systemd("1024").endswith("DefaultLimitMEMLOCK=1048576\n")


def test_a_replaced_file_keeps_its_mode_and_is_alone(tmp_path: Path) -> None:
    path = tmp_path / "fstab"
    replace_file(str(path), "one\n")
    assert path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    replace_file(str(path), "two\n")
    assert path.stat().st_mode & 0o777 == 0o600
    assert content(str(path)) == "two\n"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_no_regular_file_is_not_replaced_by_one(tmp_path: Path) -> None:
    """As root, /dev/null would be a file from then on."""
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (pipe, link):
        with pytest.raises(OSError, match="it is not a regular file") as refused:
            replace_file(str(path), "text\n")
        assert refused.value.filename == str(path)
    assert pipe.is_fifo()
    assert sorted(tmp_path.iterdir()) == [link, pipe]


def test_a_replaced_file_keeps_the_bits_that_chown_takes_away(tmp_path: Path) -> None:
    path = tmp_path / "program"
    path.write_text("one\n")
    path.chmod(0o6755)
    replace_file(str(path), "two\n")
    assert stat.S_IMODE(path.stat().st_mode) == 0o6755


def test_a_power_cut_finds_the_old_file_or_the_new_one_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing about the file changes between its fsync and the rename, and each new name is synced after it is made."""
    path = tmp_path / "new" / "inner" / "file"
    calls: list[tuple[str, object]] = []
    real = {name: getattr(os, name) for name in ("fsync", "fchmod", "fchown", "replace", "mkdir")}

    def seen(name: str, *arguments: object, **more: object) -> None:
        real[name](*arguments, **more)
        what = arguments[0]
        where = Path(f"/proc/self/fd/{what}").readlink() if isinstance(what, int) else Path(str(what))
        calls.append((name, where if where.is_dir() else where.read_text() if where.exists() else "gone"))

    for name in real:
        monkeypatch.setattr(os, name, functools.partial(seen, name))
    replace_file(str(path), "one\n")
    replace_file(str(path), "two\n")
    inner, outer = path.parent, path.parent.parent
    assert calls == [
        ("mkdir", outer),
        ("mkdir", inner),
        ("fsync", outer),
        ("fsync", tmp_path),
        ("fchmod", "one\n"),
        ("fsync", "one\n"),
        ("replace", "gone"),
        ("fsync", inner),
        ("fchown", "two\n"),
        ("fchmod", "two\n"),
        ("fsync", "two\n"),
        ("replace", "gone"),
        ("fsync", inner),
    ]


def test_a_second_run_waits_and_then_names_the_first(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with only_one(path), pytest.raises(Locked, match=rf"process {os.getpid()}"), only_one(path, patience=0):
        pass
    with only_one(path, patience=0):
        pass
