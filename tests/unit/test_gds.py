"""GPUDirect Storage: a row for each fact that changes the decision, and the reader on trees made by hand."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from machines import RECORDED, lay_out
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.commands import CommandError
from tunetool.node.common.drift import Ledger
from tunetool.node.common.refusal import Refusal
from tunetool.node.gds import requirements
from tunetool.node.gds.apply import CONFIG_HEADER, SAVED, GdsJob, early_refusals, traces
from tunetool.node.gds.cufile_check import check_config
from tunetool.node.gds.facts import GdsFacts, read_gds_facts
from tunetool.node.gds.md_udev_override import PATH as RULE
from tunetool.node.gds.md_udev_override import distributions_rule, outdated, wanted_override
from tunetool.node.gds.path_choice import MODES, Impossible, choose, current
from tunetool.node.gds.requirements import ANY, DIRECT, RULES
from tunetool.node.machine.pci_tree import redirecting_ports, redirects

READY = GdsFacts(
    kernel="6.8.0-1051-nvidia",
    architecture="x86_64",
    distribution="ubuntu 24.04",
    gpus=("0000:1b:00.0",),
    driver="580.95.05",
    driver_open=True,
    libcufile="1.16.0",
    nvfs_loaded=True,
    nvfs_installed=True,
    nvfs_version="2.28",
    nvfs_source="2.28.4",
    nvfs_built_for="580.95.05",
    nvfs_devices=True,
    nvme_patched=True,
    nvme_registered=True,
    nvme_multipath=False,
    mount_point="/mnt/nvme_raid0",
    fs_type="xfs",
    device="md127",
    md_levels=("raid0",),
    drives=("nvme1n1", "nvme2n1"),
    p2pdma_kernel=True,
    p2pdma_driver=False,
    md_members_in_udev=True,
    md_rule="/usr/lib/udev/rules.d/63-md-raid-arrays.rules",
    md_rule_lists_members=True,
)
"""A node on which nvidia-fs works; its kernel is too old for P2PDMA through md."""

PEER: dict[str, Any] = {
    "kernel": "7.2.1",
    "nvfs_loaded": False,
    "nvfs_installed": False,
    "nvfs_source": None,
    "nvfs_built_for": None,
    "nvfs_devices": False,
    "nvme_patched": False,
    "nvme_registered": None,
    "p2pdma_device": True,
    "p2pdma_driver": True,
    "config_path": "/etc/cufile.json",
    "config_valid": True,
    "config_p2pdma": True,
}
"""Changes that make it a node on which only the kernel's P2PDMA works."""

COLD: dict[str, Any] = {"nvfs_loaded": False, "nvfs_devices": False, "nvme_registered": None}
"""nvidia-fs is not loaded."""

# What is otherwise than on a ready node; the path that it blocks, by which blocker, whether the role can cure it; what
# is chosen, and what I/O takes now.
NVFS_ROWS: list[tuple[dict[str, Any], str, bool, str, str]] = [
    ({"gpus": ()}, "gpu", False, "off", "off"),
    ({"driver": None, "driver_open": None}, "driver", False, "off", "off"),
    ({"driver_open": False}, "driver.open", False, "compat", "compat"),
    ({"driver_open": None}, "driver.open", False, "compat", "compat"),
    ({"libcufile": None}, "libcufile", False, "off", "off"),
    ({"libcufile": None, "installable": True}, "libcufile", True, "nvidia-fs", "off"),
    ({"udev": False}, "udev", False, "off", "off"),
    ({"config_path": "/etc/cufile.json", "config_valid": False}, "cufile.json", True, "nvidia-fs", "off"),
    ({"device": None, "fs_type": "tmpfs"}, "volume", False, "compat", "compat"),
    ({"fs_type": "btrfs"}, "filesystem", False, "compat", "compat"),
    ({"fs_type": "ext4"}, "filesystem.journal", False, "compat", "compat"),
    ({"dm": ("dm-0",)}, "device_mapper", False, "compat", "compat"),
    ({"md_levels": ("raid5",)}, "md.level", False, "compat", "compat"),
    ({"md_members_in_udev": False, "md_rule_lists_members": False}, "md.udev", True, "nvidia-fs", "compat"),
    ({"md_members_in_udev": False}, "md.udev", True, "nvidia-fs", "compat"),
    ({"md_members_in_udev": False, "md_rule_lists_members": False, "md_rule": None}, "md.udev", False, *["compat"] * 2),
    ({"md_members_in_udev": None}, "md.udev", False, "compat", "compat"),
    ({"drives_nvme": False}, "drives", False, "compat", "compat"),
    ({**COLD, "nvfs_installed": False, "nvfs_source": None}, "nvidia_fs.installed", False, "compat", "compat"),
    (
        {**COLD, "nvfs_installed": False, "nvfs_source": None, "installable": True},
        "nvidia_fs.installed",
        True,
        "nvidia-fs",
        "compat",
    ),
    ({**COLD, "nvfs_installed": False}, "nvidia_fs.installed", True, "nvidia-fs", "compat"),
    (COLD, "nvidia_fs.loaded", True, "nvidia-fs", "compat"),
    ({**COLD, "secure_boot": True}, "nvidia_fs.secure_boot", False, "compat", "compat"),
    ({**COLD, "secure_boot": None}, "nvidia_fs.secure_boot", False, "compat", "compat"),
    ({"nvfs_built_for": "570.86.15"}, "nvidia_fs.build", True, "nvidia-fs", "compat"),
    ({"nvfs_built_for": "570.86.15", "nvfs_source": None}, "nvidia_fs.build", False, "compat", "compat"),
    ({"nvfs_stale": True}, "nvidia_fs.build", True, "nvidia-fs", "compat"),
    ({"nvfs_devices": False}, "nvidia_fs.devices", True, "nvidia-fs", "compat"),
    ({"nvfs_devices": False, "container": True}, "nvidia_fs.devices", False, "compat", "compat"),
    ({"nvme_patched": False, "nvme_registered": False}, "nvme.hooks", False, "compat", "compat"),
    ({"nvme_patched": None, "nvme_registered": None}, "nvme.hooks", False, "compat", "compat"),
    (
        {"nvme_patched": False, "nvme_registered": False, "nvme_patched_on_disk": True},
        "nvme.hooks",
        True,
        "nvidia-fs",
        "compat",
    ),
    ({"nvme_registered": False}, "nvme.registered", True, "nvidia-fs", "compat"),
    ({"iommu": "translated"}, "iommu", False, "compat", "compat"),
    ({"iommu": None}, "iommu", False, "compat", "compat"),
]

# The same for the kernel's P2PDMA.
PEER_ROWS: list[tuple[dict[str, Any], str, bool, str, str]] = [
    ({"driver": "550.54.15"}, "driver.version", False, "compat", "compat"),
    ({"libcufile": "1.11.1.6"}, "libcufile.version", False, "compat", "compat"),
    ({"libcufile": "1.15.1"}, "libcufile.version", False, "compat", "compat"),
    ({"p2pdma_kernel": False, "p2pdma_device": False}, "p2pdma.kernel", False, "compat", "compat"),
    ({"p2pdma_kernel": None, "p2pdma_device": None}, "p2pdma.kernel", False, "compat", "compat"),
    ({"kernel": "5.14.0-503.el9"}, "p2pdma.kernel", False, "compat", "compat"),
    ({"p2pdma_device": None, "kernel": "6.18.0"}, "p2pdma.device", False, "compat", "compat"),
    ({"p2pdma_device": False, "md_levels": ()}, "p2pdma.device", False, "compat", "compat"),
    ({"p2pdma_driver": False}, "p2pdma.driver", False, "compat", "compat"),
    ({"p2pdma_driver": None}, "p2pdma.driver", False, "compat", "compat"),
    ({"nvme_multipath": True, "kernel": "6.18.0"}, "nvme.multipath", False, "compat", "compat"),
    ({"nvme_multipath": None, "kernel": "6.18.0"}, "nvme.multipath", False, "compat", "compat"),
    ({"config_p2pdma": False}, "cufile.p2pdma", True, "p2pdma", "compat"),
    ({"config_p2pdma": None}, "cufile.p2pdma", True, "p2pdma", "compat"),
]


def ready(**changes: Any) -> GdsFacts:
    return replace(READY, **changes)


def peer(**changes: Any) -> GdsFacts:
    return replace(READY, **{**PEER, **changes})


def blockers(facts: GdsFacts, mode: str) -> dict[str, bool]:
    return {blocker.id: blocker.curable for blocker in current(facts).path(mode).blockers}


def test_a_ready_node_takes_the_direct_path() -> None:
    assert (choose(READY).mode, current(READY).mode, blockers(READY, "nvidia-fs")) == ("nvidia-fs", "nvidia-fs", {})
    assert (choose(peer()).mode, current(peer()).mode, blockers(peer(), "p2pdma")) == ("p2pdma", "p2pdma", {})
    assert [path.mode for path in choose(READY).paths] == list(MODES)


@pytest.mark.parametrize(
    ("way", "changes", "identity", "curable", "chosen", "now"),
    [*(("nvidia-fs", *row) for row in NVFS_ROWS), *(("p2pdma", *row) for row in PEER_ROWS)],
)
def test_what_stands_in_a_way(
    way: str, changes: dict[str, Any], identity: str, curable: bool, chosen: str, now: str
) -> None:
    facts = ready(**changes) if way == "nvidia-fs" else peer(**changes)
    assert blockers(facts, way).get(identity) is curable
    assert (choose(facts).mode, current(facts).mode) == (chosen, now)
    if chosen != way:
        assert any(identity in reason for reason in choose(facts).reasons)
        with pytest.raises(Impossible, match=rf"`{identity}`.*hint: "):
            choose(facts, way)


def test_compat_can_be_forbidden_and_the_role_can_allow_it() -> None:
    facts = ready(driver_open=False, config_path="/etc/cufile.json", config_valid=True, config_compat=False)
    assert (choose(facts).mode, current(facts).mode) == ("compat", "off")
    assert blockers(facts, "compat") == {"cufile.compat": True}


@pytest.mark.parametrize(
    "facts",
    [
        ready(fs_type="ext4", fs_options=("rw", "data=ordered")),
        ready(architecture="aarch64", iommu="translated"),
        ready(secure_boot=True),
        ready(secure_boot=None),
        ready(nvme_patched=None),
        ready(nvfs_built_for=None),
        ready(iommu="passthrough"),
        ready(acs=("0000:17:00.0",)),
        ready(acs=None),
        ready(mount_point=None, device=None, fs_type=None, md_levels=(), md_members_in_udev=None),
    ],
)
def test_what_does_not_block_nvidia_fs(facts: GdsFacts) -> None:
    assert current(facts).mode == "nvidia-fs"


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        (ready(acs=None), "could not be read"),
        (ready(acs=("0000:17:00.0",)), "0000:17:00.0"),
        (ready(iommu="passthrough"), "passthrough"),
        (ready(nvfs_built_for=None), "which driver nvidia-fs was built for"),
        (ready(mount_point=None, device=None), "no volume"),
        (peer(), "verify --gds require"),
    ],
)
def test_what_could_not_be_seen_or_is_slower_is_said(facts: GdsFacts, note: str) -> None:
    assert any(note in reason for reason in choose(facts).reasons)


def test_a_forced_path_is_taken_or_refused_with_every_reason() -> None:
    assert choose(READY, "compat").mode == "compat"
    assert choose(READY, "off").reasons[0].endswith("as asked for")
    with pytest.raises(Impossible) as refused:
        choose(ready(driver_open=False, iommu="translated", **{"dm": ("dm-3",)}), "nvidia-fs")
    for word in ("driver.open", "iommu", "device_mapper", "`dm-3`", "hint:"):
        assert word in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(Impossible, match="no NVIDIA GPU"):
        choose(GdsFacts(), "compat")


LAYOUT = "`raid_array_groups: drive`"


def test_p2pdma_names_the_layout_that_needs_no_md() -> None:
    with pytest.raises(Impossible, match=rf"GDS 1\.20, 9.*hint: .*{LAYOUT}"):
        choose(peer(kernel="6.18.0", p2pdma_device=None), "p2pdma")
    assert any("GDS 1.20" in reason and LAYOUT in reason for reason in choose(peer()).reasons)
    alone = peer(kernel="6.18.0", md_levels=(), md_members_in_udev=None)
    assert not any(LAYOUT in reason for reason in choose(alone, "p2pdma").reasons)


def test_each_of_several_volumes_is_judged_and_one_named() -> None:
    drives = [peer(md_levels=(), device=f"nvme{at}n1", mount_point=f"/mnt/drive{at}") for at in range(3)]
    assert current(replace(drives[0], others=tuple(drives[1:]))).mode == "p2pdma"
    other = replace(drives[2], fs_type="btrfs")
    decision = current(replace(drives[0], others=(drives[1], other)))
    assert [(each.id, each.found) for each in decision.path("p2pdma").blockers] == [
        ("filesystem", "the file system is btrfs on `/mnt/drive2`")
    ]


def test_libcufile_is_not_installed_for_bounce_buffers() -> None:
    facts = ready(libcufile=None, installable=True, driver_open=False)
    assert choose(facts).mode == "off"
    assert choose(facts, "compat").mode == "compat"


def test_every_fact_of_the_reader_is_in_a_row_or_named_here() -> None:
    changed = {name for changes, *_ in NVFS_ROWS + PEER_ROWS for name in changes} | set(PEER)
    named = {
        "architecture",
        "distribution",
        "cuda",
        "mount_point",
        "fs_options",
        "acs",
        "nvfs_version",
        "config_compat",
    }
    named |= {"nvfs_source", "drives", "md_rule", "others"}
    assert {field.name for field in fields(GdsFacts)} - changed - named == set()


def test_the_documentation_names_every_requirement_and_no_other() -> None:
    text = (Path(__file__).parents[2] / "docs/concepts/gpudirect-storage.md").read_text()
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (all|direct|[a-z0-9-]+) \|", text, re.MULTILINE)
    names = {ANY: "all", DIRECT: "direct"}
    assert rows == [(rule.id, names.get(rule.modes, rule.modes[0])) for rule in RULES]


# --- the reader --------------------------------------------------------------------------------------------------

RULE_TEXT = 'KERNEL!="md*", GOTO="md_end"\n# --no-devices is new\nIMPORT{program}="/sbin/mdadm --detail --no-devices --export $devnode"\n'
PROPRIETARY = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023\n"


def acs_config(control: int) -> bytes:
    """Configuration space of a port: AER at 0x100, ACS after it at 0x148."""
    config = bytearray(4096)
    config[0x100:0x104] = (0x0001 | 1 << 16 | 0x148 << 20).to_bytes(4, "little")
    config[0x148:0x14C] = (0x000D | 1 << 16).to_bytes(4, "little")
    config[0x14E:0x150] = control.to_bytes(2, "little")
    return bytes(config)


class Machine:
    """A tree to be read: a GPU and two NVMe drives in an array below one switch (tests/data/machines/gpu.json)."""

    def __init__(self, root: Path) -> None:
        self.root = lay_out("gpu", root)
        for port in ("0000:18:00.0", "0000:18:01.0", "0000:18:02.0"):
            self.port(port, 0)

    def put(self, path: str, text: str | bytes) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(text.encode() if isinstance(text, str) else text)

    def link(self, path: str, target: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).symlink_to(target)

    def port(self, address: str, control: int) -> None:
        self.put(f"sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/{address}/config", acs_config(control))

    def nvidia_fs(self, registered: str = "nvme: 1.0\n") -> None:
        self.put("sys/module/nvidia_fs/refcnt", "0\n")
        self.put("proc/driver/nvidia-fs/version", "version: 2.28\n")
        self.put("proc/driver/nvidia-fs/modules", registered)
        self.put("dev/nvidia-fs0", "")

    def read(self) -> GdsFacts:
        return read_gds_facts(str(self.root), "/mnt/nvme_raid0")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_a_whole_node_is_read(machine: Machine) -> None:
    machine.nvidia_fs()
    facts = machine.read()
    assert (facts.kernel, facts.architecture, facts.distribution) == ("6.8.0-1051-nvidia", "x86_64", "ubuntu 24.04")
    assert (facts.gpus, facts.driver, facts.driver_open) == (("0000:1b:00.0",), "580.95.05", True)
    assert (facts.cuda, facts.libcufile, facts.secure_boot) == ("13.0.1", "1.15.1", False)
    assert (facts.nvfs_loaded, facts.nvfs_version, facts.nvfs_devices) == (True, "2.28", True)
    assert (facts.nvme_patched, facts.nvme_registered, facts.nvme_multipath) == (True, True, False)
    assert (facts.fs_type, facts.device, facts.md_levels, facts.dm) == ("xfs", "md127", ("raid0",), ())
    assert (facts.drives, facts.drives_nvme, facts.md_members_in_udev) == (("nvme1n1", "nvme2n1"), True, True)
    assert (facts.p2pdma_kernel, facts.p2pdma_device, facts.p2pdma_driver) == (True, None, False)
    assert current(facts).mode == "nvidia-fs"


def test_volumes_in_directories_of_the_mount_point_are_read(machine: Machine) -> None:
    root = "22 1 8:2 / / rw - ext4 /dev/sda2 rw\n"
    several = [f"{40 + at} 22 259:{at} / /mnt/nvme_raid0/drive{at} rw - xfs /dev/nvme{at}n1 rw\n" for at in (1, 2)]
    machine.put("proc/self/mountinfo", "".join([root, *several]))
    for at in (1, 2):
        machine.link(f"sys/dev/block/259:{at}", f"../../block/nvme{at}n1")
    facts = machine.read()
    assert [(each.mount_point, each.device, each.md_levels) for each in facts.volumes] == [
        ("/mnt/nvme_raid0/drive1", "nvme1n1", ()),
        ("/mnt/nvme_raid0/drive2", "nvme2n1", ()),
    ]
    assert all(each.p2pdma_device for each in facts.volumes)


def test_what_is_to_be_built_is_judged_by_its_layout(machine: Machine) -> None:
    wanted = {"mode": "p2pdma", "packages": [], "cufile": {}}
    striped, alone = (
        early_refusals(wanted, ("nvme1n1", "nvme2n1"), str(machine.root), level) for level in ("raid0", "single")
    )
    assert "`p2pdma.device`" in striped[0]
    assert LAYOUT in striped[0]
    assert "`p2pdma.driver`" in alone[0]
    assert "p2pdma.device" not in alone[0]
    assert "RAID" not in alone[0]


def test_an_empty_tree_has_no_gpu_and_no_path(tmp_path: Path) -> None:
    decision = choose(read_gds_facts(str(tmp_path), "/mnt"))
    assert decision.mode == "off"
    assert decision.reasons[1].startswith("gpu: ")
    assert len(decision.reasons) == 2


@pytest.mark.parametrize(
    ("path", "text", "fact", "value"),
    [
        ("proc/driver/nvidia/version", PROPRIETARY, "driver_open", False),
        (
            "proc/driver/nvidia/params",
            'RegistryDwords: "RMForceStaticBar1=1;RmForceDisableIomapWC=1;"\n',
            *("p2pdma_driver", True),
        ),
        ("sys/bus/pci/devices/0000:1b:00.0/p2pmem/size", "68719476736\n", "p2pdma_driver", True),
        ("proc/kallsyms", "0000000000000000 T nvme_v2_register_nvfs_dma_ops\t[nvme]\n", "nvme_patched", True),
        ("proc/kallsyms", "0000000000000000 T nvme_rdma_v1_register_nvfs_dma_ops\n", "nvme_patched", False),
        ("proc/kallsyms", "", "nvme_patched", None),
        ("proc/kallsyms", "0000000000000000 T nvme_probe\n", "p2pdma_kernel", False),
        ("sys/module/nvme_core/parameters/multipath", "Y\n", "nvme_multipath", True),
        ("run/udev/data/b9:127", "E:MD_LEVEL=raid0\n", "md_members_in_udev", False),
        ("usr/lib/udev/rules.d/63-md-raid-arrays.rules", RULE_TEXT, "md_rule_lists_members", False),
        ("run/.containerenv", "", "container", False),
        ("proc/self/mountinfo", "22 1 0:50 / / rw - overlay overlay rw\n", "container", True),
        ("etc/cufile.json", "{ // ours\n}", "config_valid", True),
        ("etc/cufile.json", "{,}", "config_valid", False),
        ("etc/cufile.json", '{"properties": {"allow_compat_mode": false}}', "config_compat", False),
        ("etc/cufile.json", '{"use_pci_p2pdma": true}', "config_p2pdma", None),
        ("sys/devices/virtual/block/md127/md/level", "raid5\n", "md_levels", ("raid5",)),
        ("sys/devices/virtual/block/md127/dm/uuid", "LVM-x\n", "dm", ("md127",)),
        ("proc/sys/kernel/osrelease", "7.2.1\n", "p2pdma_device", True),
        ("proc/sys/kernel/osrelease", "6.1.0-31-amd64\n", "p2pdma_device", False),
        ("lib/modules/6.8.0-1051-nvidia/modules.dep", "updates/dkms/nvme.ko.zst:\n", "nvme_patched_on_disk", True),
        (
            "lib/modules/6.8.0-1051-nvidia/modules.dep",
            "kernel/drivers/nvme/host/nvme.ko:\n",
            "nvme_patched_on_disk",
            False,
        ),
        ("lib/modules/6.8.0-1051-nvidia/modules.dep", "updates/dkms/nvidia-fs.ko.zst: x\n", "nvfs_installed", True),
        ("usr/src/nvidia-fs-2.28.4/dkms.conf", "", "nvfs_source", "2.28.4"),
        (
            "usr/local/lib/python3.12/dist-packages/nvidia_cufile-1.20.0.3.dist-info/METADATA",
            "",
            "libcufile",
            "1.20.0.3",
        ),
        (
            "var/lib/dkms/nvidia-fs/2.28.4/6.8.0-1051-nvidia/x86_64/log/make.log",
            "Picking NVIDIA driver sources from NVIDIA_SRC_DIR=/usr/src/nvidia-570.86.15/nvidia. If that does not\n",
            "nvfs_built_for",
            "570.86.15",
        ),
        (
            "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c",
            b"\x06\0\0\0\x01",
            "secure_boot",
            True,
        ),
        ("sys/firmware/efi/config_table", "", "secure_boot", None),
    ],
)
def test_one_file_one_fact(machine: Machine, path: str, text: str | bytes, fact: str, value: object) -> None:
    machine.put(path, text)
    assert getattr(machine.read(), fact) == value


OLD_SWITCH = '{"properties": {"use_pci_p2pdma": true}}'


@pytest.mark.parametrize(
    ("libcufile", "text", "allowed"),
    [
        ("1.15.1", OLD_SWITCH, True),
        ("1.16.0", OLD_SWITCH, False),
        ("1.16.0", '{"properties": {"use_pci_p2pdma": true}, "block": {"nvme": {"use_pci_p2pdma": true}}}', False),
        ("1.16.0", '{"properties": {"use_pci_p2pdma": true}, "block": {"raid": {"use_pci_p2pdma": true}}}', True),
        ("1.16.0", '{"block": {"raid": {"use_pci_p2pdma": true}}}', None),
    ],
)
def test_p2pdma_through_raid_has_a_switch_of_its_own(
    machine: Machine, libcufile: str, text: str, allowed: bool
) -> None:
    (machine.root / "usr/local/cuda-13.0/targets/x86_64-linux/lib/libcufile.so.1.15.1").unlink()
    machine.put(f"usr/lib/x86_64-linux-gnu/libcufile.so.{libcufile}", "")
    machine.put("etc/cufile.json", text)
    assert machine.read().config_p2pdma is allowed


@pytest.mark.parametrize(
    ("kinds", "iommu"),
    [({}, "off"), ({"3": "identity"}, "passthrough"), ({"3": "DMA-FQ"}, "translated"), ({"3": None}, None)],
)
def test_the_iommu_is_that_of_the_gpus_and_drives(
    machine: Machine, kinds: dict[str, str | None], iommu: object
) -> None:
    (machine.root / "sys/kernel/iommu_groups").mkdir(parents=True)
    machine.put("sys/kernel/iommu_groups/9/type", "DMA\n")
    machine.put("sys/kernel/iommu_groups/9/devices/0000:00:1f.0", "")
    for group, kind in kinds.items():
        machine.put(f"sys/kernel/iommu_groups/{group}/devices/0000:1b:00.0", "")
        if kind:
            machine.put(f"sys/kernel/iommu_groups/{group}/type", kind + "\n")
    assert machine.read().iommu == iommu


def test_acs_is_read_from_the_ports_between(machine: Machine) -> None:
    assert machine.read().acs == ()
    machine.port("0000:18:02.0", 0x1D)
    machine.port("../0000:17:00.0", 0x1D)  # above the switch where GPU and drives meet
    assert machine.read().acs == ("0000:18:02.0",)
    machine.put("sys/devices/pci0000:16/0000:16:01.0/0000:17:00.0/0000:18:01.0/config", acs_config(0)[:64])
    assert machine.read().acs is None


def test_acs_without_redirect_or_without_the_capability() -> None:
    assert redirects(acs_config(0x13)) is False
    assert redirects(bytes(4096)) is False
    assert redirects(b"") is None
    assert redirecting_ports([], []) == ()


# --- what the role writes ----------------------------------------------------------------------------------------


def test_the_override_is_the_distributions_rule_with_the_members(machine: Machine) -> None:
    rule = machine.root / "usr/lib/udev/rules.d/63-md-raid-arrays.rules"
    machine.put(str(rule.relative_to(machine.root)), RULE_TEXT)
    root = str(machine.root)
    text = wanted_override(root).after
    assert 'mdadm --detail --export $devnode"' in text
    assert "# --no-devices is new" in text
    machine.put(RULE.lstrip("/"), text)
    assert wanted_override(root) == type(wanted_override(root))(text, text)
    assert not outdated(root)
    assert machine.read().md_rule_lists_members is True
    rule.write_text(RULE_TEXT + "# newer\n")
    assert outdated(root)
    assert "# newer" in wanted_override(root).after
    assert wanted_override(root, asked=False).after == ""
    rule.write_text(RULE_TEXT.replace(" --no-devices", ""))
    assert wanted_override(root).after == ""
    assert distributions_rule(root) == rule.read_text()


def test_verify_holds_node_and_rule_to_path_and_source(machine: Machine) -> None:
    manifest = json.loads((RECORDED / "built-manifest.json").read_text())
    machine.nvidia_fs()

    def answers(mode: str) -> dict[str, str]:
        checks = run_checks(dict(manifest, gds={"mode": mode, "reasons": []}), str(machine.root))
        return {check.id: f"{check.status} {check.found}" for check in checks if check.id.startswith("gds.")}

    assert answers("nvidia-fs") == {"gds.mode": "pass nvidia-fs"}
    assert answers("compat") == {"gds.mode": "pass nvidia-fs"}
    assert answers("off") == {"gds.mode": "skip off"}
    machine.put("proc/driver/nvidia/version", PROPRIETARY)
    assert answers("nvidia-fs")["gds.mode"].startswith("fail compat: driver 535.154.05 is the proprietary")
    machine.put("usr/lib/udev/rules.d/63-md-raid-arrays.rules", RULE_TEXT)
    machine.put(RULE.lstrip("/"), wanted_override(str(machine.root)).after)
    assert "gds.md_rule" not in answers("nvidia-fs")
    machine.put("usr/lib/udev/rules.d/63-md-raid-arrays.rules", RULE_TEXT + "# newer\n")
    assert answers("nvidia-fs")["gds.md_rule"].startswith("fail")


def test_somebody_elses_override_is_left_or_refused(machine: Machine) -> None:
    machine.put(RULE.lstrip("/"), RULE_TEXT.replace(" --no-devices", ""))
    assert wanted_override(str(machine.root)).after == RULE_TEXT.replace(" --no-devices", "")
    machine.put(RULE.lstrip("/"), RULE_TEXT)
    with pytest.raises(Refusal, match="is not tunetool's"):
        wanted_override(str(machine.root))
    assert wanted_override(str(machine.root), asked=False).after == RULE_TEXT


def job(machine: Machine, mode: str, acting: bool = True, **more: Any) -> GdsJob:
    text = CONFIG_HEADER + " for %s\n" + '{"properties": {"allow_compat_mode": true}}\n'
    wanted = {
        "mode": mode,
        "mount_point": "/mnt/nvme_raid0",
        "packages": [],
        "versions": {},
        "repository_files": {},
        "pins": {},
        "keep_config": True,
        "configs": {way: text % way for way in MODES[:3]},
        **more,
    }
    return GdsJob(wanted, Ledger(None, acting), str(machine.root))


def tree(machine: Machine) -> dict[str, str]:
    return {str(path): path.read_text() for path in (machine.root / "etc").rglob("*") if path.is_file()}


def test_files_come_and_go_and_what_was_there_comes_back(machine: Machine) -> None:
    machine.nvidia_fs()
    machine.put("usr/lib/udev/rules.d/63-md-raid-arrays.rules", RULE_TEXT)
    machine.put("usr/local/cuda/gds/cufile.json", "{}")
    machine.link("etc/cufile.json", "../usr/local/cuda/gds/cufile.json")
    before = tree(machine)
    root = str(machine.root)
    looked = job(machine, "auto", acting=False)
    assert looked.all().mode == "nvidia-fs"
    assert looked.ledger.diff[0]["before_header"] == "/etc/cufile.json"
    assert (tree(machine), traces(root)) == (before, False)
    done = job(machine, "auto")
    assert done.all().mode == "nvidia-fs"
    assert (machine.root / "etc/cufile.json").read_text().startswith(CONFIG_HEADER + " for nvidia-fs")
    assert (machine.root / "usr/local/cuda/gds/cufile.json").read_text() == "{}"
    assert (machine.root / "etc/modules-load.d/60-tunetool-gds.conf").exists()
    assert (traces(root), done.reboot_reasons) == (True, [])
    again = job(machine, "auto")
    again.all()
    assert again.ledger.diff == []
    job(machine, "off").all()
    assert str((machine.root / "etc/cufile.json").readlink()) == "../usr/local/cuda/gds/cufile.json"
    assert (tree(machine), traces(root)) == (before, False)
    assert not (machine.root / SAVED.lstrip("/")).exists()
    never = job(machine, "off")
    never.all()
    assert never.ledger.diff == []


def test_a_reboot_is_asked_for_where_only_that_helps(machine: Machine) -> None:
    machine.nvidia_fs(registered="wekafsio: 1\n")
    machine.put("proc/kallsyms", "0000000000000000 T nvme_probe\n")
    machine.put("lib/modules/6.8.0-1051-nvidia/modules.dep", "updates/dkms/nvme.ko.zst:\n")
    run = job(machine, "auto")
    decision = run.all()
    assert decision.mode == "nvidia-fs"
    assert len(run.reboot_reasons) == 1
    assert "next boot" in run.reboot_reasons[0]


LOG = "var/lib/dkms/nvidia-fs/2.28.4/6.8.0-1051-nvidia/x86_64/log/make.log"
SOURCES = "Picking NVIDIA driver sources from NVIDIA_SRC_DIR=/usr/src/nvidia-%s/nvidia. If\n"


def test_a_configuration_for_bounce_buffers_is_left_alone(machine: Machine) -> None:
    machine.put("etc/cufile.json", '{"profile": {"nvtx": false}}')
    left = job(machine, "auto")
    assert (left.all().mode, left.ledger.diff) == ("compat", [])
    result = job(machine, "auto", keep_config=False)
    result.all()
    assert (machine.root / "etc/cufile.json").read_text().startswith(CONFIG_HEADER + " for compat")
    job(machine, "auto").all()
    assert (machine.root / "etc/cufile.json").read_text() == '{"profile": {"nvtx": false}}'
    machine.put("etc/cufile.json", '{"properties": {"allow_compat_mode": false}}')
    forced = job(machine, "compat")
    forced.all()
    assert '"allow_compat_mode": true' in (machine.root / "etc/cufile.json").read_text()


@pytest.mark.parametrize("in_use", [False, True])
def test_nvidia_fs_is_built_anew_for_another_driver(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, in_use: bool
) -> None:
    """Stand-ins for dkms and modprobe that log their calls; dkms also writes the log of the real one."""
    machine.nvidia_fs()
    machine.put("usr/src/nvidia-fs-2.28.4/dkms.conf", "")
    machine.put(LOG, SOURCES % "570.86.15")
    calls = machine.root / "calls"
    stand_ins = {
        "dkms": f"echo '{(SOURCES % '580.95.05').strip()}' > {machine.root / LOG}",
        "modprobe": f'[ "$1" = -r ] && exit {int(in_use)}; exit 0',
    }
    for name, script in stand_ins.items():
        machine.put(f"bin/{name}", f'#!/bin/sh\necho "{name} $*" >> {calls}\n{script}\n')
        (machine.root / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{machine.root / 'bin'}:/usr/bin:/bin")
    job(machine, "auto", acting=False).all()
    assert not calls.exists()
    first = job(machine, "auto")
    assert first.all().mode == "nvidia-fs"
    built = [f"dkms {step} -m nvidia-fs -v 2.28.4 -k 6.8.0-1051-nvidia --force" for step in ("build", "install")]
    loaded = ["modprobe -r nvidia-fs"] + ([] if in_use else ["modprobe nvidia-fs"])
    assert calls.read_text().splitlines() == built + loaded
    assert [reason for reason in first.reboot_reasons if "former build" in reason] == first.reboot_reasons
    assert len(first.reboot_reasons) == int(in_use)
    # A second run builds nothing, and a reason remains until the reboot that removes it.
    calls.unlink()
    again = job(machine, "auto")
    again.all()
    assert (again.reboot_reasons, again.ledger.diff) == (first.reboot_reasons, [])
    assert calls.exists() is in_use


def test_packages_come_first_and_only_then_the_rest(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for dpkg-query lists the installed packages; the role calls apt (molecule/default/gds.yml)."""
    machine.nvidia_fs(registered="")
    machine.put("proc/kallsyms", "0000000000000000 T nvme_probe\n")
    (machine.root / "usr/local/cuda-13.0/targets/x86_64-linux/lib/libcufile.so.1.15.1").unlink()
    monkeypatch.setenv("PATH", f"{machine.root / 'bin'}:/usr/bin:/bin")

    def there(*packages: str) -> None:
        lines = "".join(f"echo 'installed {package}'\n" for package in packages)
        machine.put("bin/dpkg-query", f"#!/bin/sh\n{lines}")
        (machine.root / "bin/dpkg-query").chmod(0o755)

    key = "-----BEGIN PGP PUBLIC KEY BLOCK-----\n"
    asked: dict[str, Any] = {
        "packages": ["nvidia-gds", "mlnx-nvme-dkms"],
        "versions": {"nvidia-gds": "13.0.1-1", "libcufile-13-0": "1.15.0.42-1"},
        "repository_files": {"/etc/apt/keyrings/x.asc": key, "/etc/apt/sources.list.d/x.sources": "Types: deb\n"},
        "pins": {"/etc/apt/preferences.d/x": "Package: nvidia-gds\n"},
    }
    there("mdadm 4.2-5")
    first = job(machine, "auto", **asked)
    assert first.all().mode == "nvidia-fs"
    assert first.packages == ["nvidia-gds=13.0.1-1", "mlnx-nvme-dkms"]
    assert (machine.root / "etc/apt/preferences.d/x").exists()
    assert not traces(str(machine.root))
    machine.put("usr/local/cuda-13.0/targets/x86_64-linux/lib/libcufile.so.1.15.0", "")
    machine.put("lib/modules/6.8.0-1051-nvidia/modules.dep", "updates/dkms/nvme.ko:\n")
    there("nvidia-gds 13.0.1-1", "mlnx-nvme-dkms 25.10-1", "libcufile-13-0 1.15.0.42-1")
    second = job(machine, "auto", **asked)
    assert (second.all().mode, second.packages, len(second.reboot_reasons)) == ("nvidia-fs", [], 1)
    assert traces(str(machine.root))
    third = job(machine, "auto", **asked)
    third.all()
    assert (third.ledger.diff, third.reboot_reasons) == ([], second.reboot_reasons)
    there("nvidia-gds 13.0.1-1", "mlnx-nvme-dkms 25.10-1", "libcufile-13-0 1.15.1.6-1")
    drifted = job(machine, "auto", **asked)
    drifted.all()
    assert drifted.packages == ["libcufile-13-0=1.15.0.42-1"]


def test_packages_that_nobody_can_be_asked_for_are_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def program(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CommandError, match="neither dpkg nor rpm"):
        requirements.installed()
    with pytest.raises(CommandError, match="neither apt-cache nor dnf"):
        requirements.available(["nvidia-gds"])
    program("dnf", "exit 1")
    assert not requirements.available(["nvidia-gds"])
    program("dpkg-query", "echo 'the database is locked' >&2; exit 2")
    with pytest.raises(CommandError, match="the database is locked"):
        requirements.installed()
    program("rpm", "echo installed kernel 5.14")
    assert requirements.installed() == {"kernel": "5.14"}


def test_an_ignored_configuration_is_refused_before_a_write(machine: Machine) -> None:
    machine.nvidia_fs()
    before = tree(machine)
    text = CONFIG_HEADER + '\n{"allow_compat_mode": true}\n'
    assert check_config(text)
    with pytest.raises(Refusal, match=r"properties\.allow_compat_mode.*gpudirect_storage_cufile"):
        job(machine, "auto", configs=dict.fromkeys(MODES[:3], text)).all()
    assert tree(machine) == before


def test_a_repository_without_its_key_is_refused(machine: Machine) -> None:
    files = {"/etc/apt/keyrings/x.asc": "\n", "/etc/apt/sources.list.d/x.sources": "Types: deb\n"}
    with pytest.raises(Refusal, match="gpudirect_storage_repository_key"):
        job(machine, "auto", repository_files=files).all()
    assert not (machine.root / "etc/apt").exists()


def test_packages_that_are_missing_or_of_another_version() -> None:
    there = {"nvidia-gds": "13.0.1-1", "nvidia-fs-dkms": "2.28.4-1"}
    assert requirements.differing(["nvidia-gds", "gds-tools-13-0"], {}, there) == ["gds-tools-13-0"]
    assert requirements.differing([], {"nvidia-fs-dkms": "2.27.0-1", "libcufile-13-0": "1"}, there) == [
        "nvidia-fs-dkms"
    ]
    assert requirements.differing([], {"nvidia-fs-dkms": "2.28.4"}, there) == []
    assert requirements.pinned(["a", "b"], {"a": "1"}, debian=True) == ["a=1", "b"]
    assert requirements.pinned(["a"], {"a": "1"}, debian=False) == ["a-1"]
