"""The process that drains: ``python -m tunetool.checkpoint.drain_worker``, its order as JSON on stdin.

A process of its own, so that training feels neither Python's lock nor its priorities, and so that it goes on when
training dies. It imports no torch. On stdout it says ``{"path"}`` of the complete step, or ``{"error", "hint"}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tunetool.checkpoint import bulk as on_bulk
from tunetool.checkpoint.bulk import Delivery
from tunetool.checkpoint.pace import Pace, saving, yield_to_training
from tunetool.checkpoint.space import need
from tunetool.checkpoint.steps import remove_step, steps_in, surplus, sweep
from tunetool.checkpoint.transfer import Filed, Gone, copy_file, digest_of, remove_parts
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem

_LOOK = 0.1
_ALIVE = 5.0
"""Seconds between two signs of life."""


@dataclass(frozen=True)
class Order:
    """What one rank drains."""

    step_dir: str
    bulk_dir: str
    rank: int
    world: int
    local_rank: int
    local_world: int
    coordinator: int
    digest: str | None
    """Of the `.metadata` in ``step_dir``, where there is one."""
    needed: dict[str, int] | None
    """By file that it names, the least bytes it must have."""
    rate: float | None
    max_to_keep: int | None
    local_max_to_keep: int | None
    patience: float


class Worker:
    """One rank's drain of one step."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.step_dir, self.bulk = Path(order.step_dir), Path(order.bulk_dir)
        self.name = self.step_dir.name
        self.host = socket.gethostname()
        self._sign: Path | None = None
        self._signed = 0.0
        self.pace = Pace(self.step_dir.parent, order.rate, tick=self._sign_of_life)

    def run(self) -> Path:
        """Return the complete step on shared storage, when every rank's files are there."""
        # Made now, so that writers find it from here on.
        with saving(self.step_dir.parent):
            pass
        with _locked(self.step_dir, fcntl.LOCK_SH):
            final = self._coordinate() if self.order.rank == self.order.coordinator else self._follow()
        self._retain_here()
        return final

    def _coordinate(self) -> Path:
        order, digest, needed = self.order, self.order.digest, self.order.needed
        if digest is None or needed is None:
            raise UsageProblem(f"`{self.step_dir}` has no `.metadata`", "drain after the save is done")
        with _locked(self.step_dir / on_bulk.METADATA, fcntl.LOCK_EX):
            with _named(self.bulk):
                self.bulk.mkdir(parents=True, exist_ok=True)
                sweep(self.bulk)
            final, partial = self.bulk / self.name, on_bulk.partial_of(self.bulk, self.name, digest)
            if self._is_there(final, digest):
                return final
            if on_bulk.marker_of(partial) is None:
                if final.exists():
                    on_bulk.replaceable(final)
                there = sum(path.stat().st_size for path in partial.glob("*.distcp"))
                need(self.bulk, max(0, sum(needed.values()) - there))
                with _named(self.step_dir):
                    metadata = (self.step_dir / on_bulk.METADATA).read_bytes()
                on_bulk.begin(self.bulk, self.name, digest, metadata, needed)
                self._deliver(partial, needed)
                self._await_the_others(partial, needed)
            final = on_bulk.publish(self.bulk, partial, on_bulk.deliveries(partial))
            if order.max_to_keep is not None:
                steps = on_bulk.complete_steps(self.bulk)
                for step in surplus(steps, steps, order.max_to_keep):
                    remove_step(steps[step])
            return final

    def _await_the_others(self, partial: Path, needed: Mapping[str, int]) -> None:
        patience = _Patience(self.order.patience)
        while True:
            brought = on_bulk.deliveries(partial)
            there = on_bulk.delivered(partial, brought)
            if needed.keys() <= there.keys():
                return
            if patience.ends(_signs(partial)):
                lacking = on_bulk.lacking(needed, brought, self.order.world)
                raise CannotJudge(
                    f"`{self.name}` is not complete on `{self.bulk}`: nothing came for {self.order.patience:g} s; "
                    f"missing: {'; '.join(lacking)}",
                    "is that node alive, and did every rank call drain()? what is there is taken up by the next drain",
                )
            self._rest()

    def _follow(self) -> Path:
        patience = _Patience(self.order.patience)
        final = self.bulk / self.name
        while True:
            partial = self._find()
            needed = on_bulk.plan_of(partial) if partial else None
            if partial is not None and needed is not None:
                digest = on_bulk.name_of(partial)[1]
                try:
                    self._deliver(partial, needed)
                except Gone:
                    # It was an older save's, which the coordinator has removed, or another drain was in the way.
                    self._rest()
                    continue
                while partial.exists() and not patience.ends(_signs(partial)):
                    self._rest()
                if not partial.exists() and self._is_there(final, digest):
                    return final
            elif partial is None and self._holds_what_is_here(final):
                return final
            if patience.ends(None if partial is None else _signs(partial)):
                raise CannotJudge(
                    f"`{self.name}` did not become complete on `{self.bulk}`: nothing was heard of rank "
                    f"{self.order.coordinator} for {self.order.patience:g} s",
                    "is it alive, and did it call drain()? what is there is taken up by the next drain",
                )
            self._rest()

    def _find(self) -> Path | None:
        if self.order.digest is not None:
            known = on_bulk.partial_of(self.bulk, self.name, self.order.digest)
            return known if known.is_dir() else None
        # `.metadata` lies on another node. An older save's leftovers are removed by the coordinator, and then this rank
        # begins again.
        return next(iter(on_bulk.partials(self.bulk, self.name)), None)

    def _is_there(self, final: Path, digest: str) -> bool:
        marker = on_bulk.marker_of(final)
        if marker is None or marker.digest != digest:
            return False
        try:
            return all((final / name).stat().st_size == filed.size for name, filed in marker.files.items())
        except OSError:
            return False  # damaged since: it is drained anew

    def _holds_what_is_here(self, final: Path) -> bool:
        """Whether the step was complete before this rank began: another drain may have brought its files."""
        marker = on_bulk.marker_of(final)
        if marker is None:
            return False
        if self.order.digest is not None:
            return marker.digest == self.order.digest
        here = {path.name for path in self.step_dir.glob("*.distcp")} & marker.files.keys()
        if not here and any(self.step_dir.glob("*.distcp")):
            return False
        sizes = all((self.step_dir / name).stat().st_size == marker.files[name].size for name in here)
        return sizes and all(digest_of(self.step_dir / name, self.pace.wait) == marker.files[name] for name in here)

    def _deliver(self, partial: Path, needed: Mapping[str, int]) -> None:
        """Copy what the plan names and lies here: of the ranks of one node each takes its part."""
        order = self.order
        here = [name for name in sorted(needed) if (self.step_dir / name).exists()]
        mine = here[order.local_rank :: order.local_world]
        there = on_bulk.delivered(partial, on_bulk.deliveries(partial))
        files: dict[str, Filed | None] = {name: there.get(name) for name in mine}
        self._sign = on_bulk.manifest_path(partial, order.rank)
        remove_parts(partial, order.rank)
        on_bulk.deliver(partial, Delivery(order.rank, self.host, files))
        for name in mine:
            size = (self.step_dir / name).stat().st_size
            if size < needed[name]:
                raise CannotJudge(
                    f"`{self.step_dir / name}` has {size} of the {needed[name]} bytes that `.metadata` speaks of",
                    "the checkpoint on this node is damaged: go back to an older one",
                )
            if files[name] is None:
                (partial / name).parent.mkdir(parents=True, exist_ok=True)
                files[name] = copy_file(self.step_dir / name, partial / name, self.pace.wait, order.rank)
                on_bulk.deliver(partial, Delivery(order.rank, self.host, files))

    def _retain_here(self) -> None:
        keep = self.order.local_max_to_keep
        if keep is None or self.order.local_rank != 0:
            return
        scratch = self.step_dir.parent
        sweep(scratch)
        steps = steps_in(scratch)
        for step in surplus(steps, on_bulk.complete_steps(self.bulk), keep):
            # Who still drains it holds it; who deletes it too was quicker.
            with contextlib.suppress(BlockingIOError, CannotJudge), _locked(steps[step], fcntl.LOCK_EX | fcntl.LOCK_NB):
                remove_step(steps[step])

    def _rest(self) -> None:
        self._sign_of_life()
        time.sleep(_LOOK)

    def _sign_of_life(self) -> None:
        now = time.monotonic()
        if self._sign is not None and now - self._signed > _ALIVE:
            self._signed = now
            with contextlib.suppress(OSError):
                os.utime(self._sign)


class _Patience:
    """Ends when what is looked at has not changed for so many seconds."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._last, self._since = seconds, object(), time.monotonic()

    def ends(self, seen: object) -> bool:
        if seen != self._last:
            self._last, self._since = seen, time.monotonic()
        return time.monotonic() - self._since > self._seconds


def _signs(partial: Path) -> tuple[tuple[str, int], ...]:
    """When each rank gave its last sign of life."""
    found = []
    for path in sorted(on_bulk.manifest_path(partial, 0).parent.glob("*.json")):
        with contextlib.suppress(OSError):
            found.append((path.name, path.stat().st_mtime_ns))
    return tuple(found)


@contextlib.contextmanager
def _locked(path: Path, how: int) -> Iterator[None]:
    with _named(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, how)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotJudge(
            f"`{error.filename or path}`: {error.strerror}", "see `dmesg | tail`, then drain again"
        ) from error


def main(read: Callable[[], str] = sys.stdin.read) -> int:
    """The order from stdin; what came of it to stdout."""
    yield_to_training()
    try:
        found = Worker(Order(**json.loads(read()))).run()
    except TunetoolError as error:
        sys.stdout.write(json.dumps({"error": error.message, "hint": error.hint}))
        return int(error.exit_code)
    except OSError as error:
        told = f"`{error.filename or 'system call'}`: {error.strerror or error}"
        sys.stdout.write(json.dumps({"error": told, "hint": "the checkpoint on the node is untouched; drain again"}))
        return 3
    sys.stdout.write(json.dumps({"path": str(found)}))
    return 0


def order_text(order: Order) -> str:
    """For its stdin."""
    return json.dumps(asdict(order))


if __name__ == "__main__":
    sys.exit(main())
