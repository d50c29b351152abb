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
from tunetool.stage.destination import Destination, find_destination, inode_of, is_empty, known, only_one, take_away
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
    """Stage, verify or evict. Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` when it cannot be done."""
    destination = find_destination(request.destination)
    runs_dir = request.runs_dir or records.default_runs_dir()
    if request.dry_run:
        _dry_run(request, destination, progress)
        return Result()
    records.prepare_runs_dir(runs_dir)
    if request.action == "stage":
        record = _stage(request, destination, progress)
    elif request.action == "verify":
        record = _verify(request, destination, progress)
    else:
        record = _evict(request, destination, progress)
    return Result(record, records.write(record, runs_dir))


def default_threads() -> int:
    """Twice the CPUs, since a thread waits for the source half of its time, but enough requests for one drive."""
    return min(32, max(8, 2 * len(os.sched_getaffinity(0))))


def _dry_run(request: Request, destination: Destination, progress: MovingProgress) -> None:
    if request.action == "stage":
        job = _prepare(request, destination, progress)
        if job is None:
            progress.say(f"`{destination.path}` is that already: nothing would be copied")
    elif request.action == "verify":
        progress.say(f"reads {format_size(_need(destination).bytes)} of `{destination.path}`")
    else:
        progress.say(f"removes {format_size(_need(destination).bytes)}: `{destination.path}`")


def _stage(request: Request, destination: Destination, progress: MovingProgress) -> Record:
    started = records.utc_now()
    _check_source(request.source or "", destination)
    with only_one(destination, request.wait, progress.say):
        job = _prepare(request, destination, progress)
        if job is None:
            manifest = known(destination)
            assert manifest is not None  # noqa: S101  (else it could not be identical)
            progress.say(f"`{destination.path}` is that already: nothing is copied")
            return unchanged(request.command, destination, manifest, started)
        with progress.moving("copying", total_bytes(job.entries)) as tick:
            built = build(job, tick)
    source_medium = "remote" if job.remote else read_stack(job.source).medium
    return copied(request.command, job, built, source_medium, read_stack(str(destination.path)), started)


def _check_source(source: str, destination: Destination) -> None:
    if remote.is_remote(source):
        remote.need_rclone()
        return
    path = Path(source)
    if not path.exists():
        raise UsageProblem(f"`{source}` does not exist", "SRC is a directory, or `remote:path` for rclone")
    if not path.is_dir():
        raise UsageProblem(f"`{source}` is not a directory", "name the directory that it lies in")
    real, target = os.path.realpath(path), str(destination.path)
    if within(target, real) or within(real, target):
        raise UsageProblem(f"`{target}` and `{real}` lie in each other", "stage to a directory apart from the source")


def _prepare(request: Request, destination: Destination, progress: MovingProgress) -> Job | None:
    """Announce the copy and return its job; None if DST is that copy already. Changes nothing."""
    source = request.source or ""
    _check_source(source, destination)
    far = remote.is_remote(source)
    entries = remote.scan_remote(source) if far else scan(Path(source))
    source = source if far else os.path.realpath(source)
    reason = _occupied(destination, entries, request.checksum)
    if reason == "":
        return None
    if reason is not None and not request.replace:
        raise UsageProblem(
            f"`{destination.path}` is there and is not that: {reason}", "`--replace` puts the copy in its place"
        )
    parent = destination.path.parent
    mount = mount_holding(str(parent), read_mounts())
    fs_type = mount.fs_type if mount else "unknown"
    need = space_needed(entries)
    bounds = limits(parent, fs_type)
    refuse_too_big(need, len(entries), parent, bounds, _held(destination))
    job = Job(
        source,
        far,
        destination,
        entries,
        request.checksum or DEFAULT,
        request.threads or default_threads(),
        fs_type in IN_MEMORY,
        not far and read_stack(source).in_memory,
    )
    room = f"; {bounds[0].what} {format_size(bounds[0].left)}" if bounds else ""
    progress.say(
        f"copies {format_size(total_bytes(entries))} in {len(files_of(entries))} files from `{source}` to "
        f"`{destination.path}` ({fs_type}){room}"
    )
    return job


def _held(destination: Destination) -> int:
    """Bytes of a staged tree that is to be replaced."""
    try:
        manifest = known(destination)
    except UsageProblem:
        return 0
    return manifest.bytes if manifest is not None else 0


def _occupied(destination: Destination, entries: Sequence[Entry], checksum: Checksum | None) -> str | None:
    """What is at DST: None for nothing, empty for this very copy, else why it is not this copy."""
    if inode_of(destination.path) is None or is_empty(destination.path):
        return None
    try:
        manifest = known(destination)
    except UsageProblem as error:
        return error.message
    if manifest is None:
        return "it was not staged by tunetool"
    wrong = changes(destination.path, manifest, times=True)
    if wrong:
        return first(wrong, str(destination.path))
    if checksum not in (None, manifest.checksum):
        return f"its manifest has {manifest.checksum}, {checksum} was asked for"
    same = same_source(entries, manifest.entries)
    return "" if same else f"the source is not as it was when it was staged ({manifest.staged})"


def _need(destination: Destination) -> Manifest:
    """The manifest of the tree at DST. Raises ``UsageProblem`` where there is no staged tree."""
    manifest = known(destination)
    if manifest is None:
        beside = (
            "" if manifests.read(destination.manifest) is None else f" (`{destination.manifest}` is of another tree)"
        )
        raise UsageProblem(
            f"`{destination.path}` is no tree that tunetool staged{beside}", "name the DST of a `tunetool stage`"
        )
    return manifest


def _verify(request: Request, destination: Destination, progress: MovingProgress) -> Record:
    started = records.utc_now()
    manifest = _need(destination)
    wrong = changes(destination.path, manifest, times=False)
    pairs = [
        (entry, digests)
        for entry, digests in zip(rooted(files_of(manifest.entries), destination.path), manifest.digests, strict=True)
        if entry.path not in wrong
    ]
    # What was written may still be in the page cache, and would be found right there whatever is on the medium.
    in_memory = read_stack(str(destination.path)).in_memory
    plan = Plan(None, manifest.checksum, request.threads or default_threads(), not in_memory, ask_cache=False)
    with progress.moving("reading", total_bytes(entry for entry, _ in pairs)) as tick:
        moved = move([entry for entry, _ in pairs], plan, tick)
    for (entry, expected), read in zip(pairs, moved.digests, strict=True):
        if list(expected) != read:
            wrong[entry.path] = f"does not have the {manifest.checksum} of the manifest"
    return verified(
        request.command, destination, manifest, moved, plan, wrong, read_stack(str(destination.path)), started
    )


def _evict(request: Request, destination: Destination, progress: MovingProgress) -> Record:
    started = records.utc_now()
    with only_one(destination, request.wait, progress.say):
        manifest = _need(destination)
        wrong = changes(destination.path, manifest, times=True)
        if wrong:
            raise UsageProblem(
                f"{first(wrong, str(destination.path))} since it was staged",
                "save what is yours and remove the directory yourself",
            )
        take_away(destination)
    progress.say(f"removed `{destination.path}`: {format_size(manifest.bytes)}")
    return evicted(request.command, destination, manifest, started)
