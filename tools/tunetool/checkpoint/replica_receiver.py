"""What a replica's peer runs: ``python -m tunetool.checkpoint.replica_receiver``, by ssh.

Its stdin is a line of JSON, ``Incoming``, and the bytes of `.metadata`. It prints lines of JSON: ``{"ready": PATH}``,
the directory for the files, ``{"saving": BOOL}`` whenever that changes and as a sign of life, then ``{"path"}`` of the
whole replica, or ``{"error", "hint"}``. Once the files are there, its stdin brings a line with their digests at the
source, if the save made no checksums. It ends with its stdin: nothing becomes whole without the other side.

A node's replicas are laid out as steps on shared storage are (``bulk``).
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.checkpoint import bulk, identity, markers
from tunetool.checkpoint.bulk import Delivery, Plan
from tunetool.checkpoint.checksums import digest_of as digest_of_bytes
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.pace import Pace, saving, yield_to_training
from tunetool.checkpoint.retention import retain_on_bulk, stamp_of
from tunetool.checkpoint.saved_bytes import SavedItem, check_file
from tunetool.checkpoint.space import need
from tunetool.checkpoint.steps import fsync, sweep
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.node.common.file_lock import FileLock

SIGN_SECONDS = 1.0
"""Seconds between two signs of life."""
_POLL_SECONDS = 0.1
_REPAIR = "the checkpoint on its own node is unchanged; repair the peer's storage: `dmesg | tail`"


@dataclass(frozen=True)
class Incoming:
    """What a node sends for one step; see ``replicating.replicate`` for the options."""

    directory: str
    host: str
    """The node of which it is a replica."""
    step: str
    digest: str
    """Of `.metadata`."""
    metadata_bytes: int
    metadata: list[int] | None
    """Identity of `.metadata` on the node, if it is there."""
    needed: dict[str, int]
    """Size of each file."""
    sources: dict[str, list[int]]
    """Identity of each file on the node."""
    saved_ns: int
    now_ns: int
    """What the node's clock showed after that."""
    save: str | None
    items: dict[str, list[list[Any]]] | None
    """The items of each file, as ``SavedItem``; None if the save made no checksums."""
    rate: float | None
    max_to_keep: int | None
    patience: float


class Receiver:
    """Receives one replica."""

    def __init__(self, order: Incoming) -> None:
        self.order = order
        self.root = bulk.replicas_of(Path(order.directory), order.host)
        self.pace = Pace(Path(order.directory), order.rate, tick=self._sign_of_life)
        self._said, self._saving = 0.0, False

    def run(self, metadata: bytes) -> Path:
        """Receive, verify and mark it; returns the whole replica. Raises ``TunetoolError``, and ``EOFError`` if the
        other side is gone."""
        order, final = self.order, self.root / self.order.step
        if len(metadata) != order.metadata_bytes or digest_of_bytes(metadata) != order.digest:
            raise CannotJudge(f"`.metadata` of `{order.step}` came damaged from `{order.host}`", "replicate it again")
        with naming_errors(self.root, _REPAIR):
            self.root.mkdir(parents=True, exist_ok=True)
            # Create the file now, so that writers find it from here on.
            with saving(Path(order.directory)):
                pass
            lock = FileLock.on(self.root)
        with lock:
            if not lock.take(patience=order.patience, tick=self._sign_of_life):
                raise CannotJudge(
                    f"`{self.root}` is locked: another replica of `{order.host}` is being made",
                    "wait for one before the next is begun",
                )
            if final.exists() and not (final / markers.MARKER).exists():
                raise UsageProblem(f"`{final}` exists, and is no replica", "move it away on the peer")
            if not self._is_there(final):
                partial = self._begin(metadata)
                self._sign_of_life()
                say(ready=str(partial))
                self._verify(partial, self._when_sent())
                with naming_errors(self.root, _REPAIR):
                    bulk.publish(self.root, partial, bulk.deliveries(partial))
            if order.max_to_keep is not None:
                with naming_errors(self.root, _REPAIR):
                    retain_on_bulk(self.root, order.max_to_keep, order.step)
        return final

    def _is_there(self, final: Path) -> bool:
        marker = markers.whole(final, self.order.needed)
        return (
            marker is not None
            and marker.digest == self.order.digest
            and marker.sources == identity.parsed(self.order.sources)
        )

    def _begin(self, metadata: bytes) -> Path:
        order = self.order
        with naming_errors(self.root, _REPAIR):
            sweep(self.root)
            # Nobody else brings files for this node: what other steps have left will not be continued.
            for other in bulk.partials(self.root):
                if bulk.name_of(other)[0] == order.step:
                    continue
                if markers.sound_marker_of(other) is None:
                    shutil.rmtree(other, ignore_errors=True)
                else:
                    bulk.publish(self.root, other, ())
            partial = bulk.partial_of(self.root, order.step, order.digest)
            there = sum(_size(partial / name) for name in order.needed)
        need(self.root, max(0, sum(order.needed.values()) - there) + order.metadata_bytes)
        saved = stamp_of(self.root / order.step, self.root, order.saved_ns, order.digest, order.now_ns)
        sums = markers.OF_THE_SOURCE if order.items is None else markers.OF_THE_SAVE
        known = Identity.parse(order.metadata) if order.metadata else None
        plan = Plan(order.needed, saved, known, sums)
        return bulk.begin(self.root, order.step, order.digest, metadata, plan)

    def _when_sent(self) -> Mapping[str, Any]:
        """Wait until all files are there; returns their digests at the source."""
        while not select.select([sys.stdin], [], [], _POLL_SECONDS)[0]:
            self._sign_of_life()
        line = sys.stdin.buffer.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        digests: Mapping[str, Any] = json.loads(line)
        return digests

    def _verify(self, partial: Path, digests: Mapping[str, Any]) -> None:
        """Hold each file against the save, as the medium returns it. Raises ``CannotJudge``."""
        order, files = self.order, dict[str, CopiedFile]()
        for name, size in order.needed.items():
            path = partial / name
            try:
                with naming_errors(path, _REPAIR):
                    fsync(path)
                    if order.items is None:
                        files[name] = digest_of(path, self.pace.wait)
                        came, sent = files[name], markers.copied_file(digests[name])
                        if came != sent:
                            raise CannotJudge(
                                f"`{path}` differs from what `{order.host}` sent: {came.size} bytes, xxh3_64 "
                                f"{came.xxh3_64}, and not {sent.size}, {sent.xxh3_64}",
                                "replicate it again; the peer's storage or the network corrupts data",
                            )
                    else:
                        items = [SavedItem(*item) for item in order.items[name]]
                        files[name] = check_file(partial, name, items, order.save, self.pace.wait)
                if files[name].size != size:
                    raise CannotJudge(f"`{path}` has {files[name].size} of {size} bytes", "replicate it again")
            except CannotJudge:
                # By its size and time it would pass for the file that is to be sent.
                with contextlib.suppress(OSError):
                    path.unlink()
                raise
        with naming_errors(partial, _REPAIR):
            if digest_of(partial / bulk.METADATA_COPY).xxh3_64 != order.digest:
                raise CannotJudge(f"`{partial / bulk.METADATA_COPY}` does not hold what was written to it", _REPAIR)
        bulk.deliver(partial, Delivery(0, order.host, files, identity.parsed(order.sources)))

    def _sign_of_life(self) -> None:
        now, saving = time.monotonic(), self.pace.must_wait()
        if saving != self._saving or now - self._said >= SIGN_SECONDS:
            self._said, self._saving = now, saving
            say(saving=saving)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def say(**answer: object) -> None:
    """Send a line to the other side. Raises ``EOFError`` if nobody is there."""
    try:
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        raise EOFError from None


def main() -> int:
    """Receive one replica. Returns the exit status."""
    yield_to_training()
    try:
        return _answer()
    except EOFError:
        # Nobody is there to be told; and the interpreter would complain about a pipe that it cannot flush.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 3


def _answer() -> int:
    try:
        order = Incoming(**json.loads(sys.stdin.buffer.readline()))
        # Not buffered beyond its end: `select` sees what comes after.
        say(path=str(Receiver(order).run(sys.stdin.buffer.read(order.metadata_bytes))))
    except TunetoolError as error:
        say(error=error.message, hint=error.hint)
        return int(error.exit_code)
    except OSError as error:
        say(error=f"`{error.filename or 'system call'}`: {error.strerror or error}", hint=_REPAIR)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
