"""Facts of the kernel modules that GPUDirect Storage needs: the NVIDIA driver, nvidia-fs and the NVMe driver."""

from __future__ import annotations

import glob
import os
import re
from dataclasses import dataclass
from typing import Optional

from ..common.files import read_text

_HOOKS = re.compile(rb"\bnvme_v\d+_register_nvfs_dma_ops\b")
"""Symbols that nvidia-fs looks for in the NVMe driver (gds-nvidia-fs, src/nvfs-dma.c, `modules_list`)."""
_P2PDMA = re.compile(rb"\bp2pdma_pgmap_ops\b")
"""NVIDIA's own test for P2PDMA in the kernel (GDS troubleshooting guide, 14.1)."""
_BUILT_FOR = re.compile(r"NVIDIA_SRC_DIR=\S*/nvidia-(?!fs-)(?:[a-z]+-)*(\d+(?:\.\d+)+)")
"""nvidia-fs's build names the driver's sources that it took (`NVIDIA_SRC_DIR` in DKMS's make.log)."""
NVFS_STALE = "/run/tunetool-nvidia-fs.stale"
"""The role's note that nvidia-fs could not be unloaded after a rebuild; a boot removes it."""
_REGISTRY = ("rmforcestaticbar1=1", "rmforcedisableiomapwc=1")


@dataclass(frozen=True)
class Symbols:
    """Facts from /proc/kallsyms; both None if it cannot be read."""

    nvme_hooks: Optional[bool] = None
    p2pdma: Optional[bool] = None


def read_symbols(root: str = "/") -> Symbols:
    """Read the symbols in one pass over some ten megabytes: a fifth of a second, so only on a machine with a GPU."""
    try:
        with open(os.path.join(root, "proc/kallsyms"), "rb") as stream:
            text = stream.read()
    except OSError:
        return Symbols()
    if not text:
        return Symbols()
    return Symbols(bool(_HOOKS.search(text)), bool(_P2PDMA.search(text)))


def read_driver(root: str = "/") -> tuple[Optional[str], Optional[bool]]:
    """Version of the loaded NVIDIA driver, and whether it is the open kernel module."""
    text = read_text(os.path.join(root, "proc/driver/nvidia/version"))
    line = (text or "").partition("\n")[0]
    version = re.search(r"\s(\d+(?:\.\d+)+)\s", line)
    if not version:
        return None, None
    return version.group(1), "Open Kernel Module" in line


def read_driver_p2pdma(gpus: tuple[str, ...], root: str = "/") -> Optional[bool]:
    """Whether the driver may hand GPU memory to the kernel's P2PDMA.

    A GPU that already did has ``p2pmem``. Before the first program uses it there is none, and the driver's own
    parameters tell (GDS troubleshooting guide, 14.3: both are needed on x86).
    """
    for gpu in gpus:
        size = read_text(os.path.join(root, "sys/bus/pci/devices", gpu, "p2pmem/size"))
        if size and size != "0":
            return True
    text = read_text(os.path.join(root, "proc/driver/nvidia/params"))
    if text is None:
        return None
    line = next((line for line in text.splitlines() if line.startswith("RegistryDwords:")), "").lower()
    return all(word in line for word in _REGISTRY)


def module_on_disk(name: str, kernel: str, root: str = "/") -> Optional[str]:
    """Path of a module below the kernel's directory, as depmod lists it; None if it does not list it."""
    pattern = re.compile(r"^(\S*/)?%s\.ko(\.\w+)?:" % name.replace("_", "[-_]"), re.MULTILINE)
    for modules_directory in ("lib/modules", "usr/lib/modules"):
        match = pattern.search(read_text(os.path.join(root, modules_directory, kernel, "modules.dep")) or "")
        if match:
            return match.group(0)[:-1]
    return None


@dataclass(frozen=True)
class NvidiaFs:
    """nvidia-fs: the loaded module, and the one on disk for the running kernel."""

    nvfs_loaded: bool = False
    nvfs_version: Optional[str] = None
    """Version of the loaded module, else of the one on disk for this kernel."""
    nvfs_installed: bool = False
    """nvidia-fs is on disk for this kernel."""
    nvfs_source: Optional[str] = None
    """Version of its DKMS source, so that it can be built anew; None where there is none."""
    nvfs_built_for: Optional[str] = None
    """NVIDIA driver that the module on disk was built against; None where nothing says so."""
    nvfs_stale: bool = False
    """The module was built anew and its former build is still loaded."""
    nvfs_devices: bool = False
    """/dev/nvidia-fs0 and its like are visible: a container may hide them."""
    nvme_registered: Optional[bool] = None
    """nvidia-fs has taken the NVMe driver's hooks; None while it is not loaded."""


def read_nvidia_fs(kernel: str, root: str = "/") -> NvidiaFs:
    """What is known of nvidia-fs. ``nvfs_built_for`` comes from DKMS's log; a prebuilt module has none."""
    loaded = os.path.isdir(os.path.join(root, "sys/module/nvidia_fs"))
    sources = glob.glob(os.path.join(root, "usr/src/nvidia-fs-*/dkms.conf"))
    versions = [os.path.basename(os.path.dirname(path))[len("nvidia-fs-") :] for path in sources]
    source = max(versions, key=version_key) if versions else None
    version_text = read_text(os.path.join(root, "proc/driver/nvidia-fs/version")) or ""
    version = re.search(r"version:\s*(\S+)", version_text)
    registered = None
    if loaded:
        listed = read_text(os.path.join(root, "proc/driver/nvidia-fs/modules"))
        registered = None if listed is None else bool(re.search(r"^nvme:", listed, re.MULTILINE))
    return NvidiaFs(
        nvfs_loaded=loaded,
        nvfs_version=version.group(1) if version else (source if not loaded else None),
        nvfs_installed=module_on_disk("nvidia_fs", kernel, root) is not None,
        nvfs_source=source,
        nvfs_built_for=_built_for(kernel, root),
        nvfs_stale=loaded and os.path.exists(os.path.join(root, NVFS_STALE.lstrip("/"))),
        nvfs_devices=bool(glob.glob(os.path.join(root, "dev/nvidia-fs[0-9]*"))),
        nvme_registered=registered,
    )


def _built_for(kernel: str, root: str) -> Optional[str]:
    logs = glob.glob(os.path.join(root, "var/lib/dkms/nvidia-fs/*", kernel, "*/log/make.log"))
    for log in sorted(logs, key=os.path.getmtime, reverse=True):
        match = _BUILT_FOR.search(read_text(log) or "")
        if match:
            return match.group(1)
    return None


def nvme_patched_on_disk(kernel: str, root: str = "/") -> bool:
    """Whether another NVMe driver than the kernel's is on disk: mlnx-nvme installs into updates or extra."""
    path = module_on_disk("nvme", kernel, root)
    return path is not None and path.split("/")[0] in ("updates", "extra", "weak-updates")


def version_key(version: str) -> tuple[int, ...]:
    """A dotted version as numbers, for comparisons."""
    return tuple(int(part) for part in re.findall(r"[0-9]{1,18}", version))
