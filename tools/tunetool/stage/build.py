"""Builds the copy beside DST, and renames it to DST when it is complete."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.node.common.files import content, replace_file
from tunetool.record import utc_now
from tunetool.stage import manifest as manifests
from tunetool.stage import remote
from tunetool.stage.destination import Destination, inode_of, put, remove_tree, settle
from tunetool.stage.manifest import Manifest, listing, rooted
from tunetool.stage.moving import Moved, Plan, move
from tunetool.stage.pieces import Checksum, piece_bytes
from tunetool.stage.system import flush
from tunetool.stage.tree import Entry, files_of, scan, total_bytes, untouched


@dataclass(frozen=True)
class Job:
    """One copy. ``in_memory``: the file system of DST is in memory."""

    source: str
    remote: bool
    destination: Destination
    entries: Sequence[Entry]
    checksum: Checksum
    threads: int
    in_memory: bool
    source_in_memory: bool


@dataclass(frozen=True)
class Built:
    """The result. ``seconds``: the time of the whole copy, including the rename to DST."""

    moved: Moved
    seconds: float


def build(job: Job, tick: Callable[[int], None]) -> Built:
    """Make the copy and rename it to DST; ``tick`` gets the bytes done. After any error, the copy is removed and DST is
    unchanged."""
    started = time.perf_counter()
    destination, built = job.destination, job.destination.fresh("stage")
    before = content(str(destination.manifest)) if destination.manifest.exists() else None
    inode: int | None = None
    try:
        built.mkdir(mode=0o700)
        inode = inode_of(built)
        assert inode is not None  # noqa: S101  (made above)
        moved = _fetch(job, built, tick) if job.remote else _copy(job, built, tick)
        if not job.in_memory:
            flush(built)
        manifest = Manifest(
            source=job.source,
            inode=inode,
            replaces=inode_of(destination.path),
            staged=utc_now().isoformat(),
            checksum=job.checksum,
            piece_bytes=piece_bytes(job.checksum),
            bytes=total_bytes(job.entries),
            entries=job.entries,
            digests=moved.digests,
        )
        manifests.write(manifest, destination.manifest)
        put(built, destination)
    except BaseException:
        _undo(destination, built, inode, before)
        raise
    return Built(moved, time.perf_counter() - started)


def _undo(destination: Destination, built: Path, inode: int | None, before: str | None) -> None:
    if inode is not None and inode_of(destination.path) == inode:
        settle(destination)  # the copy is already renamed to DST: only remove the tree that it replaced
        return
    if before is None:
        destination.manifest.unlink(missing_ok=True)
    elif content(str(destination.manifest)) != before:
        replace_file(str(destination.manifest), before, follow=False)
    remove_tree(built)


def _copy(job: Job, built: Path, tick: Callable[[int], None]) -> Moved:
    for entry in job.entries:
        if entry.kind == "directory" and entry.path != ".":
            (built / entry.path).mkdir(mode=0o700)
        elif entry.kind == "link":
            link = built / entry.path
            link.symlink_to(entry.target)
            os.utime(link, ns=(entry.mtime_ns, entry.mtime_ns), follow_symlinks=False)
    plan = Plan(built, job.checksum, job.threads, not job.source_in_memory, write_direct=not job.in_memory)
    moved = move(files_of(job.entries), plan, tick)
    _finish_directories(job.entries, built)
    if not untouched(scan(Path(job.source), ask=False), job.entries):
        raise CannotJudge(f"`{job.source}` changed while it was staged", "stage a source at rest")
    return moved


def _fetch(job: Job, built: Path, tick: Callable[[int], None]) -> Moved:
    """Copy by rclone, compare names and sizes with the listing, and read the files once for the checksums."""
    remote.fetch(job.source, built, tick)
    for entry in job.entries:
        # An object store may list directories that rclone does not create.
        if entry.kind == "directory":
            (built / entry.path).mkdir(parents=True, exist_ok=True)
    wanted = {entry.path: (entry.kind, entry.size) for entry in job.entries if entry.path != "."}
    fetched = {entry.path: (entry.kind, entry.size) for entry in listing(built)}
    if wanted != fetched:
        path = sorted(set(wanted.items()) ^ set(fetched.items()))[0][0]
        raise CannotJudge(f"`{path}` of `{job.source}` does not match its listing", "stage a source at rest")
    moved = move(rooted(files_of(job.entries), built), Plan(None, job.checksum, job.threads), lambda _: None)
    _finish_directories(job.entries, built)
    return moved


def _finish_directories(entries: Sequence[Entry], built: Path) -> None:
    """Set modes and times of directories, the innermost first: creating an entry changes its directory's time."""
    for entry in reversed([entry for entry in entries if entry.kind == "directory"]):
        path = built / entry.path
        if entry.mtime_ns:
            os.utime(path, ns=(entry.mtime_ns, entry.mtime_ns))
        path.chmod(entry.mode)
