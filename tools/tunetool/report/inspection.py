"""The screen of ``tunetool inspect`` as fixed-width text; nothing is shown by colour alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunetool.inspect.model import Array, Blocker, Disk, Drive, Filesystem, Gds, Host, HugePages, Inspection, Path
from tunetool.node.common.refusal import on_one_line
from tunetool.node.job_scratch.program import in_words
from tunetool.node.units import format_size_binary
from tunetool.report.lines import WIDTH, section, wrapped
from tunetool.report.pcie_tree import link_words, pcie


def gds_in_short(gds: Gds) -> Iterator[str]:
    """The lines with the path that I/O takes now, and why a better one is not available."""
    lines = [gds.reasons[0] if gds.reasons else gds.mode]
    better = gds.paths[: next((index for index, path in enumerate(gds.paths) if path.mode == gds.mode), 0)]
    shared = _shared_blocker(better)
    if shared:
        lines = [f"{gds.mode}: {shared.found}"]
    else:
        lines += [f"no {path.mode}: {_first_blocker(path)}" for path in better if path.blockers]
    yield from section("gds", lines)
    if len(lines) > 1:
        yield from section("", ["`tunetool inspect --gds` shows every blocker with its remedy"])


def _shared_blocker(paths: Sequence[Path]) -> Blocker | None:
    """The only blocker of every path, such as that there is no GPU; None where they differ."""
    blockers = {path.blockers[0].id if len(path.blockers) == 1 else "" for path in paths}
    return paths[0].blockers[0] if len(blockers) == 1 and "" not in blockers else None


def _first_blocker(path: Path) -> str:
    more = len(path.blockers) - 1
    return path.blockers[0].found + (f" (and {more} more)" if more else "")


def gds_in_full(shown: Inspection) -> Iterator[str]:
    """The lines with every path, the best first, its blockers and their remedies."""
    gds = shown.gds
    yield ""
    shared = _shared_blocker([path for path in gds.paths if path.mode != "off"])
    if shared:
        yield from section("gds", [f"{gds.mode}: {shared.found}", f"do: {shared.remedy}"])
        return
    yield from section("gds", [gds.reasons[0] if gds.reasons else gds.mode])
    for path in gds.paths:
        if path.mode == "off" and gds.mode != "off":
            continue
        yield ""
        now = "  <- the path that I/O takes now" if path.mode == gds.mode else ""
        count = len(path.blockers)
        state = f"blocked by {count}" if count else "nothing in the way"
        yield f"{path.mode}: {state}{now}"
        for blocker in path.blockers:
            yield from wrapped(f"- {blocker.id}: {blocker.found}", 2)
            by = " (role gpudirect_storage does it)" if blocker.curable else ""
            yield from wrapped(f"  do: {blocker.remedy}{by}", 6)
        for note in path.notes:
            yield from wrapped(f"- note: {note}", 2)
    config = [finding for finding in shown.findings if finding.id.startswith("gds.")]
    if config:
        yield ""
        yield "cufile.json:"
        for finding in config:
            yield from wrapped(f"- {finding.found}", 2)
            yield from wrapped(f"  do: {finding.remedy}", 6)


def screen(shown: Inspection, full_gds: bool = False) -> str:
    """The text of the whole screen, or with ``full_gds`` only the head and all facts about GPUDirect Storage."""
    if full_gds:
        return _text([*_head(shown), *gds_in_full(shown)])
    lines = [*_head(shown), *section("memory", memory_words(shown)), *_drives(shown), *pcie(shown), *_volume(shown)]
    return _text([*lines, *_gpus(shown), *gds_in_short(shown.gds), *_ceilings(shown), *_findings(shown)])


def _text(lines: Sequence[str]) -> str:
    # Text of a machine's files may hold anything, such as what a terminal takes for a command.
    return "".join(on_one_line(line.rstrip()) + "\n" for line in lines)


def _head(shown: Inspection) -> Iterator[str]:
    host = shown.host
    yield from section("node", [f"{host.name or '(no name)'}: {machine_words(host)}"])
    if shown.note:
        yield from section("", [f"NOTE: {shown.note}"])
    yield from section("cpu", cpu_words(host))
    yield from section("", isolation_words(host))


def machine_words(host: Host) -> str:
    """The machine and its operating system."""
    known = (host.machine, host.distribution, host.kernel and f"Linux {host.kernel}")
    return ", ".join(part for part in known if part) or "unknown machine"


def cpu_words(host: Host) -> list[str]:
    """A line about the CPUs and their NUMA nodes; none where nothing is known of them."""
    if not host.cpu and not host.cpus:
        return []
    count = f"{host.sockets} x " if host.sockets and host.sockets > 1 else ""
    numa = "; ".join(f"NUMA {node.node}: {node.cpus}" for node in host.numa)
    text = f"{count}{host.cpu or 'unknown'}, {host.cpus or '?'} CPUs"
    return [f"{text} ({numa})" if numa else text]


def isolation_words(host: Host) -> list[str]:
    """Lines about the container and the virtual machine that this is."""
    lines = []
    if host.container:
        lines.append(f"in a container: {host.container} ({host.container_evidence})")
    if host.virtual:
        lines.append("a virtual machine: its PCIe links are what the hypervisor shows")
    return lines


def memory_words(shown: Inspection) -> list[str]:
    """Lines about memory, its limits and huge pages."""
    memory = shown.memory
    parts = []
    if memory.total:
        free = f", {_binary(memory.available)} available" if memory.available else ""
        limit = f", cgroup limit {_binary(memory.cgroup_limit)}" if memory.cgroup_limit else ""
        parts.append(f"{_binary(memory.total)}{free}{limit}")
    huge = f" (huge pages: {memory.shm_huge})" if memory.shm_huge is not None else ""
    parts.append(f"/dev/shm {_binary(memory.shm)}{huge}" if memory.shm is not None else "no tmpfs at /dev/shm")
    if memory.memlock is not None:
        parts.append(f"memlock {memory.memlock_in_words}")
    lines = ["; ".join(parts)]
    if memory.hugepages:
        taken = sum(pool.count * pool.size_kib * 1024 for pool in memory.hugepages)
        lines.append(f"huge pages of {_pools(memory.hugepages)}; {_binary(taken)} of RAM")
    return lines


def _pools(pools: Sequence[HugePages]) -> str:
    sizes = dict.fromkeys(pool.size_kib for pool in pools)
    descriptions = []
    for size in sizes:
        same_size = [pool for pool in pools if pool.size_kib == size]
        where = ", ".join(
            f"{pool.count}{'' if pool.numa_node is None else f' on NUMA {pool.numa_node}'}"
            f"{'' if pool.free in (None, pool.count) else f' ({pool.free} free)'}"
            for pool in same_size
        )
        descriptions.append(f"{_binary(size * 1024)}: {where}")
    return "; ".join(descriptions)


def _drives(shown: Inspection) -> Iterator[str]:
    yield ""
    if not shown.drives:
        yield from section("drives", ["no NVMe drive"])
        yield from _disks(shown)
        return
    rows = [DRIVE_TITLES, *(drive_cells(drive) for drive in shown.drives)]
    lines = _columns(rows, right=RIGHT, limits={"model": 28, "use": 20})
    yield from lines
    if shown.health_note:
        yield from section("", [f"health: {shown.health_note}"])
    yield from _disks(shown)


def _disks(shown: Inspection) -> Iterator[str]:
    """The disks that are no NVMe drives, a line each."""
    if shown.disks:
        yield from section("disks", [disk_words(disk) for disk in shown.disks])


def disk_words(disk: Disk) -> str:
    """A disk in a line; what a cloud emulates shows no link, so that only a measurement counts."""
    use = f"mounted at {', '.join(disk.mounted)}" if disk.mounted else "not mounted"
    counts = "; no link to read a ceiling from: only a measurement counts" if disk.kind == "virtio disk" else ""
    return f"{disk.name}: {disk.kind}, {_decimal(disk.size_bytes)}, {use}{counts}"


DRIVE_TITLES = (
    *("drives", "serial", "model", "firmware", "size", "LBA", "temp", "wear", "health", "link", "NUMA", "use"),
)
RIGHT = ("size", "LBA", "temp", "wear", "NUMA")
"""Titles of the columns with numbers."""


def drive_cells(drive: Drive) -> tuple[str, ...]:
    """The cells of a drive, for the columns ``DRIVE_TITLES``."""
    health = drive.health
    return (
        drive.name,
        drive.serial or "-",
        drive.model or "-",
        drive.firmware or "-",
        _decimal(drive.size_bytes),
        str(drive.lba_bytes) + (f"+{drive.metadata_bytes}" if drive.metadata_bytes else ""),
        f"{health.temperature} C" if health and health.temperature is not None else "-",
        f"{health.used_percent} %" if health and health.used_percent is not None else "-",
        health.status if health else "-",
        link_words(drive.link),
        "-" if drive.numa_node is None else str(drive.numa_node),
        drive.use,
    )


def _columns(rows: Sequence[Sequence[str]], right: Sequence[str], limits: dict[str, int]) -> list[str]:
    """Rows as lines, the first one with the titles; each column is as wide as its widest cell."""
    head = rows[0]
    cells = [[_cut(cell, limits.get(head[column], WIDTH)) for column, cell in enumerate(row)] for row in rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  ".join(
            f"{cell:>{widths[column]}}" if head[column] in right else f"{cell:{widths[column]}}"
            for column, cell in enumerate(row)
        ).rstrip()
        for row in cells
    ]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 2] + ".."


def _volume(shown: Inspection) -> Iterator[str]:
    yield ""
    yield from section("array", array_words(shown))
    yield from section("mounts", filesystem_words(shown))
    if shown.jobs:
        yield from section("jobs", job_words(shown))


def array_words(shown: Inspection) -> list[str]:
    """A line for each array."""
    return [_array(array) for array in shown.arrays] or ["none"]


def filesystem_words(shown: Inspection) -> list[str]:
    """A line for each mounted file system."""
    return [_filesystem(filesystem) for filesystem in shown.filesystems] or ["no block device is mounted"]


def job_words(shown: Inspection) -> list[str]:
    """A line for each job that has a directory on the volume."""
    return [in_words(job.model_dump()) for job in shown.jobs]


def _array(array: Array) -> str:
    present = sum(member is not None for member in array.members)
    degraded = (
        f", degraded, rebuild at {array.rebuild}" if array.rebuild else ", degraded" if None in array.members else ""
    )
    state = array.state + degraded if array.serves else f"{array.state}, DOES NOT SERVE"
    chunk = f", chunk {_binary(array.chunk_bytes)}" if array.chunk_bytes else ""
    return (
        f"{array.device} `{array.name or '-'}`: {array.level}, {present} of {len(array.members)} drives{chunk}, {state}"
    )


_COMMON_OPTIONS = ("rw", "relatime", "attr2", "inode64", "noquota", "seclabel")


def _filesystem(filesystem: Filesystem) -> str:
    stripe = ""
    if filesystem.stripe_unit_bytes and filesystem.stripe_width_bytes:
        units = filesystem.stripe_width_bytes // filesystem.stripe_unit_bytes
        stripe = f", stripe {_binary(filesystem.stripe_unit_bytes)} x {units}"
    aligned = {True: ", aligned with the array", False: ", NOT ALIGNED with the array", None: ""}[filesystem.aligned]
    options = [
        option
        for option in filesystem.options
        if option not in _COMMON_OPTIONS and not option.startswith(("sunit", "swidth"))
    ]
    shown = f" ({','.join(options)})" if options else ""
    return f"{filesystem.mount_point}: {filesystem.type} on {filesystem.medium}{stripe}{aligned}{shown}"


def _gpus(shown: Inspection) -> Iterator[str]:
    yield ""
    driver_text = driver_words(shown)
    if not shown.gpus:
        yield from section("gpus", ["no NVIDIA GPU" + (f"; {driver_text}" if shown.driver else "")])
        return
    rows: dict[tuple[str, str], list[str]] = {}
    for gpu in shown.gpus:
        numa = "" if gpu.numa_node is None else f" (NUMA {gpu.numa_node})"
        rows.setdefault((gpu.model, link_words(gpu.link)), []).append(f"{gpu.index}{numa}")
    lines = [f"{len(which)} x {model}, {link}; {driver_text}" for (model, link), which in rows.items()]
    yield from section("gpus", lines)


def driver_words(shown: Inspection) -> str:
    """The NVIDIA driver."""
    driver = shown.driver
    if driver is None:
        return "no driver"
    return f"NVIDIA driver {driver.version}, {'open' if driver.open else 'closed'} kernel module"


def _ceilings(shown: Inspection) -> Iterator[str]:
    if not shown.ceilings:
        return
    lines = []
    for ceiling in shown.ceilings:
        value = f"{ceiling.value / 1e9:7.1f} GB/s" if ceiling.value is not None else f"{'unknown':>12}"
        lines.append(f"{ceiling.id:7}{value}  {ceiling.of}{'   <- binds' if ceiling.binds else ''}")
    yield ""
    yield from section("ceilings", lines)


def _findings(shown: Inspection) -> Iterator[str]:
    yield ""
    if not shown.findings:
        yield from section("findings", ["none"])
        return
    yield f"findings: {len(shown.findings)}"
    for number, finding in enumerate(shown.findings, start=1):
        yield from wrapped(f"{number:2} {finding.id}: {finding.found}", 3)
        yield from wrapped(f"   do: {finding.remedy}", 7)


def _decimal(size: int) -> str:
    # Three digits, as in drives' data sheets.
    return f"{size / 1e12:.2f} TB" if size >= 10**12 else f"{size / 1e9:.3g} GB"


def _binary(size: float | None) -> str:
    return format_size_binary(size or 0)
