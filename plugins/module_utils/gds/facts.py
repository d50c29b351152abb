"""Reads the facts that decide the path of I/O between files and GPU memory, from /proc, /sys and files.

Nothing here judges; ``path_choice`` does. ``None`` is "could not be read" and never "no".
"""

from __future__ import annotations

import glob
import gzip
import json
import os
from dataclasses import dataclass, replace
from typing import Any, Optional

from ..common.files import read_text
from ..common.raid_levels import DEFAULT
from ..machine.container import read_container
from ..machine.distribution import read_distribution
from ..machine.mounts import read_mounts, volumes_at
from ..machine.pci_tree import redirecting_ports
from .cufile_check import ConfigError, read_config
from .kernel_modules import (
    NvidiaFs,
    Symbols,
    nvme_patched_on_disk,
    read_driver,
    read_driver_p2pdma,
    read_nvidia_fs,
    read_symbols,
    version_key,
)
from .volume_facts import drive_addresses, kernel_version, planned_volume, read_md_rule, read_volume

IOMMU_OFF = "off"
IOMMU_PASSTHROUGH = "passthrough"
IOMMU_TRANSLATED = "translated"
_CONFIGS = ("/etc/cufile.json", "/usr/local/cuda/gds/cufile.json")
"""Path of cuFile's configuration without CUFILE_ENV_PATH_JSON."""


@dataclass(frozen=True)
class GdsFacts(NvidiaFs):
    """Facts of a machine and of the volume at ``mount_point`` that matter for GPUDirect Storage."""

    kernel: str = ""
    """Release of the running kernel, as in `uname -r`; empty if unknown."""
    architecture: str = ""
    """``x86_64``, ``aarch64``; empty if unknown."""
    distribution: str = ""
    """Id and version of the distribution, such as ``ubuntu 24.04``."""
    secure_boot: Optional[bool] = False
    gpus: tuple[str, ...] = ()
    """PCI addresses of NVIDIA GPUs."""
    driver: Optional[str] = None
    """Version of the NVIDIA kernel driver that is loaded; None when none is."""
    driver_open: Optional[bool] = None
    cuda: Optional[str] = None
    """Newest CUDA toolkit on the machine; cuFile needs only its own library."""
    libcufile: Optional[str] = None
    """Version of the library, such as ``1.15.0``; None if none is installed where the loader looks."""
    nvme_patched: Optional[bool] = None
    """Whether the running NVMe driver has hooks for nvidia-fs."""
    nvme_patched_on_disk: bool = False
    """A driver that does is on disk, for the next boot."""
    nvme_multipath: Optional[bool] = None
    mount_point: Optional[str] = None
    fs_type: Optional[str] = None
    fs_options: tuple[str, ...] = ()
    device: Optional[str] = None
    """Kernel name of the mounted device."""
    md_levels: tuple[str, ...] = ()
    """Levels of the md arrays under the file system."""
    dm: tuple[str, ...] = ()
    """Device-mapper devices under the file system."""
    drives: tuple[str, ...] = ()
    """Kernel names of the drives at the bottom."""
    drives_nvme: bool = True
    """Whether all of them are NVMe drives."""
    iommu: Optional[str] = IOMMU_OFF
    """State of the IOMMU: ``off``, ``passthrough``, ``translated``."""
    acs: Optional[tuple[str, ...]] = ()
    """PCI addresses of the ports between GPUs and drives that send peer traffic up to the root (ACS redirect)."""
    p2pdma_kernel: Optional[bool] = None
    """Whether the kernel has CONFIG_PCI_P2PDMA."""
    p2pdma_device: Optional[bool] = None
    """Whether the mounted device accepts peer pages (BLK_FEAT_PCI_P2PDMA), through md too."""
    p2pdma_driver: Optional[bool] = None
    """Whether the NVIDIA driver was loaded with the settings that P2PDMA needs on x86."""
    udev: bool = True
    """Whether there is a udev database for cuFile (/run/udev)."""
    md_members_in_udev: Optional[bool] = None
    """Whether udev's entry of the array names its members, as cuFile needs; None without an entry."""
    md_rule: Optional[str] = None
    """Path of the udev rule in force for arrays."""
    md_rule_lists_members: Optional[bool] = None
    """Whether that rule asks mdadm for the members; None without such a rule."""
    container: bool = False
    config_path: Optional[str] = None
    """The cufile.json in force; None when there is none."""
    config_valid: Optional[bool] = None
    """Whether it is JSON with comments; with another file cuFile does not open its driver."""
    config_p2pdma: Optional[bool] = None
    """Whether it allows P2PDMA."""
    config_compat: Optional[bool] = None
    """Whether it allows the fallback through host memory. cuFile's default is true."""
    installable: bool = False
    """Whether the role can install packages of GPUDirect Storage here; set by the role, not by a reader."""
    others: tuple[GdsFacts, ...] = ()
    """The same with each further volume of the node, where it has several."""

    @property
    def volumes(self) -> tuple[GdsFacts, ...]:
        """These facts with each volume."""
        return (self, *self.others)

    @property
    def kernel_version(self) -> tuple[int, int]:
        """Major and minor; (0, 0) if unknown."""
        return kernel_version(self.kernel)


_SECURE_BOOT = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"


def read_gds_facts(
    root: str = "/",
    mount_point: Optional[str] = None,
    planned: Optional[tuple[str, ...]] = None,
    level: str = DEFAULT,
) -> GdsFacts:
    """The facts of the machine under ``root``, with those of a volume if ``mount_point`` is given, or of the volumes in
    its directories.

    ``planned``: kernel names of the drives on which that volume, over an array of this ``level``, is yet to be built.
    The kernel's symbols, which take a fifth of a second, are read only on a machine with an NVIDIA GPU.
    """
    kernel = read_text(os.path.join(root, "proc/sys/kernel/osrelease")) or ""
    distribution = read_distribution(root)
    gpus = read_gpus(root)
    driver, is_open = read_driver(root)
    symbols = read_symbols(root) if gpus else Symbols()
    p2pdma = symbols.p2pdma if symbols.p2pdma is not None else _configured(kernel, root)
    config_path, config = _config_in_force(root)
    libcufile = read_libcufile(root)
    md_rule = read_md_rule(root)
    if planned is not None:
        volumes = [planned_volume(planned, kernel, p2pdma, md_rule.get("md_rule"), level)]
    elif mount_point:
        places = volumes_at(mount_point, read_mounts(root)) or [mount_point]
        volumes = [dict(read_volume(place, kernel, p2pdma, root), mount_point=place) for place in places]
    else:
        volumes = [{}]
    common = GdsFacts(
        kernel=kernel,
        distribution=("%s %s" % (distribution.id, distribution.version)).strip(),
        gpus=gpus,
        mount_point=mount_point,
        architecture=read_text(os.path.join(root, "proc/sys/kernel/arch"))
        or (os.uname().machine if root == "/" else ""),
        secure_boot=read_secure_boot(root),
        driver=driver,
        driver_open=is_open,
        cuda=_read_cuda(root),
        libcufile=libcufile,
        nvme_patched=symbols.nvme_hooks,
        nvme_patched_on_disk=nvme_patched_on_disk(kernel, root),
        nvme_multipath=_read_multipath(root),
        p2pdma_kernel=p2pdma,
        p2pdma_driver=read_driver_p2pdma(gpus, root),
        udev=_read_udev(root),
        container=read_container(root) is not None,
        config_path=config_path,
        config_valid=None if config_path is None else config is not None,
        config_compat=_setting(config, "properties", "allow_compat_mode"),
        **vars(read_nvidia_fs(kernel, root)),
        **md_rule,
    )

    def with_volume(volume: dict[str, Any]) -> GdsFacts:
        drives = drive_addresses(volume.get("drives", ()), root)
        return replace(
            common,
            iommu=read_iommu(gpus + drives, root),
            acs=redirecting_ports(gpus, drives, root),
            config_p2pdma=_allows_p2pdma(config, bool(volume.get("md_levels")), libcufile),
            **volume,
        )

    first, *others = map(with_volume, volumes)
    return replace(first, others=tuple(others))


def read_gpus(root: str = "/") -> tuple[str, ...]:
    """PCI addresses of NVIDIA display controllers (class 03)."""
    addresses = []
    for device in sorted(glob.glob(os.path.join(root, "sys/bus/pci/devices/*"))):
        vendor = read_text(os.path.join(device, "vendor"))
        kind = read_text(os.path.join(device, "class")) or ""
        if vendor == "0x10de" and kind.startswith("0x03"):
            addresses.append(os.path.basename(device))
    return tuple(addresses)


def read_secure_boot(root: str = "/") -> Optional[bool]:
    """Whether Secure Boot is on: False without EFI, None if EFI does not say."""
    if not os.path.isdir(os.path.join(root, "sys/firmware/efi")):
        return False
    try:
        with open(os.path.join(root, _SECURE_BOOT), "rb") as stream:
            data = stream.read()
    except OSError:
        return None
    # efivarfs: four bytes of attributes, then the value.
    return data[4] == 1 if len(data) == 5 else None


def read_libcufile(root: str = "/") -> Optional[str]:
    """Newest version among the libraries of the system, the CUDA toolkits and the system Pythons' wheels."""
    versions = []
    for directory in (
        "usr/lib",
        "usr/lib64",
        "usr/lib/*-linux-gnu",
        "usr/local/cuda*/lib64",
        "usr/local/cuda*/targets/*/lib",
    ):
        for path in glob.glob(os.path.join(root, directory, "libcufile.so.*.*")):
            versions.append(os.path.basename(path)[len("libcufile.so.") :])
    for directory in ("usr/lib/python3*", "usr/local/lib/python3*"):
        # A wheel's library is called libcufile.so.0: its version is the wheel's.
        for path in glob.glob(os.path.join(root, directory, "*-packages/nvidia_cufile*-*.dist-info")):
            versions.append(os.path.basename(path)[: -len(".dist-info")].rpartition("-")[2])
    return max(versions, key=version_key) if versions else None


def read_iommu(addresses: tuple[str, ...], root: str = "/") -> Optional[str]:
    """How the IOMMU treats these devices (without any: all devices): the strictest of their groups."""
    try:
        groups = os.listdir(os.path.join(root, "sys/kernel/iommu_groups"))
    except OSError:
        words = (read_text(os.path.join(root, "proc/cmdline")) or "").split()
        return IOMMU_OFF if {"iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(words) else None
    kinds = set()
    for group in groups:
        base = os.path.join(root, "sys/kernel/iommu_groups", group)
        if not addresses or any(os.path.lexists(os.path.join(base, "devices", address)) for address in addresses):
            kinds.add(read_text(os.path.join(base, "type")))
    if not kinds:
        return IOMMU_OFF
    if None in kinds:
        return None
    return IOMMU_PASSTHROUGH if kinds == {"identity"} else IOMMU_TRANSLATED


def _configured(kernel: str, root: str) -> Optional[bool]:
    line = "CONFIG_PCI_P2PDMA=y"
    for config in ("boot/config-%s" % kernel, "lib/modules/%s/config" % kernel, "usr/lib/modules/%s/config" % kernel):
        text = read_text(os.path.join(root, config))
        if text:
            return line in text.splitlines()
    try:
        with gzip.open(os.path.join(root, "proc/config.gz"), "rt", encoding="ascii", errors="replace") as stream:
            return line in stream.read().splitlines()
    except (OSError, EOFError):
        return None


def _read_cuda(root: str) -> Optional[str]:
    versions = []
    for path in glob.glob(os.path.join(root, "usr/local/cuda-*/version.json")):
        try:
            versions.append(str(json.loads(read_text(path) or "")["cuda"]["version"]))
        except (ValueError, KeyError, TypeError):
            continue
    return max(versions, key=version_key) if versions else None


def _read_multipath(root: str) -> Optional[bool]:
    base = os.path.join(root, "sys/module/nvme_core")
    answer = read_text(os.path.join(base, "parameters/multipath"))
    if answer is None:
        # A kernel built without it has the module and no such parameter.
        return False if os.path.isdir(base) else None
    return answer == "Y"


def _read_udev(root: str) -> bool:
    try:
        return bool(os.listdir(os.path.join(root, "run/udev/data")))
    except OSError:
        return False


def _config_in_force(root: str = "/") -> tuple[Optional[str], Any]:
    """Path and content of the configuration in force; None if it is missing or cannot be parsed."""
    for path in _CONFIGS:
        text = read_text(os.path.join(root, path.lstrip("/")))
        if text is not None:
            try:
                return path, read_config(text)
            except ConfigError:
                return path, None
    return None, None


def _setting(config: Any, *keys: str) -> Optional[bool]:
    """A switch of the configuration; None if it is not set."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config if isinstance(config, bool) else None


def _allows_p2pdma(config: Any, through_raid: bool, libcufile: Optional[str]) -> Optional[bool]:
    """Whether P2PDMA is allowed: the general switch, and from libcufile 1.16 on also that of the kind of device."""
    general = _setting(config, "properties", "use_pci_p2pdma")
    if not general or libcufile is None or version_key(libcufile) < (1, 16):
        return general
    return bool(_setting(config, "block", "raid" if through_raid else "nvme", "use_pci_p2pdma"))
