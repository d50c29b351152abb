"""``DirectWriter``: the storage writer for torch.distributed.checkpoint that is bound by the storage alone."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tunetool.checkpoint import commit, open_saves, pace
from tunetool.checkpoint.gds import library
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.job import Job, Outcome, Settings, resolve
from tunetool.checkpoint.stager import DirectStager, Hold, marks
from tunetool.checkpoint.steps import fsync_directory
from tunetool.errors import UsageProblem

BUFFER_BYTES = 8 << 20


@dataclass(frozen=True)
class Saved:
    """What this rank's last save took. Bytes and seconds.

    ``stall_seconds``: the training loop was held (from ``stage`` until no tensor was needed any more, or all of this
    rank's writing); ``copy_seconds``: until all bytes had left the tensors; ``write_seconds``: until all files were
    synced. ``host_bytes``: buffers in use. ``held_for_memory``: not all of it fitted into memory, so that the loop was
    held while the rest was written. ``direct``: past the page cache. ``gds_bytes``: of ``bytes``, without the host's
    memory.
    """

    bytes: int
    files: int
    threads: int
    stall_seconds: float
    copy_seconds: float
    write_seconds: float
    host_bytes: int
    direct: bool
    held_for_memory: bool = False
    gds_bytes: int = 0


@dataclass(frozen=True)
class _Ticket:
    """What the coordinator tells each rank about one save, in the plan's ``storage_data``.

    A planner that caches plans (``enable_plan_caching``) drops the plan that comes from the coordinator and hands
    ``write_data`` the one of an earlier save, with that save's ticket. So a ticket that comes to a rank is kept for its
    thread as it is unpickled; the same thread then writes.
    """

    token: str
    rank: int
    failed: tuple[str, ...] = ()
    """Tokens of earlier saves that failed, and may have left files on this rank's node."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.token, self.rank, self.failed)


class _Arrived(threading.local):
    ticket: _Ticket | None = None


_arrived = _Arrived()
"""The ticket of the save that this thread takes part in, until it writes."""
_used: set[tuple[str, int]] = set()
"""Token and rank of each ticket that this process has written under."""


def _arrive(token: str, rank: int, failed: tuple[str, ...]) -> _Ticket:
    _arrived.ticket = _Ticket(token, rank, failed)
    return _arrived.ticket


def _take_ticket(plan: SavePlan) -> _Ticket:
    ticket, _arrived.ticket = _arrived.ticket or plan.storage_data, None
    if not isinstance(ticket, _Ticket):
        raise UsageProblem(
            f"the plan carries a `{type(ticket).__name__}` where DirectWriter's coordinator puts the name of the save",
            "let `prepare_global_plan` of the same kind of writer see every plan",
        )
    if (ticket.token, ticket.rank) in _used:
        raise UsageProblem(
            f"the plan of rank {ticket.rank} belongs to the save `{ticket.token}`, which has written its files already",
            "the planner reuses plans in a way that torch's own do not: make a new planner for each save",
        )
    _used.add((ticket.token, ticket.rank))
    return ticket


def default_threads() -> int:
    """As many as this rank's share of the cores, from 4 to 16: they wait for the storage more than they compute."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return min(16, max(4, len(os.sched_getaffinity(0)) // max(1, local_ranks)))


class DirectWriter(StorageWriter):
    """Writes torch's own checkpoint format with O_DIRECT from several threads into several files per rank.

    For ``dcp.save`` and ``dcp.async_save``; torch's FileSystemReader (and ``tunetool.checkpoint.DirectReader``) read
    what it wrote. When ``save`` returns, everything is on the medium, and the directory holds the new checkpoint; until
    then, and after a failure at any instant, it holds the previous one. Tensors of all devices and dtypes; memory that
    is not contiguous is put in order piece by piece.

    ``path``: a directory, made if missing; ``checkpoint_id`` of ``dcp.save`` overrides it.
    ``threads``: that fill buffers and write, per rank. ``files_per_rank``: at most; fewer for a small state.
    ``buffer_bytes``: of one buffer, a multiple of 4096. A synchronous save takes two buffers per thread of host memory,
    whatever the state's size; they are kept for the next one (``tunetool.checkpoint.release_buffers``).
    ``checksums``: xxh3_64 of every tensor's bytes, which ``DirectReader`` verifies.
    ``overwrite``: whether an existing checkpoint may be replaced.
    ``gds``: large tensors on a GPU go to the drives by GPUDirect Storage, for which nvidia-fs or a kernel with P2PDMA
    is needed, and never through the host instead (``last.gds_bytes`` tells how much). Not with ``checksums``, which
    need the bytes on the host; under ``dcp.async_save`` with ``stager()`` everything is copied to the host.

    Raises ``UsageProblem`` for impossible settings and where cuFile is not installed, ``CannotJudge`` (within torch's
    CheckpointException when ranks are several) for a held lock, too little space, a cuFile that does not open, and a
    failed write, which names the file and the kernel's reason.

    >>> dcp.save(state, storage_writer=DirectWriter("/scratch/step-100"), planner=DirectSavePlanner())
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        files_per_rank: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        checksums: bool = False,
        overwrite: bool = True,
        gds: bool = False,
    ) -> None:
        super().__init__()
        open_saves.end_overdue()
        self.path = Path(path)
        self.overwrite = overwrite
        threads = default_threads() if threads is None else threads
        files = threads if files_per_rank is None else files_per_rank
        self.settings = Settings(threads, files, buffer_bytes, checksums, gds)
        if threads < 1 or files < 1:
            raise UsageProblem("`threads` and `files_per_rank` must be 1 or more", "leave them out for the defaults")
        if buffer_bytes < LARGE or buffer_bytes % 4096:
            raise UsageProblem(
                f"`buffer_bytes` is {buffer_bytes}: it must be a multiple of 4096, 1 MiB or more", "try 8 MiB: 8 << 20"
            )
        if gds and checksums:
            raise UsageProblem(
                "`gds` and `checksums` exclude each other: a checksum needs the bytes on the host",
                "leave one of them out",
            )
        if gds:
            library()
        self.last: Saved | None = None
        """Of this rank's last completed save."""
        self._hold: Hold | None = None
        self._coordinates = False

    def __getstate__(self) -> dict[str, Any]:
        # dcp.async_save sends it to a process of its own, where no loop is to be held.
        return {**self.__dict__, "_hold": None}

    def stager(self) -> DirectStager:
        """For ``dcp.async_save(..., async_stager=writer.stager())`` with its default, a thread: the loop goes on as
        soon as this rank's own share is copied into pinned memory. Where that does not fit, it is held while the rest
        is written; ``last.held_for_memory`` tells. One save at a time; the next one waits for it."""
        return DirectStager(self._take_hold)

    def _take_hold(self, hold: Hold) -> None:
        # Here, in the loop's own thread, it is known that the loop's synchronous saves are over.
        open_saves.end_overdue()
        if self._hold is not None:
            self._hold.join()
        self._hold = hold

    @property
    def checkpoint_id(self) -> str:
        return str(self.path)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id:
            self.path = Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(filesystem.FileSystemWriter.validate_checkpoint_id(checkpoint_id))

    def storage_meta(self) -> StorageMeta:
        if self._hold is not None:
            self._hold.entered()
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise UsageProblem(
                "`use_collectives=False` is not for DirectWriter: no rank would know the others' files",
                "leave it out, or use torch's FileSystemWriter",
            )
        self._coordinates = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator: takes the directory's lock. Now, since a planner that caches plans would be out of step
        with the other ranks' after a failure once it has made the global plan."""
        if self._coordinates:
            self._begin()
        return plan

    def _begin(self) -> commit.Saving:
        if not self.overwrite and (self.path / ".metadata").exists():
            raise UsageProblem(f"`{self.path}` holds a checkpoint already", "save elsewhere, or with overwrite=True")
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return open_saves.begin(self.path.absolute(), alone=not several)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, once every rank has planned: names the save to each."""
        saving = open_saves.current(self.path.absolute()) or self._begin()
        tickets = [_Ticket(saving.token, rank, open_saves.abandoned(saving)) for rank in range(len(plans))]
        if len(tickets) == 1:
            # Alone, torch hands the plan over as it is.
            _arrived.ticket = tickets[0]
        return [replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once every rank's files are synced: the new checkpoint replaces the old one."""
        saving = open_saves.close(self.path.absolute())
        try:
            metadata.storage_data = {result.index: result.storage_data for rank in results for result in rank}
            metadata.storage_meta = replace(self.storage_meta(), save_id=saving.token)
            if hasattr(filesystem, "CURRENT_DCP_VERSION"):
                metadata.version = filesystem.CURRENT_DCP_VERSION
            saving.commit(metadata)
        except BaseException:
            saving.abandon()
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes and syncs this rank's items. Every tensor is resolved at the start; torch's planners only give
        references then."""
        hold = self._hold if self._hold and self._hold.is_mine() else None
        began = hold.began if hold else time.monotonic()
        ticket = None
        try:
            ticket = _take_ticket(plan)
            # Drains of older steps give way.
            with pace.saving(self.path.absolute().parent, make=False):
                outcome = self._write(ticket, plan, planner, hold)
        except BaseException:
            if ticket is not None:
                # The coordinator's own share failed: it will not be asked to finish.
                open_saves.abandon(self.path.absolute(), ticket.token)
            raise
        finally:
            if hold:
                hold.release()
        seconds = time.monotonic() - began
        self.last = Saved(
            bytes=outcome.bytes,
            files=outcome.files,
            threads=outcome.threads,
            stall_seconds=hold.stall_seconds if hold else seconds,
            copy_seconds=outcome.copy_seconds,
            write_seconds=seconds,
            host_bytes=outcome.host_bytes,
            direct=outcome.direct,
            held_for_memory=hold is not None and not outcome.all_at_once,
            gds_bytes=outcome.gds_bytes,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(outcome.results)
        return done

    def _write(self, ticket: _Ticket, plan: SavePlan, planner: SavePlanner, hold: Hold | None) -> Outcome:
        directory = self.path.absolute()
        # Where each node has storage of its own, the coordinator made only its own directory, and swept no other.
        commit.make_directory(directory)
        open_saves.learn(ticket.failed)
        commit.sweep_failed(directory, ticket.failed)
        shared = open_saves.is_shared(directory, ticket.token)
        items = [resolve(write, planner, self.settings.checksums, ticket.token) for write in plan.items]

        def name(number: int) -> str:
            return commit.data_name(ticket.rank, number, ticket.token)

        job = Job(directory, items, self.settings, name, copy_first=hold is not None)
        outcome = job.run(hold.after if hold else marks(job.devices), hold.release if hold else lambda: None)
        try:
            fsync_directory(directory)
        except BaseException:
            job.remove()
            raise
        open_saves.hand_over(directory, ticket.token, job.created, shared)
        return outcome
