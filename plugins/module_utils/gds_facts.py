"""What decides which path I/O between files and GPU memory takes: read from a machine's /proc, /sys and files.

Nothing here judges; :mod:`gds` does. ``None`` is "could not be read" and never "no".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

IOMMU_OFF = "off"
IOMMU_PASSTHROUGH = "passthrough"
IOMMU_TRANSLATED = "translated"


@dataclass(frozen=True)
class GdsFacts:
    """A machine, and the volume at ``mount_point``, as far as GPUDirect Storage is concerned."""

    kernel: str = ""
    """Release of the running kernel, as `uname -r` says it; empty where it could not be read."""
    architecture: str = ""
    """``x86_64``, ``aarch64``; empty where it could not be read."""
    distribution: str = ""
    """Its id and version, such as ``ubuntu 24.04``."""
    secure_boot: Optional[bool] = False
    gpus: tuple[str, ...] = ()
    """PCI addresses of NVIDIA GPUs."""
    driver: Optional[str] = None
    """Version of the NVIDIA kernel driver that is loaded; None when none is."""
    driver_open: Optional[bool] = None
    cuda: Optional[str] = None
    """Newest CUDA toolkit on the machine; cuFile needs none beside its own library."""
    libcufile: Optional[str] = None
    """Version of the library, such as ``1.15.0``; None when none is installed where the loader looks."""
    nvfs_loaded: bool = False
    nvfs_version: Optional[str] = None
    """Of the module that is loaded, else of the one on disk for this kernel."""
    nvfs_installed: bool = False
    """nvidia-fs is on disk for this kernel."""
    nvfs_source: bool = False
    """Its DKMS source is there, so that it can be built anew."""
    nvfs_built_for: Optional[str] = None
    """NVIDIA driver that the module on disk was built against; None where nothing says so."""
    nvfs_devices: bool = False
    """/dev/nvidia-fs0 and its like are visible: a container may hide them."""
    nvme_patched: Optional[bool] = None
    """The running NVMe driver offers nvidia-fs its hooks."""
    nvme_registered: Optional[bool] = None
    """nvidia-fs has taken them; None while it is not loaded."""
    nvme_multipath: Optional[bool] = None
    mount_point: Optional[str] = None
    fs_type: Optional[str] = None
    fs_options: tuple[str, ...] = ()
    device: Optional[str] = None
    """Kernel name of what is mounted."""
    md_levels: tuple[str, ...] = ()
    """Levels of the md arrays under the file system."""
    dm: tuple[str, ...] = ()
    """Device-mapper devices under the file system."""
    drives: tuple[str, ...] = ()
    """Kernel names of the drives at the bottom."""
    drives_nvme: bool = True
    """All of them are NVMe."""
    iommu: Optional[str] = IOMMU_OFF
    """``off``, ``passthrough``, ``translated``."""
    acs: Optional[tuple[str, ...]] = ()
    """PCI addresses of the ports between GPUs and drives that send peer traffic up to the root (ACS redirect)."""
    p2pdma_kernel: Optional[bool] = None
    """CONFIG_PCI_P2PDMA."""
    p2pdma_device: Optional[bool] = None
    """What is mounted accepts peer pages (BLK_FEAT_PCI_P2PDMA), through md too."""
    p2pdma_driver: Optional[bool] = None
    """The NVIDIA driver was loaded with the settings that x86 needs for it."""
    udev: bool = True
    """A udev database that cuFile can ask (/run/udev)."""
    md_rule_lists_members: Optional[bool] = None
    """The udev rule in force for arrays lists their members, as cuFile needs; None where there is no such rule."""
    container: bool = False
    config_path: Optional[str] = None
    """The cufile.json in force; None when there is none."""
    config_p2pdma: Optional[bool] = None
    """It allows P2PDMA."""
    config_compat: Optional[bool] = None
    """It allows the fallback through memory of the host. cuFile's own default is true."""


def read_gds_facts(root: str = "/", mount_point: Optional[str] = None) -> GdsFacts:
    """The facts of the machine under ``root``; those of a volume where ``mount_point`` is given."""
    raise NotImplementedError
