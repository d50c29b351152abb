"""Brings a step, or a node's part of it, from the nearest of several tiers that has it whole and sound.

From a directory of steps it is copied, and each byte is checked on its way; from another node's replicas ``recover``
brings it. Either way it appears by one rename.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tunetool.checkpoint import markers
from tunetool.checkpoint.bulk import replicas_of, writer_of
from tunetool.checkpoint.checksums import Stopped
from tunetool.checkpoint.checksums import digest_of as digest_of_bytes
from tunetool.checkpoint.draining import holders_in, needed_by
from tunetool.checkpoint.holders import holds
from tunetool.checkpoint.markers import MARKER, METADATA, Marker
from tunetool.checkpoint.os_errors import WRITING, naming_errors
from tunetool.checkpoint.recovering import partial_of, recover, sweep
from tunetool.checkpoint.replica_worker import first_line
from tunetool.checkpoint.resume import leads_out, problem_of_file
from tunetool.checkpoint.space import left
from tunetool.checkpoint.steps import (
    fsync_directory,
    number_or_none,
    put_new_step,
    steps_in,
)
from tunetool.checkpoint.tiers import Tier, checked, there_error, with_limits
from tunetool.checkpoint.transfer import PART, CopiedFile, create, digest_of, write_all
from tunetool.checkpoint.workers import default_threads
from tunetool.ctrl_c import Threads, wait_briefly
from tunetool.errors import CannotJudge, TunetoolError
from tunetool.node.common.commands import captured
from tunetool.node.common.documents import parse
from tunetool.node.common.file_lock import FileLock
from tunetool.node.units import format_size
from tunetool.regular_files import read_bytes

if TYPE_CHECKING:
    from tunetool.checkpoint.saved_bytes import SavedItem
    from tunetool.measure.progress import MovingProgress

_TICK_SECONDS = 0.2
_OF_SSH = 255
"""The exit status of ssh itself, and not of what it ran."""
_AGAIN = "fetch it again: it continues with what came"
_ANOTHER_TIER = "name another tier with `--from`, or another step: `tunetool checkpoint ls` lists them"
_DAMAGED = "its source is damaged: `tunetool checkpoint verify` names everything that is"


@dataclass(frozen=True)
class Fetched:
    """What was brought, or would be."""

    step: str
    source: str
    """The step's directory in its tier, as ssh and rsync name it."""
    files: int
    bytes: int
    free: int
    """Bytes that fit where the step is to be, before it came."""
    done: bool
    """False of a dry run."""
    seconds: float
    passed_over: tuple[str, ...]
    """Why the tiers before it were not taken."""

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.bytes <= self.free


class _NoMore(CannotJudge):
    """No other tier would help."""


@dataclass(frozen=True)
class _Found:
    """A step in a tier, whole by the sizes of its files."""

    source: str
    sizes: Mapping[str, int]
    """Of each file, `.metadata` included."""
    partial: Path
    """Where it is put together."""
    bring: Callable[[Callable[[int], None]], None]
    """Gets what takes the bytes that came so far. Raises ``TunetoolError``, ``OSError``."""


def fetch(
    step_dir: Path,
    tiers: Sequence[str],
    progress: MovingProgress,
    *,
    host: str | None = None,
    dry_run: bool = False,
    ssh: Sequence[str] = ("ssh",),
) -> Fetched:
    """Bring ``step_dir`` (named ``step_<N>``), which is not there, from the first of ``tiers`` that has it whole.

    A tier is a directory of steps, or ``HOST:DIR``: the replicas of this node in the directory of steps of another one.
    ``host``: the name under which this node saved; only what its ranks need comes then, also from a directory of
    drained steps. Default: all of it from a directory, and from replicas what this node's host name has there.

    A tier whose step is missing, cut short or damaged is passed over, and said. An interrupted call is continued by the
    next one.

    Raises ``UsageProblem`` for a wrong call and if the step is there, ``CannotJudge`` if no tier has it, or if it does
    not fit.
    """
    final, parsed = checked(step_dir, tiers, host)
    passed: list[str] = []
    for tier in parsed:
        try:
            with naming_errors(tier.directory, _ANOTHER_TIER):
                found = _at_peer(tier, final, host, ssh) if tier.peer else _here(tier, final, host)
                taken = _taken(found, final, progress, passed, dry_run)
                return replace(taken, step=str(step_dir))
        except _NoMore:
            raise
        except TunetoolError as error:
            if os.path.lexists(final):  # it appeared meanwhile
                raise
            passed.append(f"`{tier.name}`: {error.message}")
            progress.say(f"passed over {passed[-1]}")
    raise CannotJudge(f"no tier has `{final.name}` whole: {'; '.join(passed)}", _ANOTHER_TIER)


def _taken(found: _Found, final: Path, progress: MovingProgress, passed: Sequence[str], dry_run: bool) -> Fetched:
    began = time.monotonic()
    total = sum(found.sizes.values())
    if not dry_run and passed:
        sweep(final.parent, found.partial)  # what a tier left that was damaged takes room
    room, of_what = left(final.parent)
    room += _bytes_in(found.partial)  # by an earlier call
    if not dry_run:
        if total > room:
            raise _NoMore(
                f"`{final.parent}` has {format_size(room)} of {of_what} left; `{found.source}` needs "
                f"{format_size(total)}",
                "remove old checkpoints, or fetch it to another directory",
            )
        final.parent.mkdir(parents=True, exist_ok=True)
        with progress.moving(f"fetch {found.source}", total) as tick:
            found.bring(tick)
        sweep(final.parent)
    seconds = time.monotonic() - began
    return Fetched(str(final), found.source, len(found.sizes), total, room, not dry_run, seconds, tuple(passed))


def _bytes_in(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        with contextlib.suppress(OSError):
            total += path.lstat().st_size
    return total


def _at_peer(tier: Tier, final: Path, host: str | None, ssh: Sequence[str]) -> _Found:
    """A replica of this node. Raises ``CannotJudge``."""
    peer, name = str(tier.peer), host or socket.gethostname()
    replica = replicas_of(tier.directory, name) / final.name
    source = f"{peer}:{replica}"
    script = f"cd {shlex.quote(str(replica))} && find . -type f -printf '%s %P\\0' && cat {MARKER}"
    with naming_errors(Path(ssh[0]), "install ssh on every node"):
        done = captured([*with_limits(ssh), peer, script], None)
    if done.returncode == _OF_SSH:
        raise CannotJudge(f"`{peer}` cannot be reached: {first_line(done.stderr)}", _ANOTHER_TIER)
    if done.returncode:
        raise CannotJudge(f"`{peer}` has no replica `{replica}`: {first_line(done.stderr)}", _ANOTHER_TIER)
    *lines, document = done.stdout.split("\0")
    try:
        there = {path: int(size) for size, _, path in (line.partition(" ") for line in lines)}
        files = {str(file): int(row["size"]) for file, row in parse(document, odd_names=True)["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotJudge(f"`{source}/{MARKER}` is damaged", _ANOTHER_TIER) from None
    for file, size in files.items():
        if there.get(file) != size:
            raise CannotJudge(f"`{source}/{file}` has {there.get(file, 0)} of {size} bytes", _ANOTHER_TIER)
    sizes, partial = {**files, METADATA: there.get(METADATA, 0)}, partial_of(final, name)

    def bring(tick: Callable[[int], None]) -> None:
        with _watching(partial, tick):
            recover(final, peer=peer, peer_dir=tier.directory, host=name, ssh=ssh)

    return _Found(source, sizes, partial, bring)


@contextlib.contextmanager
def _watching(directory: Path, tick: Callable[[int], None]) -> Iterator[None]:
    """Tell how much has come, while another program brings it."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_TICK_SECONDS):
            tick(_bytes_in(directory))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


@dataclass(frozen=True)
class _Step:
    """A step in a directory, and what its bytes are held against."""

    path: Path
    content: bytes
    """Of `.metadata`."""
    marker: Marker | None
    sizes: Mapping[str, int]
    items: Mapping[str, Sequence[SavedItem]] | None
    """Of each file, if the save made checksums."""
    save: str | None
    saved_ns: int

    def read(self, directory: Path, name: str, take: Callable[[memoryview], object]) -> None:
        """Read a file there past the page cache, and hold it against what was saved. Raises ``CannotJudge`` where it is
        something else, ``OSError``."""
        if self.items is None:
            read = digest_of(directory / name, take=take)
        else:
            from tunetool.checkpoint.saved_bytes import check_file  # noqa: PLC0415  (imports numpy)

            read = check_file(directory, name, self.items[name], self.save, take=take)
        known = self.marker.files.get(name) if self.marker is not None else None
        if read != (known or CopiedFile(self.sizes[name], read.xxh3_64)):
            raise CannotJudge(f"`{directory / name}` is not what was drained", _DAMAGED)


def _here(tier: Tier, final: Path, host: str | None) -> _Found:
    """A step in a directory. Raises ``TunetoolError``, ``OSError``."""
    number = number_or_none(final.name)
    path = steps_in(tier.directory).get(-1 if number is None else number)
    if path is None:
        raise CannotJudge(f"it has no `{final.name}`", _ANOTHER_TIER)
    step = _look_at(path, host)

    partial = partial_of(final, digest_of_bytes(step.content))

    def bring(tick: Callable[[int], None]) -> None:
        with _locked(partial):
            _Copies(step, partial).run(tick)
            try:
                put_new_step(partial, final)
            except FileExistsError:
                shutil.rmtree(partial, ignore_errors=True)
                raise there_error(final) from None

    return _Found(str(path), {**step.sizes, METADATA: len(step.content)}, partial, bring)


def _look_at(path: Path, host: str | None) -> _Step:
    from tunetool.checkpoint import metadata  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.saved_bytes import items_in  # noqa: PLC0415  (imports numpy)

    for name in (METADATA, MARKER):
        problem = leads_out(path, name)
        if problem is not None:
            raise CannotJudge(f"`{path / name}` {problem}", _DAMAGED)
    content = read_bytes(path / METADATA, metadata.LARGEST)
    described, marker = metadata.loads(content, path / METADATA), markers.marker_of(path)
    if marker is not None and digest_of_bytes(content) != marker.digest:
        raise CannotJudge(f"{markers.OTHER_METADATA} in `{path}`", _DAMAGED)
    sums: Any = getattr(described, SUMS, None)
    if sums is not None and metadata.without_sum(content) is content:
        raise CannotJudge(f"`{path / METADATA}` is damaged: its own checksum is not at its end", _DAMAGED)
    needed = needed_by(described)
    if host is not None:
        hosts = marker.hosts if marker is not None else {}
        own = {name for name in needed if hosts.get(name) == host}
        ranks, held = {rank for rank in map(writer_of, own) if rank is not None}, holders_in(described)
        theirs = {name for name in needed.keys() & held.keys() if own and holds(held[name], ranks)}
        needed = {name: least for name, least in needed.items() if name in own | theirs}
    if not needed:
        whose = f" that came from `{host}`" if host is not None else ""
        raise CannotJudge(f"`{path}` has no file{whose}", "without `--host` all of it comes")
    unproven = marker is None or marker.lacks(needed)
    if sums is None and unproven:
        raise CannotJudge(f"`{path}` has no checksums: nothing says whether it is sound", "copy it by `cp`")
    sizes: dict[str, int] = {}
    for name, least in needed.items():
        known = marker.files.get(name) if marker is not None else None
        problem = problem_of_file(path, name, least if known is None else known.size)
        if problem is not None:
            raise CannotJudge(f"`{path / name}` {problem}", _DAMAGED)
        sizes[name] = (path / name).stat().st_size
    return _Step(
        path,
        content,
        marker,
        sizes,
        None if sums is None else items_in(described, sums, sizes),
        getattr(described.storage_meta, "save_id", None),
        marker.saved.time_ns if marker is not None and marker.saved else (path / METADATA).stat().st_mtime_ns,
    )


@contextlib.contextmanager
def _locked(partial: Path) -> Iterator[None]:
    with naming_errors(partial, _AGAIN, WRITING):
        partial.mkdir(exist_ok=True)
        lock = FileLock.on(partial)
    with lock:
        if not lock.take(patience=0) or not lock.is_named():
            raise _NoMore(f"`{partial}` is locked: this step is being fetched", "wait until that has ended")
        yield


@dataclass
class _Copies:
    """Copies the files of a step, several at a time."""

    step: _Step
    partial: Path
    bytes: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, tick: Callable[[int], None]) -> None:
        """Copy all that is not there yet, and `.metadata` last. Raises ``CannotJudge``, ``OSError``."""
        names = self.step.sizes
        with naming_errors(self.partial, _AGAIN, WRITING):
            for path in self.partial.rglob("*"):
                if not path.is_dir() and str(path.relative_to(self.partial)) not in names:
                    path.unlink()  # half a file, or of a call that asked for more
        with Threads(default_threads()) as pool:
            try:
                asked = [pool.begin(self._bring, name) for name in names]
                over, waiting = wait_briefly(asked)
                while waiting and not any(future.exception() for future in over):
                    tick(self.bytes)
                    over, waiting = wait_briefly(asked)
                self.stopped = bool(waiting)
            except BaseException:
                self.stopped = True
                raise
        errors = [error for future in asked if not future.cancelled() and (error := future.exception())]
        for error in errors:
            if not isinstance(error, Stopped):
                raise error
        with naming_errors(self.partial, _AGAIN, WRITING):
            with (self.partial / METADATA).open("wb") as stream:
                stream.write(self.step.content)
                stream.flush()
                os.utime(stream.fileno(), ns=(self.step.saved_ns, self.step.saved_ns))
                os.fsync(stream.fileno())
            for folder in {self.partial, *((self.partial / name).parent for name in names)}:
                fsync_directory(folder)

    def _count(self, piece: memoryview) -> None:
        if self.stopped:
            raise Stopped
        with self.lock:
            self.bytes += len(piece)

    def _bring(self, name: str) -> None:
        source, target = self.step.path / name, self.partial / name
        if target.is_file():
            with contextlib.suppress(CannotJudge):
                self.step.read(self.partial, name, self._count)
                return
        temporary = target.with_name(f"{PART}{target.name}-{secrets.token_hex(4)}")
        try:
            with _no_more(target):
                target.parent.mkdir(parents=True, exist_ok=True)
                out = create(temporary)
            try:

                def take(piece: memoryview) -> None:
                    with _no_more(target):
                        write_all(out, piece)
                    self._count(piece)

                with naming_errors(source, _DAMAGED):
                    self.step.read(self.step.path, name, take)
                with _no_more(target):
                    os.fsync(out)
            finally:
                os.close(out)
            with _no_more(target):
                temporary.replace(target)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextlib.contextmanager
def _no_more(path: Path) -> Iterator[None]:
    """For what is done to the target: no other tier would do better."""
    try:
        yield
    except OSError as error:
        raise _NoMore(
            f"`{path}` {WRITING}: {error.strerror}", f"free some space or repair it, then {_AGAIN}"
        ) from error
