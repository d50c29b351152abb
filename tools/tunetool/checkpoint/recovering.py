"""Brings a node's part of a checkpoint back from the node that keeps its replica."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tunetool.checkpoint import markers
from tunetool.checkpoint.draining import needed_by
from tunetool.checkpoint.markers import MARKER, METADATA, Marker
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.replica_receiver import replicas_of
from tunetool.checkpoint.replica_worker import RSYNC, first_line
from tunetool.checkpoint.replicating import check_names, peer_directory, with_limits
from tunetool.checkpoint.steps import fsync, fsync_directory, put_new_step, same_step, same_step_error, step_number
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.commands import captured
from tunetool.node.common.file_lock import FileLock
from tunetool.regular_files import below

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_PARTIAL = ".recovering-"
_SILENT_SECONDS = 120
"""Seconds without a byte from the peer before it fails."""
_ANOTHER = (
    "look at the health of the drives on both nodes: `tunetool verify`; resume from another step, or from a drain"
)
_AGAIN = "recover it again: it continues with what came"


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
    final = Path(step_dir).absolute()
    step_number(final.name)
    namesake = same_step(final)
    if namesake is not None:
        raise same_step_error(namesake, final)
    if os.path.lexists(final):
        raise there_error(final)
    host = socket.gethostname() if host is None else host
    check_names(peer, host)
    source = replicas_of(peer_directory(final, peer_dir), host) / final.name
    partial = partial_of(final, host)
    with naming_errors(partial, _AGAIN):
        sweep(final.parent, partial)
        partial.mkdir(parents=True, exist_ok=True)
        with FileLock.on(partial) as lock:
            if not lock.take(patience=0) or not lock.is_named():
                raise CannotJudge(f"`{partial}` is locked: this step is being recovered", "wait until that has ended")
            try:
                _bring(f"{peer}:{source}/", partial, lock, ssh)
                _verify(partial)
                # It is of that save: it would speak against a later one to this directory.
                (partial / MARKER).unlink()
                fsync_directory(partial)
                put_new_step(partial, final)
            except FileExistsError:
                shutil.rmtree(partial, ignore_errors=True)
                raise there_error(final) from None
            except (CannotJudge, OSError):
                with contextlib.suppress(OSError):
                    partial.rmdir()  # if nothing came
                raise
    return final


def partial_of(final: Path, what: str) -> Path:
    """Where the step is put together. ``what`` tells apart what may come for it."""
    return final.with_name(f"{_PARTIAL}{final.name}-{what}")


def there_error(final: Path) -> UsageProblem:
    """The error for a step that is there."""
    return UsageProblem(f"`{final}` exists", "only a step that was lost is recovered: move it away if it is damaged")


def sweep(root: Path, kept: Path | None = None) -> None:
    """Delete what ended calls have left, but not ``kept``."""
    for path in root.glob(f"{_PARTIAL}*"):
        if path != kept:
            with contextlib.suppress(OSError), FileLock.on(path) as lock:
                if lock.take(patience=0):
                    shutil.rmtree(path, ignore_errors=True)


def _bring(source: str, partial: Path, lock: FileLock, ssh: Sequence[str]) -> None:
    """Bring the files. Raises ``CannotJudge``."""
    argv = [*RSYNC, "--recursive", "--delete", f"--timeout={_SILENT_SECONDS}", f"--rsh={shlex.join(with_limits(ssh))}"]
    with naming_errors(Path(RSYNC[0]), "install rsync on every node"):
        # It keeps the lock when this process dies: nothing of it may write into a step that was verified since.
        done = captured([*argv, source, f"{partial}/"], None, pass_fds=(lock.handle,))
    if done.returncode:
        peer, _, path = source.partition(":")
        said = first_line(done.stderr)
        raise CannotJudge(f"`{peer}` does not give the replica `{path.rstrip('/')}`: {said}", _AGAIN)


def _verify(partial: Path) -> None:
    """Hold everything against the marker and the save. Raises ``CannotJudge``, ``OSError``."""
    from tunetool.checkpoint import metadata  # noqa: PLC0415  (imports torch)

    marker = markers.marker_of(partial)
    if marker is None or markers.digest_of_metadata(partial) != marker.digest:
        raise CannotJudge(f"`{partial}` is no whole replica: {markers.OTHER_METADATA}", _AGAIN)
    fsync(partial / METADATA)
    if digest_of(partial / METADATA).xxh3_64 != marker.digest:
        raise CannotJudge(f"`{partial / METADATA}` does not hold what was written to it", _ANOTHER)
    loaded = metadata.read(partial)
    needed = needed_by(loaded)
    there = {name for name in needed if os.path.lexists(partial / name)}
    if not marker.files or marker.lacks(there | marker.sources.keys()):
        raise CannotJudge(f"`{partial}` is no whole replica: its marker does not cover all its files", _ANOTHER)
    for name in marker.files:
        if name not in needed or not _is_below(partial, name):
            raise CannotJudge(f"`{partial / MARKER}` is damaged: it names `{name}`", _ANOTHER)
    read = _reader(partial, marker, loaded)
    for name, expected in marker.files.items():
        fsync(partial / name)
        try:
            if read(name) != expected:
                raise CannotJudge(f"`{partial / name}` differs from the replica that was verified", _ANOTHER)
        except CannotJudge:
            # By its size and time it would pass for the file that is to be brought.
            with contextlib.suppress(OSError):
                (partial / name).unlink()
            raise


def _is_below(partial: Path, name: str) -> bool:
    try:
        below(partial, name)
    except UsageProblem:
        return False
    return True


def _reader(partial: Path, marker: Marker, loaded: Metadata) -> Callable[[str], CopiedFile]:
    """What reads a file, and holds it against the checksums of the save if that made any."""
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.saved_bytes import check_file, items_in  # noqa: PLC0415  (imports numpy)

    sums = getattr(loaded, SUMS, None)
    if sums is None:
        return lambda name: digest_of(partial / name)
    items, save = items_in(loaded, sums, marker.files), getattr(loaded.storage_meta, "save_id", None)
    return lambda name: check_file(partial, name, items[name], save)
