"""Every reader of machines, for trees that were damaged (tests/trees.py)."""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doors import a_recording
from machines import RECORDED, lay_out
from trees import property_of
from tunetool.inspect.collect import inspect
from tunetool.inspect.model import dumps
from tunetool.inspect.source import opened
from tunetool.measure.figures import ceiling
from tunetool.measure.ladder.facts import read_facts
from tunetool.measure.made_by import node_facts
from tunetool.measure.process_io import look, movers
from tunetool.node.array.md_arrays import read_arrays, sync_actions
from tunetool.node.array.stripe import NoStripe, read_stripe
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import FAIL
from tunetool.node.machine import busy
from tunetool.node.machine.block_stack import CountersChanged, devices_under, read_stack, snapshot
from tunetool.node.machine.drive_health import Health
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.memory import groups_usage, memory_left
from tunetool.node.machine.pcie_links import shared_ports
from tunetool.node.machine.recording import anonymous, record
from tunetool.node.machine.recording import lay_out as lay_out_document
from tunetool.node.machine.volume_users import occupants
from tunetool.report.inspection import screen
from tunetool.training.rank import kernel_counters

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
HEALTHY = Health(0, 40, 100, 10, 3, 0, 0, 0, 0, 70)


def _inspect(root: Path) -> None:
    with opened(root) as source:
        shown = inspect(source)
        assert "\x1b" not in screen(shown, True)
        json.loads(dumps(shown))


def _verify(root: Path) -> None:
    point = MANIFEST["filesystem"]["mount_point"]
    run_checks(MANIFEST, str(root), health=lambda _: HEALTHY)
    stack, drives = read_stack(point, str(root)), read_drives(str(root))
    with contextlib.suppress(CountersChanged):
        snapshot(stack, str(root))
    limit = ceiling(stack, drives)
    assert limit is None or limit > 0
    node_facts(drives, stack, str(root)).model_dump_json()
    shared_ports(drives, str(root))
    read_facts(stack, drives, [], str(root))
    busy.volume_users(point, str(root))
    busy.gpu_holders(str(root))
    busy.scheduler_jobs({}, str(root))
    for name in ("md127", stack.device or "md0"):
        with contextlib.suppress(NoStripe):
            read_stripe(name, str(root))
        devices_under(name, str(root))


def _memory(root: Path) -> None:
    memory_left(str(root))
    groups_usage(str(root))
    kernel_counters.node_counters(str(root))
    kernel_counters.node_gauges(str(root))
    kernel_counters.process_counters(str(root))
    kernel_counters.process_gauges(str(root))
    movers(look(str(root)), look(str(root)), ["read", "write"], 1)
    sync_actions(str(root))


def _record(root: Path) -> None:
    document = anonymous(record(str(root)))
    with tempfile.TemporaryDirectory() as folder:
        lay_out_document(document, folder)


def _lost_drive(root: Path) -> None:
    checks = run_checks(MANIFEST, str(root), health=lambda _: HEALTHY)
    assert FAIL in [check.status for check in checks], "a drive is missing, and nothing fails"


COUNTERS = {
    "proc/stat": "cpu  120 0 60 850 60 0 0 10 0 0\ncpu0 120 0 60 850 60 0 0 10 0 0\n",
    "proc/net/dev": "Inter-| Receive\n face |bytes\n    lo: 9 1 0 0 0 0 0 0 9 1\n  eth0: 70 1 0 0 0 0 0 0 30 1\n",
    "proc/meminfo": "MemTotal:  2027024 kB\nMemAvailable:  1684876 kB\nShmem:  3 kB\nHugepagesize:  2048 kB\n",
    "proc/self/cgroup": "4:cpu,memory:/job/step\n0::/job\n",
    "proc/self/stat": "12 (a b) c) S " + " ".join(map(str, range(1, 40))),
    "proc/self/statm": "100 20 3 4 5 6 7",
    "proc/12/stat": "12 (a b) c) S " + " ".join(map(str, range(1, 40))),
    "proc/12/io": "rchar: 9\nwchar: 9\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 0\n",
    "sys/block/md5/md/sync_action": "check",
    "sys/block/nvme0n1/stat": "1 2 3 4 5 6 7 8 9 10 11",
    "sys/class/net/eth0/device/vendor": "0x15b3",
    "sys/class/infiniband/mlx5_0/ports/1/counters/port_rcv_data": "70",
    "sys/fs/cgroup/job/memory.max": "max",
    "sys/fs/cgroup/job/memory.current": "4096",
    "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 6\nactive_file 7\n",
    "sys/fs/cgroup/memory/job/step/memory.limit_in_bytes": "8192",
    "sys/fs/cgroup/memory/job/step/memory.usage_in_bytes": "4096",
    "sys/fs/cgroup/memory/job/step/memory.stat": "total_inactive_file 6\n",
}


def _counters(root: Path) -> None:
    for name, text in COUNTERS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def _machine(name: str) -> Callable[[Path], object]:
    return lambda root: lay_out(name, root)


USED = {
    "proc/self/mountinfo": "20 1 8:1 / / rw - ext4 /dev/vda rw\n40 20 9:127 / /mnt/a rw shared:3 - xfs /dev/md127 rw\n",
    "proc/10/mountinfo": "20 1 8:1 / / rw - ext4 /dev/vda rw\n41 20 9:127 /x /mnt/b rw - xfs /dev/md127 rw\n",
    "proc/10/comm": "train\n",
    "proc/10/maps": "7f00-7f01 r--p 00000000 09:7f 12 /mnt/b/lib.so\n",
    "proc/10/fdinfo/3": "pos:\t0\nflags:\t02\nmnt_id:\t41\n",
    "proc/swaps": "Filename Type Size Used Priority\n/mnt/a/swap file 1 0 -2\n",
    "sys/block/loop0/loop/backing_file": "/mnt/a/image\n",
    "sys/block/md127/dev": "9:127\n",
    "sys/block/md127/md/raid_disks": "8\n",
    "sys/block/md127/md/array_state": "clean\n",
}
LINKS = {"self/ns/mnt": "mnt:[1]", "10/ns/mnt": "mnt:[2]", "10/cwd": "/mnt/b", "10/root": "/", "10/fd/3": "/mnt/b/f"}


def _used(root: Path) -> None:
    for name, text in USED.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in LINKS.items():
        (root / "proc" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "proc" / name).symlink_to(target)


def _users(root: Path) -> None:
    for array in read_arrays(str(root)):
        assert all("`" in line for line in occupants(array.device_number, array.device, "/mnt/a", str(root)))


@dataclass(frozen=True)
class Tree:
    """A machine and one of its readers."""

    lay_out: Callable[[Path], object]
    read: Callable[[Path], None]


TREES = {
    "inspect": Tree(_machine("built"), _inspect),
    "verify": Tree(_machine("built"), _verify),
    "memory and counters": Tree(_counters, _memory),
    "users of a volume": Tree(_used, _users),
    # It is written down again for every example, so it is a small machine: one drive and what is built on it.
    "a recording": Tree(lambda root: lay_out_document(json.loads(a_recording()), str(root)), _record),
    "a node that lost a drive": Tree(_machine("lost-drive"), _lost_drive),
}


def property_of_tree(name: str, folder: Path) -> Callable[[], None]:
    """``property_of`` for the tree ``name``, which is laid out in the new directory ``folder``."""
    root = folder / "root"
    root.mkdir(parents=True)
    TREES[name].lay_out(root)
    TREES[name].read(root)
    return property_of(TREES[name].read, root)
