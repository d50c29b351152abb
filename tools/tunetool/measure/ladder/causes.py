"""Finds the cause of a loss, with its remedy, from facts of the machine and figures of the ladder. Pure.

The order within a kind of rung is from what is certain to what is likely: a link that sysfs calls downgraded comes
before a drive that is merely slow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tunetool.measure.ladder.budget import EXPECTED
from tunetool.node.machine.drive_health import possible_link
from tunetool.node.machine.drives import Link
from tunetool.node.machine.pcie_links import downgraded
from tunetool.node.units import format_bandwidth, format_size_binary
from tunetool.record import Loss

BUSY_CORES = 0.9
"""Of all cores, or of one thread's: beyond it there is no time left to issue requests."""
NEAR = 0.8
"""Drives that one by one ask for less than this of what a link carries are not held up by it (protocol overhead)."""
REACHED = 0.6
"""Of what a link carries must have gone through it, for it to be the limit: how much went where is only estimated."""

SLOWING_OPTIONS: Mapping[str, Mapping[str, str]] = {
    "write": {
        "sync": "every write waits for the drives",
        "dirsync": "every change of a directory waits for the drives",
        "wsync": "every change of metadata waits for the log",
        "discard": "every freed block is discarded at once; `fstrim.timer` does that when the node is idle",
        "data=journal": "every byte is written twice, and direct I/O uses the page cache",
    },
    "read": {
        "strictatime": "every read also writes an access time",
        "data=journal": "direct I/O uses the page cache",
    },
}
"""By direction, mount options (mount(8), xfs(5), ext4(5)) and what they cost."""


@dataclass(frozen=True)
class DriveFacts:
    """One drive."""

    serial: str
    name: str
    alone: float | None = None
    """Bytes per second."""
    link: Link = field(default_factory=Link)
    scheduler: str | None = None
    best: float | None = None
    """The best of its samples; None: as ``alone``. One that only jitters is not called slow."""

    @property
    def downgraded(self) -> bool:
        """Whether its link runs below what drive and slot allow."""
        return downgraded(self.link.current_speed_gts, self.link.current_width, *possible_link(self.link))


@dataclass(frozen=True)
class SharedLink:
    """A PCIe link above several drives."""

    address: str
    carries: float
    """Bytes per second."""
    words: str
    """``16 GT/s x8``."""
    serials: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Of the machine."""

    drives: Sequence[DriveFacts] = ()
    shared: Sequence[SharedLink] = ()
    cores: int = 1
    chunk_bytes: int | None = None
    stripe_unit_bytes: int | None = None
    """Of the file system; None where it has none."""
    stripe_width_bytes: int | None = None
    mount_options: Sequence[str] = ()


@dataclass(frozen=True)
class Step:
    """The rung that loses, with what is known of its measurement."""

    title: str
    kind: str
    value: float
    share: float
    below: str
    direction: str = "read"
    serials: Sequence[str] = ()
    """Of the drives that were read; empty: all."""
    cores_used: float = 0.0
    threads: int | None = None
    """None: enough."""
    files: int | None = None
    falling: bool = False
    """The samples fell from first to last."""


Cause = tuple[str, str, str]
"""Name of the cause, finding and remedy."""
Ask = Callable[[Step, Facts], "Cause | None"]


def diagnose(step: Step, facts: Facts) -> Loss:
    """The cause of a loss; ``unknown``, with what to look at, where no fact explains it."""
    for ask in _ASKED.get(step.kind, _ASKED_OF_RANDOM):
        cause = ask(step, facts)
        if cause is not None:
            break
    else:
        cause = ("unknown", "no link, drive, scheduler, mount option or core explains it", _LOOK)
    name, explanation, remedy = cause
    # Of drives alone the cause itself says which one is slow, and how slow.
    sentence = f"{step.title} reaches {format_bandwidth(step.value)}, {step.share:.0%} of {step.below}: {explanation}"
    sentence = explanation if step.kind == "alone" else sentence
    return Loss.model_validate({"rung": step.title, "cause": name, "found": sentence, "remedy": remedy})


_LOOK = "look at `dmesg`, `nvme smart-log` of each drive and other load; repeat with a longer `--duration`"


def _link(step: Step, facts: Facts) -> Cause | None:
    bad = [drive for drive in facts.drives if drive.downgraded]
    if not bad:
        return None
    return (
        "link",
        "; ".join(map(_runs_below, bad)),
        "reseat that drive, then its cable or riser; its slot's speed may be set in the firmware",
    )


def _runs_below(drive: DriveFacts) -> str:
    speed, width = possible_link(drive.link)
    return (
        f"the link of `{drive.serial}` runs at {drive.link.current_speed_gts:g} GT/s x{drive.link.current_width}, "
        f"{speed or 0:g} GT/s x{width} is possible"
    )


def _slow_drive(step: Step, facts: Facts) -> Cause | None:
    slow = slow_drives(facts.drives)
    if not slow:
        return None
    speeds = ", ".join(
        f"drive `{drive.serial}` reads {format_bandwidth(drive.alone or 0)} alone, {share:.0%} of the others' median"
        for drive, share in slow
    )
    names = ", ".join(f"`/dev/{drive.name}`" for drive, _ in slow)
    return (
        "slow-drive",
        speeds,
        f"look at {names}: `nvme smart-log` for wear, temperature and media errors; replace it if it stays slow "
        "(`ansible-playbook tunetool.node.replace_drive`)",
    )


def slow_drives(drives: Sequence[DriveFacts]) -> list[tuple[DriveFacts, float]]:
    """Drives that alone never reach the expected share of the others' median, with their share; the slowest first."""
    known = [drive for drive in drives if drive.alone]
    slow = []
    for drive in known:
        other_speeds = sorted(other.alone or 0.0 for other in known if other is not drive)
        if not other_speeds:
            continue
        middle = (other_speeds[(len(other_speeds) - 1) // 2] + other_speeds[len(other_speeds) // 2]) / 2
        if (drive.best or drive.alone or 0.0) < EXPECTED["alone"].least * middle:
            slow.append((drive, (drive.alone or 0.0) / middle))
    return sorted(slow, key=lambda each: each[1])


def _shared_link(step: Step, facts: Facts) -> Cause | None:
    alone = {drive.serial: drive.alone for drive in facts.drives if drive.alone}
    for link in facts.shared:
        below = [serial for serial in link.serials if not step.serials or serial in step.serials]
        wanted = sum(alone.get(serial, 0.0) for serial in below)
        everything = sum(rate for serial, rate in alone.items() if not step.serials or serial in step.serials)
        through = step.value * wanted / everything if everything else 0.0
        if len(below) > 1 and wanted > NEAR * link.carries and through > REACHED * link.carries:
            return (
                "shared-link",
                f"{len(below)} drives share the PCIe link of `{link.address}` ({link.words}, "
                f"{format_bandwidth(link.carries)}) and read {format_bandwidth(wanted)} one by one: "
                + ", ".join(f"`{serial}`" for serial in below),
                "spread the drives over more root ports or switches; no setting of the node widens a link",
            )
    return None


def _misaligned(step: Step, facts: Facts) -> Cause | None:
    chunk, unit, width = facts.chunk_bytes, facts.stripe_unit_bytes, facts.stripe_width_bytes
    if chunk is None:
        return None
    row = chunk * len(facts.drives)
    if unit == chunk and width == row:
        return None
    has = (
        f"stripe unit {format_size_binary(unit)}, width {format_size_binary(width or 0)}" if unit else "no stripe unit"
    )
    return (
        "misalignment",
        f"the file system has {has}, the array chunks of {format_size_binary(chunk)} over {len(facts.drives)} drives",
        "rebuild the file system for the array (`ansible-playbook tunetool.node.teardown`, then "
        "`tunetool provision`): `raid_array_chunk` sets "
        "both; its data must move",
    )


def _scheduler(step: Step, facts: Facts) -> Cause | None:
    bad = [drive for drive in facts.drives if drive.scheduler not in (None, "none")]
    if not bad:
        return None
    kinds = ", ".join(sorted({f"`{drive.scheduler}`" for drive in bad}))
    return (
        "scheduler",
        f"{len(bad)} drives sort requests by {kinds}: " + ", ".join(f"`{drive.serial}`" for drive in bad),
        "`echo none > /sys/block/NAME/queue/scheduler` for each, and a udev rule to keep it: no role sets another one",
    )


def _mount_options(step: Step, facts: Facts) -> Cause | None:
    costs = SLOWING_OPTIONS[step.direction]
    bad = [option for option in facts.mount_options if option in costs]
    if not bad:
        return None
    effects = "; ".join(f"it is mounted with `{option}`: {costs[option]}" for option in bad)
    return "mount-options", effects, "remove it from `scratch_filesystem_mount_options`, then run `tunetool provision`"


def _cpu(step: Step, facts: Facts) -> Cause | None:
    available = min(facts.cores, step.threads) if step.threads else facts.cores
    if step.cores_used < BUSY_CORES * available:
        return None
    if step.threads and step.threads < facts.cores:
        return (
            "cpu",
            f"its {'one thread' if step.threads == 1 else f'{step.threads} threads'} used {step.cores_used:.2g} cores",
            "spread it over more threads or processes: a checkpoint with one shard per rank",
        )
    return (
        "cpu",
        f"it used {step.cores_used:.2g} of {facts.cores} cores",
        "use larger blocks; look for other load, a power-saving governor or a limit on the cores of this container",
    )


def _if_one_file_is_written(found: str, cure: str) -> Ask:
    def ask(step: Step, facts: Facts) -> Cause | None:
        # Direct reads of one file do not wait for each other; writers hold its lock.
        return ("one-inode", found, cure) if step.files == 1 and step.direction == "write" else None

    return ask


_one_inode = _if_one_file_is_written(
    "it goes through one file, and writers of one file wait for each other",
    "split the checkpoint into several files, such as one per rank",
)
_one_writer = _if_one_file_is_written(
    "one thread writes one file through the page cache: it copies, then waits for the drives, in turn",
    "split the checkpoint into several files, such as one per rank, or write it with direct I/O",
)


def _write_cache(step: Step, facts: Facts) -> Cause | None:
    if step.direction != "write" or not step.falling:
        return None
    return (
        "write-cache",
        "it fell while it was measured: the drives' write cache is exhausted, or they throttle",
        "expect the lower speed; look at `nvme smart-log` for temperatures, and keep a share of each drive free",
    )


_ASKED: Mapping[str, Sequence[Ask]] = {
    "alone": (_link, _slow_drive),
    "together": (_shared_link, _cpu),
    "array": (_slow_drive, _scheduler, _shared_link, _cpu),
    "filesystem": (_misaligned, _mount_options, _scheduler, _cpu),
    "engine": (_cpu,),
    "sustained": (_write_cache, _slow_drive),
    "aio": (_cpu, _one_inode),
    "hbm-bounce": (_cpu, _one_inode),
    "hbm-direct": (_cpu, _one_inode),
    "checkpoint": (_cpu, _one_writer),
}
"""By kind of rung, what can cost something there; of random requests see ``_ASKED_OF_RANDOM``.

What affects a rung and the one that it is compared with equally, such as a mount option if both use the file system,
explains no difference between them.
"""

_ASKED_OF_RANDOM: Sequence[Ask] = (_slow_drive, _misaligned, _scheduler, _cpu)
"""Of all sizes, which are kinds of their own."""
