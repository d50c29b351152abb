"""What the kernel's log says of a node's drives, array and file system: a table of its lines, in plain English.

Formats: the kernel's source, 5.15 to 6.x (drivers/nvme/host/pci.c and core.c, block/blk-core.c and blk-mq.c,
drivers/pci/pcie/aer.c and dpc.c, drivers/pci/hotplug/pciehp_ctrl.c, drivers/md, fs/xfs/xfs_fsops.c and xfs_log.c,
fs/iomap, fs/buffer.c, kernel/hung_task.c). ``tests/unit/test_kernel_faults.py`` has a line for each row, with where it
was seen.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Mapping, Pattern, Sequence

DRIVES, ARRAY, FILESYSTEM = "kernel.drives", "kernel.array", "kernel.filesystem"
CHECKS = (DRIVES, ARRAY, FILESYSTEM)

FAILS, HEALS, COUNTS = 1, 3, 0
"""How often a fault may be seen within a day until the check fails: at once; the third time, since it heals; never."""

_NVME = r"nvme (?P<name>nvme\d+): "
_PORT = r"\b(?P<name>[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): "
_XFS = r"XFS \((?P<name>[^)]+)\): "
_REPLACE = "save what you need, then replace that drive: `ansible-playbook tunetool.node.replace_drive`"
_WATCH = "look at its cooling, power, firmware and link (`nvme smart-log`, `lspci -vv`); replace it if that goes on"
_RESEAT = "reseat the drive, its cable or riser; the kernel's log (`dmesg`) has the registers"
_REPAIR = "unmount the volume, run `xfs_repair`, and see the kernel's log (`dmesg`) for the drive below it"


@dataclass(frozen=True)
class Fault:
    """A kind of line."""

    id: str
    """As the metrics name it."""
    check: str
    means: str
    remedy: str
    fails_at: int
    pattern: Pattern[str]
    """Its group ``name`` is what the line is about: a drive, its controller, a bus address, an array, a device."""


def _fault(identity: str, check: str, fails_at: int, pattern: str, means: str, remedy: str) -> Fault:
    return Fault(identity, check, means, remedy, fails_at, re.compile(pattern))


FAULTS: Sequence[Fault] = (
    _fault(
        "nvme_lost",
        DRIVES,
        FAILS,
        _NVME + r"(?:Device not ready; aborting (?:reset|initiali[sz]ation)|Removing after probe failure|"
        r"Disabling device after reset failure|failure state error detected)",
        "it did not come back from a reset",
        _REPLACE,
    ),
    _fault(
        "nvme_reset",
        DRIVES,
        HEALS,
        _NVME + r"(?:I/O .*\btimeout, (?:reset|disable) controller|controller is down; will reset|"
        r"frozen state error detected, reset controller|resetting controller)",
        "its controller did not answer and was reset",
        _WATCH,
    ),
    _fault(
        "nvme_timeout",
        DRIVES,
        HEALS,
        _NVME + r"I/O .*\btimeout, (?:aborting|completion polled)",
        "a command was not answered in time",
        _WATCH,
    ),
    _fault(
        "medium_error",
        DRIVES,
        FAILS,
        r"\b(?:critical medium|protection) error, dev (?P<name>\S+), sector \d",
        "it lost data: it cannot read or write some of its blocks",
        _REPLACE,
    ),
    # Not those of a discard, zeroes or an erase (op 3, 9 and 5), which some drives refuse: they lose nothing.
    _fault(
        "io_error",
        DRIVES,
        FAILS,
        r"\b(?:I/O|timeout|device offline|recoverable transport|critical target) error, "
        r"dev (?P<name>\S+), sector \d+\b(?! op 0x[359]:)",
        "it answered with an error",
        "look at it (`nvme smart-log`, `nvme error-log`); " + _REPLACE,
    ),
    _fault(
        "pcie_unrecovered",
        DRIVES,
        FAILS,
        _PORT + r"AER: (?:subordinate device reset|device recovery) failed",
        "an error of its PCIe link could not be recovered",
        _RESEAT,
    ),
    _fault(
        "pcie_link_down",
        DRIVES,
        FAILS,
        _PORT + r"pciehp: Slot\([^)]*\): (?:Link Down|Card not present)",
        "its PCIe link went down, or it was pulled",
        _RESEAT,
    ),
    _fault(
        "pcie_uncorrected",
        DRIVES,
        HEALS,
        _PORT + r"(?:(?:AER: )?PCIe Bus Error: severity=Uncorrect(?:ed|able) |DPC: containment event)",
        "its PCIe link had an error that the link could not correct, and was reset",
        _RESEAT,
    ),
    # Links may have one wrong bit in 10^12 (PCI Express Base Specification): at 32 GT/s x4 that is one in 8 s.
    _fault(
        "pcie_corrected",
        DRIVES,
        COUNTS,
        _PORT + r"(?:AER: )?PCIe Bus Error: severity=Correct(?:ed|able),",
        "its PCIe link corrected an error",
        _RESEAT,
    ),
    _fault(
        "md_disk_failure",
        DRIVES,
        FAILS,
        r"\bmd/(?:raid\d+|linear|multipath):?[^:\s]+: Disk failure on (?P<name>[^\s,]+)",
        "md calls it failed",
        _REPLACE,
    ),
    _fault(
        "md_member_gone",
        ARRAY,
        FAILS,
        r"\bmd: (?P<name>\S+): \w+ array has a missing/failed member",
        "a member is gone",
        "see `array.members` for which; reseat or replace it",
    ),
    _fault(
        "md_io_error",
        ARRAY,
        FAILS,
        r"\bmd/raid\d+:(?P<name>[^:\s]+): .*\bunrecoverable I/O",
        "no member could read a block",
        "restore what is damaged from a copy, and replace the drive that `kernel.drives` names",
    ),
    _fault(
        "xfs_shutdown",
        FILESYSTEM,
        FAILS,
        _XFS + r"(?:.*Shutting down filesystem|Filesystem has been shut down|.*shutdown\(0x|User initiated shutdown)",
        "XFS was shut down",
        "unmount the volume, mount it again, and see the kernel's log (`dmesg`) for why it was",
    ),
    _fault(
        "xfs_io_error",
        FILESYSTEM,
        FAILS,
        _XFS + r"(?:log I/O error|metadata I/O error|page discard)",
        "XFS could not write or read",
        "see `kernel.drives`; " + _REPAIR,
    ),
    _fault(
        "xfs_corruption",
        FILESYSTEM,
        FAILS,
        _XFS + r"(?:Metadata (?:corruption|CRC error) detected|Internal error|Corruption|.*run xfs_repair)",
        "XFS found damage in its own data",
        _REPAIR,
    ),
    _fault(
        "lost_write",
        FILESYSTEM,
        FAILS,
        r"^(?P<name>\S+): writeback error on inode|\bBuffer I/O error on dev(?:ice)? (?P<target>\w+), logical block",
        "what was written, or was to be read, is lost",
        "see `kernel.drives`; restore the files that were being written",
    ),
)
"""A line is of the first fault whose pattern it has. Left out are the lines that come beside one of these, such as
``nvme0n1: I/O Cmd(0x2) @ LBA ...`` beside ``I/O error, dev nvme0n1``."""

HUNG_TASK = _fault(
    "hung_task",
    FILESYSTEM,
    HEALS,
    r"INFO: task (?P<name>.+):\d+ blocked (?:in I/O wait )?for more than \d+ seconds",
    "a process waited for it for two minutes",
    "see `filesystem.answers` and `drives.answer`, and the kernel's log (`dmesg`) for the drive that is slow",
)
"""It has its device, if any, in the lines that follow."""
BY_ID: Mapping[str, Fault] = {fault.id: fault for fault in (*FAULTS, HUNG_TASK)}

_PART = re.compile(r"^(nvme\d+)(?:c\d+)?(n\d+)(?:p\d+)?$")


def fault_in(text: str) -> tuple[Fault, str] | None:
    """The fault that a line of the log tells of, and the name of what it is about."""
    for fault in FAULTS:
        match = fault.pattern.search(text)
        if match:
            groups = match.groupdict()
            # A path of a drive with several, and a partition, are the drive.
            return fault, _PART.sub(r"\1\2", groups["name"] or groups["target"])
    return None


def concerns(stack: str, volume: str, only_xfs: bool, only_array: bool) -> bool:
    """Whether a hung task with these lines waits for the volume.

    ``volume``: the kernel's name of its device. Where no line names a device, the code that it waits in says so, if
    this node has no other XFS or no other array: ``only_xfs``, ``only_array``.
    """
    if volume and re.search(r"(?<![\w-])%s(?![0-9a-z-])" % re.escape(volume), stack):
        return True
    if re.search(r"\b(?:xfsaild|xfs-[\w-]+|jbd2)/\w|\bmd\w+_raid\d", stack):
        # It names another device.
        return False
    in_xfs = re.search(r"\[xfs\]|\b(?:xfs|xlog)_\w+\+0x", stack)
    in_array = re.search(r"\[(?:md_mod|raid\d+)\]|\b(?:md|raid\d+)_\w+\+0x", stack)
    return bool((only_xfs and in_xfs) or (only_array and in_array))
