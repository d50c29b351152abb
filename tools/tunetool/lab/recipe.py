"""The contents of the guest's root file system: packages, files, services.

Data only, and pure: ``image`` builds from it, and the cache key is a hash over it, so that a change here
makes a new image by itself.
"""

from __future__ import annotations

import hashlib
import json

RECIPE_VERSION = 1
"""Version of the build. Raise it when ``image`` builds differently from the same data."""

SUITES = {"debian12": "bookworm", "debian13": "trixie"}
"""Values of ``--os``, each with its Debian suite."""

PACKAGES = (
    "linux-image-cloud-amd64",
    "initramfs-tools",
    "gzip",
    "zstd",
    "systemd",
    "systemd-sysv",
    "udev",
    "dbus",
    "kmod",
    "openssh-server",
    "python3",
    "python3-apt",
    "iproute2",
    "sudo",
    "procps",
    "util-linux",
    "fdisk",
    "e2fsprogs",
    "xfsprogs",
    "mdadm",
    # No MBR is written and no partition is there: QEMU starts GRUB's core image, which reads grub.cfg from the disk.
    "grub2-common",
    "grub-pc-bin",
    "nvme-cli",
    "rsync",
    "fio",
    "ca-certificates",
    # Only for the faults, which use the tools of each format.
    "lvm2",
    "cryptsetup-bin",
    "btrfs-progs",
)
"""Everything that the roles install, so that they find it present: `apt-get update` alone takes 32 s under TCG."""

_OPTIONS = "console=ttyS0 quiet net.ifnames=0 mitigations=off"
KERNEL_CMDLINE = f"root=/dev/vda ro {_OPTIONS}"
ROOT_LABEL = "labroot"
SYSTEM_LABEL = "labsystem"
SYSTEM_MOUNT = "/srv/system"

# Units that only cost boot time here. mdadm's own stay: the roles are tested against them.
_MASKED = (
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "e2scrub_reap.service",
    "fstrim.timer",
    "getty@tty1.service",
    "serial-getty@ttyS0.service",
    "blk-availability.service",
    "lvm2-lvmpolld.socket",
    "lvm2-monitor.service",
    "systemd-firstboot.service",
    "systemd-networkd-wait-online.service",
)

EARLY_FILES = {
    # Read while the kernel package is installed, so that the first initramfs is already the small one.
    # With MODULES=most `update-initramfs -u` takes more than three times as long under TCG.
    "etc/initramfs-tools/conf.d/lab": "MODULES=list\nCOMPRESS=gzip\nRESUME=none\n",
    # mdadm's own hook brings the md modules; nvme and ext4 are built into the cloud kernel of Debian 12.
    "usr/share/initramfs-tools/modules.d/lab": "virtio_pci\nvirtio_blk\next4\nnvme\n",
    # A build in a container or on a minimal host must not start services.
    "usr/sbin/policy-rc.d": "#!/bin/sh\nexit 101\n",
}

LATE_FILES = {
    "etc/hostname": "labnode\n",
    "etc/hosts": "127.0.0.1 localhost\n127.0.1.1 labnode\n",
    "etc/resolv.conf": "nameserver 10.0.2.3\n",
    "etc/machine-id": "00000000000000000000000000001abe\n",
    "etc/default/grub": (
        "GRUB_DEFAULT=0\nGRUB_TIMEOUT=0\nGRUB_DISTRIBUTOR=Debian\nGRUB_TERMINAL=serial\nGRUB_SERIAL_COMMAND=serial\nGRUB_DISABLE_RECOVERY=true\n"
        "GRUB_DISABLE_OS_PROBER=true\nGRUB_DISABLE_LINUX_UUID=true\n"
        f'GRUB_CMDLINE_LINUX_DEFAULT=""\nGRUB_CMDLINE_LINUX="{_OPTIONS}"\n'
    ),
    # Until the node's first `update-grub`, which cannot find its disk while the image is built.
    "boot/grub/grub.cfg": f"linux /vmlinuz {KERNEL_CMDLINE}\ninitrd /initrd.img\nboot\n",
    # The ninth drive is mounted by the udev rule below, at boot and after hot-adding alike; with `noauto`
    # no boot waits for a drive that the snapshot does not have yet.
    "etc/fstab": (
        "/dev/vda / ext4 defaults,errors=remount-ro 0 0\n"
        f"LABEL={SYSTEM_LABEL} {SYSTEM_MOUNT} ext4 noauto,nofail,x-systemd.device-timeout=20s 0 0\n"
    ),
    "etc/udev/rules.d/90-lab-system.rules": (
        f'SUBSYSTEM=="block", ACTION!="remove", ENV{{ID_FS_LABEL}}=="{SYSTEM_LABEL}", TAG+="systemd", '
        'ENV{SYSTEMD_WANTS}+="srv-system.mount"\n'
    ),
    "etc/systemd/network/10-lab.network": (
        "[Match]\nName=eth0\n\n[Network]\nAddress=10.0.2.15/24\nGateway=10.0.2.2\nDNS=10.0.2.3\n"
        "LinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    # One host key and one key exchange: the default post-quantum exchange costs most of a login under TCG.
    "etc/ssh/sshd_config.d/10-lab.conf": (
        "HostKey /etc/ssh/ssh_host_ed25519_key\nKexAlgorithms curve25519-sha256\nUseDNS no\n"
        "PermitRootLogin prohibit-password\nPasswordAuthentication no\nPrintLastLog no\nMaxStartups 50\n"
    ),
    "etc/systemd/journald.conf.d/lab.conf": "[Journal]\nStorage=volatile\n",
    "etc/apt/apt.conf.d/90lab": 'APT::Install-Recommends "false";\n',
}

LINKS = {
    **{f"etc/systemd/system/{unit}": "/dev/null" for unit in _MASKED},
    "etc/systemd/system/multi-user.target.wants/systemd-networkd.service": (
        "/lib/systemd/system/systemd-networkd.service"
    ),
    "etc/systemd/system/default.target": "/lib/systemd/system/multi-user.target",
}

# Modules that grub.cfg uses, built in: the disk holds no modules.
_GRUB_MODULES = (
    "biosdisk ext2 normal linux configfile search search_label search_fs_uuid search_fs_file "
    "echo ls test true serial terminal gzio part_msdos part_gpt loadenv sleep reboot halt minicmd all_video regexp"
)

FINISH_SCRIPT = f"""\
set -eu
root="$1"
rm -f "$root/usr/sbin/policy-rc.d"
mkdir -p "$root/srv/system"
# The files that were copied in kept their owner.
[ "$LAB_UID" = 0 ] || find "$root" -xdev -uid "$LAB_UID" -exec chown -h 0:0 {{}} +
chmod 700 "$root/root" "$root/root/.ssh"
chmod 600 "$root/root/.ssh/authorized_keys"
# mdadm's postinst scans for arrays: those of the build machine are none of the guest's business.
sed -i '/^ARRAY/d' "$root/etc/mdadm/mdadm.conf"
# What nothing here boots from. Without these hooks `update-initramfs -u` takes a quarter less under TCG.
for hook in btrfs dmsetup fsck keymap lvm2 resume thermal; do
    [ ! -e "$root/usr/share/initramfs-tools/hooks/$hook" ] || chmod a-x "$root/usr/share/initramfs-tools/hooks/$hook"
done
chroot "$root" update-initramfs -u
# The same disk has another number for the BIOS when the drives come first.
printf 'search.fs_label {ROOT_LABEL} root\\nset prefix=($root)/boot/grub\\n' > "$root/tmp/early.cfg"
chroot "$root" grub-mkimage -O i386-pc -p /boot/grub -c /tmp/early.cfg -o /tmp/core.img {_GRUB_MODULES}
cat "$root/usr/lib/grub/i386-pc/lnxboot.img" "$root/tmp/core.img" > "/proc/self/fd/$LAB_LOADER"
rm "$root/tmp/early.cfg" "$root/tmp/core.img"
rm -rf "$root"/var/cache/apt/*.bin "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
rm -rf "$root"/usr/share/doc "$root"/usr/share/man
cat "$root"/vmlinuz > "/proc/self/fd/$LAB_KERNEL"
cat "$root"/initrd.img > "/proc/self/fd/$LAB_INITRD"
# /proc, /sys and /dev are still mounted in the root. A bind of the root alone leaves them out, and in a mount
# namespace of its own it is gone with this command, however that ends.
unshare --mount sh -euc 'mount --bind "$1" /mnt
    # GRUB 2.06 reads no file system with metadata_csum_seed.
    mke2fs -q -F -t ext4 -L {ROOT_LABEL} -O ^metadata_csum_seed \\
        -E root_owner=0:0,lazy_itable_init=1,lazy_journal_init=1 -d /mnt "/proc/self/fd/$LAB_ROOT"' sh "$root"
"""
"""Run by mmdebstrap with the finished root as ``$1``, inside the user namespace when there is one.

It writes to descriptors that it inherits: the mapped user could not reach the caller's cache by path.
"""

IMAGE_SIZE = 6 * 2**30
"""Sparse: only what the packages fill takes space."""


def fingerprint(os_name: str) -> str:
    """The cache key of the image for one ``--os``."""
    inputs = (RECIPE_VERSION, os_name, PACKAGES, EARLY_FILES, LATE_FILES, LINKS, FINISH_SCRIPT, IMAGE_SIZE)
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]
