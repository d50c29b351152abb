"""The stack of devices under a directory, on trees laid out like sysfs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunetool.measure.evidence import obstacles
from tunetool.node.machine.block_stack import Counters, CountersChanged, difference, read_counters, read_stack, snapshot

STAT = "100 0 2048 50 10 0 4096 20 0 60 70 0 0 0 0 3 1\n"


def disk(root: Path, name: str, number: str, where: str, **files: str) -> Path:
    """A block device: its directory under sys/devices, and the links that the kernel keeps to it."""
    base = root / "sys/devices" / where / name
    base.mkdir(parents=True)
    contents = {"dev": number, "stat": STAT, "queue/iostats": "1", **files}
    for path, text in contents.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(text + "\n" if not text.endswith("\n") else text)
    for link in (f"sys/dev/block/{number}", f"sys/class/block/{name}", f"sys/block/{name}"):
        link_path = root / link
        link_path.parent.mkdir(parents=True, exist_ok=True)
        if not (link.startswith("sys/block") and "partition" in files):
            link_path.symlink_to(os.path.relpath(base, link_path.parent))
    return base


def nvme(root: Path, index: int, serial: str | None = None) -> Path:
    return disk(
        root,
        f"nvme{index}n1",
        f"259:{index}",
        f"pci0000:00/nvme{index}",
        **{"device/serial": serial or f"SER{index:03}"},
    )


def below(base: Path, *slaves: Path) -> None:
    (base / "slaves").mkdir()
    for slave in slaves:
        (base / "slaves" / slave.name).symlink_to(os.path.relpath(slave, base / "slaves"))


def mounts(root: Path, *lines: str) -> None:
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    (root / "proc/self/mountinfo").write_text("".join(line + "\n" for line in lines))


ROOT_MOUNT = "1 0 8:2 / / rw - ext4 /dev/sda2 rw"


def array(root: Path, members: int = 8, level: str = "raid0") -> Path:
    md = disk(root, "md127", "9:127", "virtual/block", **{"md/level": level})
    below(md, *(nvme(root, index) for index in range(members)))
    mounts(root, ROOT_MOUNT, "2 1 9:127 / /mnt/scratch rw,noatime - xfs /dev/md127 rw")
    return md


def test_array_of_eight(tmp_path: Path) -> None:
    array(tmp_path)
    stack = read_stack("/mnt/scratch/some/dir", str(tmp_path))
    assert stack.medium == "md RAID0 (8 x nvme)"
    assert stack.device == "md127"
    assert [leaf.serial for leaf in stack.leaves] == [f"SER{index:03}" for index in range(8)]
    assert stack.counts == tuple(f"nvme{index}n1" for index in range(8))
    assert not stack.redundant


def test_partition_leads_to_its_disk(tmp_path: Path) -> None:
    disk(tmp_path, "sda", "8:0", "pci/host0/block", serial="S1")
    disk(tmp_path, "sda2", "8:2", "pci/host0/block/sda", partition="2")
    mounts(tmp_path, ROOT_MOUNT)
    stack = read_stack("/home", str(tmp_path))
    assert (stack.medium, [leaf.name for leaf in stack.leaves]) == ("disk", ["sda"])
    assert stack.leaves[0].serial == "S1"


def test_array_over_partitions(tmp_path: Path) -> None:
    md = disk(tmp_path, "md0", "9:0", "virtual/block", **{"md/level": "raid0"})
    parts = []
    for index in range(2):
        nvme(tmp_path, index)
        where = f"pci0000:00/nvme{index}/nvme{index}n1"
        parts.append(disk(tmp_path, f"nvme{index}n1p1", f"259:{10 + index}", where, partition="1"))
    below(md, *parts)
    mounts(tmp_path, "1 0 9:0 / / rw - xfs /dev/md0 rw")
    stack = read_stack("/", str(tmp_path))
    assert stack.counts == ("nvme0n1", "nvme1n1")


def test_mirror_counts_at_the_top(tmp_path: Path) -> None:
    array(tmp_path, members=2, level="raid1")
    stack = read_stack("/mnt/scratch", str(tmp_path))
    assert stack.medium == "md RAID1 (2 x nvme)"
    assert stack.counts == ("md127",)
    assert set(snapshot(stack, str(tmp_path))) == {"md127", "nvme0n1", "nvme1n1"}


def test_multipath_counts_its_hidden_paths(tmp_path: Path) -> None:
    nvme(tmp_path, 0)
    for path in (0, 1):
        hidden = tmp_path / f"sys/block/nvme0c{path}n1"
        (hidden / "queue").mkdir(parents=True)
        (hidden / "stat").write_text(STAT)
        (hidden / "queue/iostats").write_text("1\n")
    mounts(tmp_path, "1 0 259:0 / / rw - xfs /dev/nvme0n1 rw")
    stack = read_stack("/", str(tmp_path))
    assert stack.medium == "nvme disk"
    assert stack.leaves[0].counted_by == ("nvme0c0n1", "nvme0c1n1")
    assert snapshot(stack, str(tmp_path))["nvme0n1"].read_sectors == 2 * 2048


@pytest.mark.parametrize("kind", ["tmpfs", "overlay", "nfs4"])
def test_no_device(tmp_path: Path, kind: str) -> None:
    mounts(tmp_path, ROOT_MOUNT, f"2 1 0:42 / /mnt/x rw - {kind} {kind} rw")
    stack = read_stack("/mnt/x/y", str(tmp_path))
    assert (stack.medium, stack.device, stack.leaves, stack.counts) == (kind, None, (), ())
    assert snapshot(stack, str(tmp_path)) == {}


def btrfs(root: Path, *devices: str, profile: str = "single") -> None:
    """The file system's directory in sysfs, beside another one's."""
    for uuid, names in (("11-22", devices), ("33-44", ("sdz",))):
        for name in names:
            link = root / "sys/fs/btrfs" / uuid / "devices" / name
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"../../../../block/{name}")
        data = root / "sys/fs/btrfs" / uuid / "allocation/data"
        (data / profile).mkdir(parents=True)
        (data / "total_bytes").write_text("1\n")


def test_btrfs_names_its_device_in_the_source(tmp_path: Path) -> None:
    nvme(tmp_path, 3)
    btrfs(tmp_path, "nvme3n1")
    mounts(tmp_path, "1 0 0:30 / / rw - btrfs /dev/nvme3n1 rw")
    stack = read_stack("/", str(tmp_path))
    assert (stack.medium, stack.counts, stack.device) == ("nvme disk", ("nvme3n1",), "nvme3n1")


@pytest.mark.parametrize(("profile", "medium"), [("single", "btrfs (3 x nvme)"), ("raid0", "btrfs RAID0 (3 x nvme)")])
def test_each_member_of_a_btrfs_counts(tmp_path: Path, profile: str, medium: str) -> None:
    for index in range(3):
        nvme(tmp_path, index)
    disk(tmp_path, "nvme2n1p1", "259:12", "pci0000:00/nvme2/nvme2n1", partition="1")
    btrfs(tmp_path, "nvme0n1", "nvme1n1", "nvme2n1p1", profile=profile)
    mounts(tmp_path, "1 0 0:30 / / rw - btrfs /dev/nvme1n1 rw")
    stack = read_stack("/", str(tmp_path))
    assert (stack.medium, sorted(stack.counts)) == (medium, ["nvme0n1", "nvme1n1", "nvme2n1"])
    assert sorted(snapshot(stack, str(tmp_path))) == ["nvme0n1", "nvme1n1", "nvme2n1"]
    assert obstacles(stack) == []


@pytest.mark.parametrize(("profile", "members"), [("raid1", 2), ("raid5", 3), ("dup", 1)])
def test_a_btrfs_that_writes_all_twice_counts_nothing(tmp_path: Path, profile: str, members: int) -> None:
    names = [f"nvme{index}n1" for index in range(members)]
    for index in range(members):
        nvme(tmp_path, index)
    btrfs(tmp_path, *names, profile=profile)
    mounts(tmp_path, "1 0 0:30 / / rw - btrfs /dev/nvme0n1 rw")
    stack = read_stack("/", str(tmp_path))
    assert (stack.counts, [leaf.name for leaf in stack.leaves]) == ((), names)
    said = f"lies on btrfs {profile.upper()} ({members} x nvme), which has no block device whose counters"
    assert said in obstacles(stack)[0]


def test_a_btrfs_whose_members_are_not_known_counts_nothing(tmp_path: Path) -> None:
    nvme(tmp_path, 0)
    mounts(tmp_path, "1 0 0:30 / / rw - btrfs /dev/nvme0n1 rw")
    stack = read_stack("/", str(tmp_path))
    assert stack.counts == ()
    assert "lies on btrfs on drives that are not known" in obstacles(stack)[0]


@pytest.mark.parametrize(
    ("options", "replicas", "counts"),
    [
        ("rw", "1", ("nvme0n1", "nvme1n1")),
        ("rw", None, ("nvme0n1", "nvme1n1")),
        ("rw", "2", ()),
        ("rw,replicas=2", None, ()),
        ("rw,metadata_replicas=2", None, ("nvme0n1", "nvme1n1")),
    ],
)
def test_each_member_of_a_bcachefs_counts(
    tmp_path: Path, options: str, replicas: str | None, counts: tuple[str, ...]
) -> None:
    for index in range(2):
        member = tmp_path / f"sys/fs/bcachefs/55-66/dev-{index}"
        member.mkdir(parents=True)
        (member / "block").symlink_to(nvme(tmp_path, index))
    if replicas is not None:
        (tmp_path / "sys/fs/bcachefs/55-66/options").mkdir()
        (tmp_path / "sys/fs/bcachefs/55-66/options/data_replicas").write_text(replicas + "\n")
    mounts(tmp_path, f"1 0 0:30 / / rw - bcachefs /dev/nvme0n1:/dev/nvme1n1 {options}")
    stack = read_stack("/", str(tmp_path))
    assert (stack.medium, stack.counts) == ("bcachefs (2 x nvme)", counts)


def test_a_bcachefs_with_a_member_that_is_gone_counts_nothing(tmp_path: Path) -> None:
    nvme(tmp_path, 0)
    mounts(tmp_path, "1 0 0:30 / / rw - bcachefs /dev/nvme0n1:/dev/nvme1n1 rw")
    assert read_stack("/", str(tmp_path)).counts == ()


def test_the_real_time_device_of_an_xfs_counts_too(tmp_path: Path) -> None:
    for index in range(3):
        nvme(tmp_path, index)
    mounts(tmp_path, "1 0 259:0 / / rw - xfs /dev/nvme0n1 rw,rtdev=/dev/nvme1n1,logdev=/dev/nvme2n1")
    stack = read_stack("/", str(tmp_path))
    assert (stack.medium, stack.counts) == ("xfs (3 x nvme)", ("nvme0n1", "nvme1n1", "nvme2n1"))


@pytest.mark.parametrize(
    ("root", "image", "medium", "counts"),
    [
        ("259:0 / / rw - xfs /dev/nvme0n1 rw", "/var/image", "loop device on nvme disk", ("nvme0n1",)),
        ("0:1 / / rw - tmpfs tmpfs rw", "/image", "loop device on tmpfs", ()),
    ],
    ids=["disk", "memory"],
)
def test_loop_device_is_where_its_file_lies(
    tmp_path: Path, root: str, image: str, medium: str, counts: tuple[str, ...]
) -> None:
    nvme(tmp_path, 0)
    disk(tmp_path, "loop0", "7:0", "virtual/block", **{"loop/backing_file": image})
    mounts(tmp_path, f"1 0 {root}", "2 1 7:0 / /mnt rw - xfs /dev/loop0 rw")
    stack = read_stack("/mnt", str(tmp_path))
    assert (stack.medium, stack.counts, stack.in_memory) == (medium, counts, not counts)


def test_compressed_memory_is_no_disk(tmp_path: Path) -> None:
    disk(tmp_path, "zram0", "253:0", "virtual/block")
    mounts(tmp_path, "1 0 253:0 / / rw - ext4 /dev/zram0 rw")
    assert read_stack("/", str(tmp_path)).in_memory


@pytest.mark.parametrize(
    ("vendor", "model", "memory"),
    [
        ("Linux", "scsi_debug", True),
        ("LIO-ORG", "RAMDISK-MCP", True),
        ("LIO-ORG", "block", False),
        ("ATA", "scsi_debug", False),
    ],
)
def test_a_scsi_disk_in_memory_is_known_by_vendor_and_model(
    tmp_path: Path, vendor: str, model: str, memory: bool
) -> None:
    identity = {"device/vendor": f"{vendor:8}", "device/model": f"{model:16}"}
    base = disk(tmp_path, "sdb", "8:16", "platform/host2/block", **identity)
    volume = disk(tmp_path, "dm-0", "253:0", "virtual/block", **{"dm/uuid": "LVM-abc"})
    below(volume, base)
    mounts(tmp_path, "1 0 253:0 / / rw - xfs /dev/mapper/vg-lv rw")
    stack = read_stack("/", str(tmp_path))
    assert stack.in_memory is memory
    assert any("in memory" in line for line in obstacles(stack)) is memory


NQN = "nqn.2026-11.test:loop"


def over_loop(root: Path, **more: str) -> None:
    """An NVMe drive that the node's own target offers, with the file system at `/`."""
    identity = {"device/transport": "loop", "device/subsysnqn": NQN, "nsid": "1", "device/serial": "L0"}
    disk(root, "nvme9n1", "259:9", "virtual/nvme-fabrics/ctl/nvme9", **identity, **more)
    mounts(root, "1 0 259:0 / / rw - xfs /dev/nvme0n1 rw", "2 1 259:9 / /mnt rw - xfs /dev/nvme9n1 rw")


def offers(root: Path, path: str) -> None:
    namespace = root / f"sys/kernel/config/nvmet/subsystems/{NQN}/namespaces/1"
    namespace.mkdir(parents=True)
    (namespace / "device_path").write_text(path + "\n")


def test_nvme_over_loop_is_what_lies_behind_it(tmp_path: Path) -> None:
    nvme(tmp_path, 0)
    over_loop(tmp_path)
    offers(tmp_path, "/dev/nvme0n1")
    stack = read_stack("/mnt", str(tmp_path))
    assert (stack.medium, stack.counts, stack.in_memory) == ("nvme over loop on nvme disk", ("nvme0n1",), False)


@pytest.mark.parametrize("path", ["/dev/ram0", "/dev/shm/image", None], ids=["RAM disk", "file in memory", "unknown"])
def test_nvme_over_loop_on_memory_or_the_unknown_is_no_disk(tmp_path: Path, path: str | None) -> None:
    nvme(tmp_path, 0)
    disk(tmp_path, "ram0", "1:0", "virtual/block")
    over_loop(tmp_path)
    with (tmp_path / "proc/self/mountinfo").open("a") as stream:
        stream.write("3 1 0:9 / /dev/shm rw - tmpfs tmpfs rw\n")
    if path is not None:
        offers(tmp_path, path)
    assert read_stack("/mnt", str(tmp_path)).in_memory


def test_iostats_off_is_seen(tmp_path: Path) -> None:
    base = nvme(tmp_path, 0)
    (base / "queue/iostats").write_text("0\n")
    mounts(tmp_path, "1 0 259:0 / / rw - xfs /dev/nvme0n1 rw")
    assert not read_stack("/", str(tmp_path)).leaves[0].iostats


@pytest.mark.parametrize(("level", "silent"), [("raid0", ("nvme2n1",)), ("raid1", ("md127",))])
def test_only_what_proves_must_count(tmp_path: Path, level: str, silent: tuple[str, ...]) -> None:
    (array(tmp_path, level=level) / "queue/iostats").write_text("0\n")
    assert read_stack("/mnt/scratch", str(tmp_path)).silent == (() if level == "raid0" else silent)
    (tmp_path / "sys/block/nvme2n1/queue/iostats").write_text("0\n")
    assert read_stack("/mnt/scratch", str(tmp_path)).silent == silent


def test_counters_and_their_difference(tmp_path: Path) -> None:
    base = nvme(tmp_path, 0)
    before = {"nvme0n1": read_counters("nvme0n1", str(tmp_path))}
    (base / "stat").write_text("110 0 4096 150 10 0 4096 20 0 90 70\n")
    change = difference({"nvme0n1": read_counters("nvme0n1", str(tmp_path))}, before)["nvme0n1"]
    assert change == Counters(10, 2048, 100, 0, 0, 0, 30)
    assert change.moved_bytes("read") == 2**20
    assert change.service_seconds("read") == pytest.approx(0.01)
    assert change.service_seconds("write") is None


def test_milliseconds_wrap_at_32_bits() -> None:
    before = Counters(0, 0, 2**32 - 10, 0, 0, 0, 0)
    assert Counters(1, 8, 5, 0, 0, 0, 0).since(before).read_ms == 15


def test_a_drive_that_was_replaced_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CountersChanged):
        Counters(0, 0, 0, 0, 0, 0, 0).since(Counters(5, 40, 1, 0, 0, 0, 0))
    with pytest.raises(CountersChanged):
        read_counters("nvme9n1", str(tmp_path))
    with pytest.raises(CountersChanged):
        difference({}, {"nvme0n1": Counters(0, 0, 0, 0, 0, 0, 0)})
