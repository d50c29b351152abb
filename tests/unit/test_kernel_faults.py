"""Lines of the kernel's log: which fault each tells of, of what, and whether it fails a node. Each was printed by a
kernel and published, but for the rows below `source`: a format of the kernel's source, filled in."""

from __future__ import annotations

import pytest

from tunetool.node.health.kernel_faults import BY_ID, CHECKS, COUNTS, FAILS, FAULTS, HEALS, concerns, fault_in

LINES = [
    # github.com/oxidecomputer/propolis/issues/578 (5.15)
    ("nvme_timeout", "nvme1", "nvme nvme1: I/O 775 QID 2 timeout, aborting"),
    # github.com/starfive-tech/linux/issues/98 (6.3)
    ("nvme_timeout", "nvme0", "nvme nvme0: I/O 897 QID 2 timeout, completion polled"),
    # lore.kernel.org CABXGCsMd_xv8jPDF_sFYhwd8GtANZ23nbaSJuCxQRO7cjPtgWg (6.13)
    (
        "nvme_timeout",
        "nvme1",
        "nvme nvme1: I/O tag 0 (3000) opcode 0x1 (I/O Cmd) QID 1 timeout, aborting req_op:WRITE(1) size:131072",
    ),
    # github.com/linux-nvme/nvme-cli/issues/151
    ("nvme_reset", "nvme2", "nvme nvme2: I/O 0 QID 0 timeout, reset controller"),
    # ahmedalsawi.github.io/posts/2025/01/linux-kernel-debug-nvme-timeout (6.8)
    (
        "nvme_reset",
        "nvme0",
        "nvme nvme0: I/O tag 641 (c281) opcode 0x1 (I/O Cmd) QID 8 timeout, reset controller",
    ),
    # bugzilla.kernel.org 216709 (5.17)
    ("nvme_reset", "nvme0", "nvme nvme0: controller is down; will reset: CSTS=0xffffffff, PCI_STATUS=0x10"),
    # linux-pci, 2023: "PCI: pciehp: Disable Surprise Down Error reporting"
    ("nvme_reset", "nvme2", "nvme nvme2: frozen state error detected, reset controller"),
    # source: drivers/nvme/host/core.c, nvme_reset_work
    ("nvme_reset", "nvme3", "nvme nvme3: resetting controller"),
    # blog.bspwr.com (6.x)
    ("nvme_lost", "nvme0", "nvme nvme0: Device not ready; aborting reset, CSTS=0x1"),
    # github.com/linux-nvme/nvme-cli/issues/151
    ("nvme_lost", "nvme2", "nvme nvme2: Removing after probe failure status: -19"),
    # linux-arm-msm, 2026, Val Packett (6.x)
    ("nvme_lost", "nvme0", "nvme nvme0: Disabling device after reset failure: -19"),
    # source: drivers/nvme/host/pci.c, nvme_error_detected
    ("nvme_lost", "nvme0", "nvme nvme0: failure state error detected, request disconnect"),
    # bugzilla.kernel.org 216709 (5.17)
    (
        "io_error",
        "nvme0n1",
        "blk_update_request: I/O error, dev nvme0n1, sector 2786568960 op 0x1:(WRITE) flags 0x103000 phys_seg 1 prio"
        " class 0",
    ),
    # blog.bspwr.com (6.x)
    (
        "io_error",
        "nvme0n1",
        "I/O error, dev nvme0n1, sector 2623470496 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2",
    ),
    # source: block/blk-core.c, blk_errors
    (
        "io_error",
        "nvme0n1",
        "device offline error, dev nvme0n1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
    ),
    (
        "io_error",
        "nvme0n1",
        "critical target error, dev nvme0c2n1, sector 8 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2",
    ),
    # linux-block, blktests nvme/039, 2024-02-19 (6.8)
    ("medium_error", "nvme0n1", "critical medium error, dev nvme0n1, sector 0 op 0x0:(READ) flags 0x800 phys_seg 12"),
    # a shop's customer, 2023 (5.15)
    (
        "medium_error",
        "nvme0n1",
        "blk_update_request: critical medium error, dev nvme0n1, sector 951741928 op 0x0:(READ) flags 0x0 phys_seg 1"
        " prio class 0",
    ),
    # github.com/pop-os/pop/issues/751
    (
        "pcie_corrected",
        "0000:03:00.0",
        "nvme 0000:03:00.0: AER: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)",
    ),
    # linux-pci, 2025 (6.16)
    (
        "pcie_corrected",
        "0000:00:1c.0",
        "pcieport 0000:00:1c.0: PCIe Bus Error: severity=Correctable, type=Data Link Layer, (Transmitter ID)",
    ),
    # linux-pci, 2023: "PCI: pciehp: Disable Surprise Down Error reporting"
    (
        "pcie_uncorrected",
        "0000:00:01.4",
        "pcieport 0000:00:01.4: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer, (Receiver ID)",
    ),
    ("pcie_uncorrected", "0000:00:01.4", "pcieport 0000:00:01.4: DPC: containment event, status:0x1f01 source:0x0000"),
    ("pcie_unrecovered", "0000:00:01.4", "pcieport 0000:00:01.4: AER: subordinate device reset failed"),
    # github.com/geerlingguy/raspberry-pi-pcie-devices/issues/600 (6.1)
    ("pcie_unrecovered", "0000:00:00.0", "pcieport 0000:00:00.0: AER: device recovery failed"),
    # linux-pci: "pcieport 0000:89:02.0 ... Slot(400)"
    ("pcie_link_down", "0000:89:02.0", "pcieport 0000:89:02.0: pciehp: Slot(400): Link Down"),
    ("pcie_link_down", "0000:89:02.0", "pcieport 0000:89:02.0: pciehp: Slot(400): Card not present"),
    # github.com/leptonai/gpud (6.5 on: no colon behind the level)
    ("md_disk_failure", "nvme0n1", "md/raid0md0: Disk failure on nvme0n1p1 detected, failing array."),
    # source: drivers/md/raid10.c, raid10_error
    ("md_disk_failure", "nvme1n1", "md/raid10:md127: Disk failure on nvme1n1, disabling device."),
    # source: drivers/md/md.h of 5.15, mddev_is_broken
    ("md_member_gone", "md0", "md: md0: raid0 array has a missing/failed member"),
    # source: drivers/md/raid10.c, handle_read_error
    ("md_io_error", "md0", "md/raid10:md0: nvme1n1: unrecoverable I/O read error for block 2048"),
    # github.com/kubernetes/node-problem-detector/pull/845 (before 5.15)
    (
        "xfs_corruption",
        "dm-4",
        "XFS (dm-4): Internal error xfs_iunlink_remove at line 2038 of file fs/xfs/xfs_inode.c.",
    ),
    ("xfs_corruption", "dm-4", "XFS (dm-4): Corruption detected. Unmount and run xfs_repair"),
    (
        "xfs_shutdown",
        "dm-4",
        "XFS (dm-4): xfs_do_force_shutdown(0x1) called from line 1788 of file fs/xfs/xfs_inode.c.  Return address ="
        " 000000009d022bf1",
    ),
    ("xfs_shutdown", "dm-4", "XFS (dm-4): I/O Error Detected. Shutting down filesystem"),
    # github.com/siderolabs/talos/pull/8733 (6.6)
    ("xfs_io_error", "sdb6", "XFS (sdb6): log I/O error -5"),
    ("xfs_shutdown", "sdb6", "XFS (sdb6): Filesystem has been shut down due to log error (0x2)."),
    # linux-xfs (6.x)
    (
        "xfs_shutdown",
        "dm-0",
        "XFS (dm-0): Log I/O Error (0x2) detected at xlog_ioend_work+0xb4/0x100 [xfs] (fs/xfs/xfs_log.c:1377).  Shutting"
        " down filesystem.",
    ),
    (
        "xfs_shutdown",
        "sda4",
        "XFS (sda4): Corruption of in-memory data (0x8) detected at xfs_ag_shrink_space+0x739/0xae0 [xfs]"
        " (fs/xfs/libxfs/xfs_ag.c:877).  Shutting down filesystem",
    ),
    # github.com/dm-vdo/kvdo/issues/25
    (
        "xfs_io_error",
        "dm-7",
        'XFS (dm-7): metadata I/O error: block 0x280000010 ("xlog_bread_noalign") error 5 numblks 8',
    ),
    (
        "xfs_corruption",
        "dm-2",
        "XFS (dm-2): Corruption warning: Metadata has LSN (1:2736) ahead of current LSN (1:120). Please unmount and run"
        " xfs_repair (>= v4.3) to resolve.",
    ),
    # linux-xfs (5.x, 6.x)
    ("lost_write", "dm-0", "dm-0: writeback error on inode 131, offset 131072, sector 78144"),
    # bugzilla.kernel.org 216709 (5.17)
    ("lost_write", "nvme0n1", "Buffer I/O error on dev nvme0n1p3, logical block 308281696, lost async page write"),
]


@pytest.mark.parametrize(("kind", "name", "line"), LINES)
def test_a_real_line_is_its_fault(kind: str, name: str, line: str) -> None:
    found = fault_in(line)
    assert found is not None
    assert (found[0].id, found[1]) == (kind, name)


@pytest.mark.parametrize(
    "line",
    [
        "nvme nvme0: pci function 0000:65:00.0",
        "nvme nvme0: 16/0/0 default/read/poll queues",
        "nvme nvme1: Abort status: 0x0",
        'nvme nvme0: Try "nvme_core.default_ps_max_latency_us=0 pcie_aspm=off" and report a bug',
        "nvme nvme0: missing or invalid SUBNQN field.",
        "nvme0n1: detected capacity change from 3907029168 to 0",
        "operation not supported error, dev nvme0n1, sector 0 op 0x9:(WRITE_ZEROES) flags 0x8000000 phys_seg 0 prio class 2",
        "critical target error, dev nvme0n1, sector 0 op 0x3:(DISCARD) flags 0x800 phys_seg 1 prio class 2",
        "I/O error, dev nvme0n1, sector 12 op 0x9:(WRITE_ZEROES) flags 0x0 phys_seg 0 prio class 2",
        "pcieport 0000:00:01.4: AER: Corrected error received: 0000:05:00.0",
        "pcieport 0000:97:02.0: AER: device recovery successful",
        "pcieport 0000:00:1c.0: pciehp: Slot(8): Card present",
        "XFS (md0): Mounting V5 Filesystem",
        "XFS (md0): Ending clean mount",
        "XFS (md0): Unmounting Filesystem",
        "md: md0 stopped.",
        "md/raid10:md0: Operation continuing on 7 devices.",
        "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', GPU has fallen off the bus.",
    ],
)
def test_a_line_of_a_node_that_is_well_is_no_fault(line: str) -> None:
    assert fault_in(line) is None


def test_every_fault_has_a_line_and_plain_words() -> None:
    assert {kind for kind, _, _ in LINES} == {fault.id for fault in FAULTS}
    for fault in BY_ID.values():
        assert fault.check in CHECKS
        assert fault.fails_at in (FAILS, HEALS, COUNTS)
        assert fault.means
        assert fault.remedy
    assert [fault.id for fault in FAULTS if fault.fails_at == COUNTS] == ["pcie_corrected"]


# github.com/NixOS/nixpkgs/issues/144787 (5.10)
WORKER = """kworker/15:1
      Tainted: P           O      5.10.76 #1-NixOS
task:kworker/15:1    state:D stack:    0 pid:  181 ppid:     2 flags:0x00004000
Workqueue: xfs-sync/{0} xfs_log_worker [xfs]
Call Trace:
 __schedule+0x217/0x830
 xlog_cil_force_lsn+0x71/0x220 [xfs]"""
# github.com/dm-vdo/kvdo/issues/8
THREAD = "xfsaild/{0}\n schedule+0x29/0x70\n _xfs_log_force+0x1c6/0x2c0 [xfs]"
# github.com/openshift/os/issues/376, with the names of functions that 5.15 prints
FSYNC = "manager\n schedule+0x29/0x70\n xfs_file_fsync+0x199/0x1c0 [xfs]\n do_fsync+0x67/0xb0"
OTHER = "txg_quiesce\n cv_wait_common+0xf5/0x130 [spl]\n txg_quiesce_thread+0x2c4/0x390 [zfs]"


@pytest.mark.parametrize(
    ("stack", "only_xfs", "ours"),
    [
        (WORKER.format("md0"), False, True),
        (THREAD.format("md0"), False, True),
        (WORKER.format("md01"), True, False),
        (WORKER.format("dm-1"), True, False),
        (THREAD.format("dm-3"), True, False),
        (FSYNC, True, True),
        (FSYNC, False, False),
        (OTHER, True, False),
        ("md0_raid10\n md_write_start+0x1/0x2 [md_mod]", False, True),
    ],
)
def test_a_hung_task_is_ours_where_the_log_says_so(stack: str, only_xfs: bool, ours: bool) -> None:
    assert concerns(stack, "md0", only_xfs, only_array=False) == ours


def test_a_task_that_hangs_in_md_is_ours_with_one_array() -> None:
    stack = "python3\n md_handle_request+0x135/0x1c0 [md_mod]\n raid0_make_request+0x1/0x2 [raid0]"
    assert concerns(stack, "md0", only_xfs=False, only_array=True)
    assert not concerns(stack, "md0", only_xfs=True, only_array=False)
