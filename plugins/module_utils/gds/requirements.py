"""The requirements of each path, one rule each, with its source.

Sources: NVIDIA's GPUDirect Storage documents (docs.nvidia.com/gpudirect-storage: TG troubleshooting and installation
guide, BP best practices, RN release notes), its gds-nvidia-fs repository (NFS), the Linux source, and what was run.
Section numbers are those of the guide's table of contents of 2026; they move between releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Mapping, Optional, Sequence

from ..common.commands import CommandError, NotInstalled, run
from .facts import IOMMU_PASSTHROUGH, IOMMU_TRANSLATED, GdsFacts
from .kernel_modules import version_key
from .volume_facts import PEER_PAGES_SINCE, PEER_PAGES_STACKED_SINCE

DIRECT = ("nvidia-fs", "p2pdma")
ANY = (*DIRECT, "compat")

NO_RAID = "NVIDIA's release notes (GDS 1.20, 9) call P2PDMA on RAID unsupported"
WITHOUT_RAID = "`raid_array_groups: drive` makes a file system on each drive, without md"

Finding = Optional[tuple[str, str, bool]]
"""The finding, its remedy, and whether the role can remove it; None if the requirement is met."""


@dataclass(frozen=True)
class Blocker:
    """One reason why a path cannot be taken."""

    id: str
    found: str
    remedy: str
    curable: bool
    """Whether the role gpudirect_storage can remove it: install, load, render, rebuild, or ask for a reboot."""

    def __str__(self) -> str:
        return "%s: %s. hint: %s" % (self.id, self.found, self.remedy)


@dataclass(frozen=True)
class Rule:
    """A requirement of some paths."""

    id: str
    modes: tuple[str, ...]
    look: Callable[[GdsFacts], Finding]

    def judge(self, facts: GdsFacts) -> Optional[Blocker]:
        """The blocker if the requirement is not met, else None. Without a GPU only the requirement of a GPU counts.

        Each of several volumes is judged; one that differs is named.
        """
        if not facts.gpus and self.id != "gpu":
            return None
        places: dict[tuple[str, str, bool], list[str]] = {}
        for each in facts.volumes:
            finding = self.look(each)
            if finding:
                places.setdefault(finding, []).append("`%s`" % each.mount_point)
        if not places:
            return None
        told = []
        for (found, _remedy, _curable), there in places.items():
            told.append(found if len(there) == len(facts.volumes) else "%s on %s" % (found, ", ".join(there)))
        remedy = "; ".join(dict.fromkeys(finding[1] for finding in places))
        return Blocker(self.id, "; ".join(told), remedy, all(finding[2] for finding in places))


def _gpu(facts: GdsFacts) -> Finding:
    return None if facts.gpus else ("no NVIDIA GPU on the PCI bus", "nothing to set up on this node", False)


def _driver(facts: GdsFacts) -> Finding:
    if facts.driver:
        return None
    return "no NVIDIA driver is loaded", "install and load the GPU's driver; tunetool does not", False


def _driver_open(facts: GdsFacts) -> Finding:
    """RN 1.7.2: the proprietary module is not supported. NFS#48: the kernel refuses nvidia-fs that module's symbols."""
    if facts.driver is None or facts.driver_open:
        return None
    problem = (
        "whether the driver is the open module is not known"
        if facts.driver_open is None
        else ("driver %s is the proprietary kernel module" % facts.driver)
    )
    return problem, "install NVIDIA's open kernel module of that driver and reboot", False


def _driver_version(facts: GdsFacts) -> Finding:
    """ "GDS Support for NVMe drives using Linux PCI P2PDMA", 3.4: open driver 565 or above."""
    if facts.driver is None or version_key(facts.driver) >= (565,):
        return None
    return "driver %s offers no GPU memory to the kernel's P2PDMA" % facts.driver, "driver 565 or newer", False


def _libcufile(facts: GdsFacts) -> Finding:
    if facts.libcufile:
        return None
    remedy = "install libcufile (CUDA's packages or wheels); `gpudirect_storage_repository_url` sets the source"
    return "no libcufile", remedy, facts.installable


def _libcufile_version(facts: GdsFacts) -> Finding:
    """P2PDMA came with GDS 1.13 (CUDA 12.8), the switch for RAID (block.raid.use_pci_p2pdma) with 1.16."""
    least = (1, 16) if facts.md_levels else (1, 13)
    if facts.libcufile is None or version_key(facts.libcufile) >= least:
        return None
    what = "through RAID" if facts.md_levels else "at all"
    problem = "libcufile %s has no P2PDMA %s" % (facts.libcufile, what)
    return problem, "libcufile %d.%d or newer" % least, False


def _udev(facts: GdsFacts) -> Finding:
    """Run on an H200: without udev cuFileHandleRegister fails (5027), with allow_compat_mode true as well."""
    if facts.udev:
        return None
    if facts.container:
        remedy = "bind-mount /run/udev of the host into the container, read-only"
    else:
        remedy = "install and start systemd-udevd"
    return "no udev database in /run/udev: cuFile registers no file", remedy, False


def _config(facts: GdsFacts) -> Finding:
    """Run on an H200: cuFileDriverOpen fails with a file that it cannot parse."""
    if facts.config_valid is not False:
        return None
    return "`%s` is not JSON" % facts.config_path, "let the role render it, or correct it", True


def _volume(facts: GdsFacts) -> Finding:
    if facts.mount_point is None or facts.device:
        return None
    problem = "`%s` lies on %s, no local block device" % (facts.mount_point, facts.fs_type or "nothing that is mounted")
    return problem, "mount a local NVMe file system", False


def _filesystem(facts: GdsFacts) -> Finding:
    """NVIDIA, nvidia-fs key features: XFS, and ext4 in ordered mode, on NVMe."""
    if facts.device is None or facts.fs_type in ("xfs", "ext4"):
        return None
    return "the file system is %s" % facts.fs_type, "XFS, or ext4 with data=ordered", False


def _journal(facts: GdsFacts) -> Finding:
    """TG 15 (NVMe): ext4 must show data=ordered; being the default is not enough, cuFile reads the mount table."""
    if facts.fs_type != "ext4" or facts.device is None or "data=ordered" in facts.fs_options:
        return None
    remedy = "`mount -o remount,data=ordered %s`, and in /etc/fstab" % facts.mount_point
    return "ext4 does not show data=ordered in the mount table", remedy, False


def _mapper(facts: GdsFacts) -> Finding:
    if not facts.dm:
        return None
    names = ", ".join("`%s`" % name for name in facts.dm)
    return (
        "device mapper under the file system (%s)" % names,
        "put it on NVMe or md RAID0 without LVM or dm-crypt",
        False,
    )


def _md_level(facts: GdsFacts) -> Finding:
    """TG 15, RAID: "GDS only supports RAID 0"."""
    levels = [level for level in facts.md_levels if level != "raid0"]
    if not levels:
        return None
    return "md %s under the file system" % ", ".join(levels), "md RAID0 (data must move)", False


def _drives(facts: GdsFacts) -> Finding:
    if facts.device is None or facts.drives_nvme:
        return None
    return "not every drive under it is NVMe (%s)" % ", ".join(facts.drives), "a volume on NVMe drives", False


def _md_udev(facts: GdsFacts) -> Finding:
    """TG 5.15: mdadm is called with --no-devices, so udev knows no members of the array."""
    if not facts.md_levels or facts.md_members_in_udev or not facts.udev:
        return None
    remedy = "a copy of 63-md-raid-arrays.rules without --no-devices in /etc/udev/rules.d"
    if facts.md_members_in_udev is None:
        return "whether udev knows the array's members is not known", "is /run/udev that of the host?", False
    if facts.md_rule_lists_members:
        return "udev's entry of the array is older than its rule", "`udevadm trigger --action=change`", True
    return "udev does not know the array's members", remedy, facts.md_rule is not None


def _nvfs_installed(facts: GdsFacts) -> Finding:
    if facts.nvfs_loaded or facts.nvfs_installed:
        return None
    if facts.nvfs_source:
        return "nvidia-fs %s is not built for kernel %s" % (facts.nvfs_source, facts.kernel), "`dkms install`", True
    remedy = "install nvidia-fs; `gpudirect_storage_repository_url` sets the source"
    return "nvidia-fs is not installed", remedy, facts.installable


def _nvfs_loaded(facts: GdsFacts) -> Finding:
    if facts.nvfs_loaded or not facts.nvfs_installed:
        return None
    return "nvidia-fs is not loaded", "`modprobe nvidia-fs`", True


def _secure_boot(facts: GdsFacts) -> Finding:
    """NFS#81: DKMS's signing does not cover nvidia-fs everywhere; one that is loaded was accepted."""
    if facts.nvfs_loaded or facts.secure_boot is False:
        return None
    if facts.secure_boot is None:
        return "whether Secure Boot is on is not known", "read it as root", False
    return (
        "Secure Boot refuses a module that no enrolled key signed",
        ("sign nvidia-fs with an enrolled key (mokutil) and load it, or turn Secure Boot off"),
        False,
    )


def _nvfs_build(facts: GdsFacts) -> Finding:
    """nvidia-fs takes nvidia_p2p_* with their versions from the driver; DKMS does not rebuild it for a new driver."""
    if facts.nvfs_stale:
        return "the former build of nvidia-fs is still loaded", "reboot, or unload it when nobody uses it", True
    if facts.nvfs_built_for is None or facts.driver is None or facts.nvfs_built_for == facts.driver:
        return None
    problem = "nvidia-fs was built for driver %s, %s is loaded" % (facts.nvfs_built_for, facts.driver)
    return problem, "rebuild it with dkms", facts.nvfs_source is not None


def _nvfs_devices(facts: GdsFacts) -> Finding:
    if not facts.nvfs_loaded or facts.nvfs_devices:
        return None
    remedy = (
        "give the container /dev/nvidia-fs*" if facts.container else "`modprobe -r nvidia-fs && modprobe nvidia-fs`"
    )
    return "no /dev/nvidia-fs* here", remedy, not facts.container


def _nvme_patched(facts: GdsFacts) -> Finding:
    """NFS, src/nvfs-dma.c: nvidia-fs looks up nvme_v1/v2_register_nvfs_dma_ops; a stock driver has none. TG 15."""
    if facts.nvme_patched or facts.nvme_registered:
        return None
    if facts.nvme_patched_on_disk:
        return "the running NVMe driver has no hooks for nvidia-fs, another lies on disk", "reboot into it", True
    hooks = "not known" if facts.nvme_patched is None else "none"
    return (
        "hooks of the NVMe driver for nvidia-fs: %s" % hooks,
        (
            "install the patched driver (doca-ofed with mlnx-nvme-dkms; kmod-mlnx-nvme on RHEL; Ubuntu's linux-nvidia "
            "kernels have it) and reboot"
        ),
        False,
    )


def _nvme_registered(facts: GdsFacts) -> Finding:
    """NFS, src/nvfs-proc.c: /proc/driver/nvidia-fs/modules lists the drivers whose hooks were found when it loaded."""
    if not facts.nvfs_loaded or not facts.nvme_patched or facts.nvme_registered:
        return None
    return "nvidia-fs was loaded before the NVMe driver", "`modprobe -r nvidia-fs && modprobe nvidia-fs`", True


def _iommu(facts: GdsFacts) -> Finding:
    """TG 1.1: "iommu=on is not guaranteed to work functionally or performantly"; Grace (BP 1.1) wants it on."""
    if facts.architecture == "aarch64" or facts.iommu not in (IOMMU_TRANSLATED, None):
        return None
    problem = "the IOMMU translates" if facts.iommu else "the IOMMU's state is not known"
    return problem, "`iommu=pt`, or intel_iommu=off / amd_iommu=off, on the kernel command line, then reboot", False


def _peer_kernel(facts: GdsFacts) -> Finding:
    """TG 14.1."""
    if facts.kernel_version >= PEER_PAGES_SINCE and facts.p2pdma_kernel:
        return None
    if facts.kernel_version >= PEER_PAGES_SINCE and facts.p2pdma_kernel is None:
        return "whether kernel %s has P2PDMA is not known" % facts.kernel, "read /proc/kallsyms", False
    return "kernel %s without P2PDMA" % (facts.kernel or "unknown"), "Linux 6.2 or newer, CONFIG_PCI_P2PDMA=y", False


def _peer_device(facts: GdsFacts) -> Finding:
    """TG 16.6 and RN 9 (GDS 1.20): not with RAID. Since Linux 7.2 md passes the members' ability on (02666132403a)."""
    if facts.device is None or not facts.p2pdma_kernel or facts.p2pdma_device or not facts.drives_nvme or facts.dm:
        return None
    if facts.md_levels:
        found = "kernel %s is not known to take GPU pages through md, and %s" % (facts.kernel, NO_RAID)
        return found, "%s (tear down first); or Linux 7.2 or newer" % WITHOUT_RAID, False
    return "`%s` does not take GPU pages" % facts.device, "Linux 6.2 or newer", False


def _multipath(facts: GdsFacts) -> Finding:
    """TG 14.3, RN 9; the kernel's own multipath passes it on since 7.2 (commit fb0eeeed91f3)."""
    if facts.nvme_multipath is False or facts.kernel_version >= PEER_PAGES_STACKED_SINCE:
        return None
    state = "is on" if facts.nvme_multipath else "is not known to be off"
    return (
        "NVMe multipath %s" % state,
        ("`options nvme_core multipath=N` in /etc/modprobe.d, rebuild the initramfs, reboot"),
        False,
    )


def _peer_driver(facts: GdsFacts) -> Finding:
    """TG 14.3: required on x86."""
    if facts.p2pdma_driver or facts.architecture == "aarch64" or facts.driver is None:
        return None
    state = "does not offer" if facts.p2pdma_driver is False else "is not known to offer"
    return (
        "the NVIDIA driver %s GPU memory to the kernel" % state,
        (
            '`options nvidia NVreg_RegistryDwords="RMForceStaticBar1=1;RmForceDisableIomapWC=1;"` in /etc/modprobe.d, '
            "rebuild the initramfs, reboot"
        ),
        False,
    )


def _config_peer(facts: GdsFacts) -> Finding:
    """cuFile's default is false (cufile.json, properties.use_pci_p2pdma)."""
    if facts.config_p2pdma:
        return None
    return "cufile.json does not allow P2PDMA", "`properties.use_pci_p2pdma: true`", True


def _config_compat(facts: GdsFacts) -> Finding:
    if facts.config_compat is not False:
        return None
    return "`%s` forbids it" % facts.config_path, "`properties.allow_compat_mode: true`", True


RULES: tuple[Rule, ...] = (
    Rule("gpu", ANY, _gpu),
    Rule("driver", ANY, _driver),
    Rule("driver.open", DIRECT, _driver_open),
    Rule("driver.version", ("p2pdma",), _driver_version),
    Rule("libcufile", ANY, _libcufile),
    Rule("libcufile.version", ("p2pdma",), _libcufile_version),
    Rule("udev", ANY, _udev),
    Rule("cufile.json", ANY, _config),
    Rule("volume", DIRECT, _volume),
    Rule("filesystem", DIRECT, _filesystem),
    Rule("filesystem.journal", DIRECT, _journal),
    Rule("device_mapper", DIRECT, _mapper),
    Rule("md.level", DIRECT, _md_level),
    Rule("md.udev", DIRECT, _md_udev),
    Rule("drives", DIRECT, _drives),
    Rule("nvidia_fs.installed", ("nvidia-fs",), _nvfs_installed),
    Rule("nvidia_fs.secure_boot", ("nvidia-fs",), _secure_boot),
    Rule("nvidia_fs.build", ("nvidia-fs",), _nvfs_build),
    Rule("nvidia_fs.loaded", ("nvidia-fs",), _nvfs_loaded),
    Rule("nvidia_fs.devices", ("nvidia-fs",), _nvfs_devices),
    Rule("nvme.hooks", ("nvidia-fs",), _nvme_patched),
    Rule("nvme.registered", ("nvidia-fs",), _nvme_registered),
    Rule("iommu", ("nvidia-fs",), _iommu),
    Rule("p2pdma.kernel", ("p2pdma",), _peer_kernel),
    Rule("p2pdma.device", ("p2pdma",), _peer_device),
    Rule("p2pdma.driver", ("p2pdma",), _peer_driver),
    Rule("nvme.multipath", ("p2pdma",), _multipath),
    Rule("cufile.p2pdma", ("p2pdma",), _config_peer),
    Rule("cufile.compat", ("compat",), _config_compat),
)


def notes_on(mode: str, facts: GdsFacts) -> tuple[str, ...]:
    """Facts that do not block a path but should be reported."""
    notes = []
    if not facts.gpus:
        return ()
    if facts.mount_point is None and mode in DIRECT:
        notes.append("no volume was looked at")
    if mode in DIRECT and facts.acs is None:
        notes.append("ACS of the ports between GPUs and drives could not be read (that needs root)")
    elif mode in DIRECT and facts.acs:
        # BP 1.1: "for optimal GDS performance, disable ACS". It works with it.
        notes.append("ACS sends traffic between GPUs and drives up to the root at %s: slower" % ", ".join(facts.acs))
    if mode == "nvidia-fs" and facts.iommu == IOMMU_PASSTHROUGH:
        notes.append("the IOMMU is in passthrough: allowed, off is best")
    if mode == "nvidia-fs" and facts.nvfs_loaded and facts.nvfs_built_for is None:
        notes.append("it is not known which driver nvidia-fs was built for")
    if mode == "p2pdma" and facts.md_levels and facts.p2pdma_device:
        notes.append("%s: `tunetool verify --gds require` proves it; %s" % (NO_RAID, WITHOUT_RAID))
    return tuple(notes)


def installed() -> dict[str, str]:
    """Version by name of every installed package. Raises ``CommandError`` if neither dpkg nor rpm answers."""
    problem = CommandError("there is neither dpkg nor rpm")
    for argv in (
        ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package} ${Version}\n"],
        ["rpm", "-qa", "--qf", "installed %{NAME} %{VERSION}-%{RELEASE}\n"],
    ):
        try:
            lines = run(argv).stdout.splitlines()
        except CommandError as error:
            # The error of a dpkg that fails matters more than a missing rpm.
            problem = problem if isinstance(error, NotInstalled) else error
            continue
        fields = [line.split() for line in lines]
        return {field[1]: field[2] for field in fields if len(field) == 3 and field[0] == "installed"}
    raise problem


def differing(names: Sequence[str], versions: Mapping[str, str], present: Mapping[str, str]) -> list[str]:
    """The packages of ``names`` that are absent, and those of ``versions`` that are present in another version."""
    missing = [name for name in names if name not in present]
    missing += [name for name, version in versions.items() if name in present and not matches(present[name], version)]
    return list(dict.fromkeys(missing))


def pinned(names: Sequence[str], versions: Mapping[str, str], debian: bool) -> list[str]:
    """The packages in the notation of apt or dnf."""
    between = "=" if debian else "-"
    return [name + between + versions[name] if name in versions else name for name in names]


def matches(version: str, asked: str) -> bool:
    """Whether ``version`` is ``asked``, which may leave out rpm's release."""
    return version == asked or version.startswith(asked + "-")


def available(names: Sequence[str]) -> bool:
    """Whether the node's own repositories offer all of ``names``, according to their lists on the node.

    Raises ``CommandError`` if there is neither apt nor dnf.
    """
    if not names:
        return False
    try:
        text = run(["apt-cache", "policy", *names]).stdout
    except NotInstalled:
        pass
    else:
        candidates = [line.split()[1] for line in text.splitlines() if line.strip().startswith("Candidate:")]
        return len(candidates) == len(names) and "(none)" not in candidates
    try:
        # -C: only the cache; reading a node needs no network.
        text = run(["dnf", "-C", "-q", "repoquery", "--qf", "%{name}\n", *names]).stdout
    except NotInstalled:
        raise CommandError("there is neither apt-cache nor dnf") from None
    except CommandError:
        return False  # dnf has fetched no lists yet: they offer nothing
    return set(names) <= set(text.split())
