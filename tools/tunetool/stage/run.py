"""``tunetool stage``: stage a tree, verify a staged one, evict it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tunetool.errors import UsageProblem
from tunetool.measure import session
from tunetool.measure.progress import MovingProgress
from tunetool.measure.session import Findings, Result, Session
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_count, format_size
from tunetool.regular_files import POINTER_BYTES, is_pointer, read_end
from tunetool.stage import manifest as manifests
from tunetool.stage import remote
from tunetool.stage.build import Job, build
from tunetool.stage.destination import Destination, find_destination, inode_of, is_empty, known, only_one, take_away
from tunetool.stage.manifest import Manifest, changes, first, rooted
from tunetool.stage.moving import Plan, move
from tunetool.stage.outcome import KIND, copied, evicted, findings, unchanged, verified
from tunetool.stage.pieces import DEFAULT_CHECKSUM, Checksum
from tunetool.stage.room import IN_MEMORY, limits, refuse_too_big, space_needed
from tunetool.stage.tree import Entry, files_of, same_source, scan, total_bytes, within

Action = Literal["stage", "verify", "evict"]
_LEAST_HOLES = 1 << 20
_OF_MODELS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".json", ".model", ".parquet", ".tar", ".npy")
"""Endings of files for which repositories of models and data sets use Git LFS."""


@dataclass(frozen=True)
class Request:
    """The options of the call. ``source``: None if there is nothing to copy."""

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
    """Stage, verify or evict. What goes wrong in the middle of the work is in the record.

    Raises ``UsageProblem`` when the call is wrong, ``CannotJudge`` when it cannot start.
    """
    destination = find_destination(request.destination)
    options = session.Run(request.runs_dir, dry_run=request.dry_run, command=request.command)
    return session.run(KIND, options, _WORK[request.action](request, destination, progress), progress)


def default_threads() -> int:
    """Twice the CPUs, since a thread waits for the source half of its time, but enough requests for one drive."""
    return min(32, max(8, 2 * len(os.sched_getaffinity(0))))


class _Staging:
    """What the three have in common; see ``session.Work``."""

    def __init__(self, request: Request, destination: Destination, progress: MovingProgress) -> None:
        self.request, self.destination, self.progress = request, destination, progress
        self.outcome = findings(destination)
        """Nothing yet."""

    def findings(self) -> Findings:
        """See ``session.Work``."""
        return self.outcome

    def lock(self, session: Session) -> None:
        """Nobody else works on DST until the work ends."""
        session.subject = str(self.destination.path)
        session.hold(only_one(self.destination, self.request.wait, self.progress.say))


class _Copy(_Staging):
    job: Job | None = None
    there: Manifest | None = None
    """Of the tree at DST that is that copy already."""

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        _check_source(self.request.source or "", self.destination)
        if not self.request.dry_run:
            self.lock(session)
        prepared = _prepare(self.request, self.destination, self.progress)
        if isinstance(prepared, Job):
            self.job = prepared
        else:
            self.there = prepared
            done = "would be" if self.request.dry_run else "is"
            self.progress.say(f"`{self.destination.path}` is that copy already: nothing {done} copied")

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        job, destination = self.job, self.destination
        if self.there is not None:
            self.outcome = unchanged(destination, self.there)
        if job is None:
            return
        with self.progress.moving("copying", total_bytes(job.entries)) as tick:
            built = build(job, tick)
        source_medium = "remote" if job.remote else read_stack(job.source).medium
        self.outcome = copied(job, built, source_medium, read_stack(str(destination.path)))


def _check_source(source: str, destination: Destination) -> None:
    if remote.is_remote(source):
        address = remote.web_address(source)
        if address is not None:
            raise UsageProblem(
                f"`{source}` is an address of {address}, which rclone has no backend for", remote.WAYS[address]
            )
        remote.need_rclone()
        return
    path = Path(source)
    if not path.exists():
        raise UsageProblem(f"`{source}` does not exist", "SRC is a directory, or `remote:path` for rclone")
    if not path.is_dir():
        raise UsageProblem(f"`{source}` is not a directory", "name the directory that it lies in")
    real, target = os.path.realpath(path), str(destination.path)
    if within(target, real) or within(real, target):
        raise UsageProblem(
            f"`{target}` and `{real}` lie inside each other", "stage to a directory apart from the source"
        )


def _prepare(request: Request, destination: Destination, progress: MovingProgress) -> Job | Manifest:
    """Announce the copy and return its job, or the manifest of DST if that is that copy already. Changes nothing."""
    source = request.source or ""
    _check_source(source, destination)
    far = remote.is_remote(source)
    # Whether files may be read is asked where they will be: of 100,000 files, that is a sixth of the listing.
    empty = _is_free(destination)
    entries = remote.scan_remote(source) if far else scan(Path(source), ask=empty)
    source = source if far else os.path.realpath(source)
    reason = None if empty else _occupied(destination, entries, request.checksum)
    if isinstance(reason, Manifest):
        return reason
    if reason is not None and not request.replace:
        raise UsageProblem(
            f"`{destination.path}` exists and is not that copy: {reason}",
            "`--replace` puts the copy in its destination",
        )
    if not empty and not far:
        entries = scan(Path(source))
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
        request.checksum or DEFAULT_CHECKSUM,
        request.threads or default_threads(),
        fs_type in IN_MEMORY,
        not far and read_stack(source).in_memory,
    )
    holes = sum(entry.holes for entry in entries)
    kept = (
        f", of which {format_size(holes)} are holes or stored compressed in the source" if holes >= _LEAST_HOLES else ""
    )
    room = f"; {bounds[0].what} {format_size(bounds[0].left)}" if bounds else ""
    progress.say(
        f"copies {format_size(total_bytes(entries))} in {len(files_of(entries))} files{kept} from `{source}` to "
        f"`{destination.path}` ({fs_type}){room}"
    )
    _say_pointers(entries, progress)
    return job


def _say_pointers(entries: Sequence[Entry], progress: MovingProgress) -> None:
    """Say which weights are Git LFS pointers: they may be what nobody needs, so that they are no reason to refuse."""
    pointers = []
    for entry in files_of(entries):
        if entry.origin and 0 < entry.size < POINTER_BYTES and entry.path.endswith(_OF_MODELS):
            with suppress(OSError):
                if is_pointer(read_end(Path(entry.origin), POINTER_BYTES)):
                    pointers.append(entry.origin)
    if pointers:
        progress.say(
            f"{format_count(len(pointers), 'file')} are Git LFS pointers, not the files themselves, the first is "
            f"`{pointers[0]}`; `git lfs pull` in their clone brings the files"
        )


def _held(destination: Destination) -> int:
    """Bytes of a staged tree that is to be replaced."""
    try:
        manifest = known(destination)
    except UsageProblem:
        return 0
    return manifest.bytes if manifest is not None else 0


def _is_free(destination: Destination) -> bool:
    """Whether there is nothing at DST, or an empty directory."""
    return inode_of(destination.path) is None or is_empty(destination.path)


def _occupied(destination: Destination, entries: Sequence[Entry], checksum: Checksum | None) -> str | Manifest:
    """What is at DST, which is not free: the manifest of this very copy, or why it is not this copy."""
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
    return manifest if same else f"the source changed after it was staged ({manifest.staged})"


def _need(destination: Destination) -> Manifest:
    """The manifest of the tree at DST. Raises ``UsageProblem`` if there is no staged tree."""
    manifest = known(destination)
    if manifest is None:
        beside = (
            ""
            if manifests.read(destination.manifest) is None
            else f" (`{destination.manifest}` belongs to another tree)"
        )
        raise UsageProblem(
            f"`{destination.path}` is not a tree that tunetool staged{beside}", "name the DST of a `tunetool stage`"
        )
    return manifest


class _Verify(_Staging):
    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        session.subject = str(self.destination.path)
        self.manifest = _need(self.destination)
        if self.request.dry_run:
            self.progress.say(f"reads {format_size(self.manifest.bytes)} of `{self.destination.path}`")

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        destination, manifest = self.destination, self.manifest
        wrong = changes(destination.path, manifest, times=False)
        pairs = [
            (entry, digests)
            for entry, digests in zip(
                rooted(files_of(manifest.entries), destination.path), manifest.digests, strict=True
            )
            if entry.path not in wrong
        ]
        # What was written may still be in the page cache, and would be found right there whatever is on the medium.
        stack = read_stack(str(destination.path))
        threads = self.request.threads or default_threads()
        plan = Plan(None, manifest.checksum, threads, not stack.in_memory, ask_cache=False)
        with self.progress.moving("reading", total_bytes(entry for entry, _ in pairs)) as tick:
            moved = move([entry for entry, _ in pairs], plan, tick)
        for (entry, expected), read in zip(pairs, moved.digests, strict=True):
            if list(expected) != read:
                wrong[entry.path] = f"does not have the {manifest.checksum} of the manifest"
        self.outcome = verified(destination, manifest, moved, plan, wrong, stack)


class _Evict(_Staging):
    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        if self.request.dry_run:
            self.progress.say(f"removes {format_size(_need(self.destination).bytes)}: `{self.destination.path}`")
            return
        self.lock(session)
        self.manifest = _need(self.destination)
        wrong = changes(self.destination.path, self.manifest, times=True)
        if wrong:
            raise UsageProblem(
                f"{first(wrong, str(self.destination.path))} since it was staged",
                "save your changes, then remove the directory yourself",
            )

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        take_away(self.destination)
        self.progress.say(f"removed `{self.destination.path}`: {format_size(self.manifest.bytes)}")
        self.outcome = evicted(self.destination, self.manifest)


_WORK: Mapping[Action, Callable[[Request, Destination, MovingProgress], session.Work]] = {
    "stage": _Copy,
    "verify": _Verify,
    "evict": _Evict,
}
