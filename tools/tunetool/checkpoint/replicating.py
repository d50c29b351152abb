"""Copies a node's part of a checkpoint to the scratch of another node in the background, verified there.

This protects what was not drained yet against the loss of one node.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from tunetool.checkpoint.checksums import digest_of
from tunetool.checkpoint.draining import PACKAGES, check_numbers, needed_by, start
from tunetool.checkpoint.identity import Identity, look_at, rows
from tunetool.checkpoint.markers import METADATA
from tunetool.checkpoint.pace import savers
from tunetool.checkpoint.replica_receiver import Incoming
from tunetool.checkpoint.replica_worker import Outgoing, warned
from tunetool.checkpoint.steps import now_ns, same_step, same_step_error, step_number
from tunetool.checkpoint.tiers import check_names, peer_directory, with_limits
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.regular_files import below


@dataclass(frozen=True)
class Replicated:
    """How a replication ended: with the ``path`` of the replica on the peer, or with a ``problem``, one line."""

    path: str | None
    problem: str | None = None


class Replica:
    """A replica that is being made. That continues when this process ends."""

    def __init__(self, process: subprocess.Popen[str] | Replicated, step_dir: Path, peer: str) -> None:
        """``process``: how it ended, if none could be started."""
        self._process = None if isinstance(process, Replicated) else process
        self._outcome = process if isinstance(process, Replicated) else Replicated(None)
        self._step_dir, self._peer = step_dir, peer
        self._waiting = threading.Lock()

    @property
    def running(self) -> bool:
        """Whether it is still being made."""
        process = self._process  # another thread may wait for it
        return process is not None and process.poll() is None

    def wait(self, timeout: float | None = None, *, check: bool = False) -> Replicated:
        """Wait, for ``timeout`` seconds at most, until the replica is whole on the peer; returns how that ended.

        A problem was also printed to stderr, by the process that replicates. With ``check`` it raises ``CannotJudge``.
        """
        with self._waiting:
            outcome = self._ending(timeout)
        if check and outcome.problem is not None:
            raise CannotJudge(outcome.problem)
        return outcome

    def _ending(self, timeout: float | None) -> Replicated:
        if self._process is None:
            return self._outcome
        try:
            output, _ = self._process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            waits = "; ".join(map(str, savers(self._step_dir.parent)))
            reason = f": it pauses for a save, {waits}" if waits else ""
            return Replicated(None, f"`{self._step_dir}` is not on `{self._peer}` yet{reason}")
        self._outcome = self._ended(output, self._process.returncode)
        self._process = None
        return self._outcome

    def stop(self) -> None:
        """End it. Files that were sent remain, and the next replication of the same step continues with them."""
        # It leads a group of its own. A rsync that waits for a save takes no other signal.
        if self._process is not None and self.running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self.wait()

    def _ended(self, output: str, status: int) -> Replicated:
        try:
            document = json.loads(output)
        except ValueError:
            return Replicated(None, f"the replication of `{self._step_dir}` ended with status {status}")
        if "path" in document:
            return Replicated(document["path"])
        return Replicated(None, document["problem"])


class NothingHere(UsageProblem):
    """No file of the step is on this node."""


def check_settings(rate: float | str, max_to_keep: int | None, patience: float) -> None:
    """Raises ``UsageProblem`` for numbers that ``replicate`` does not take."""
    check_numbers(rate, max_to_keep)
    if not isinstance(patience, int | float) or not patience > 0:
        raise UsageProblem(f"`patience={patience}` is not a time", "give seconds")


def replicate(
    step_dir: str | Path,
    *,
    peer: str,
    peer_dir: str | Path | None = None,
    host: str | None = None,
    metadata: bytes | None = None,
    ssh: Sequence[str] = ("ssh",),
    python: str = sys.executable,
    rate: float | Literal["auto"] = "auto",
    max_to_keep: int | None = None,
    patience: float = 120.0,
) -> Replica:
    """Copy this node's files of the checkpoint in ``step_dir`` (named ``step_<N>``) to ``peer``, in the background.

    One rank of each node must call this after ``dcp.save`` has returned (for ``dcp.async_save``: after its future is
    done). It sends the files that `.metadata` names and that are on this node, and `.metadata` itself, by rsync over
    ssh. The peer reads them back past the page cache and holds them against the checksums of the save. Only then the
    replica appears there, by one rename, as ``peer_dir/.replicas/<host>/step_<N>``. Saves without checksums, such as
    those of torch's writer, are held against digests that are made at the source after sending.

    ``peer``: where ssh leads to the node that keeps the replica; see ``peer_of``. ``peer_dir``: its directory of steps;
    default: the parent of ``step_dir``. ``host``: the name of this node, default: its host name. ``metadata``: the
    bytes of `.metadata`, needed where it is on another node. ``ssh``: the command, with options such as a key; without
    a password. ``python``: the peer's Python, which must have tunetool; default: the path of this one. ``rate``: bytes
    per second; ``"auto"``: no limit. It runs at low priority and pauses while a save runs beside ``step_dir`` or in
    ``peer_dir``, for at most 600 s. ``max_to_keep``: number of replicas of this node that the peer keeps, at least 1:
    those that were saved last, and always the one just made. ``patience``: seconds without a sign of life of the peer
    before it fails; a dead link ends after a minute.

    A peer that is gone, slow or full ends in one warning on stderr, as does an error of the system here; see
    ``Replica.wait``. The files here are never changed; a note beside them says of which
    save they are. Do not save to the step before `wait` returns: it fails if a file has changed since this call.

    Raises ``UsageProblem`` for a wrong call, and for a step without files that `.metadata` names.
    """
    source = Path(os.path.realpath(step_dir))
    step_number(source.name)
    check_settings(rate, max_to_keep, patience)
    host = socket.gethostname() if host is None else host
    check_names(peer, host)
    directory = peer_directory(source, peer_dir)
    try:
        namesake = same_step(source)
        if namesake is not None:
            raise same_step_error(namesake, source)
        incoming, content = _incoming(source, metadata, str(directory), host, rate, max_to_keep, patience)
        order = Outgoing(
            step_dir=str(source),
            peer=peer,
            ssh=with_limits(ssh),
            receiver=["env", f"PYTHONPATH={PACKAGES}", python, "-m", "tunetool.checkpoint.replica_receiver"],
            incoming=asdict(incoming),
        )
        process = start("replica_worker", json.dumps(asdict(order)).encode() + b"\n" + content)
    except OSError as error:
        return Replica(Replicated(None, warned(source, peer, error).line), source, peer)
    return Replica(process, source, peer)


def _incoming(
    source: Path,
    given: bytes | None,
    directory: str,
    host: str,
    rate: float | Literal["auto"],
    max_to_keep: int | None,
    patience: float,
) -> tuple[Incoming, bytes]:
    """What the peer is to receive, with the current identities of the files; and the bytes of `.metadata`."""
    from tunetool.checkpoint.metadata import loads  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.saved_bytes import items_in  # noqa: PLC0415  (imports numpy)

    path, known = source / METADATA, None
    try:
        with path.open("rb") as stream:
            known = Identity.of(os.fstat(stream.fileno()))
            content = stream.read()
    except OSError as error:
        if given is None:
            raise UsageProblem(
                f"`{path}` cannot be read: {error.strerror}",
                "replicate after the save is done; where `.metadata` is on another node, give its bytes as `metadata=`",
            ) from None
        content = given
    loaded = loads(content, path)
    needed = needed_by(loaded)
    for name in needed:
        if "/" in name or (source / name).is_symlink():
            below(source, name)
    sources = look_at(source, needed)
    short = next((name for name, file in sources.items() if file.size < needed[name]), None)
    damaged = "the checkpoint on this node is damaged: use another one"
    if short is not None:
        raise UsageProblem(f"`{source / short}` is cut short", damaged)
    if not sources:
        raise NothingHere(f"`{source}` has no file that `.metadata` names", damaged)
    sums = getattr(loaded, SUMS, None)
    items = None if sums is None else items_in(loaded, sums, sources)
    incoming = Incoming(
        directory=directory,
        host=host,
        step=source.name,
        digest=digest_of(content),
        metadata_bytes=len(content),
        metadata=known.row() if known else None,
        needed={name: file.size for name, file in sources.items()},
        sources=rows(sources),
        saved_ns=known.mtime_ns if known else min(now_ns(), max(file.mtime_ns for file in sources.values())),
        now_ns=now_ns(),
        save=getattr(loaded.storage_meta, "save_id", None),
        items=None if items is None else {name: [list(item) for item in some] for name, some in items.items()},
        rate=None if rate == "auto" else float(rate),
        max_to_keep=max_to_keep,
        patience=patience,
    )
    return incoming, content
