"""Brings a node's part of a checkpoint from other nodes: from the one that keeps its replica, or from several.

What comes is read back past the page cache, and held against the checksums of the save and those of the replica.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.checkpoint import markers
from tunetool.checkpoint.agreement import Failures, Source
from tunetool.checkpoint.bulk import replicas_of, token_of
from tunetool.checkpoint.draining import needed_by
from tunetool.checkpoint.markers import MARKER, METADATA, Marker
from tunetool.checkpoint.os_errors import SystemRefused, naming_errors
from tunetool.checkpoint.replica_worker import RSYNC, Program, first_line
from tunetool.checkpoint.steps import fsync, fsync_directory, put_new_step
from tunetool.checkpoint.tiers import check_names, not_there, peer_directory, there_error, with_limits
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.file_lock import FileLock
from tunetool.regular_files import below

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_PARTIAL = ".recovering-"
_SILENT_SECONDS = 120
"""Seconds without a byte from the peer before it fails."""
_CALLS = 4
"""Calls for the same step that are waited for, at the most."""
_LONGEST = 500
"""Bytes of what the peer says that an error repeats."""
_ANOTHER = (
    "look at the health of the drives on both nodes: `tunetool verify`; resume from another step, or from a drain"
)
_AGAIN = "recover it again: it continues with what came"
_OWN_FAULT = re.compile(r'^rsync: \[(?:receiver|Receiver|generator)\] .*".*\(\d+\)', re.MULTILINE)
"""What rsync says where the system refuses it a file on the side that gets them: with its name and the error's number.
Those of a broken connection name no file. The exit code may be that of the connection, which ends then."""


_CROWDED = re.compile(r"(?:kex|ssh)_exchange_identification")
"""What ssh says where sshd takes no more connections for the moment (`MaxStartups`), as when all nodes of a job ask
one of them."""
_CUT = re.compile(r"connection unexpectedly closed \((?!0 bytes)")
"""What rsync says where the connection broke after it had stood."""
_PAUSES = (1, 2, 4, 8, 16)
"""Seconds, at the most, before each further attempt: each node waits a random part of them. A cut has one attempt."""


class _Refused(CannotJudge):
    """A source does not give what was asked of it."""


class _Damaged(CannotJudge):
    """A source gave other bytes than were saved."""


def recover(
    step_dir: str | Path,
    *,
    peer: str,
    peer_dir: str | Path | None = None,
    host: str | None = None,
    ssh: Sequence[str] = ("ssh",),
) -> Path:
    """Bring the replica of ``step_dir`` (named ``step_<N>``), which was lost here, back from ``peer``; returns its
    path.

    Call it before anything loads, in one process on each node that lost its files, such as a blank one that replaces
    another. The files come by rsync over ssh. Each is read back past the page cache and held against the digests of the
    replica and against the checksums of the save, if that made any. Only then the step appears, by one rename. An
    interrupted call is continued by the next one for the same step; one for another step removes what it left.

    ``host``: the name under which the lost node replicated; default: the host name. ``peer``, ``peer_dir``, ``ssh``: as
    they were for ``replicate``.

    Raises ``UsageProblem`` if the step is there, ``CannotJudge`` if the peer cannot be reached, has no such replica, or
    a file is not as saved.
    """
    final = not_there(Path(step_dir))
    host = socket.gethostname() if host is None else host
    check_names(peer, host)
    source = replicas_of(peer_directory(final, peer_dir), host) / final.name
    with _arriving(final, host) as (partial, lock):
        _bring(peer, source, partial, lock, ssh)
        marker, loaded = _replica(partial)
        _verify(partial, loaded, marker.files)
        # It is of that save: it would speak against a later one to this directory.
        (partial / MARKER).unlink()
        fsync_directory(partial)
        try:
            put_new_step(partial, final)
        except FileExistsError:
            shutil.rmtree(partial, ignore_errors=True)
            raise there_error(final) from None
    return final


def gather(
    final: Path,
    digest: str,
    sources: Mapping[Source, Mapping[str, CopiedFile | None]],
    held: Collection[str],
    saved_ns: int,
    *,
    here: str,
    ssh: Sequence[str],
) -> tuple[int, Failures]:
    """Bring files of the save with this ``digest`` of `.metadata` into the step ``final``, beside those that are there.

    ``sources``: the files by node and directory, each with its checksum where one is known; ``held``: the files of the
    save that are in ``final``; ``here``: this node.
    Returns the bytes that came from other nodes, and the sources from which nothing came, or not what was saved: then
    ``final`` is as it was. `.metadata` comes last, with the time ``saved_ns`` of the save. A directory ``final`` of
    another save is kept under another name. Raises ``CannotJudge`` for an error of this node, which is no source's.
    """
    count, damaged, refused = 0, dict[Source, str](), dict[tuple[str, Source], str]()
    with _arriving(final, digest, _SILENT_SECONDS) as (partial, lock):
        where = final
        # `.metadata` first: the others are held against it.
        for source, files in sorted(sources.items(), key=lambda each: METADATA not in each[1]):
            host, directory = source
            peer = None if host == here else host
            try:
                for name in files:
                    if not _is_below(partial, name):
                        raise CannotJudge(f"`{name}` leads out of the step", _ANOTHER)
                _bring(peer, Path(directory), partial, lock, ssh, files)
                if METADATA in files:
                    where = partial
                    _verify_metadata(partial, digest)
                _verify(partial, _metadata_in(where), {name: files[name] for name in files if name != METADATA})
            except _Damaged as error:
                damaged[source] = error.message
            except _Refused as error:
                refused[here, source] = error.message
            else:
                count += sum((partial / name).stat().st_size for name in files) if peer else 0
            if METADATA in files and (damaged or refused):
                break
        if not damaged and not refused:
            _keep_only(partial, {name for files in sources.values() for name in files})
            _put(partial, final, digest, held, saved_ns)
    return count, Failures(damaged, refused)


def _keep_only(partial: Path, names: Collection[str]) -> None:
    """Delete what an earlier call brought, and this one did not verify."""
    for path in partial.rglob("*"):
        if not path.is_dir() and str(path.relative_to(partial)) not in names:
            path.unlink()


def _put(partial: Path, final: Path, digest: str, held: Collection[str], saved_ns: int) -> None:
    """Put what was brought into the step, which is there or not. Raises ``OSError``."""
    if (partial / METADATA).exists():
        # It came with the time of the replica.
        os.utime(partial / METADATA, ns=(saved_ns, saved_ns))
    fsync_directory(partial)
    aside = f".other-save-{secrets.token_hex(4)}"
    if os.path.lexists(final / METADATA) and not _is_of(final, digest):
        final.rename(final.with_name(f"{final.name}{aside}"))
    elif METADATA not in held:
        # Beside `.metadata` they would pass for files of this save, if every save calls them so.
        for path in final.glob("*.distcp"):
            if path.name not in held and token_of(path.name) is None:
                path.rename(path.with_name(f"{path.name}{aside}"))
    try:
        put_new_step(partial, final)
        return
    except FileExistsError:
        names = [str(path.relative_to(partial)) for path in partial.rglob("*") if not path.is_dir()]
    for name in sorted(names, key=METADATA.__eq__):
        if name == METADATA:
            fsync_directory(final)
        (final / name).parent.mkdir(parents=True, exist_ok=True)
        (partial / name).replace(final / name)
    fsync_directory(final)
    shutil.rmtree(partial, ignore_errors=True)


def _is_of(step: Path, digest: str) -> bool:
    try:
        return markers.digest_of_metadata(step) == digest
    except OSError:
        return False


@contextlib.contextmanager
def _arriving(final: Path, key: str, patience: float = 0) -> Iterator[tuple[Path, FileLock]]:
    """A directory for the files that come for a step, and the lock on it. What came before an interruption is there."""
    partial = partial_of(final, key)
    with naming_errors(partial, _AGAIN), contextlib.ExitStack() as stack:
        sweep(final.parent, partial)
        for _ in range(_CALLS):
            partial.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(FileLock.on(partial))
            taken = lock.take(patience=patience)
            if not taken or lock.is_named():
                break
            lock.free()  # the call that was waited for has put it into place
        if not taken or not lock.is_named():
            raise CannotJudge(f"`{partial}` is locked: this step is being recovered", "wait until that has ended")
        try:
            yield partial, lock
        finally:
            with contextlib.suppress(OSError):
                partial.rmdir()  # if nothing came


def partial_of(final: Path, what: str) -> Path:
    """Where the step is put together. ``what`` tells apart what may come for it."""
    return final.with_name(f"{_PARTIAL}{final.name}-{what}")


def sweep(root: Path, kept: Path | None = None) -> None:
    """Delete what ended calls have left, but not ``kept``."""
    for path in root.glob(f"{_PARTIAL}*"):
        if path != kept:
            with contextlib.suppress(OSError), FileLock.on(path) as lock:
                if lock.take(patience=0):
                    shutil.rmtree(path, ignore_errors=True)


def _bring(
    peer: str | None,
    source: Path,
    partial: Path,
    lock: FileLock,
    ssh: Sequence[str],
    names: Collection[str] | None = None,
) -> None:
    """Bring all files of the directory ``source`` of ``peer`` (None: of this node), or those of ``names``. Raises
    ``_Refused``, and ``CannotJudge`` or ``OSError`` for an error of this node."""
    argv = [*RSYNC, f"--timeout={_SILENT_SECONDS}", f"--rsh={shlex.join(with_limits(ssh))}"]
    with tempfile.NamedTemporaryFile() as listed, tempfile.TemporaryFile() as said:
        if names is None:
            argv += ["--recursive", "--delete"]
        else:
            listed.write(b"".join(os.fsencode(name) + b"\0" for name in names))
            listed.flush()
            argv += ["--from0", f"--files-from={listed.name}"]
        argv += [f"{peer}:{source}/" if peer else f"{source}/", f"{partial}/"]
        was_cut = False
        for pause in (*_PAUSES, None):
            # Into a file: a pipe ends only with all that ssh has left, such as a master of its connections. rsync keeps
            # the lock, so that nothing of it writes into a step that was verified since; it ends with this process, or
            # else the next call would wait for that lock, and give up.
            program = Program(argv, subprocess.DEVNULL, said, pass_fds=(lock.handle,))
            with contextlib.closing(program):
                status = program.process.wait()
            said.seek(0)
            text = said.read(_LONGEST).decode(errors="replace")
            first_cut = not was_cut and _CUT.search(text) is not None
            was_cut = was_cut or first_cut
            if not status or pause is None or not (first_cut or _CROWDED.search(text)):
                break
            said.seek(0)
            said.truncate()
            time.sleep(random.uniform(0, pause))  # noqa: S311  (no secret)
        line = first_line(text)
    own = _OWN_FAULT.search(text)
    if own and status:
        raise CannotJudge(f"`{partial}`: {own[0]}", "look at the free space and the health of the drives here")
    if status:
        whose = (
            f"`{peer}` does not give {'the replica ' if names is None else ''}" if peer else "this node cannot copy "
        )
        raise _Refused(f"{whose}`{source}`: {line}", _AGAIN)
    # rsync passes over what is no regular file.
    gone = next((name for name in names or () if not os.path.lexists(partial / name)), None)
    if gone is not None:
        raise _Refused(f"{f'`{peer}`' if peer else 'this node'} gave no `{gone}` of `{source}`", _AGAIN)


def _replica(partial: Path) -> tuple[Marker, Metadata]:
    """The marker and the metadata of a replica that came, if it covers all its files. Raises ``CannotJudge``,
    ``OSError``."""
    marker = markers.marker_of(partial)
    if marker is None or markers.digest_of_metadata(partial) != marker.digest:
        raise CannotJudge(f"`{partial}` is no whole replica: {markers.OTHER_METADATA}", _AGAIN)
    _verify_metadata(partial, marker.digest)
    loaded = _metadata_in(partial)
    needed = needed_by(loaded)
    there = {name for name in needed if os.path.lexists(partial / name)}
    if not marker.files or marker.lacks(there | marker.sources.keys()):
        raise CannotJudge(f"`{partial}` is no whole replica: its marker does not cover all its files", _ANOTHER)
    for name in marker.files:
        if name not in needed or not _is_below(partial, name):
            raise CannotJudge(f"`{partial / MARKER}` is damaged: it names `{name}`", _ANOTHER)
    return marker, loaded


def _metadata_in(step: Path) -> Metadata:
    """What `.metadata` in a step says."""
    from tunetool.checkpoint import metadata  # noqa: PLC0415  (imports torch)

    return metadata.read(step)


def _verify_metadata(partial: Path, digest: str) -> None:
    fsync(partial / METADATA)
    if digest_of(partial / METADATA).xxh3_64 != digest:
        with contextlib.suppress(OSError):
            (partial / METADATA).unlink()
        raise _Damaged(f"`{partial / METADATA}` does not hold what was written to it", _ANOTHER)


def _verify(partial: Path, loaded: Metadata, files: Mapping[str, CopiedFile | None]) -> None:
    """Hold each file against its checksum, and against those of the save if that made any. Raises ``_Damaged``,
    and ``SystemRefused`` or ``OSError`` for an error of this node."""
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.saved_bytes import check_file, items_in  # noqa: PLC0415  (imports numpy)

    sums, save = getattr(loaded, SUMS, None), getattr(loaded.storage_meta, "save_id", None)
    items = None if sums is None else items_in(loaded, sums, files)
    for name, expected in files.items():
        path = partial / name
        fsync(path)
        if items is None and expected is None:
            raise CannotJudge(f"`{path}` has no checksum", _ANOTHER)
        try:
            came = digest_of(path) if items is None else check_file(partial, name, items[name], save)
            if expected is not None and came != expected:
                raise CannotJudge(f"`{path}` differs from the replica that was verified", _ANOTHER)
        except SystemRefused:
            raise
        except CannotJudge as error:
            # By its size and time it would pass for the file that is to be brought.
            with contextlib.suppress(OSError):
                path.unlink()
            raise _Damaged(error.message, error.hint) from error


def _is_below(partial: Path, name: str) -> bool:
    try:
        below(partial, name)
    except UsageProblem:
        return False
    return True
