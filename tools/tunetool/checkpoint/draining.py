"""Local checkpoints leave the node: copied to shared storage in the background, checked, complete all at once.

A scratch of RAID0 dies with one drive, and a replaced node takes its shards with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import xxhash

from tunetool.checkpoint.bulk import METADATA
from tunetool.checkpoint.drain_worker import Order, order_text
from tunetool.checkpoint.identity import Identity, look_at, rows
from tunetool.checkpoint.pace import savers
from tunetool.checkpoint.steps import same_step, step_number, two_names
from tunetool.errors import CannotJudge, UsageProblem

_PACKAGES = Path(__file__).resolve().parents[2]


class Drain:
    """A drain at work. It goes on when this process ends."""

    def __init__(self, process: subprocess.Popen[str], step_dir: Path) -> None:
        self._process, self._step_dir = process, step_dir
        self._path: Path | None = None

    @property
    def running(self) -> bool:
        """Whether it is still at work."""
        return self._process.poll() is None

    def wait(self, timeout: float | None = None) -> Path:
        """The complete step on shared storage, every rank's files in it.

        Raises ``CannotJudge`` when that failed, which names the file, rank or node, and ``TimeoutError`` when it is not
        done within ``timeout`` seconds, which names the save that it gives way to, if there is one.
        """
        if self._path is None:
            try:
                output, _ = self._process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                waits = "; ".join(map(str, savers(self._step_dir.parent)))
                reason = f": it gives way to a save, {waits}" if waits else ""
                raise TimeoutError(f"`{self._step_dir}` is not drained yet{reason}") from None
            self._path = self._outcome(output)
        return self._path

    def stop(self) -> None:
        """End it. What was copied stays, and the next drain of the same step takes it up."""
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
                "drain it again: what was copied is taken up",
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

    Every rank calls it, after ``dcp.save`` has returned (for ``dcp.async_save``: after its future is done); each brings
    the files that lie on its node. No collective is called. ``rank``, ``world``, ``local_rank`` and ``local_world`` are
    taken from torchrun's or Slurm's variables; ranks of one node share a directory. ``coordinator`` is the rank whose
    directory has `.metadata`.

    The step appears in ``bulk_dir`` by one rename, when every file that `.metadata` names is there, synced, and was
    read back past the page cache with the same xxh3_64. An interrupted drain is taken up by the next one of that save.

    ``rate``: bytes per second of this rank, reading back included; ``"auto"``: as fast as it goes. Either way it runs
    at low priority and pauses while a save runs in ``step_dir``'s parent (a `DirectWriter`, or any writer inside
    `saving`), for 600 s at most. ``max_to_keep`` and ``local_max_to_keep``: steps to keep in ``bulk_dir`` and beside
    ``step_dir``, 1 at least: those that were saved last, whatever their numbers. Never deleted are the step that was
    just drained and what is not whole in ``bulk_dir``. With ``delete_undrained`` that is no longer so for what was
    saved on the node before the last step that is whole there: for jobs that do not drain every step.
    ``patience``: seconds without a sign of life of another rank after which it gives up.

    The step must not be saved to until `wait` returns: the drain fails when a file of it is not what it was when this
    was called.

    Raises ``UsageProblem`` for a name that is no step, two names of one step, a coordinator without `.metadata` and
    impossible numbers.
    """
    source, bulk = Path(step_dir).resolve(), Path(bulk_dir).resolve()
    step_number(source.name)
    namesake = same_step(source)
    if namesake is not None:
        raise two_names(namesake, source)
    if source.parent == bulk:
        raise UsageProblem(f"`{bulk}` is where the step lies already", "name the directory on shared storage")
    _check_numbers(rate, max_to_keep, local_max_to_keep)
    from_launcher = places_of(os.environ)
    this_rank, world_size = _or(rank, from_launcher["rank"], 0), _or(world, from_launcher["world"], 1)
    # Ranks that were told by hand are taken to have a directory each.
    given_by_caller = rank is not None or world is not None
    this_local_rank = _or(local_rank, None if given_by_caller else from_launcher["local_rank"], 0)
    local_world_size = _or(local_world, None if given_by_caller else from_launcher["local_world"], 1)
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
    process = subprocess.Popen(
        [sys.executable, "-m", "tunetool.checkpoint.drain_worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(_PACKAGES), os.environ.get("PYTHONPATH")]))},
        # So that the Ctrl-C or the death of training does not take it along.
        start_new_session=True,
    )
    with contextlib.suppress(BrokenPipeError):
        if process.stdin is not None:
            with process.stdin as stream:
                stream.write(order_text(order))
    process.stdin = None
    return Drain(process, source)


def order_of(source: Path, bulk: Path, *, rank: int, coordinator: int, **options: Any) -> Order:
    """What is to be drained, as it lies there now: whatever is written to it from here on is another save's."""
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
            raise UsageProblem(f"`{source}` is no directory", "name the directory that was saved to") from None
        if rank == coordinator:
            raise UsageProblem(
                f"`{source}` has no `.metadata`, so it is no complete checkpoint",
                "drain after the save is done; `coordinator=` is the rank that wrote `.metadata`",
            ) from None
    else:
        digest, needed = named_by(content, path)
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
    """Digest of a `.metadata`, and by file that it names the least bytes that it must have. Raises ``UsageProblem``."""
    from tunetool.checkpoint.metadata import loads  # noqa: PLC0415  (imports torch)

    needed: dict[str, int] = {}
    for stored in (loads(content, path).storage_data or {}).values():
        needed[stored.relative_path] = max(needed.get(stored.relative_path, 0), stored.offset + stored.length)
    return xxhash.xxh3_64_hexdigest(content), needed


def places_of(environment: Mapping[str, str]) -> dict[str, int | None]:
    """Which rank this is, by torchrun's variables, else by Slurm's."""

    def number(*names: str) -> int | None:
        return next((int(environment[name]) for name in names if environment.get(name, "").isdigit()), None)

    return {
        "rank": number("RANK", "SLURM_PROCID"),
        "world": number("WORLD_SIZE", "SLURM_NTASKS"),
        "local_rank": number("LOCAL_RANK", "SLURM_LOCALID"),
        "local_world": number("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE"),
    }


def _or(by_caller: int | None, by_launcher: int | None, default: int) -> int:
    return by_caller if by_caller is not None else by_launcher if by_launcher is not None else default


def _check_numbers(rate: float | str, *keeps: int | None) -> None:
    if rate != "auto" and not (isinstance(rate, (int, float)) and 0 < rate < float("inf")):
        raise UsageProblem(f"`rate={rate}` is no rate", 'bytes per second, or "auto"')
    for keep in keeps:
        if keep is not None and keep < 1:
            raise UsageProblem(f"`max_to_keep={keep}` would keep nothing", "1 at least, or None to keep all")
