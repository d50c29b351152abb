"""``tunetool stage``: stage a tree, verify a staged one, evict it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool import record as records
from tunetool.errors import UsageProblem
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Result
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size
from tunetool.record import Record
from tunetool.stage import manifest as manifests
from tunetool.stage import remote
from tunetool.stage.build import Job, build
from tunetool.stage.checksums import DEFAULT, Checksum
from tunetool.stage.compare import changes, first
from tunetool.stage.destination import Place, find_place, inode_of, is_empty, known, only_one, take_away
from tunetool.stage.manifest import Manifest, rooted
from tunetool.stage.moving import Plan, move
from tunetool.stage.outcome import copied, evicted, unchanged, verified
from tunetool.stage.room import IN_MEMORY, limits, refuse_too_big, space_needed
from tunetool.stage.tree import Entry, files_of, same_source, scan, total_bytes, within

Action = Literal["stage", "verify", "evict"]


@dataclass(frozen=True)
class Request:
    """What the caller asked for. ``source`` is None where there is nothing to copy."""

    action: Action
    destination: str
    source: str | None = None
    replace: bool = False
    checksum: Checksum | None = None
    threads: int | None = None
    wait: bool = True
    dry_run: bool = False
    runs_dir: Path | None = None
    command: Sequence[str] = ()


def run(request: Request, progress: MovingProgress) -> Result:
    """Do it. Raises ``UsageProblem`` when the call is wrong, ``CannotJudge`` when it cannot be done."""
    place = find_place(request.destination)
    runs_dir = request.runs_dir or records.default_runs_dir()
    if request.dry_run:
        _dry_run(request, place, progress)
        return Result()
    records.prepare_runs_dir(runs_dir)
    if request.action == "stage":
        record = _stage(request, place, progress)
    elif request.action == "verify":
        record = _verify(request, place, progress)
    else:
        record = _evict(request, place, progress)
    return Result(record, records.write(record, runs_dir))


def default_threads() -> int:
    """Twice the CPUs, since a thread waits for the source half of its time, but enough requests for one drive."""
    return min(32, max(8, 2 * len(os.sched_getaffinity(0))))


def _dry_run(request: Request, place: Place, progress: MovingProgress) -> None:
    if request.action == "stage":
        job = _prepare(request, place, progress)
        if job is None:
            progress.say(f"`{place.path}` is that already: nothing would be copied")
    elif request.action == "verify":
        progress.say(f"reads {format_size(_need(place).bytes)} of `{place.path}`")
    else:
        progress.say(f"removes {format_size(_need(place).bytes)}: `{place.path}`")


def _stage(request: Request, place: Place, progress: MovingProgress) -> Record:
    started = records.utc_now()
    _check_source(request.source or "", place)
    with only_one(place, request.wait, progress.say):
        job = _prepare(request, place, progress)
        if job is None:
            found = known(place)
            assert found is not None  # noqa: S101  (else it could not be identical)
            progress.say(f"`{place.path}` is that already: nothing is copied")
            return unchanged(request.command, place, found, started)
        with progress.moving("copying", total_bytes(job.entries)) as tick:
            built = build(job, tick)
    source_medium = "remote" if job.remote else read_stack(job.source).medium
    return copied(request.command, job, built, source_medium, read_stack(str(place.path)), started)


def _check_source(source: str, place: Place) -> None:
    if remote.is_remote(source):
        remote.need_rclone()
        return
    path = Path(source)
    if not path.exists():
        raise UsageProblem(f"`{source}` does not exist", "SRC is a directory, or `remote:path` for rclone")
    if not path.is_dir():
        raise UsageProblem(f"`{source}` is not a directory", "name the directory that it lies in")
    real, there = os.path.realpath(path), str(place.path)
    if within(there, real) or within(real, there):
        raise UsageProblem(f"`{there}` and `{real}` lie in each other", "stage to a directory apart from the source")


def _prepare(request: Request, place: Place, progress: MovingProgress) -> Job | None:
    """The copy to make, announced; None where DST is that copy already. Changes nothing."""
    source = request.source or ""
    _check_source(source, place)
    far = remote.is_remote(source)
    entries = remote.scan_remote(source) if far else scan(Path(source))
    source = source if far else os.path.realpath(source)
    reason = _occupied(place, entries, request.checksum)
    if reason == "":
        return None
    if reason is not None and not request.replace:
        raise UsageProblem(
            f"`{place.path}` is there and is not that: {reason}", "`--replace` puts the copy in its place"
        )
    parent = place.path.parent
    mount = mount_holding(str(parent), read_mounts())
    fs_type = mount.fs_type if mount else "unknown"
    need = space_needed(entries)
    bounds = limits(parent, fs_type)
    refuse_too_big(need, len(entries), parent, bounds, _held(place))
    job = Job(
        source,
        far,
        place,
        entries,
        request.checksum or DEFAULT,
        request.threads or default_threads(),
        fs_type in IN_MEMORY,
        not far and read_stack(source).in_memory,
    )
    room = f"; {bounds[0].what} {format_size(bounds[0].left)}" if bounds else ""
    progress.say(
        f"copies {format_size(total_bytes(entries))} in {len(files_of(entries))} files from `{source}` to "
        f"`{place.path}` ({fs_type}){room}"
    )
    return job


def _held(place: Place) -> int:
    """Bytes of a staged tree that is to be replaced."""
    try:
        found = known(place)
    except UsageProblem:
        return 0
    return found.bytes if found is not None else 0


def _occupied(place: Place, entries: Sequence[Entry], checksum: Checksum | None) -> str | None:
    """What stands in the way at DST: None nothing, empty that it is this very copy, else why it is not."""
    if inode_of(place.path) is None or is_empty(place.path):
        return None
    try:
        found = known(place)
    except UsageProblem as error:
        return error.message
    if found is None:
        return "it was not staged by tunetool"
    wrong = changes(place.path, found, times=True)
    if wrong:
        return first(wrong, str(place.path))
    if checksum not in (None, found.checksum):
        return f"its manifest has {found.checksum}, {checksum} was asked for"
    same = same_source(entries, found.entries)
    return "" if same else f"the source is not as it was when it was staged ({found.staged})"


def _need(place: Place) -> Manifest:
    """The manifest of the tree at DST. Raises ``UsageProblem`` where there is no staged tree."""
    found = known(place)
    if found is None:
        beside = "" if manifests.read(place.manifest) is None else f" (`{place.manifest}` is of another tree)"
        raise UsageProblem(
            f"`{place.path}` is no tree that tunetool staged{beside}", "name the DST of a `tunetool stage`"
        )
    return found


def _verify(request: Request, place: Place, progress: MovingProgress) -> Record:
    started = records.utc_now()
    found = _need(place)
    wrong = changes(place.path, found, times=False)
    pairs = [
        (entry, digests)
        for entry, digests in zip(rooted(files_of(found.entries), place.path), found.digests, strict=True)
        if entry.path not in wrong
    ]
    # What was written may still be in the page cache, and would be found right there whatever is on the medium.
    in_memory = read_stack(str(place.path)).in_memory
    plan = Plan(None, found.checksum, request.threads or default_threads(), not in_memory, ask_cache=False)
    with progress.moving("reading", total_bytes(entry for entry, _ in pairs)) as tick:
        moved = move([entry for entry, _ in pairs], plan, tick)
    for (entry, expected), read in zip(pairs, moved.digests, strict=True):
        if list(expected) != read:
            wrong[entry.path] = f"does not have the {found.checksum} of the manifest"
    return verified(request.command, place, found, moved, plan, wrong, read_stack(str(place.path)), started)


def _evict(request: Request, place: Place, progress: MovingProgress) -> Record:
    started = records.utc_now()
    with only_one(place, request.wait, progress.say):
        found = _need(place)
        wrong = changes(place.path, found, times=True)
        if wrong:
            raise UsageProblem(
                f"{first(wrong, str(place.path))} since it was staged",
                "save what is yours and remove the directory yourself",
            )
        take_away(place)
    progress.say(f"removed `{place.path}`: {format_size(found.bytes)}")
    return evicted(request.command, place, found, started)
