"""``DirectWriter``: a storage writer for torch.distributed.checkpoint that saves at the speed of the storage."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import DefaultSavePlanner, filesystem
from torch.distributed.checkpoint import logger as dcp_logger
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tunetool.checkpoint import commit, open_saves, pace
from tunetool.checkpoint import metadata as metadata_file
from tunetool.checkpoint.collections_off import without_collections
from tunetool.checkpoint.gds import library
from tunetool.checkpoint.global_plan import GroupedPlan, by_wholeness
from tunetool.checkpoint.holders import ByItem
from tunetool.checkpoint.items import LARGE
from tunetool.checkpoint.job import Job, Outcome, Settings
from tunetool.checkpoint.os_errors import WRITING, naming_errors
from tunetool.checkpoint.packed import Locations, Packed, Results
from tunetool.checkpoint.planner import DirectSavePlanner, kept_bytes
from tunetool.checkpoint.rank_layout import items_of
from tunetool.checkpoint.stager import DirectStager, Hold, marks
from tunetool.checkpoint.steps import fsync_directory
from tunetool.checkpoint.tensor_table import TensorTable
from tunetool.checkpoint.torch_call import TorchCall
from tunetool.checkpoint.workers import BUFFER_BYTES, default_threads
from tunetool.errors import UsageProblem


@dataclass(frozen=True)
class Saved:
    """Figures of this rank's last save, in bytes and seconds.

    ``stall_seconds``: how long the training loop waited (from ``stage`` until no tensor was needed any more; for a
    synchronous save, the whole write); ``copy_seconds``: until all bytes were copied from the tensors;
    ``write_seconds``: until all files were synced. ``host_bytes``: size of the host buffers. ``held_for_memory``: the
    data did not fit into host memory, so the loop also waited for writes. ``direct``: written with O_DIRECT.
    ``gds_bytes``: those of ``bytes`` that were written by GPUDirect Storage. ``ahead``: the copy began before the plan.
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
    ahead: bool = False


@dataclass(frozen=True)
class _Ticket:
    """What the coordinator sends to each rank for one save, in the plan's ``storage_data``.

    A planner that caches plans (``enable_plan_caching``) drops the plan from the coordinator and passes the plan of an
    earlier save, with the ticket of that save, to ``write_data``. So a ticket that a rank receives is stored per thread
    while it is unpickled; the same thread then writes.
    """

    token: str
    rank: int
    ranks: int
    failed: tuple[str, ...] = ()
    """Tokens of earlier saves that failed and may have left files on this rank's node."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.token, self.rank, self.ranks, self.failed)

    def by_item(self, plan: SavePlan) -> ByItem | None:
        """The groups of the plan's items; None for one rank."""
        if self.ranks == 1:
            return None
        groups = plan.groups if isinstance(plan, GroupedPlan) else None
        known = groups is not None and sum(groups.counts) == len(plan.items)
        return groups.by_item() if groups and known else by_wholeness(plan.items)


class _Arrived(threading.local):
    ticket: _Ticket | None = None


_arrived = _Arrived()
"""The ticket of this thread's current save, until it writes."""
_used_tickets: set[tuple[str, int]] = set()
"""Token and rank of each ticket that this process has used for writing."""


def _arrive(*fields: Any) -> _Ticket:
    _arrived.ticket = _Ticket(*fields)
    return _arrived.ticket


def _take_ticket(plan: SavePlan) -> _Ticket:
    ticket, _arrived.ticket = _arrived.ticket or plan.storage_data, None
    if not isinstance(ticket, _Ticket):
        raise UsageProblem(
            f"the plan carries a `{type(ticket).__name__}` where DirectWriter's coordinator puts the name of the save",
            "let `prepare_global_plan` of the same kind of writer see every plan",
        )
    if (ticket.token, ticket.rank) in _used_tickets:
        raise UsageProblem(
            f"the plan of rank {ticket.rank} belongs to the save `{ticket.token}`, which has already written its files",
            "the planner reuses plans in a way that torch's planners do not: create a new planner for each save",
        )
    _used_tickets.add((ticket.token, ticket.rank))
    return ticket


def _drop_unread_logs() -> None:
    """torch makes a debug record for each key of the state, twice, and by default nobody reads it."""
    logger = getattr(dcp_logger, "_dcp_logger", None)
    if isinstance(logger, logging.Logger):
        unread = not logger.propagate and all(isinstance(handler, logging.NullHandler) for handler in logger.handlers)
        if unread and logger.level == logging.DEBUG:
            logger.setLevel(logging.INFO)
            _quiet.append(logger)
        elif not unread and logger in _quiet:
            logger.setLevel(logging.DEBUG)
            _quiet.remove(logger)


_quiet: list[logging.Logger] = []
"""Loggers whose level is ours."""


def _results_of(rank: Sequence[WriteResult]) -> Results:
    """The results of a rank, of whatever writer."""
    if isinstance(rank, Results):
        return rank
    numbers: dict[str, int] = {}
    stored = [
        (each.index, numbers.setdefault(info.relative_path, len(numbers)), info.offset, info.length)
        for each in rank
        for info in [each.storage_data]
    ]
    return Results(Packed(stored), tuple(numbers))


def _refuse_names_of_another_save(names: Collection[str], saving: commit.Saving) -> None:
    """Metadata that ends with the token of a save is trusted to name the files of that save alone."""
    for name in names:
        if not name.endswith(f".{saving.token}.distcp"):
            raise UsageProblem(
                f"a rank wrote `{name}` in the save `{saving.token}`, which names its files otherwise",
                "use DirectWriter on every rank",
            )


class DirectWriter(StorageWriter):
    """Writes torch's own checkpoint format with O_DIRECT from several threads into several files per rank.

    For ``dcp.save`` and ``dcp.async_save``; torch's FileSystemReader and ``DirectReader`` can read the checkpoint. When
    ``save`` returns, all data is on the medium and the directory holds the new checkpoint; before that, and after a
    failure at any time, it holds the previous one. Tensors of all devices and dtypes are supported; tensors that are
    not contiguous are reordered piece by piece.

    ``path``: a directory, created if missing; ``checkpoint_id`` of ``dcp.save`` overrides it.
    ``threads``: threads per rank that fill host buffers and write. ``files_per_rank``: largest number of files; fewer
    for a small state, and more where other ranks hold a part of it too, which has files of its own.
    ``buffer_bytes``: size of one host buffer in bytes, a multiple of 4096. A synchronous save uses two buffers per
    thread, whatever the size of the state; they are kept for the next save (``release_buffers`` frees them).
    ``checksums``: store the xxh3_64 of every object and of every 256 KiB of every tensor, which ``DirectReader``
    verifies; of a GPU's tensors they are made there. Default: yes, but for ``gds``. `.metadata` always has one of its
    own.
    ``overwrite``: whether an existing checkpoint may be replaced.
    ``gds``: write large tensors from GPU memory to the drives by GPUDirect Storage, which needs nvidia-fs or a kernel
    with P2PDMA; they are never copied through host memory instead (``last.gds_bytes``: how much was written so).
    Excludes ``checksums``, which need the data in host memory; with ``dcp.async_save`` and ``stager()`` everything is
    copied to host memory.

    Raises ``UsageProblem`` for invalid settings and if cuFile is not installed; ``CannotJudge`` (within torch's
    CheckpointException if there are several ranks) for a held lock, too little space, a cuFile driver that does not
    open, and a failed write (the message names the file and the reason).

    >>> dcp.save(state, storage_writer=DirectWriter("/scratch/step-100"), planner=DirectSavePlanner())
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        threads: int | None = None,
        files_per_rank: int | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        checksums: bool | None = None,
        overwrite: bool = True,
        gds: bool = False,
    ) -> None:
        super().__init__()
        _drop_unread_logs()
        open_saves.end_overdue()
        self.path = Path(path)
        self.overwrite = overwrite
        threads = default_threads() if threads is None else threads
        files = threads if files_per_rank is None else files_per_rank
        self.settings = Settings(threads, files, buffer_bytes, not gds if checksums is None else checksums, gds)
        if threads < 1 or files < 1:
            raise UsageProblem("`threads` and `files_per_rank` must be 1 or more", "omit them for the defaults")
        if buffer_bytes < LARGE or buffer_bytes % 4096:
            raise UsageProblem(
                f"`buffer_bytes` is {buffer_bytes}: it must be a multiple of 4096, 1 MiB or more", "use 8 << 20 (8 MiB)"
            )
        if gds and checksums:
            raise UsageProblem(
                "`gds` and `checksums` exclude each other: a checksum needs the data in host memory",
                "omit one of them",
            )
        if gds:
            library()
        self.last: Saved | None = None
        """Figures of this rank's last completed save."""
        self.token: str | None = None
        """Of this rank's last save, once it writes."""
        self._hold: Hold | None = None
        self._coordinates = False

    def __getstate__(self) -> dict[str, Any]:
        # dcp.async_save can send the writer to another process, where no training loop waits.
        return {**self.__dict__, "_hold": None}

    def stager(self) -> DirectStager:
        """The stager for ``dcp.async_save(..., async_stager=writer.stager())`` with its default, a thread: the training
        loop continues as soon as this rank's part is copied to pinned memory. If the part does not fit, the loop also
        waits while the rest is written (``last.held_for_memory``). One save runs at a time; the next one waits for
        it."""
        return DirectStager(self._take_hold)

    def _take_hold(self, hold: Hold) -> None:
        # This runs in the thread of the training loop, so its synchronous saves are over.
        open_saves.end_overdue()
        if self._hold is not None:
            self._hold.join()
            self._hold.drop_ahead()  # torch may never have started its thread
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
                "DirectWriter does not support `use_collectives=False`: no rank would know the files of the others",
                "omit it, or use torch's FileSystemWriter",
            )
        self._coordinates = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """On the coordinator, lock the directory. A failure later than this, once the global plan is made, would leave
        a planner that caches plans inconsistent with those of the other ranks."""
        if self._coordinates:
            self._begin()
        return plan

    def _begin(self) -> commit.Saving:
        if not self.overwrite and (self.path / ".metadata").exists():
            raise UsageProblem(f"`{self.path}` already holds a checkpoint", "save elsewhere, or with overwrite=True")
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        return open_saves.begin(self.path.absolute(), alone=not several)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator, once every rank has planned: send each rank its ticket."""
        saving = open_saves.current(self.path.absolute()) or self._begin()
        failed = open_saves.abandoned(saving)
        tickets = [_Ticket(saving.token, rank, len(plans), failed) for rank in range(len(plans))]
        if len(tickets) == 1:
            # With a single rank, torch does not pickle the plan.
            _arrived.ticket = tickets[0]
        return [replace(plan, storage_data=ticket) for plan, ticket in zip(plans, tickets, strict=True)]

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """On the coordinator, once every rank's files are synced: replace the old checkpoint by the new one."""
        saving = open_saves.close(self.path.absolute())
        try:
            ranks = [_results_of(rank) for rank in results]
            names = {name for rank in ranks for name in rank.names}
            _refuse_names_of_another_save(names, saving)
            # torch sends the metadata to every rank before this call of it ends.
            during = TorchCall.current() if len(ranks) > 1 else None
            metadata.storage_data = Locations(ranks, during)
            metadata.storage_meta = replace(self.storage_meta(), save_id=saving.token)
            if hasattr(filesystem, "CURRENT_DCP_VERSION"):
                metadata.version = filesystem.CURRENT_DCP_VERSION
            where = self.path.absolute() / metadata_file.NAME
            content = metadata_file.content_of(metadata, ranks, where, kept_bytes(metadata))
            tables = metadata.state_dict_metadata
            if isinstance(tables, TensorTable) and tables.is_as_planned:
                metadata.state_dict_metadata = tables.fresh(during)
            saving.commit_content(content, names)
        except BaseException as error:
            if not getattr(error, "committed", False):
                open_saves.failed(saving.token)
            saving.abandon()
            raise

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write and sync this rank's items. All tensors are resolved at the start; torch's planners then return
        references only."""
        hold = self._hold if self._hold and self._hold.is_mine() else None
        began = hold.began if hold else time.monotonic()
        ticket = _take_ticket(plan)
        self.token = ticket.token
        # After a failure the loop waits on, until torch's call is over: a stager may still try again.
        outcome = self._write(ticket, plan, planner, hold)
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
            ahead=outcome.ahead,
        )
        done: Future[list[WriteResult]] = Future()
        done.set_result(outcome.results)
        return done

    def _write(self, ticket: _Ticket, plan: SavePlan, planner: SavePlanner, hold: Hold | None) -> Outcome:
        try:
            # Drains of older steps pause meanwhile.
            with pace.saving(self.path.absolute().parent, make=False):
                return self._write_items(ticket, plan, planner, hold)
        except BaseException:
            # The coordinator's own part failed: torch will not call `finish`.
            open_saves.abandon(self.path.absolute(), ticket.token)
            raise

    def _write_items(self, ticket: _Ticket, plan: SavePlan, planner: SavePlanner, hold: Hold | None) -> Outcome:
        directory = self.path.absolute()
        # If each node has its own storage, the coordinator has made and cleaned only the directory on its own node.
        with naming_errors(directory, commit.PREVIOUS_IS_WHOLE, WRITING):
            commit.make_directory(directory)
        open_saves.learn(ticket.failed)
        commit.sweep_failed(directory, ticket.failed)
        shared = open_saves.is_shared(directory, ticket.token)

        def name(number: int) -> str:
            return commit.data_name(ticket.rank, number, ticket.token)

        # A planner of another class may change, on its way, what the state holds.
        ahead = hold.ahead if hold and type(planner) in (DirectSavePlanner, DefaultSavePlanner) else None
        with without_collections():
            items = items_of(plan.items, planner)
            with naming_errors(directory, commit.PREVIOUS_IS_WHOLE, WRITING):
                job = Job(
                    directory,
                    items,
                    self.settings,
                    name,
                    copy_first=hold is not None,
                    save=ticket.token,
                    ahead=ahead,
                    groups=ticket.by_item(plan),
                )
                if hold and not job.ahead:
                    hold.drop_ahead()
        outcome = job.run(hold.after if hold else marks(job.devices), hold.copied if hold else lambda: None)
        try:
            with naming_errors(directory, commit.PREVIOUS_IS_WHOLE, WRITING):
                fsync_directory(directory)
        except BaseException:
            job.remove()
            raise
        open_saves.hand_over(directory, ticket.token, job.created, shared)
        return outcome
