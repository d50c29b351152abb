"""Brings a node's part of a checkpoint back from the node that keeps its replica."""

from __future__ import annotations

import contextlib
import shlex
import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from tunetool.checkpoint import markers
from tunetool.checkpoint.markers import MARKER, METADATA, Marker
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.replica_receiver import replicas_of
from tunetool.checkpoint.replica_worker import RSYNC, first_line
from tunetool.checkpoint.replicating import check_names, with_limits
from tunetool.checkpoint.steps import fsync, fsync_directory, put_step, same_step, same_step_error, step_number
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.commands import captured

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

    Call it before anything loads, once on each node that lost its files, such as a blank one that replaces another. The
    files come by rsync over ssh. Each is read back past the page cache and held against the digests of the replica and
    against the checksums of the save, if that made any. Only then the step appears, by one rename. An interrupted call
    is continued by the next one.

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
    if final.exists():
        raise UsageProblem(f"`{final}` exists", "only a step that was lost is recovered: move it away if it is damaged")
    host = socket.gethostname() if host is None else host
    check_names(peer, host)
    source = replicas_of(Path(final.parent if peer_dir is None else peer_dir), host) / final.name
    partial = final.with_name(f"{_PARTIAL}{final.name}-{host}")
    with naming_errors(partial, _AGAIN):
        partial.mkdir(parents=True, exist_ok=True)
    argv = [*RSYNC, "--recursive", "--delete", f"--timeout={_SILENT_SECONDS}", f"--rsh={shlex.join(with_limits(ssh))}"]
    with naming_errors(Path(RSYNC[0]), "install rsync on every node"):
        done = captured([*argv, f"{peer}:{source}/", f"{partial}/"], None)
    if done.returncode:
        raise CannotJudge(f"`{peer}` does not give the replica `{source}`: {first_line(done.stderr)}", _AGAIN)
    with naming_errors(partial, _AGAIN):
        _verify(partial)
        # It is of that save: it would speak against a later one to this directory.
        (partial / MARKER).unlink()
        fsync_directory(partial)
        put_step(partial, final)
    return final


def _verify(partial: Path) -> None:
    """Hold everything against the marker and the save. Raises ``CannotJudge``, ``OSError``."""
    marker = markers.marker_of(partial)
    if marker is None or markers.digest_of_metadata(partial) != marker.digest:
        raise CannotJudge(f"`{partial}` is no whole replica: {markers.OTHER_METADATA}", _AGAIN)
    fsync(partial / METADATA)
    if digest_of(partial / METADATA).xxh3_64 != marker.digest:
        raise CannotJudge(f"`{partial / METADATA}` does not hold what was written to it", _ANOTHER)
    read = _reader(partial, marker)
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


def _reader(partial: Path, marker: Marker) -> Callable[[str], CopiedFile]:
    """What reads a file, and holds it against the checksums of the save if that made any."""
    from tunetool.checkpoint.metadata import read  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.saved_bytes import check_file, items_in  # noqa: PLC0415  (imports numpy)

    loaded = read(partial)
    sums = getattr(loaded, SUMS, None)
    if sums is None:
        return lambda name: digest_of(partial / name)
    items, save = items_in(loaded, sums, marker.files), getattr(loaded.storage_meta, "save_id", None)
    return lambda name: check_file(partial, name, items[name], save)
