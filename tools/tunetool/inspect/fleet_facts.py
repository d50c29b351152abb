"""The facts of a node that its equals should share, by name. Pure.

A fact that only makes sense beside another one, such as the firmware of drives beside their number, is named below it
(``parent``): a host without the other is not named for the lack of this one too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tunetool.inspect.ceilings import format_link, format_link_speed
from tunetool.inspect.model import Drive, Gpu, HugePages, Inspection
from tunetool.node.common.io_settings import DRIVE, of_target
from tunetool.node.units import format_size, format_size_binary
from tunetool.record import DriveFacts, Node
from tunetool.record import Link as RecordedLink

ABSENT = "none"
"""The value of a fact that a host does not have."""
_OWN = ("uuid", "serial", "by_id", "pci_address", "reasons", "hardware", "path", "members", "tool_version", "schema")
"""Keys of the manifest that differ between equal nodes, or that another fact has already."""


@dataclass(frozen=True)
class Fact:
    """One fact of one host."""

    value: str | float
    """A number is compared with a tolerance (``tunetool.inspect.fleet_compare``)."""
    parts: tuple[tuple[str, str], ...] = ()
    """Drives or GPUs with the value of each, where it is put together from theirs."""
    shown: str = ""
    """A number for people."""


def facts(shown: Inspection) -> dict[str, Fact]:
    """All facts of one host; what it does not show is absent."""
    result: dict[str, Fact] = {}
    for read in (_drives, _gpus, _host, _memory, _volume, _built):
        for name, value in read(shown):
            if isinstance(value, Fact):
                result[name] = value
            elif value is not None:
                result[name] = Fact(str(value))
    return result


def facts_of_node(node: Node) -> dict[str, Fact]:
    """The facts of one host that its records have: fewer than an inspection's, under the same names."""
    drives = node.drives or []
    read: dict[str, Any] = {
        "host.machine": node.machine,
        "host.cpu": node.cpu,
        "host.cpus": node.cpu_count,
        "host.kernel": node.kernel,
        "driver.version": node.driver,
        "drives.count": len(drives),
    }
    result = {name: Fact(str(value)) for name, value in read.items() if value is not None}
    if node.memory_bytes is not None:
        result["memory.total"] = Fact(float(node.memory_bytes), shown=format_size_binary(node.memory_bytes))
    if drives:
        result["drives.model"] = _composed(drives, _drive_name, lambda drive: drive.model)
        result["drives.size"] = _composed(drives, _drive_name, lambda drive: format_size(drive.size_bytes or 0))
        result["drives.firmware"] = _composed(drives, _drive_name, lambda drive: drive.firmware)
        result["drives.link"] = _composed(drives, _drive_name, lambda drive: _link(drive.link))
    return result


def _link(link: RecordedLink | None) -> str:
    if link is None or link.current_speed_gts is None:
        return "-"
    return format_link_speed(link.current_speed_gts, link.current_width)


_OF_DRIVES = (
    *(f"settings.{name}" for name in of_target(DRIVE)),
    *("ceilings.drives", "ceilings.links"),
)
_OF_GPUS = ("ceilings.gpu", "ceilings.gpus")
_ALONE = ("drives.count", "gpus.count", "manifest")


def parent(name: str) -> str | None:
    """The fact without which this one makes no sense; None where it stands alone."""
    room = name.partition(".")[0]
    if name in _ALONE:
        above = None
    elif room == "drives" or name in _OF_DRIVES:
        above = "drives.count"
    elif room == "gpus" or name in _OF_GPUS:
        above = "gpus.count"
    elif name == "driver.open":
        above = "driver.version"
    elif room in ("arrays", "mounts"):
        above = name.rpartition("|")[0] or None
    else:
        above = "manifest" if room == "manifest" else None
    return above


Named = Iterator[tuple[str, Any]]


def _drives(shown: Inspection) -> Named:
    data = [drive for drive in shown.drives if drive.data]
    yield "drives.count", str(len(data))
    if not data:
        return
    yield "drives.model", _composed(data, _drive_name, lambda drive: drive.model)
    yield "drives.size", _composed(data, _drive_name, lambda drive: format_size(drive.size_bytes))
    yield "drives.firmware", _composed(data, _drive_name, lambda drive: drive.firmware)
    yield "drives.lba", _composed(data, _drive_name, _lba)
    yield "drives.link", _composed(data, _drive_name, lambda drive: format_link(drive.link))
    yield "drives.numa", _composed(data, _drive_name, lambda drive: f"NUMA {_known(drive.numa_node)}")
    if shown.health_note is None:
        yield "drives.health", _composed(data, _drive_name, lambda drive: drive.health.status if drive.health else "-")
    for ceiling in shown.ceilings:
        if ceiling.id in ("drives", "links") and ceiling.value is not None:
            yield f"ceilings.{ceiling.id}", Fact(ceiling.value, shown=f"{ceiling.value / 1e9:.1f} GB/s")


def _drive_name(drive: Drive | DriveFacts) -> str:
    return f"{drive.name} {drive.serial}".strip()


def _lba(drive: Drive) -> str:
    return f"{drive.lba_bytes}+{drive.metadata_bytes}" if drive.metadata_bytes else str(drive.lba_bytes)


def _known(number: int | None) -> str:
    return "-" if number is None else str(number)


def _composed(devices: Sequence[Any], name: Callable[[Any], str], value: Callable[[Any], str]) -> Fact:
    """The value that all devices share, else how many have which: their number is a fact of its own."""
    parts = tuple((name(device), value(device) or "-") for device in devices)
    counts = Counter(part for _, part in parts)
    return Fact(counted(counts), parts)


def counted(counts: Mapping[str, int]) -> str:
    """``7 x A, 1 x B``; ``A`` alone where there is nothing else."""
    if len(counts) == 1:
        return next(iter(counts))
    common = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} x {value}" for value, count in common)


def _gpus(shown: Inspection) -> Named:
    yield "gpus.count", str(len(shown.gpus))
    if shown.driver is not None:
        yield "driver.version", shown.driver.version
        yield "driver.open", "open" if shown.driver.open else "closed"
    yield "cuda", shown.cuda
    yield "gds.mode", shown.gds.mode
    if not shown.gpus:
        return
    yield "gpus.model", _composed(shown.gpus, _gpu_name, lambda gpu: gpu.model)
    yield "gpus.link", _composed(shown.gpus, _gpu_name, lambda gpu: format_link(gpu.link))
    yield "gpus.numa", _composed(shown.gpus, _gpu_name, lambda gpu: f"NUMA {_known(gpu.numa_node)}")
    for ceiling in shown.ceilings:
        if ceiling.id in ("gpu", "gpus") and ceiling.value is not None:
            yield f"ceilings.{ceiling.id}", Fact(ceiling.value, shown=f"{ceiling.value / 1e9:.1f} GB/s")


def _gpu_name(gpu: Gpu) -> str:
    return f"GPU {gpu.index}"


def _host(shown: Inspection) -> Named:
    host = shown.host
    for name in ("machine", "cpu", "sockets", "cpus", "kernel", "distribution"):
        yield f"host.{name}", getattr(host, name)
    yield "host.numa", "; ".join(f"NUMA {node.node}: {node.cpus}" for node in host.numa) or None
    yield "host.virtual", "virtual" if host.virtual else "physical"
    yield "host.container", host.container or "none"
    for setting in shown.settings:
        yield f"settings.{setting.name}", counted(setting.values)
    yield "tool_version", shown.tool_version


def _memory(shown: Inspection) -> Named:
    memory = shown.memory
    for name in ("total", "cgroup_limit", "shm"):
        size = getattr(memory, name)
        if size is not None:
            yield f"memory.{name}", Fact(float(size), shown=format_size_binary(size))
    yield "memory.shm_huge", memory.shm_huge
    lock = memory.memlock
    yield "memory.memlock", format_size_binary(int(lock)) if lock is not None and lock.isdigit() else lock
    pools = sorted(memory.hugepages, key=lambda pool: (pool.size_kib, -1 if pool.numa_node is None else pool.numa_node))
    yield "memory.hugepages", ", ".join(_pool(pool) for pool in pools) or "none"


def _pool(pool: HugePages) -> str:
    where = "" if pool.numa_node is None else f" on NUMA {pool.numa_node}"
    return f"{pool.count} of {format_size_binary(pool.size_kib * 1024)}{where}"


def _volume(shown: Inspection) -> Named:
    for array in shown.arrays:
        name = f"arrays.{array.name or array.device}"
        yield name, "there"
        yield f"{name}|level", array.level
        yield f"{name}|chunk", format_size_binary(array.chunk_bytes)
        present = sum(member is not None for member in array.members)
        yield f"{name}|drives", f"{present} of {len(array.members)}"
        yield f"{name}|state", array.state if array.serves else f"{array.state}, does not serve"
    for mounted in shown.filesystems:
        name = f"mounts.{mounted.mount_point}"
        yield name, "mounted"
        yield f"{name}|type", mounted.type
        yield f"{name}|medium", mounted.medium
        yield f"{name}|options", ",".join(sorted(mounted.options))
        if mounted.aligned is not None:
            yield f"{name}|aligned", "aligned with its array" if mounted.aligned else "not aligned with its array"
        if mounted.size_bytes:
            yield f"{name}|size", Fact(float(mounted.size_bytes), shown=format_size(mounted.size_bytes))
            if mounted.free_bytes is not None:
                share = mounted.free_bytes / mounted.size_bytes
                yield f"{name}|free", Fact(share, shown=f"{format_size(mounted.free_bytes)} ({share:.0%})")


def _built(shown: Inspection) -> Named:
    if shown.manifest is None:
        return
    yield "manifest", "there"
    yield from _flat("manifest", shown.manifest)


def _flat(name: str, value: object) -> Named:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in _OWN:
                yield from _flat(f"{name}.{key}", inner)
    elif isinstance(value, list) and all(isinstance(each, Mapping) and "name" in each for each in value) and value:
        for each in value:
            yield from _flat(f"{name}.{each['name']}", each)
    elif isinstance(value, list):
        yield name, ", ".join(_one(each) for each in value) or "none"
    elif value is not None:
        yield name, _one(value)


def _one(value: object) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key}={value[key]}" for key in sorted(value) if key not in _OWN)
    return f"{value:g}" if isinstance(value, float) else str(value)
