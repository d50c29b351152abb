"""The activity of a node and a process, by the kernel's counters. Every reader takes a root path.

Counters only grow: ``rates`` turns two readings of them into rates. Gauges are used as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tunetool.node.common.files import read_int, read_text, whole_number
from tunetool.node.machine.block_stack import CountersChanged, read_counters
from tunetool.node.machine.memory import groups_usage

Counters = Mapping[str, float]
"""Counters by name; a missing one could not be read."""

UNITS = {
    "node.cpu": "%",
    "node.memory": "B",
    "node.shared_memory": "B",
    "node.memory_group": "B",
    "node.disk_read": "B/s",
    "node.disk_write": "B/s",
    "node.network_in": "B/s",
    "node.network_out": "B/s",
    "node.rdma_in": "B/s",
    "node.rdma_out": "B/s",
    "rank.cpu": "%",
    "rank.memory": "B",
}
"""The unit of every curve of this module. 100 % of `node.cpu` is all cores, 100 % of `rank.cpu` is one core."""

_BUSY, _ALL = "cpu_busy", "cpu_all"
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_IB_LANES = 4
"""InfiniBand counts data in units of four octets (kernel: Documentation/ABI/stable/sysfs-class-infiniband)."""
_NO_DRIVE = re.compile(r"^(loop|ram|zram|nullb|sr|fd)\d+$")
_HIDDEN_PATH = re.compile(r"^(nvme\d+)c\d+(n\d+)$")


def node_counters(root: str = "/") -> dict[str, float]:
    """The node's counters: CPU time in ticks, bytes of its drives, network ports and RDMA ports."""
    return {**_cpu(root), **_disk(root), **_network(root), **_rdma(root)}


def node_gauges(root: str = "/") -> dict[str, float]:
    """Bytes of memory in use: of the node, of tmpfs and shared memory within it, and of this control group."""
    fields = {}
    for line in (read_text(f"{root}/proc/meminfo") or "").splitlines():
        name, _, value = line.partition(":")
        kibibytes = whole_number("".join(value.split()[:1]))
        if kibibytes is not None:
            fields[name] = kibibytes * 1024
    gauges: dict[str, float] = {}
    if "MemTotal" in fields and "MemAvailable" in fields:
        gauges["node.memory"] = fields["MemTotal"] - fields["MemAvailable"]
    if "Shmem" in fields:
        gauges["node.shared_memory"] = fields["Shmem"]
    usage = groups_usage(root)
    if usage:
        gauges["node.memory_group"] = usage[-1][1]
    return gauges


def process_counters(root: str = "/") -> dict[str, float]:
    """CPU time of this process with all its threads, in percent-seconds of one core (100 per second of CPU time).

    The data loader's worker processes are not included.
    """
    text = read_text(f"{root}/proc/self/stat") or ""
    # The name in field 2 may hold blanks and parentheses; utime and stime are fields 14 and 15.
    fields = text.rpartition(")")[2].split()
    user, system = _whole(fields, 11), _whole(fields, 12)
    return {"rank.cpu": (user + system) / _TICKS * 100} if user is not None and system is not None else {}


def process_gauges(root: str = "/") -> dict[str, float]:
    """Resident memory of this process in bytes, with the shared memory that it maps."""
    fields = (read_text(f"{root}/proc/self/statm") or "").split()
    pages = _whole(fields, 1)
    return {"rank.memory": pages * _PAGE} if pages is not None else {}


def _whole(fields: Sequence[str], index: int) -> int | None:
    return whole_number(fields[index]) if index < len(fields) else None


def rates(before: Counters, after: Counters, seconds: float) -> dict[str, float]:
    """The rates per second of the counters that are in both readings and did not decrease. The node's CPU time becomes
    a percentage of all cores.
    """
    grown = {name: after[name] - before[name] for name in after if name in before and after[name] >= before[name]}
    busy, whole = grown.pop(_BUSY, None), grown.pop(_ALL, None)
    per_second = {name: change / seconds for name, change in grown.items()} if seconds > 0 else {}
    if busy is not None and whole:
        per_second["node.cpu"] = 100.0 * busy / whole
    return per_second


def _cpu(root: str) -> dict[str, float]:
    fields = (read_text(f"{root}/proc/stat") or "").partition("\n")[0].split()
    # user nice system idle iowait irq softirq steal; guest time is in user and nice already (man 5 proc_stat).
    ticks = [ticks for ticks in map(whole_number, fields[1:9]) if ticks is not None]
    if len(ticks) < 8 or fields[0] != "cpu":
        return {}
    return {_ALL: sum(ticks), _BUSY: sum(ticks) - ticks[3] - ticks[4]}


def _disk(root: str) -> dict[str, float]:
    readings = []
    for name in drives(root):
        try:
            readings.append(read_counters(name, root))
        except CountersChanged:  # the drive has just disappeared: the sum decreases, and that sample is left out
            continue
    if not readings:
        return {}
    return {
        f"node.disk_{direction}": sum(counters.moved_bytes(direction) for counters in readings)
        for direction in ("read", "write")
    }


def drives(root: str = "/") -> list[str]:
    """Kernel names of the drives whose bytes add up to the node's: without devices that are built on other devices."""
    base = Path(root, "sys/block")
    try:
        names = sorted(path.name for path in base.iterdir() if not _NO_DRIVE.match(path.name))
    except OSError:
        return []
    # For a multipath NVMe namespace the paths are counted: its head has counters only since Linux 6.4.
    heads = {"".join(match.groups()) for name in names if (match := _HIDDEN_PATH.match(name))}
    return [name for name in names if name not in heads and not _holds(base / name / "slaves")]


def _network(root: str) -> dict[str, float]:
    ports: dict[str, tuple[int, int]] = {}
    for line in (read_text(f"{root}/proc/net/dev") or "").splitlines()[2:]:
        name, _, numbers = line.partition(":")
        fields = numbers.split()
        received, sent = _whole(fields, 0), _whole(fields, 8)
        if received is not None and sent is not None and name.strip() != "lo":
            ports[name.strip()] = (received, sent)
    # A bond, a bridge or a VLAN counts its ports' bytes again. A container may have virtual ports only.
    real = {name for name in ports if Path(root, "sys/class/net", name, "device").exists()}
    counted = [ports[name] for name in (real or ports)]
    if not counted:
        return {}
    return {
        "node.network_in": sum(port[0] for port in counted),
        "node.network_out": sum(port[1] for port in counted),
    }


def _rdma(root: str) -> dict[str, float]:
    moved: dict[str, float] = {}
    # RDMA bypasses the kernel and is in none of the network counters.
    for port in sorted(Path(root, "sys/class/infiniband").glob("*/ports/*/counters")):
        for name, file in (("node.rdma_in", "port_rcv_data"), ("node.rdma_out", "port_xmit_data")):
            lanes = read_int(str(port / file))
            if lanes is not None:
                moved[name] = moved.get(name, 0) + lanes * _IB_LANES
    return moved


def _holds(directory: Path) -> bool:
    try:
        return any(directory.iterdir())
    except OSError:
        return False
