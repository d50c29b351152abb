"""The process that drains: ``python -m tunetool.checkpoint.drain_worker``, with its order as JSON on stdin.

It is a separate process, so that it does not hold the interpreter's lock of training, can have a lower priority, and
continues when training dies. It imports no torch. On stdout it writes ``{"path"}`` of the complete step, or
``{"error", "hint"}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from tunetool.checkpoint import bulk as on_bulk
from tunetool.checkpoint import identity, markers
from tunetool.checkpoint.bulk import Delivery, Plan
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.pace import Pace, saving, yield_to_training
from tunetool.checkpoint.retention import Keep, leave_note, retain_on_bulk, retain_on_node, same_data, stamp_of
from tunetool.checkpoint.space import need
from tunetool.checkpoint.steps import sweep
from tunetool.checkpoint.transfer import Changed, CopiedFile, Gone, copy_file, digest_of, remove_parts
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.node.common.file_lock import FileLock

_POLL_SECONDS = 0.1
_DRAIN_AGAIN = "check `dmesg | tail`, then drain again"
_SIGN_SECONDS = 5.0
"""Seconds between two signs of life for the other ranks."""


@dataclass(frozen=True)
class Order:
    """What one rank drains; see ``draining.drain`` for the options."""

    step_dir: str
    bulk_dir: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    coordinator: int
    digest: str | None
    """Digest of `.metadata` in ``step_dir``; None if it has none."""
    needed: dict[str, int] | None
    """Minimum size in bytes, by file that `.metadata` names; None without `.metadata`."""
    sources: dict[str, list[int]]
    """Identity (``identity.Identity``) when the drain was requested, by file."""
    metadata: list[int] | None
    """Identity of `.metadata` when the drain was requested."""
    rate: float | None
    max_to_keep: int | None
    local_max_to_keep: int | None
    delete_undrained: bool
    patience: float


class Worker:
    """One rank's drain of one step."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.step_dir, self.bulk = Path(order.step_dir), Path(order.bulk_dir)
        self.name = self.step_dir.name
        self.host = socket.gethostname()
        self.sources = identity.parsed(order.sources)
        self.metadata = Identity.parse(order.metadata) if order.metadata else None
        self._sign: Path | None = None
        self._signed = 0.0
        self.pace = Pace(self.step_dir.parent, order.rate, tick=self._sign_of_life)

    def run(self) -> Path:
        """Drain; returns the complete step on shared storage once every rank's files are there. Raises
        ``TunetoolError``."""
        # Create the file now, so that writers find it from here on.
        with saving(self.step_dir.parent):
            pass
        with _locked(self.step_dir, shared=True):
            final = self._coordinate() if self.order.rank == self.order.coordinator else self._follow()
        self._retain_here()
        return final

    def _coordinate(self) -> Path:
        order, digest, needed, metadata = self.order, self.order.digest, self.order.needed, self.metadata
        if digest is None or needed is None or metadata is None:
            raise UsageProblem(f"`{self.step_dir}` has no `.metadata`", "drain after the save is done")
        with _locked(self.step_dir / markers.METADATA):
            content = self._metadata(digest)
            with naming_errors(self.bulk, _DRAIN_AGAIN):
                self.bulk.mkdir(parents=True, exist_ok=True)
                sweep(self.bulk)
            problem = on_bulk.same_step_problem(self.bulk, self.name)
            if problem is not None:
                raise problem
            final, partial = self.bulk / self.name, on_bulk.partial_of(self.bulk, self.name, digest)
            if markers.sound_marker_of(partial) is not None:
                on_bulk.publish(self.bulk, partial, ())  # it was complete except for its name
            if not self._has_this_save(final):
                if final.exists():
                    markers.replaceable(final)
                copied_bytes = sum(path.stat().st_size for path in partial.glob("*.distcp"))
                need(self.bulk, max(0, sum(needed.values()) - copied_bytes))
                saved = stamp_of(self.step_dir, self.bulk, metadata.mtime_ns, digest)
                on_bulk.begin(self.bulk, self.name, digest, content, Plan(needed, saved, metadata))
                try:
                    self._deliver(partial, needed)
                    self._wait_for_other_ranks(partial, needed)
                    self._metadata(digest)
                except Changed as changed:
                    on_bulk.mark_changed(partial, changed)
                    raise
                on_bulk.publish(self.bulk, partial, on_bulk.deliveries(partial))
            if order.max_to_keep is not None:
                retain_on_bulk(self.bulk, order.max_to_keep, self.name)
            return final

    def _metadata(self, digest: str) -> bytes:
        """The content of `.metadata`. Raises ``Changed`` if it changed since the drain was requested."""
        path = self.step_dir / markers.METADATA
        with naming_errors(path, _DRAIN_AGAIN):
            content = path.read_bytes()
        if xxhash.xxh3_64_hexdigest(content) != digest:
            raise Changed(path)
        return content

    def _wait_for_other_ranks(self, partial: Path, needed: Mapping[str, int]) -> None:
        patience = _Patience(self.order.patience)
        while True:
            changed = on_bulk.changed_error(partial)
            if changed is not None:
                raise changed
            if not partial.exists():
                raise Gone(partial)
            brought = on_bulk.deliveries(partial)
            copied = on_bulk.delivered(partial, brought)
            if needed.keys() <= copied.keys():
                return
            if patience.ends(_signs_of_life(partial)):
                lacking = on_bulk.lacking(needed, brought, self.order.world)
                raise CannotJudge(
                    f"`{self.name}` is not complete on `{self.bulk}`: no progress for {self.order.patience:g} s; "
                    f"missing: {'; '.join(lacking)}",
                    "check that the node is alive and every rank called drain(); the next drain continues from here",
                )
            self._pause()

    def _follow(self) -> Path:
        patience = _Patience(self.order.patience)
        final = self.bulk / self.name
        while True:
            partial = self._find_partial()
            plan = on_bulk.plan_of(partial) if partial else None
            if partial is not None and plan is not None:
                digest = on_bulk.name_of(partial)[1]
                try:
                    self._deliver(partial, plan.needed)
                except Gone:
                    # The coordinator removed it because it belonged to an older save, or another drain interfered.
                    self._pause()
                    continue
                except Changed as changed:
                    on_bulk.mark_changed(partial, changed)
                    raise
                # If the manifest is gone, the coordinator has begun the step again.
                while self._has_manifest() and not patience.ends(_signs_of_life(partial)):
                    changed_error = on_bulk.changed_error(partial)
                    if changed_error is not None:
                        raise changed_error
                    self._pause()
                if not partial.exists() and self._is_complete(final, digest):
                    return final
            elif partial is None and self._has_this_save(final):
                return final
            if patience.ends(None if partial is None else _signs_of_life(partial)):
                raise CannotJudge(
                    f"`{self.name}` did not become complete on `{self.bulk}`: rank {self.order.coordinator} gave no "
                    f"sign of life for {self.order.patience:g} s",
                    "check that it is alive and called drain(); the next drain continues with what is there",
                )
            self._pause()

    def _find_partial(self) -> Path | None:
        if self.order.digest is not None:
            candidates = [on_bulk.partial_of(self.bulk, self.name, self.order.digest)]
        else:
            # `.metadata` is on another node. The coordinator removes partial steps of older saves; then this rank
            # begins again.
            candidates = on_bulk.partials(self.bulk, self.name)
        return next(filter(self._is_begun, candidates), None)

    def _is_begun(self, partial: Path) -> bool:
        """Whether the partial step belongs to this drain, not to an earlier one that the coordinator will replace."""
        if not partial.is_dir() or on_bulk.changed_error(partial) is not None:
            return False
        plan = on_bulk.plan_of(partial)
        return plan is None or None in (plan.metadata, self.metadata) or plan.metadata == self.metadata

    def _is_complete(self, final: Path, digest: str) -> bool:
        marker = markers.whole(final, self.order.needed or ())
        return marker is not None and marker.digest == digest

    def _has_this_save(self, final: Path) -> bool:
        """Whether ``final`` is this save, complete: another drain may have copied it."""
        marker = markers.whole(final, self.order.needed or ())
        if marker is None or self.order.digest not in (None, marker.digest):
            return False
        # Another save can have the same `.metadata`, and a `.metadata` on another node cannot be compared.
        named = {name: source for name, source in self.sources.items() if name in marker.files}
        if self.order.digest is None and not named and any(name.endswith(".distcp") for name in self.sources):
            return False
        with naming_errors(self.step_dir, _DRAIN_AGAIN):
            return same_data(self.step_dir, named, marker, self.pace.wait)

    def _deliver(self, partial: Path, needed: Mapping[str, int]) -> None:
        """Copy the files that the plan names and that this node has; the ranks of one node divide them among
        themselves.

        Raises ``Changed`` for a file that changed since this drain, or an earlier drain of this save, was requested: it
        may then belong to another save.
        """
        order = self.order
        on_this_node = [name for name in sorted(needed) if name in self.sources]
        assigned = {name: self.sources[name] for name in on_this_node[order.local_rank :: order.local_world]}
        brought = on_bulk.deliveries(partial)
        copied = on_bulk.delivered(partial, brought)
        files: dict[str, CopiedFile | None] = dict.fromkeys(assigned)
        for earlier in brought:
            for name in earlier.sources.keys() & assigned.keys():
                if not assigned[name].as_written(earlier.sources[name]):
                    self._require_same_bytes(partial, name, copied.get(name))
                if assigned[name] == earlier.sources[name]:
                    files[name] = copied.get(name)
        recorded = next(
            (earlier_delivery.sources for earlier_delivery in brought if earlier_delivery.rank == order.rank), {}
        )
        # Keep the identities that an earlier drain recorded for files of other ranks.
        delivery = Delivery(order.rank, self.host, files, {**recorded, **assigned})
        self._sign = on_bulk.manifest_path(partial, order.rank)
        remove_parts(partial, order.rank)
        on_bulk.deliver(partial, delivery)
        for name, source in assigned.items():
            if source.size < needed[name]:
                raise CannotJudge(
                    f"`{self.step_dir / name}` has {source.size} of the {needed[name]} bytes that `.metadata` names",
                    "the checkpoint on this node is damaged: use an older one",
                )
            if files[name] is None:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                files[name] = copy_file(self.step_dir / name, partial / name, self.pace.wait, order.rank, source)
                on_bulk.deliver(partial, delivery)

    def _require_same_bytes(self, partial: Path, name: str, copied: CopiedFile | None) -> None:
        """Raises ``Changed`` unless the file has the same bytes as the copy."""
        path = self.step_dir / name
        with naming_errors(path, _DRAIN_AGAIN):
            if copied is None or digest_of(path, self.pace.wait) != copied:
                raise Changed(
                    path, "an earlier drain of this save began", f"; if its content is correct, remove `{partial}`"
                )

    def _retain_here(self) -> None:
        order = self.order
        if order.local_rank != 0:
            return
        leave_note(self.step_dir, self.bulk, self.sources, self.metadata)
        if order.local_max_to_keep is not None:
            keep = Keep(order.local_max_to_keep, order.max_to_keep, order.delete_undrained)
            retain_on_node(self.step_dir, self.bulk, keep, self.pace.wait)

    def _has_manifest(self) -> bool:
        return self._sign is not None and self._sign.exists()

    def _pause(self) -> None:
        self._sign_of_life()
        time.sleep(_POLL_SECONDS)

    def _sign_of_life(self) -> None:
        now = time.monotonic()
        if self._sign is not None and now - self._signed > _SIGN_SECONDS:
            self._signed = now
            with contextlib.suppress(OSError):
                os.utime(self._sign)


class _Patience:
    """A time-out that restarts whenever the observed value changes."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last, self._since = seconds, object(), time.monotonic()

    def ends(self, seen: object) -> bool:
        if seen != self._last:
            self._last, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > self._seconds


def _signs_of_life(partial: Path) -> tuple[tuple[str, int], ...]:
    """Name and mtime of each rank's manifest: changes show that the rank is alive."""
    times = []
    for path in sorted(on_bulk.manifest_path(partial, 0).parent.glob("*.json")):
        with contextlib.suppress(OSError):
            times.append((path.name, path.stat().st_mtime_ns))
    return tuple(times)


@contextlib.contextmanager
def _locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    with naming_errors(path, _DRAIN_AGAIN):
        lock = FileLock.on(path)
    with lock:
        lock.take(shared)
        yield


def main(read: Callable[[], str] = sys.stdin.read) -> int:
    """Read the order from stdin, drain, and write the result to stdout. Returns the exit status."""
    yield_to_training()
    try:
        final = Worker(Order(**json.loads(read()))).run()
    except TunetoolError as error:
        answer({"error": error.message, "hint": error.hint})
        return int(error.exit_code)
    except OSError as error:
        message = f"`{error.filename or 'system call'}`: {error.strerror or error}"
        answer({"error": message, "hint": "the checkpoint on the node is unchanged; drain again"})
        return 3
    answer({"path": str(final)})
    return 0


def answer(document: dict[str, str | None]) -> None:
    """Write the result to stdout, which nobody reads any more where training has ended."""
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(document).encode())


def order_text(order: Order) -> str:
    """The order as JSON for the stdin of this process."""
    return json.dumps(asdict(order))


if __name__ == "__main__":
    sys.exit(main())
