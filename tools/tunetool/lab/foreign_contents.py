"""Scripts that write foreign contents to drives, with the tools of each format inside a node. Pure: text in, text out.

Every mount ends read-only, which is also in use: a writable file system commits and initialises in the background, and
a test could not say who changed the drive's bytes.
"""

from __future__ import annotations

from tunetool.lab.guest import on_drive

_WIPE = 'wipefs -a -q "$drive"\n'


def has_filesystem(serial: str) -> str:
    """An ext4 file system that nobody mounted."""
    return on_drive(serial, _WIPE + 'mkfs.ext4 -q -F "$drive"\n')


def has_partitions(serial: str) -> str:
    """A GPT with one partition."""
    return on_drive(serial, _PARTITION)


def in_use(serial: str) -> str:
    """A mounted ext4 file system with a file in it."""
    return on_drive(serial, _WIPE + 'mkfs.ext4 -q -F "$drive"\n' + _mounted("$drive", "/mnt/in-use"))


def partition_in_use(serial: str) -> str:
    """A partition with a mounted ext4 file system."""
    return on_drive(
        serial, _PARTITION + 'mkfs.ext4 -q -F "${drive}p1"\n' + _mounted("${drive}p1", "/mnt/partition-in-use")
    )


def btrfs(serial: str) -> str:
    """A btrfs file system that nobody mounted."""
    return on_drive(serial, _WIPE + 'mkfs.btrfs -q -f "$drive"\n')


def btrfs_in_use(serial: str) -> str:
    """A mounted btrfs: the kernel gives it a device number that is no drive's."""
    return on_drive(serial, _WIPE + 'mkfs.btrfs -q -f "$drive"\n' + _mounted("$drive", "/mnt/btrfs"))


def lvm(serial: str) -> str:
    """A physical volume whose group has an active logical volume."""
    return on_drive(serial, _WIPE + _volume(serial) + "udevadm settle\n")


def lvm_idle(serial: str) -> str:
    """A physical volume whose logical volume is not active, as on drives moved in from another node."""
    # Otherwise udev activates it again when the drive appears.
    stop = f"vgchange -q --setautoactivation n lab{serial} >/dev/null\nvgchange -q -an lab{serial} >/dev/null\n"
    return on_drive(serial, _WIPE + _volume(serial) + stop + "udevadm settle\n")


def luks(serial: str) -> str:
    """An encrypted volume that nobody opened."""
    # The cheapest key derivation: the content is not secret, and the processor is emulated.
    return on_drive(
        serial,
        _WIPE + "printf secret | cryptsetup -q luksFormat --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000 "
        '--key-file - "$drive"\n',
    )


def swap_signature(serial: str) -> str:
    """A swap area that is not in use."""
    return on_drive(serial, _WIPE + 'mkswap "$drive" >/dev/null\n')


def zfs_label(serial: str) -> str:
    """The four labels of a ZFS pool `tank`, with its name and uberblocks. Debian has no ZFS to make them with."""
    return on_drive(serial, _WIPE + f'python3 - "$drive" <<\'END\'\n{_ZFS}END\nudevadm trigger --settle "$drive"\n')


def metadata(serial: str) -> str:
    """Blocks of 512 bytes with 8 bytes of metadata each, until the next boot: QEMU keeps no format over its end."""
    return on_drive(serial, 'nvme format "$drive" --lbaf=1 --force >/dev/null\nudevadm settle\n')


_PARTITION = _WIPE + 'printf "label: gpt\\n,,L\\n" | sfdisk -q "$drive"\nudevadm settle\n'


def _mounted(device: str, directory: str) -> str:
    return (
        f'mkdir -p {directory}\nmount "{device}" {directory}\necho "somebody works here" > {directory}/NOTES\n'
        f"mount -o remount,ro {directory}\nsync\n"
    )


def _volume(serial: str) -> str:
    return (
        f'pvcreate -q -y "$drive" >/dev/null\nvgcreate -q lab{serial} "$drive" >/dev/null\n'
        f"lvcreate -q -y -Z n -W n -n data -l 100%FREE lab{serial} >/dev/null\n"
    )


# On disk: 256 KiB labels, two at each end; in each an XDR nvlist at 16 KiB and uberblocks from 128 KiB.
_ZFS = """\
import os, struct, sys
def pair(name, kind, value):
    name = name.encode()
    head = struct.pack(">I", len(name)) + name.ljust(-(-len(name) // 4) * 4, b"\\0") + struct.pack(">II", kind, 1)
    return struct.pack(">II", len(head) + len(value) + 8, 64) + head + value
def text(value):
    return struct.pack(">I", len(value)) + value.ljust(-(-len(value) // 4) * 4, b"\\0")
number = lambda value: struct.pack(">Q", value)
pairs = pair("version", 8, number(5000)) + pair("name", 9, text(b"tank"))
pairs += pair("pool_guid", 8, number(0x1234567890ABCDEF)) + pair("guid", 8, number(0xFEDCBA0987654321))
nvlist = bytes([1, 1, 0, 0]) + struct.pack(">II", 0, 1) + pairs + bytes(8)
label = bytearray(256 * 1024)
label[16384:16384 + len(nvlist)] = nvlist
for slot in range(128):
    struct.pack_into("<QQQQQ", label, 131072 + 1024 * slot, 0x00BAB10C, 5000, 100 + slot, 7, 1700000000)
with open(sys.argv[1], "r+b") as drive:
    size = drive.seek(0, os.SEEK_END) // len(label) * len(label)
    for place in (0, len(label), size - 2 * len(label), size - len(label)):
        drive.seek(place)
        drive.write(label)
    os.fsync(drive.fileno())
"""
