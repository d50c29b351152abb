"""Copies local checkpoints to shared storage in the background, verifies them, and makes them complete atomically.

This protects against the loss of a node's scratch: RAID0 fails with one drive, and a replaced node takes its shards
with it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import xxhash

from tunetool.checkpoint import bulk
from tunetool.checkpoint.drain_worker import Order, order_text
from tunetool.checkpoint.holders import EVERY, HOLDERS, TOGETHER
from tunetool.checkpoint.identity import Identity, look_at, rows
from tunetool.checkpoint.markers import METADATA
from tunetool.checkpoint.pace import savers
from tunetool.checkpoint.steps import same_step, same_step_error, step_number
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.regular_files import below

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

PACKAGES = Path(__file__).resolve().parents[2]
"""The folder of this package."""


class Drain:
    """A running drain. It continues when this process ends."""

    def __init__(self, process: subprocess.Popen[str], step_dir: Path) -> None:
        self._process, self._step_dir = process, step_dir
        self._path: Path | None = None

    @property
    def running(self) -> bool:
        """Whether the drain is still running."""
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until the step is complete on shared storage, with every rank's files; returns its path.

        Raises ``CannotJudge`` naming the file, rank or node if the drain failed, and ``TimeoutError`` after ``timeout``
        seconds, naming the save for which the drain pauses, if any.
        """
        if self._path is None:
            try:
                output, _ = self._process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                waits = "; ".join(map(str, savers(self._step_dir.parent)))
                reason = f": it pauses for a save, {waits}" if waits else ""
                raise TimeoutError(f"`{self._step_dir}` is not drained yet{reason}") from None
            self._path = self._outcome(output)
        return self._path

    def stop(self) -> None:
        """End the drain. Copied files remain, and the next drain of the same step continues with them."""
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _outcome(self, output: str) -> Path:
        try:
            document = json.loads(output)
        except ValueError:
            raise CannotJudge(
                f"the drain of `{self._step_dir}` ended with status {self._process.returncode}",
                "drain it again: it continues with what was copied",
            ) from None
        if "path" in document:
            return Path(document["path"])
        raise CannotJudge(document["error"], document["hint"])


def drain(
    step_dir: str | Path,
    bulk_dir: str | Path,
    *,
    rank: int | None = None,
    world: int | None = None,
    local_rank: int | None = None,
    local_world: int | None = None,
    coordinator: int = 0,
    rate: float | Literal["auto"] = "auto",
    max_to_keep: int | None = None,
    local_max_to_keep: int | None = None,
    delete_undrained: bool = False,
    patience: float = 600.0,
) -> Drain:
    """Copy the complete checkpoint in ``step_dir`` (named ``step_<N>``) to ``bulk_dir/step_<N>``, in the background.

    Every rank must call this after ``dcp.save`` has returned (for ``dcp.async_save``: after its future is done); each
    rank copies files of its node. It calls no collective. Defaults of ``rank``, ``world`` (world size), ``local_rank``
    and ``local_world`` come from the variables of torchrun or Slurm; ranks of one node share a directory.
    ``coordinator``: the rank whose directory has `.metadata`.

    The step appears in ``bulk_dir`` by one rename, once every file that `.metadata` names is copied, synced, and was
    read back with O_DIRECT and the same checksum (xxh3_64). The next drain of the same save continues an interrupted
    one.

    ``rate``: bytes per second of this rank, including reading back; ``"auto"``: no limit. In both cases it runs at low
    priority and pauses while a save runs in the parent of ``step_dir`` (a `DirectWriter`, or any writer within
    `saving`), for at most 600 s. ``max_to_keep`` and ``local_max_to_keep``: number of steps to keep in ``bulk_dir`` and
    beside ``step_dir``, at least 1: those that were saved last, whatever their numbers. The step that was just drained,
    and steps that are not complete in ``bulk_dir``, are never deleted; with ``delete_undrained``, incomplete ones that
    were saved on the node before the last complete step may be deleted, for jobs that do not drain every step.
    ``patience``: seconds without a sign of life of another rank before the drain fails.

    Do not save to the step before `wait` returns: the drain fails if a file has changed since this call.

    Raises ``UsageProblem`` for a name that is no step, two names of the same step, a coordinator without `.metadata`,
    and invalid numbers.
    """
    source, bulk = Path(step_dir).resolve(), Path(bulk_dir).resolve()
    step_number(source.name)
    namesake = same_step(source)
    if namesake is not None:
        raise same_step_error(namesake, source)
    if source.parent == bulk:
        raise UsageProblem(f"`{bulk}` already holds the step", "name the directory on shared storage")
    check_numbers(rate, max_to_keep, local_max_to_keep)
    from_launcher = launcher_ranks(os.environ)
    this_rank, world_size = _first_given(rank, from_launcher["rank"], 0), _first_given(world, from_launcher["world"], 1)
    # If the caller gives the ranks, each is assumed to have a directory of its own.
    given_by_caller = rank is not None or world is not None
    this_local_rank = _first_given(local_rank, None if given_by_caller else from_launcher["local_rank"], 0)
    local_world_size = _first_given(local_world, None if given_by_caller else from_launcher["local_world"], 1)
    if (
        not 0 <= this_rank < world_size
        or not 0 <= this_local_rank < local_world_size
        or not 0 <= coordinator < world_size
    ):
        raise UsageProblem(
            f"rank {this_rank} of {world_size}, {this_local_rank} of {local_world_size} on its node", "count from 0"
        )
    order = order_of(
        source,
        bulk,
        rank=this_rank,
        world=world_size,
        local_rank=this_local_rank,
        local_world=local_world_size,
        coordinator=coordinator,
        rate=None if rate == "auto" else float(rate),
        max_to_keep=max_to_keep,
        local_max_to_keep=local_max_to_keep,
        delete_undrained=delete_undrained,
        patience=patience,
    )
    return Drain(start("drain_worker", order_text(order).encode()), source)


def start(worker: str, order: bytes) -> subprocess.Popen[str]:
    """A process that runs this module of the package, with its order on stdin. Its stdout is a pipe."""
    # Not a pipe, into which training would write until the process reads.
    with os.fdopen(os.memfd_create("tunetool-order"), "w+b") as stream:
        stream.write(order)
        stream.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", f"tunetool.checkpoint.{worker}"],
            stdin=stream,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH")])),
            },
            # So that the Ctrl-C or the death of training does not take it along.
            start_new_session=True,
        )


def order_of(source: Path, bulk: Path, *, rank: int, coordinator: int, **options: Any) -> Order:
    """The order for the drain process, with the current identities of the files: a later write belongs to another save.

    Raises ``UsageProblem`` if ``source`` is not a directory, the coordinator has no `.metadata`, or a link leads out of
    ``source``.
    """
    path = source / METADATA
    digest: str | None = None
    needed: dict[str, int] | None = None
    metadata: Identity | None = None
    try:
        with path.open("rb") as stream:
            metadata = Identity.of(os.fstat(stream.fileno()))
            content = stream.read()
    except FileNotFoundError:
        if not source.is_dir():
            raise UsageProblem(f"`{source}` is not a directory", "name the directory that was saved to") from None
        if rank == coordinator:
            raise UsageProblem(
                f"`{source}` has no `.metadata`: it is not a complete checkpoint",
                "drain after the save is done; `coordinator=` is the rank that wrote `.metadata`",
            ) from None
    else:
        digest, needed = named_by(content, path)
        for name in needed:
            if "/" in name or (source / name).is_symlink():
                below(source, name)
    return Order(
        step_dir=str(source),
        bulk_dir=str(bulk),
        rank=rank,
        coordinator=coordinator,
        digest=digest,
        needed=needed,
        sources=rows(look_at(source, needed)),
        metadata=metadata.row() if metadata else None,
        **options,
    )


def named_by(content: bytes, path: Path) -> tuple[str, dict[str, int]]:
    """The digest of `.metadata`, and the minimum size of each file that it names. Raises ``UsageProblem``."""
    from tunetool.checkpoint.metadata import loads  # noqa: PLC0415  (imports torch)

    return xxhash.xxh3_64_hexdigest(content), needed_by(loads(content, path))


def needed_by(metadata: Metadata) -> dict[str, int]:
    """The minimum size of each file that the metadata names."""
    needed: dict[str, int] = {}
    for stored in (metadata.storage_data or {}).values():
        needed[stored.relative_path] = max(needed.get(stored.relative_path, 0), stored.offset + stored.length)
    return needed


def holders_in(metadata: Metadata) -> Mapping[str, str]:
    """The files with items that other ranks hold too, with these ranks. Where a save of several ranks does not say so,
    any rank may need an object and a whole tensor."""
    said: Mapping[str, str] | None = getattr(metadata, HOLDERS, None)
    if said is not None:
        return said
    if len(set(map(bulk.writer_of, needed_by(metadata)))) < 2:
        return {}
    shards = {
        name
        for name, described in metadata.state_dict_metadata.items()
        if (chunks := getattr(described, "chunks", None)) and chunks[0].sizes != described.size
    } - {*getattr(metadata, TOGETHER, ())}
    stored = (metadata.storage_data or {}).items()
    return {where.relative_path: EVERY for index, where in stored if index.fqn not in shards}


def launcher_ranks(environment: Mapping[str, str]) -> dict[str, int | None]:
    """Rank, world size, local rank and local world size by the variables of torchrun, otherwise of Slurm; None if
    unset."""

    def number(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)

    return {
        "rank": number("RANK", "SLURM_PROCID"),
        "world": number("WORLD_SIZE", "SLURM_NTASKS"),
        "local_rank": number("LOCAL_RANK", "SLURM_LOCALID"),
        "local_world": number("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
    }


def _first_given(by_caller: int | None, by_launcher: int | None, default: int) -> int:
    return by_caller if by_caller is not None else by_launcher if by_launcher is not None else default


def check_numbers(rate: float | str, *keeps: int | None) -> None:
    """Raises ``UsageProblem`` for a rate or a number of steps that cannot be."""
    if rate != "auto" and not (isinstance(rate, (int, float)) and 0 < rate < float("inf")):
        raise UsageProblem(f"`rate={rate}` is not a rate", 'give bytes per second, or "auto"')
    for keep in keeps:
        if keep is not None and keep < 1:
            raise UsageProblem(f"`max_to_keep={keep}` would keep nothing", "1 at least, or None to keep all")
