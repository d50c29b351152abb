"""Checks whether a run is possible, and describes it before it starts. Writes nothing."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.bench.defaults import DRIVES_ENGINES
from tunetool.bench.drives.calls import JOBS_A_DRIVE
from tunetool.bench.drives.layouts import (
    ARRAY,
    DEFAULT,
    FILES,
    LAYOUTS,
    LEAST_BYTES,
    RAW,
    counts,
    programs,
)
from tunetool.bench.drives.request import Request
from tunetool.bench.drives.volume import BareDrive, cannot_judge
from tunetool.bench.engine_choice import choose
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import Direction
from tunetool.measure.aio.ops import Probe, need, probe
from tunetool.measure.aio.spec import default_parallelism, largest_io_bytes
from tunetool.measure.fio import no_io_uring
from tunetool.measure.ladder.source import no_raw
from tunetool.measure.sequential import FREE_SHARE, MIB, free_bytes
from tunetool.measure.target import check_target
from tunetool.measure.worker import Missing
from tunetool.node.array.create import members_by_serial, refuse_unless_blank
from tunetool.node.common import manifest
from tunetool.node.common.commands import CommandError, run
from tunetool.node.common.files import read_text
from tunetool.node.common.raid_levels import Level
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_count, format_size
from tunetool.record import CheckResult
from tunetool.system_packages import find, install_line
from tunetool.tune.pool import aio_left

FIO = {"fio-libaio": "libaio", "fio-io_uring": "io_uring"}
HANDLES = {"deepspeed-cpu": "cpu", "deepspeed-cuda": "cuda", "deepspeed-gds": "gds"}
"""Engines, each with what fio or DeepSpeed calls it."""
ENGINES = (*FIO, *HANDLES)
DIRECTIONS: tuple[Direction, ...] = ("write", "read")
SUBJECT = "scaling"
MOST_DRIVES = 64
_LARGEST = 4 * 2**30
_LEAST = 64 * MIB
_DEPTH = 32
_START, _MAKE = 1.0, 5.0
"""Seconds that a sample, and making a layout, take beside the samples' own."""
_GUESS = 1e9
"""Assumed bytes per second of a drive before the first measurement."""

Mode = Literal["standing", "blank", "virtual"]
_ROOM: Mapping[Mode, str] = {
    "standing": "free some, or use another `--target`",
    "blank": "use larger drives",
    "virtual": "use a larger `--virtual-size`: {least} or more",
}
_FEWER = "use fewer `--counts`, or `sysctl fs.aio-max-nr=1048576`"


@dataclass(frozen=True)
class Plan:
    """What will be made, written and read."""

    mode: Mode
    volumes: tuple[tuple[str, int], ...]
    """Layouts with their numbers of drives."""
    engines: tuple[str, ...]
    skipped: tuple[CheckResult, ...]
    """Engines and layouts that are left out."""
    file_bytes: int
    """Of each of fio's files."""
    io_bytes: int
    """Of each of the handle's files."""
    parallelism: int
    drives: tuple[BareDrive, ...] = ()
    """Blank ones."""
    stack: BlockStack | None = None
    """Under the target."""
    installed: Probe | None = None
    """torch and DeepSpeed, where an engine needs them."""

    @property
    def most_drives(self) -> int:
        """Of any volume."""
        return max((drives for _, drives in self.volumes), default=0)


def plan(request: Request, environment: Mapping[str, str]) -> Plan:
    """Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` for what cannot be measured at all."""
    mode = mode_of(request)
    stack = _target(request)
    drives = _blank(request.serials) if mode == "blank" else ()
    known = len(drives) or request.virtual or (len(stack.leaves) if stack else 0)
    wanted = _counts(request, known)
    volumes, left_out = _volumes(request, mode, wanted, known)
    chosen = choose(ENGINES, request.engines_of(request.engines, DRIVES_ENGINES))
    parallelism = default_parallelism(os.cpu_count() or 1)
    each = _bytes_per_drive(request, mode, drives, stack, max((_copies(*volume) for volume in volumes), default=1))
    file_bytes = each // (2 * JOBS_A_DRIVE) // MIB * MIB
    io_bytes = _io_bytes(each, max(wanted), parallelism)
    usable, installed, without = _engines(chosen, request, environment, io_bytes)
    if mode == "standing" and stack is not None:
        volumes, raw = _standing(stack, wanted)
        left_out = [*left_out, *raw]
    return Plan(
        mode, volumes, tuple(usable), (*left_out, *without), file_bytes, io_bytes, parallelism, drives, stack, installed
    )


def mode_of(request: Request) -> Mode:
    """Raises ``UsageProblem`` unless the call says exactly one thing to measure."""
    if request.serials:
        if request.target is not None or request.virtual:
            raise UsageProblem("`--drives` is for blank drives alone", "leave out `--target` and `--virtual`")
        if len(set(request.serials)) < len(request.serials):
            raise UsageProblem("`--drives` names a serial twice", "name each drive once")
        return "blank"
    if request.target is None:
        raise UsageProblem(
            "there is nothing to measure",
            "name a directory on the array with `--target`, blank drives with `--drives SERIAL,...`, or `--virtual N` "
            "with a `--target` for its files",
        )
    if request.virtual > MOST_DRIVES:
        raise UsageProblem(f"`--virtual {request.virtual}` is too many", f"at most {MOST_DRIVES}")
    if request.layouts and not request.virtual:
        raise UsageProblem(
            "`--layout` makes file systems, and `--target` names one that is there",
            "name blank drives with `--drives SERIAL,...`, or add `--virtual N`",
        )
    return "virtual" if request.virtual else "standing"


def _target(request: Request) -> BlockStack | None:
    if request.target is None:
        return None
    check_target(request.target)
    stack = read_stack(str(request.target.resolve()))
    if stack.in_memory or not stack.leaves:
        raise UsageProblem(
            f"`{request.target}` lies on {stack.medium}, on no drive", "`--target` takes a directory on drives"
        )
    return stack


def _blank(serials: Sequence[str]) -> tuple[BareDrive, ...]:
    """The drives, in the order of their PCI addresses. Raises ``CannotJudge`` for one that is not blank."""
    if os.geteuid() != 0:
        raise CannotJudge("only root may make file systems on drives", "run it with sudo")
    built = _members_of_manifest()
    for serial in serials:
        if serial in built:
            raise CannotJudge(
                f"drive `{serial}` is a member of this node's array, by `{manifest.MANIFEST_PATH}`",
                "measure the array: `--target` with a directory on it reads its drives without writing to them",
            )
    with cannot_judge():
        drives = members_by_serial(list(serials))
        refuse_unless_blank(drives, deep=True)
    for what, values in (
        ("size", {drive.size_bytes for drive in drives}),
        ("logical block", {drive.lba_bytes for drive in drives}),
        ("number of metadata bytes", {drive.metadata_bytes for drive in drives}),
    ):
        if len(values) > 1:
            raise CannotJudge(
                f"the drives are not alike: {what} {', '.join(map(str, sorted(values)))}", "name equal drives"
            )
    if drives[0].metadata_bytes:
        raise CannotJudge(
            f"the drives have {drives[0].metadata_bytes} metadata bytes in each block",
            "see `nvme id-ns`, `nvme format`",
        )
    ordered = sorted(drives, key=lambda drive: (drive.pci_address or "~", drive.name))
    return tuple(BareDrive(drive) for drive in ordered)


def _members_of_manifest() -> set[str]:
    try:
        # None on a node whose volume is the owner's.
        return {member["serial"] for member in manifest.built_members(manifest.load())}
    except FileNotFoundError:
        return set()
    except manifest.ManifestError as error:
        raise CannotJudge(error.message, error.hint) from None


def _counts(request: Request, known: int) -> list[int]:
    for count in request.counts:
        if count > known:
            raise UsageProblem(f"`--counts {count}`: there are {format_count(known, 'drive')}", f"from 1 to {known}")
    return sorted(set(request.counts)) or counts(known)


def _volumes(
    request: Request, mode: Mode, wanted: Sequence[int], known: int
) -> tuple[tuple[tuple[str, int], ...], list[CheckResult]]:
    """The layouts that can be made here with their numbers of drives, of ``known`` ones, and a check for each other."""
    if mode == "standing":
        return (), []
    for name in request.layouts:
        if name not in LAYOUTS:
            raise UsageProblem(f"`--layout {name}` is not a layout", f"known: {', '.join(LAYOUTS)}")
    names = list(dict.fromkeys(request.layouts or DEFAULT))
    lacking = {(name, count): LAYOUTS[name].lacks(count) for name, count in itertools.product(names, wanted)}
    if all(lacking.values()):
        (name, count), why = list(lacking.items())[-1]
        possible = [each for each in range(1, known + 1) if not LAYOUTS[name].lacks(each)]
        raise UsageProblem(
            f"`--layout {name}` over {format_count(count, 'drive')}: {why}",
            f"`--counts {possible[-1]}`" if possible else "name more drives, or another `--layout`",
        )
    usable: list[tuple[str, int]] = []
    left_out = []
    for name in names:
        possible = [count for count in wanted if not lacking[name, count]]
        obstacle, remedy = _obstacle(name, mode, request, max(possible, default=0))
        if obstacle:
            left_out.append(skip(f"layout.{name}", "this layout is made and measured", obstacle, remedy))
            continue
        usable += [(name, count) for count in possible]
        for count in wanted:
            if why := lacking[name, count]:
                left_out.append(skip(f"layout.{name}.{count}", "this layout is made and measured", why, ""))
    return tuple(usable), left_out


def _copies(layout: str, drives: int) -> int:
    """On how many drives of this volume each byte lies; 1 of one that is not made."""
    return LAYOUTS[layout].copies(drives) if layout in LAYOUTS else 1


def _obstacle(name: str, mode: Mode, request: Request, drives: int) -> tuple[str, str]:
    """Why a layout cannot be made here, with its remedy; two empty texts where it can."""
    layout = LAYOUTS[name]
    if mode == "virtual" and os.geteuid() != 0:
        return "only root may make loop devices and mount file systems", "run it with sudo"
    if mode == "virtual" and request.virtual_bytes < LEAST_BYTES[layout.file_system]:
        least = format_size(LEAST_BYTES[layout.file_system])
        return f"{layout.file_system} needs drives of {least} or more", "use a larger `--virtual-size`"
    missing = [program for program in programs(layout, drives) if find(program) is None]
    if missing:
        return f"`{missing[0]}` is not installed", f"install it: {install_line(*missing)}"
    if (level := layout.array(drives)) and not _has_md(level):
        return f"this kernel has no md {level}", "rehearse it on a virtual node: `tunetool lab up`"
    known = Path("/proc/filesystems").read_text().split()
    if layout.file_system not in known and not _loads(layout.file_system):
        return f"this kernel has no {layout.file_system}", "see `modprobe`"
    return "", ""


def _has_md(level: Level) -> bool:
    """Whether the kernel has this level: built in, loaded, or as a module, which it loads now."""
    return f"[{level.name}]" in (read_text("/proc/mdstat") or "") or _loads(level.name)


def _loads(module: str) -> bool:
    """Whether the kernel has the module, and loads it now."""
    try:
        run(["modprobe", module])
    except CommandError:
        return False
    return True


def _engines(
    chosen: Sequence[str], request: Request, environment: Mapping[str, str], io_bytes: int
) -> tuple[list[str], Probe | None, list[CheckResult]]:
    """Those that can run here, what DeepSpeed's are made of, and a check for each other."""
    usable, left_out, installed = [], [], None
    missing: Missing | None = None
    if any(name in HANDLES for name in chosen):
        try:
            installed = probe(request.training_python.path, environment)
        except Missing as error:
            missing = error
    for name in chosen:
        obstacle: tuple[str, str] | None = None
        if name in FIO:
            reason = no_io_uring() if FIO[name] == "io_uring" else None
            obstacle = (reason, "") if reason else None
        elif installed is None:
            obstacle = (missing.message, missing.hint or "") if missing else None
        elif io_bytes == 0:
            obstacle = ("a process for each drive takes more memory or asynchronous requests than there are", _FEWER)
        else:
            obstacle = _no_handle(HANDLES[name], installed)
        if obstacle is None:
            usable.append(name)
        else:
            left_out.append(skip(f"engine.{name}", "this engine is measured", *obstacle))
    return usable, installed, left_out


def _no_handle(device: str, installed: Probe) -> tuple[str, str] | None:
    try:
        need(installed, "gds" if device == "gds" else "async_io")
    except Missing as error:
        return error.message, error.hint or ""
    if device != "cpu" and not installed.cuda:
        return f"torch in `{installed.python}` sees no GPU", "run it on a node with a GPU and a torch with CUDA"
    return None


def skip(name: str, expected: str, found: str, remedy: str) -> CheckResult:
    """The check of something that is left out."""
    labels = {"subject": SUBJECT, "layout": name}
    return CheckResult(
        id=f"{SUBJECT}.{name}", labels=labels, status="skip", expected=expected, found=found, remedy=remedy
    )


def _standing(stack: BlockStack, wanted: Sequence[int]) -> tuple[tuple[tuple[str, int], ...], list[CheckResult]]:
    count = len(stack.leaves)
    files = (FILES, count)
    obstacle = no_raw(stack)
    if obstacle:
        return (files,), [skip(f"layout.{RAW}", "the member drives are read, 1, 2, 4 ... at once", obstacle, "")]
    return (*((RAW, each) for each in wanted), (ARRAY, count), files), []


def _bytes_per_drive(
    request: Request, mode: Mode, drives: Sequence[BareDrive], stack: BlockStack | None, copies: int
) -> int:
    """Bytes of files for each drive, which lie on at most ``copies`` drives. Raises ``UsageProblem``, and
    ``CannotJudge`` where they do not fit."""
    # A drive gets a quarter full, with the copies of a mirror at most half.
    parts = max(4, 2 * copies)
    if mode == "virtual":
        assert request.target is not None  # noqa: S101  (by the mode)
        room, each = free_bytes(request.target), request.virtual_bytes
        if each * request.virtual > room:
            raise CannotJudge(
                f"{request.virtual} virtual drives may grow to {format_size(each * request.virtual)}, "
                f"`{request.target}` has {format_size(room)}",
                "free some, or use fewer or smaller ones: `--virtual-size`",
            )
        most = each // parts
    elif mode == "blank":
        most = drives[0].drive.size_bytes // parts
    else:
        assert request.target is not None  # noqa: S101  (by the mode)
        assert stack is not None  # noqa: S101
        most = int(free_bytes(request.target) * FREE_SHARE) // len(stack.leaves)
    if most < _LEAST:
        raise CannotJudge(
            f"a drive's files take {format_size(_LEAST)} or more, and there is room for {format_size(most)}",
            _ROOM[mode].format(least=format_size(parts * _LEAST)),
        )
    chosen = min(_LARGEST, most) if request.bytes_per_drive is None else request.bytes_per_drive
    if chosen < _LEAST or chosen > most:
        raise UsageProblem(
            f"`--bytes-per-drive {format_size(chosen)}` does not fit",
            f"from {format_size(_LEAST)} to {format_size(most)}",
        )
    return chosen


def _io_bytes(each: int, drives: int, parallelism: int) -> int:
    """Of the handle's file of one process; 0 where its buffers do not fit into memory or the kernel's requests."""
    unit = MIB * parallelism
    size = int(min(each // 4, largest_io_bytes(each * 10, memory_total() // drives))) // unit * unit
    left = aio_left()
    # Each thread has its own queue, and the handle one more.
    return 0 if left is not None and drives * (parallelism + 1) * _DEPTH > left else size


def announcement(request: Request, planned: Plan) -> list[str]:
    """What the run will make, write and read, and how long it takes, a line each."""
    left_out = [f"{check.labels['layout']}: left out: {check.found}" for check in planned.skipped]
    if not (planned.volumes and planned.engines):
        return ["makes and measures nothing", *left_out]
    files = 2 * planned.file_bytes + planned.io_bytes * bool(planned.installed)
    lines = list(_makes(request, planned, files))
    both = len(planned.engines) * len(DIRECTIONS)
    # Raw ranges are read by fio alone.
    fio = sum(engine in FIO for engine in planned.engines)
    samples = sum(fio if layout in (RAW, ARRAY) else both for layout, _ in planned.volumes)
    made = planned.mode != "standing"
    making = sum(_MAKE + files * _copies(*volume) / _GUESS for volume in planned.volumes) if made else 0.0
    seconds = samples * (request.duration + _START) + making
    names = ", ".join(f"{layout} over {drives}" for layout, drives in planned.volumes)
    lines.append(f"measures {names}, by {', '.join(planned.engines)}")
    lines.append(
        f"{format_count(request.pace.fewest, 'round')}, {samples} samples of {request.duration:g} s in each, in an "
        f"order that is drawn: about {request.pace.fewest * seconds:.0f} s in all; each sample of a write writes what "
        "the drives take in that time"
    )
    return [*lines, *request.pace.announcement(), *left_out]


def _makes(request: Request, planned: Plan, files: int) -> list[str]:
    if planned.mode == "standing" and planned.stack is not None:
        size = files * len(planned.stack.leaves)
        raw = any(layout == RAW for layout, _ in planned.volumes)
        text = (
            f"writes to `{request.target}` ({planned.stack.medium}): {format_size(size)} of files, removed afterwards"
        )
        reads = "; reads the drives themselves, read-only, where these files lie" if raw else ""
        return [text + reads]
    if planned.mode == "virtual":
        each = format_size(request.virtual_bytes)
        return [
            f"makes {request.virtual} sparse files of {each} in `{request.target}` and loop devices over them, and "
            "file systems on these, again and again; all of it is removed afterwards"
        ]
    serials = ", ".join(f"`{each.drive.serial}`" for each in planned.drives[: planned.most_drives])
    copies = max((_copies(*volume) for volume in planned.volumes), default=1)
    mirrored = f" (of a mirror, {copies} times that)" if copies > 1 else ""
    return [
        f"makes file systems on {serials}, which are blank, again and again, writes {format_size(files)} of files to "
        f"each{mirrored}, and leaves the drives blank"
    ]
