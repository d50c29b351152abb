"""What every path needs of a node, and what the direct ones need of its volume. Sources as in :mod:`gds_rules`."""

from __future__ import annotations

from typing import Optional

from .gds_config import version_key
from .gds_facts import GdsFacts

Finding = Optional[tuple[str, str, bool]]
"""What was found, the remedy, and whether the role can cure it; None where the requirement is met."""


def gpu(facts: GdsFacts) -> Finding:
    return None if facts.gpus else ("no NVIDIA GPU on the PCI bus", "nothing to set up on this node", False)


def driver(facts: GdsFacts) -> Finding:
    if facts.driver:
        return None
    return "no NVIDIA driver is loaded", "install and load the GPU's driver; tunetool does not", False


def driver_open(facts: GdsFacts) -> Finding:
    """RN 1.7.2: the proprietary module is not supported. NFS#48: the kernel refuses nvidia-fs that module's symbols."""
    if facts.driver is None or facts.driver_open:
        return None
    found = (
        "whether the driver is the open module is not known"
        if facts.driver_open is None
        else ("driver %s is the proprietary kernel module" % facts.driver)
    )
    return found, "install NVIDIA's open kernel module of that driver and reboot", False


def driver_version(facts: GdsFacts) -> Finding:
    """ "GDS Support for NVMe drives using Linux PCI P2PDMA", 3.4: open driver 565 or above."""
    if facts.driver is None or version_key(facts.driver) >= (565,):
        return None
    return "driver %s hands no GPU memory to the kernel's P2PDMA" % facts.driver, "driver 565 or newer", False


def libcufile(facts: GdsFacts) -> Finding:
    if facts.libcufile:
        return None
    remedy = "install libcufile (CUDA's packages or wheels); `gpudirect_storage_repository_url` names where from"
    return "no libcufile", remedy, facts.installable


def libcufile_version(facts: GdsFacts) -> Finding:
    """P2PDMA came with GDS 1.13 (CUDA 12.8), the switch for RAID (block.raid.use_pci_p2pdma) with 1.16."""
    least = (1, 16) if facts.md_levels else (1, 13)
    if facts.libcufile is None or version_key(facts.libcufile) >= least:
        return None
    what = "through RAID" if facts.md_levels else "at all"
    found = "libcufile %s knows no P2PDMA %s" % (facts.libcufile, what)
    return found, "libcufile %d.%d or newer" % least, False


def udev(facts: GdsFacts) -> Finding:
    """Run on an H200: without udev cuFileHandleRegister fails (5027), with allow_compat_mode true as well."""
    if facts.udev:
        return None
    if facts.container:
        remedy = "bind-mount /run/udev of the host into the container, read-only"
    else:
        remedy = "install and start systemd-udevd"
    return "no udev database in /run/udev: cuFile registers no file", remedy, False


def config(facts: GdsFacts) -> Finding:
    """Run on an H200: cuFileDriverOpen fails with a file that it cannot parse."""
    if facts.config_valid is not False:
        return None
    return "`%s` is not JSON" % facts.config_path, "let the role render it, or mend it", True


def volume(facts: GdsFacts) -> Finding:
    if facts.mount_point is None or facts.device:
        return None
    found = "`%s` lies on %s, no local block device" % (facts.mount_point, facts.fs_type or "nothing that is mounted")
    return found, "mount a local NVMe file system", False


def filesystem(facts: GdsFacts) -> Finding:
    """NVIDIA, nvidia-fs key features: XFS, and ext4 in ordered mode, on NVMe."""
    if facts.device is None or facts.fs_type in ("xfs", "ext4"):
        return None
    return "the file system is %s" % facts.fs_type, "XFS, or ext4 with data=ordered", False


def journal(facts: GdsFacts) -> Finding:
    """TG 15 (NVMe): ext4 must show data=ordered; being the default is not enough, cuFile reads the mount table."""
    if facts.fs_type != "ext4" or facts.device is None or "data=ordered" in facts.fs_options:
        return None
    remedy = "`mount -o remount,data=ordered %s`, and in /etc/fstab" % facts.mount_point
    return "ext4 does not show data=ordered in the mount table", remedy, False


def mapper(facts: GdsFacts) -> Finding:
    if not facts.dm:
        return None
    names = ", ".join("`%s`" % name for name in facts.dm)
    return (
        "device mapper under the file system (%s)" % names,
        "put it on NVMe or md RAID0 without LVM or dm-crypt",
        False,
    )


def md_level(facts: GdsFacts) -> Finding:
    """TG 15, RAID: "GDS only supports RAID 0"."""
    other = [level for level in facts.md_levels if level != "raid0"]
    if not other:
        return None
    return "md %s under the file system" % ", ".join(other), "md RAID0 (data must move)", False


def drives(facts: GdsFacts) -> Finding:
    if facts.device is None or facts.drives_nvme:
        return None
    return "not every drive under it is NVMe (%s)" % ", ".join(facts.drives), "a volume on NVMe drives", False


def md_udev(facts: GdsFacts) -> Finding:
    """TG 5.15: mdadm is called with --no-devices, so udev knows no members of the array."""
    if not facts.md_levels or facts.md_members_in_udev or not facts.udev:
        return None
    remedy = "a copy of 63-md-raid-arrays.rules without --no-devices in /etc/udev/rules.d"
    if facts.md_members_in_udev is None:
        return "whether udev knows the array's members is not known", "is /run/udev that of the host?", False
    if facts.md_rule_lists_members:
        return "udev's entry of the array is older than its rule", "`udevadm trigger --action=change`", True
    return "udev does not know the array's members", remedy, facts.md_rule is not None
