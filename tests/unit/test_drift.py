"""Drift on a recorded node: each difference has a name and is mended or left; nothing is built again."""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_host_files import XFS_INFO

from initramfs_images import image
from machines import RECORDED, lay_out
from programs import need_program
from tunetool.node.array.drift import Asked, array_differences
from tunetool.node.array.md_arrays import Array, Superblock, read_arrays
from tunetool.node.audit import before_changes
from tunetool.node.common.commands import CommandError, Result, run
from tunetool.node.common.drift import Difference, Drifted, Ledger, settle
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine import file_system
from tunetool.node.machine.drive_contents import Signature
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.memory import HugePages
from tunetool.node.machine.mounts import read_mounts
from tunetool.node.memory.apply import MemoryJob
from tunetool.node.memory.persistent_files import (
    parse_tmpfiles,
    pools_to_give_back,
    render_limits,
    render_systemd,
    render_tmpfiles,
)
from tunetool.node.volume import apply as volume_apply
from tunetool.node.volume import late_mount, mount_point, offload_access
from tunetool.node.volume.apply import Volume
from tunetool.node.volume.immutable_flag import Directory
from tunetool.node.volume.mount_options import at_mount_only, like, unwanted
from tunetool.node.volume.unit_dropins import apply

ROOT = Path(__file__).parents[2]
MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
POINT = MANIFEST["filesystem"]["mount_point"]
FS_UUID = MANIFEST["filesystem"]["uuid"]
SERIALS = tuple(member["serial"] for member in MANIFEST["array"]["members"])
ASKED = Asked("nvme_raid0", "raid0", 2**20, SERIALS, 8)
OPTIONS = ["noatime", "logbufs=8", "logbsize=256k"]
FSTAB = (
    "UUID=1 / ext4 defaults 0 1\n"
    f"UUID={FS_UUID} {POINT} xfs {','.join(OPTIONS)},nofail,x-systemd.device-timeout=30s 0 0\n"
    f"tmpfs /dev/shm tmpfs nosuid,nodev,size={512 * 2**20} 0 0\n"
)
CONF = f"ARRAY /dev/md/nvme_raid0 metadata=1.2 UUID={MANIFEST['array']['uuid']}\n"
UNIT = "etc/systemd/system/slurmd.service.d/60-tunetool-scratch.conf"
LATE = f"etc/systemd/system/{late_mount.UNIT}"
IMAGE = "boot/initrd.img-6.1.0-56-cloud-amd64"
SIGNATURE = Signature("md127", "xfs", "nvme_raid0", FS_UUID, "0x0")
SUPERBLOCK = Superblock("", MANIFEST["array"]["uuid"], "nvme_raid0", "raid0", 8, 2**20, 0)
NO_MDADM = CommandError("`mdadm` is not installed")


def wishes(**changes: Any) -> dict[str, Any]:
    """The roles' settings on the recorded node; changes are to those of the file system or of the memory."""
    filesystem = {
        "mount_point": POINT,
        "mount_options": OPTIONS,
        "device_timeout": "30s",
        "label": "nvme_raid0",
        "adopt": False,
        "new_array": False,
        "offload_dir": MANIFEST["offload_dir"],
        "offload_owner": "root",
        "offload_group": "root",
        "offload_mode": "1777",
        "protect_mount_point": True,
        "services": ["slurmd.service"],
        "array": "nvme_raid0",
        "chunk_bytes": 2**20,
        "members": 8,
    }
    memory = {
        "hugepages": [{"size": "2MiB", "count": 64, "numa_node": None}],
        "hugepages_max_share": 50,
        "shm_size": "512MiB",
        "shm_huge": "",
        "memlock": "unlimited",
    }
    for key, value in changes.items():
        (filesystem if key in filesystem else memory)[key] = value
    return {"filesystem": filesystem, "memory": memory}


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


class Node:
    """The recorded node, with the answers of its programs."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.signatures = [SIGNATURE]
        self.xfs_info = XFS_INFO
        self.bare = Directory(True, True)
        self.ran: list[list[str]] = []
        self.superblocks: dict[str, Superblock] | CommandError = {
            f"nvme{slot + 1}n1": SUPERBLOCK for slot in range(len(SERIALS))
        }

    def run(self, argv: list[str], **_: object) -> Result:
        self.ran.append(list(argv))
        return Result(0, self.xfs_info if argv[0] == "xfs_info" else "", "")

    def examine(self, devices: Sequence[str]) -> dict[str, Superblock]:
        if isinstance(self.superblocks, CommandError):
            raise self.superblocks
        return {
            name: replace(block, device=name, role=slot)
            for slot, (name, block) in enumerate(self.superblocks.items())
            if name in devices
        }

    def look(self, asked: Asked = ASKED, **changes: Any) -> list[Difference]:
        return before_changes.overview(asked, wishes(**changes), str(self.root))

    def edit(self, path: str, old: str, new: str) -> None:
        text = (self.root / path).read_text()
        assert old in text
        (self.root / path).write_text(text.replace(old, new))


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    root = lay_out("built", tmp_path)
    write(root, "etc/os-release", "ID=debian\nVERSION_ID=12\n")
    write(root, "etc/fstab", FSTAB)
    write(root, "etc/mdadm/mdadm.conf", CONF)
    write(root, "etc/tunetool/node.json", json.dumps(MANIFEST))
    write(root, "etc/tmpfiles.d/60-tunetool-hugepages.conf", render_tmpfiles([HugePages(2048, 64)]))
    write(root, "etc/security/limits.d/60-tunetool-memlock.conf", render_limits("unlimited"))
    for kind in ("system", "user"):
        write(root, f"etc/systemd/{kind}.conf.d/60-tunetool-memlock.conf", render_systemd("unlimited"))
    place_text = mount_point.changes(["slurmd.service"], POINT, str(root / "etc/systemd/system"))[0].after
    write(root, UNIT, place_text)
    for change in late_mount.changes(late_mount.files(POINT, FS_UUID), str(root)):
        apply(change)
    write(root, "usr/sbin/update-initramfs", "")
    (root / "lib/modules/6.1.0-56-cloud-amd64").mkdir(parents=True)
    (root / IMAGE).parent.mkdir(exist_ok=True)
    (root / IMAGE).write_bytes(image(CONF))
    offload = root / MANIFEST["offload_dir"].lstrip("/")
    offload.mkdir(parents=True)
    offload.chmod(0o1777)
    made = Node(root)
    monkeypatch.setattr(before_changes, "examine", made.examine)
    monkeypatch.setattr(volume_apply, "run", made.run)
    monkeypatch.setattr(file_system, "run", made.run)
    monkeypatch.setattr(mount_point, "run", made.run)
    monkeypatch.setattr(volume_apply, "read_signatures", lambda names: made.signatures)
    monkeypatch.setattr(mount_point, "look_beneath", lambda path: made.bare)
    if os.geteuid() != 0:
        monkeypatch.setattr(offload_access, "name_of", lambda uid: "root")
        monkeypatch.setattr(offload_access, "group_of", lambda gid: "root")
    return made


def test_a_node_as_built_and_asked_has_no_difference(node: Node) -> None:
    assert node.look() == []


def test_a_node_without_a_manifest_has_none_whatever_it_is(node: Node) -> None:
    (node.root / "etc/tunetool/node.json").unlink()
    node.edit("proc/self/mountinfo", "noatime", "relatime")
    assert node.look(replace(ASKED, chunk_bytes=2**19)) == []


@pytest.mark.parametrize("point", [POINT + "/", "/" + POINT])
def test_one_mount_point_is_one_however_it_is_written(node: Node, point: str) -> None:
    assert node.look(mount_point=point) == []


@pytest.mark.parametrize(
    "theirs", [f"LABEL=other {POINT}/ ext4 nofail 0 0", f"LABEL=other /{POINT} ext4", f"UUID=11-22 {POINT}/. xfs ro"]
)
def test_a_second_line_for_the_mount_point_stops_the_run(node: Node, theirs: str) -> None:
    path = node.root / "etc/fstab"
    path.write_bytes(b"# fr\xfc\r\n" + theirs.encode() + b"\n" + path.read_bytes())
    left = one_left(node.look())
    assert left.name == f"fstab[{POINT}]"
    assert "twice (lines 2, " in left.found


FILES = [
    ("etc/fstab", ",nofail", "", f"fstab[{POINT}]", "nofail"),
    ("etc/fstab", "size=536870912", "size=1", "fstab[/dev/shm]", "size=536870912"),
    ("etc/mdadm/mdadm.conf", "ARRAY", "#ARRAY", "mdadm.conf", CONF.strip()),
    ("proc/self/mountinfo", "size=524288k", "size=1024k", "memory.shm", "512 MiB"),
    ("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "64", "0", "memory.hugepages[2MiB]", "64 pages"),
    ("etc/tmpfiles.d/60-tunetool-hugepages.conf", "64", "1", "memory.hugepages.boot", "- 64`"),
    (
        "etc/security/limits.d/60-tunetool-memlock.conf",
        "root hard",
        "joe hard",
        "memory.memlock[limits.d]",
        "root hard",
    ),
    ("etc/systemd/user.conf.d/60-tunetool-memlock.conf", "inf", "x", "memory.memlock[user.conf.d]", "infinity"),
    (LATE, "After=", "#", "mount.late", LATE),
    (UNIT, "RequiresMountsFor", "#", "services[slurmd.service]", "RequiresMountsFor"),
    ("proc/self/mountinfo", "noatime", "relatime", "mount.options", "noatime"),
]


@pytest.mark.parametrize(("path", "old", "new", "name", "expected"), FILES)
def test_each_thing_that_can_be_mended_is_named(
    node: Node, path: str, old: str, new: str, name: str, expected: str
) -> None:
    node.edit(path, old, new)
    by_name = {difference.name: difference for difference in node.look()}
    # A missing array line makes the images outdated too.
    assert set(by_name) == ({name, "initramfs"} if name == "mdadm.conf" else {name})
    assert by_name[name].mended
    assert expected in by_name[name].expected
    assert expected not in by_name[name].found


def test_what_is_not_in_a_file_is_named(node: Node) -> None:
    node.signatures = [replace(SIGNATURE, label="scratch")]
    node.bare = Directory(True, False)
    (node.root / MANIFEST["offload_dir"].lstrip("/")).chmod(0o700)
    (node.root / IMAGE).write_bytes(image("# no array\n"))
    assert [
        (difference.name, difference.expected, difference.found, difference.mended) for difference in node.look()
    ] == [
        ("initramfs", "the arrays of mdadm.conf", f"{node.root / IMAGE}: it lacks `{CONF.strip()}`", True),
        ("mount.bare", "immutable", "writable", True),
        ("filesystem.label", "`nvme_raid0`", "`scratch`", True),
        ("offload.directory", "root:root 1777", "root:root 0700", True),
    ]


def test_an_unmounted_volume_is_mounted(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (node.root / "proc/self/mountinfo").read_text().splitlines(keepends=True)
    (node.root / "proc/self/mountinfo").write_text("".join(line for line in lines if POINT not in line))
    (node.root / MANIFEST["offload_dir"].lstrip("/")).rmdir()
    (node.root / "dev/md127").write_bytes(b"XFSB".ljust(512, b"\0"))
    monkeypatch.setattr(mount_point, "look", lambda path: node.bare)
    assert [str(difference) for difference in node.look()] == [f"`mount`: expected `{POINT}`, found not mounted"]
    (node.root / POINT.lstrip("/") / "lost").touch()
    (left,) = [difference for difference in node.look() if not difference.mended]
    assert (left.name, left.found) == ("mount", "not mounted, with 1 entry: `lost` in its place")


@pytest.mark.parametrize("mounted", [True, False])
def test_a_mount_that_the_late_unit_made_first_is_no_error(
    node: Node, monkeypatch: pytest.MonkeyPatch, mounted: bool
) -> None:
    mountinfo = node.root / "proc/self/mountinfo"
    text = mountinfo.read_text()
    mountinfo.write_text("".join(line for line in text.splitlines(keepends=True) if POINT not in line))

    def refuse(argv: list[str], **_: object) -> Result:
        assert argv == ["mount", POINT]
        mountinfo.write_text(text if mounted else "")
        raise CommandError("already mounted")

    monkeypatch.setattr(volume_apply, "run", refuse)
    monkeypatch.setattr(os, "makedirs", lambda *_, **__: None)
    (array,) = read_arrays(str(node.root))
    volume = Volume(wishes()["filesystem"], Ledger(MANIFEST, acting=True), array, str(node.root))
    with nullcontext() if mounted else pytest.raises(CommandError):
        volume.mount()
    assert [difference.name for difference in volume.ledger.differences] == ["mount"]


def one_left(differences: list[Difference]) -> Difference:
    (left,) = [difference for difference in differences if not difference.mended]
    assert left.hint
    return left


@pytest.mark.parametrize(
    ("asked", "name", "expected", "actual"),
    [
        (replace(ASKED, chunk_bytes=2**19), "array.chunk", "512 KiB", "1 MiB"),
        (replace(ASKED, name="other"), "array.name", "other", "nvme_raid0"),
        (
            replace(ASKED, members=(*SERIALS, "NEW"), count=9),
            "array.members",
            "9 members by serial",
            "8 of 8 members; asked for and no member: `NEW`",
        ),
        (
            replace(ASKED, members=(*SERIALS[:7], "NEW")),
            "array.members",
            "8 members by serial",
            "8 of 8 members; asked for and no member: `NEW`; member and not asked for: `LAB1NV8`",
        ),
    ],
)
def test_an_array_that_is_not_as_asked_is_left(node: Node, asked: Asked, name: str, expected: str, actual: str) -> None:
    left = one_left(node.look(asked))
    assert (left.name, left.expected, left.found) == (name, expected, actual)


@pytest.mark.parametrize(
    ("path", "text", "name", "actual"),
    [
        ("sys/devices/virtual/block/md127/md/level", "raid5\n", "array.level", "raid5"),
        ("sys/devices/virtual/block/md127/md/array_state", "broken\n", "array.state", "broken"),
        ("sys/devices/virtual/block/md127/md/array_state", "readonly\n", "array.state", "readonly"),
        ("sys/devices/virtual/block/md127/md/array_state", "suspended\n", "array.state", "suspended"),
    ],
)
def test_an_array_that_became_another_is_left(node: Node, path: str, text: str, name: str, actual: str) -> None:
    (node.root / path).write_text(text)
    left = one_left(node.look())
    assert (left.name, left.found) == (name, actual)


def test_a_lost_drive_is_named_with_the_rest(tmp_path: Path) -> None:
    root = lay_out("lost-drive", tmp_path)
    write(root, "etc/tunetool/node.json", json.dumps(MANIFEST))
    differences = before_changes.overview(
        replace(ASKED, members=()), {"memory": wishes(shm_size="1GiB")["memory"]}, str(root)
    )
    names = {difference.name: difference for difference in differences}
    assert names["array.members"].found == "7 of 8 members; missing: `LAB1NV3`"
    assert "replace_drive" in names["array.members"].hint
    assert {"mdadm.conf", "memory.shm"} <= set(names)


def serials(node: Node) -> dict[str, str]:
    return {drive.name: drive.serial for drive in read_drives(str(node.root))}


def test_an_array_that_waits_is_mended_and_a_member_less_is_not(node: Node) -> None:
    uuid = MANIFEST["array"]["uuid"]
    blocks = {
        f"nvme{slot + 1}n1": Superblock(f"nvme{slot + 1}n1", uuid, "nvme_raid0", "raid0", 8, 2**20, slot)
        for slot in range(8)
    }
    arguments = (MANIFEST, ASKED, [], blocks, serials(node), str(node.root))
    assert [(difference.name, difference.mended) for difference in array_differences(*arguments)] == [
        ("array.assembled", True)
    ]
    del blocks["nvme3n1"]
    assert one_left(array_differences(*arguments)).found == "7 of 8 members; missing: `LAB1NV3`"


@pytest.mark.parametrize("answers", [True, False], ids=["mdadm", "no mdadm"])
def test_an_array_made_anew_is_left_unless_it_is_adopted(node: Node, answers: bool) -> None:
    if not answers:
        node.superblocks = NO_MDADM
    other = json.loads(json.dumps(MANIFEST).replace(MANIFEST["array"]["uuid"], "0:0:0:0").replace(FS_UUID, "11-22"))
    write(node.root, "etc/tunetool/node.json", json.dumps(other))
    left = [difference for difference in node.look() if not difference.mended]
    assert [(difference.name, difference.expected) for difference in left] == [
        ("array.uuid", "0:0:0:0"),
        ("filesystem.uuid", "11-22"),
    ]
    assert all("raid_array_adopt" in difference.hint for difference in left)
    taken = node.look(replace(ASKED, adopt=True), adopt=True)
    assert {difference.name: difference.mended for difference in taken} == {"array.uuid": True, "filesystem.uuid": True}


def test_an_array_that_mdadm_cannot_tell_of_is_unknown(node: Node) -> None:
    (node.root / "sys/block/md127").unlink()
    assert [difference.name for difference in node.look()] == ["array.assembled"]
    node.superblocks = NO_MDADM
    left = one_left(node.look())
    assert (left.name, left.expected) == ("array", f"array `nvme_raid0` UUID {MANIFEST['array']['uuid']}")
    assert left.found == "no answer: `mdadm` is not installed"
    assert "mdadm --examine" in left.hint


def test_no_array_is_known_where_the_drives_carry_none(node: Node) -> None:
    (node.root / "sys/block/md127").unlink()
    node.superblocks = {}
    assert node.look() == []


@pytest.mark.parametrize(
    ("signatures", "name", "actual"),
    [
        ([], "filesystem.type", "nothing"),
        ([replace(SIGNATURE, type="ext4", label=None)], "filesystem.type", f"ext4 UUID {FS_UUID}"),
        ([replace(SIGNATURE, uuid="other")], "filesystem.uuid", "other"),
    ],
)
def test_another_file_system_is_left(node: Node, signatures: list[Signature], name: str, actual: str) -> None:
    node.signatures = signatures
    left = one_left(node.look())
    assert (left.name, left.found) == (name, actual)


@pytest.mark.parametrize(
    ("old", "new", "name", "actual"),
    [
        ("sunit=256    swidth=2048", "sunit=128    swidth=1024", "filesystem.data_stripe_unit", "512 KiB"),
        ("swidth=2048", "swidth=1024", "filesystem.data_stripe_width", "4 members"),
        ("sunit=64 blks", "sunit=8 blks", "filesystem.log_stripe_unit", "32 KiB"),
    ],
)
def test_another_geometry_is_left(node: Node, old: str, new: str, name: str, actual: str) -> None:
    node.xfs_info = XFS_INFO.replace(old, new)
    left = one_left(node.look())
    assert (left.name, left.found) == (name, actual)


def test_an_option_only_for_mount_names_the_command(node: Node) -> None:
    left = one_left(node.look(mount_options=["noatime", "logbufs=4", "logbsize=256k"]))
    assert (left.name, left.expected, left.found) == ("mount.options", "logbufs=4", "logbufs=8")
    assert f"`umount {POINT}`" in left.hint


def test_one_look_tells_everything_and_a_stopped_run_mends_none(node: Node) -> None:
    node.edit("proc/self/mountinfo", "noatime", "relatime")
    node.edit("sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages", "64", "0")
    drift = Drifted(node.look(replace(ASKED, chunk_bytes=2**19)))
    assert [difference.mended for difference in drift.differences] == [False] * 3
    assert str(drift).splitlines()[1:] == [
        "`array.chunk`: expected 512 KiB, found 1 MiB. hint: save the data, `ansible-playbook tunetool.node.teardown`, then `tunetool provision`;"
        " or ask for what is there",
        "`mount.options`: expected noatime, found relatime. hint: it is mended by the next run that nothing else stops",
        "`memory.hugepages[2MiB]`: expected 64 pages, found 0 pages. hint: it is mended by the next run that nothing"
        " else stops",
    ]


def test_what_cannot_be_asked_is_told_and_hides_nothing(node: Node) -> None:
    by_name = {
        difference.name: difference
        for difference in node.look(hugepages=[{"size": "3MiB", "count": 1, "numa_node": None}])
    }
    assert "are not offered" in by_name["memory"].found
    assert not by_name["memory"].mended
    write(node.root, "etc/fstab", FSTAB + FSTAB)
    names = {difference.name: difference.mended for difference in node.look()}
    assert names == {f"fstab[{POINT}]": False, "fstab[/dev/shm]": False}


def mend_memory(node: Node, **changes: Any) -> tuple[list[Difference], list[Difference]]:
    """The differences that a run mended, and those of a second run."""
    pages = node.root / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages"
    manifest = json.loads((node.root / "etc/tunetool/node.json").read_text())
    rounds = []
    for _ in range(2):
        _, done = settle(
            lambda ledger: MemoryJob(wishes(**changes)["memory"], ledger, str(node.root)).hugepages(), manifest, False
        )
        rounds.append(done.differences)
        assert pages.read_text().strip() in ("0", "32", "64")
    return rounds[0], rounds[1]


def test_a_pool_that_is_no_longer_asked_for_is_given_back(node: Node) -> None:
    first, second = mend_memory(node, hugepages=[])
    assert {difference.name: (difference.expected, difference.mended) for difference in first} == {
        "memory.hugepages.boot": ("nothing", True),
        "memory.hugepages[2MiB]": ("0 pages", True),
    }
    assert (node.root / "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages").read_text() == "0"
    assert second == []


POOLS = st.lists(
    st.builds(HugePages, st.sampled_from([2048, 1048576]), st.integers(1, 9), st.sampled_from([None, 0, 1])),
    max_size=4,
    unique_by=lambda pool: pool.path,
)


@given(POOLS, POOLS)
def test_given_back_is_what_nobody_asks_for(before: list[HugePages], asked: list[HugePages]) -> None:
    assert parse_tmpfiles(render_tmpfiles(before)) == before
    left = pools_to_give_back(before, asked, [0, 1])
    assert all(pool.count == 0 for pool in left)
    assert not {pool.path for pool in left} & {pool.path for pool in asked}
    for size in {pool.size_kib for pool in before} - {pool.size_kib for pool in asked}:
        assert {pool.path for pool in before if pool.size_kib == size} <= {pool.path for pool in left}
    # The pool over all nodes is not emptied for a requested pool of a node, nor the other way round.
    for size in {pool.size_kib for pool in asked}:
        whole = {pool.numa_node for pool in asked if pool.size_kib == size}
        emptied = {pool.numa_node for pool in left if pool.size_kib == size}
        assert not emptied or (None not in whole and None not in emptied)


@given(
    st.lists(st.sampled_from(["noatime", "relatime", "nodev", "ro", "logbsize=64k", "inode32", "discard"]), unique=True)
)
def test_a_remount_never_carries_what_xfs_would_ignore(asked: list[str]) -> None:
    shown = ["rw", "relatime", "nosuid", "logbsize=256k", "inode64"]
    assert unwanted(asked, shown) == {"nosuid": "suid"}
    assert not any(at_mount_only(option) for option in unwanted(asked, shown).values())
    assert {option for option in asked if at_mount_only(option)} == {"logbsize=64k", "discard"} & set(asked)
    assert like(["logbsize=64k", "noatime", "inode32"], shown) == "logbsize=256k,relatime,inode64"


@pytest.fixture
def real_xfs(tmp_path: Path) -> Iterator[tuple[Array, Path]]:
    """A real XFS on a loop device, mounted with other options and another label than requested."""
    need_program("mkfs.xfs", "losetup", "mount")
    image, point = tmp_path / "image", tmp_path / "point"
    point.mkdir()
    with image.open("w") as stream:
        stream.truncate(4 * 2**30)
    run(["mkfs.xfs", "-q", "-L", "other", "-d", "su=1m,sw=8", "-l", "su=256k", str(image)])
    try:
        device = run(["losetup", "--find", "--show", str(image)]).stdout.strip()
    except CommandError as error:
        pytest.skip(f"needs root and loop devices: {error}")
    try:
        run(["mount", "-o", "relatime,nodev,logbufs=8,logbsize=256k", device, str(point)])
    except CommandError as error:
        run(["losetup", "--detach", device])
        pytest.skip(f"needs XFS: {error}")
    try:
        number = Path("/sys/block", Path(device).name, "dev").read_text().strip()
        yield Array(Path(device).name, "0", "nvme_raid0", "raid0", 2**20, 8, "clean", (), number), point
    finally:
        run(["umount", str(point)])
        run(["losetup", "--detach", device])


def test_a_real_mount_takes_options_and_label_and_keeps_its_data(real_xfs: tuple[Array, Path]) -> None:
    array, point = real_xfs
    (point / "file").write_text("precious")
    wanted = wishes(mount_point=str(point))["filesystem"]

    def work(ledger: Ledger) -> None:
        volume = Volume(wanted, ledger, array)
        volume.mount()
        volume.label()

    rounds = [[str(each) for each in settle(work, MANIFEST, check)[1].differences] for check in (True, False, False)]
    expected = [
        "`mount.options`: expected noatime,dev, found relatime,nodev",
        "`filesystem.label`: expected `nvme_raid0`, found `other`",
    ]
    assert rounds == [expected, expected, []]
    wanted["project_quota"] = True
    with pytest.raises(Drifted) as caught:
        settle(work, MANIFEST, False)
    (quota,) = caught.value.differences
    assert (quota.expected, quota.found, quota.mended) == ("prjquota", "none of them", False)
    assert "takes it only when it is mounted" in quota.hint
    wanted["project_quota"] = False
    wanted["mount_options"] = ["relatime", "logbufs=4", "logbsize=256k"]
    with pytest.raises(Drifted) as caught:
        settle(work, MANIFEST, False)
    assert [(each.expected, each.found) for each in caught.value.differences] == [
        ("logbufs=4", "logbufs=8"),
        ("relatime", "noatime"),
    ]
    (mount,) = [each for each in read_mounts() if each.mount_point == str(point)]
    assert {"noatime", "logbufs=8"} <= set(mount.options)
    assert (point / "file").read_text() == "precious"


# From here on: a built node is never built again.


@pytest.mark.parametrize("acting", [False, True])
@pytest.mark.parametrize("kind", [None, "ext4", "xfs"])
@pytest.mark.parametrize("damaged", [False, True], ids=["manifest", "damaged manifest"])
def test_a_built_node_never_gets_a_file_system(node: Node, acting: bool, kind: str | None, damaged: bool) -> None:
    node.signatures = [replace(SIGNATURE, type=kind)] if kind else []
    if damaged:
        write(node.root, "etc/tunetool/node.json", "{")
    (array,) = read_arrays(str(node.root))
    ledger = Ledger(None if damaged else MANIFEST, acting)
    try:
        Volume(wishes()["filesystem"], ledger, array, str(node.root)).make()
    except Refusal:
        assert damaged
    assert not [argv for argv in node.ran if "mkfs" in argv[0]]


def raid_array() -> Any:
    pytest.importorskip("ansible", reason="Ansible's control side needs Python 3.11")
    collections = str(ROOT / ".ansible/collections")
    if collections not in sys.path:
        sys.path.insert(0, collections)
    return importlib.import_module("ansible_collections.tunetool.node.plugins.modules.raid_array")


class Ended(Exception):
    """The module's fail_json."""


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30)
@given(
    lost=st.sets(st.integers(0, 7), max_size=7),
    changes=st.fixed_dictionaries(
        {},
        optional={
            "uuid": st.just("0:0:0:0"),
            "chunk_bytes": st.just(2**19),
            "name": st.just("x"),
            "raid_disks": st.just(9),
        },
    ),
    assembled=st.booleans(),
    adopt=st.booleans(),
)
def test_a_built_array_never_leads_to_mdadm_create(
    node: Node, monkeypatch: pytest.MonkeyPatch, lost: set[int], changes: dict[str, Any], assembled: bool, adopt: bool
) -> None:
    module = raid_array()
    drives = [drive for drive in read_drives(str(node.root)) if drive.serial in SERIALS]
    block = Superblock("", MANIFEST["array"]["uuid"], "nvme_raid0", "raid0", 8, 2**20, 0)
    blocks = {
        drive.name: replace(block, device=drive.name, role=slot, **changes)
        for slot, drive in enumerate(drives)
        if slot not in lost
    }
    made: list[str] = []

    def fail(msg: str, **_: object) -> None:
        raise Ended(msg)

    for name in ("create", "wipe", "forget_volume"):
        monkeypatch.setattr(module, name, lambda *_, name=name: made.append(name))
    monkeypatch.setattr(module, "assemble", lambda *_: None)
    monkeypatch.setattr(module, "examine", lambda names: blocks)
    monkeypatch.setattr(module, "read_arrays", lambda: read_arrays(str(node.root)) if assembled else [])
    monkeypatch.setattr(module, "read_drives", lambda: drives)
    monkeypatch.setattr(module, "members_by_serial", lambda serials: drives)
    monkeypatch.setattr(module, "settled", lambda uuid: None)
    monkeypatch.setattr(module, "built_manifest", lambda: MANIFEST)
    array = {"name": "nvme_raid0", "level": "raid0", "chunk": "1MiB"}
    params = {**array, "serials": list(SERIALS), "wipes": [], "adopt": adopt}
    fake = SimpleNamespace(
        params=params,
        check_mode=False,
        fail_json=fail,
        get_bin_path=lambda name: name,
        change_begins=lambda: None,
    )
    with pytest.raises((Ended, module.Drifted, module.Refusal)) as caught:
        module.converge(fake)
    assert made == []
    if lost or set(changes) - {"uuid", "name"}:
        assert "`array" in str(caught.value)


@pytest.mark.parametrize(("manifest", "made"), [(MANIFEST, False), (None, True)])
def test_an_array_that_was_stopped_and_started_is_not_made(
    node: Node, monkeypatch: pytest.MonkeyPatch, manifest: dict[str, Any] | None, made: bool
) -> None:
    module = raid_array()
    drives = [drive for drive in read_drives(str(node.root)) if drive.serial in SERIALS]
    (array,) = read_arrays(str(node.root))
    block = Superblock("", MANIFEST["array"]["uuid"], "nvme_raid0", "raid0", 8, 2**20, 0)
    blocks = {drive.name: replace(block, device=drive.name, role=slot) for slot, drive in enumerate(drives)}
    for name, answer in {
        "assemble": None,
        "examine": blocks,
        "read_arrays": [],
        "read_drives": drives,
        "members_by_serial": drives,
        "settled": array,
        "built_manifest": manifest,
        "remember": [],
        "refuse_unless_as_wanted": None,
    }.items():
        monkeypatch.setattr(module, name, lambda *_, answer=answer: answer)
    params = {"name": "nvme_raid0", "level": "raid0", "chunk": "1MiB", "serials": list(SERIALS), "wipes": []}
    fake = SimpleNamespace(
        params=dict(params, adopt=manifest is None),
        check_mode=False,
        get_bin_path=lambda name: name,
        change_begins=lambda: None,
    )
    result = module.converge(fake)
    assert (result["action"], result["changed"], result["made"]) == ("assemble", True, made)


# A program's name as an argument, or in a task's command line.
MAKES = r"""["']mkfs(\.\w+)?["']|["']--create["']|^\s*(argv|cmd|[\w.]*(command|shell)):.*(mkfs|--create)"""
MAKERS = {"create": {"modules/raid_array.py"}, "mkfs": {"volume/apply.py"}}


def test_only_two_places_make_anything_and_each_is_guarded() -> None:
    """A third module of this kind must consider built nodes, and needs an entry here and a test like those above."""
    for maker, callers in MAKERS.items():
        makers = set()
        for path in [*ROOT.glob("plugins/**/*.py"), *ROOT.glob("roles/**/*.py")]:
            for call in ast.walk(ast.parse(path.read_text())):
                if isinstance(call, ast.Call) and maker in (vars(call.func).get("id"), vars(call.func).get("attr")):
                    makers.add(f"{path.parent.name}/{path.name}")
        assert makers == callers
    for path in [*ROOT.glob("plugins/**/*.py"), *ROOT.glob("roles/**/*.yml"), *ROOT.glob("playbooks/*.yml")]:
        if f"{path.parent.name}/{path.name}" not in ("array/create.py", "machine/file_system.py"):
            assert not re.search(MAKES, path.read_text(), re.MULTILINE), path


def test_nothing_is_rescued_and_no_error_is_ignored() -> None:
    paths = [*ROOT.glob("roles/**/*.y*ml"), *ROOT.glob("playbooks/**/*.y*ml"), ROOT / "site.yml"]
    assert len(paths) > 20
    for path in paths:
        assert not re.search(r"^\s*-?\s*(rescue|ignore_errors|ignore_unreachable)\s*:", path.read_text(), re.M), path
