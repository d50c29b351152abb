"""Finds the step from which a new job can resume: the last saved one that all of its ranks can read.

A tier is a directory of steps, for example scratch on the node, then shared storage. ``survey`` lists what one rank can
read; ``agreement.agree`` (pure) decides from the surveys of all ranks; ``recovering.gather`` brings what a node lacks.
"""

from __future__ import annotations

import functools
import os
import socket
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tunetool.checkpoint import bulk, identity, markers
from tunetool.checkpoint.agreement import Agreement, Failures, StepCopy, Survey, agree
from tunetool.checkpoint.checksums import digest_of as digest_of_bytes
from tunetool.checkpoint.draining import holders_in, launcher_ranks, needed_by
from tunetool.checkpoint.identity import look
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.retention import note_in, replica_note_in
from tunetool.checkpoint.steps import now_ns, number_or_none, replaced_steps, steps_in
from tunetool.checkpoint.survey_exchange import SentSurvey, Tables, packed, unpacked
from tunetool.errors import TunetoolError, Unforeseen, UsageProblem
from tunetool.regular_files import below, open_regular, read_bytes

_T = TypeVar("_T")


@dataclass(frozen=True)
class Latest:
    """The step from which this rank resumes, together with all others."""

    step: int
    path: Path
    skipped: tuple[str, ...] = field(default=())
    """Steps that were saved later but cannot be read, each with the missing shard and node. Log these."""
    brought_bytes: int = 0
    """What all nodes together took from other nodes."""


@dataclass(frozen=True)
class _Gathered:
    """What a node brought, and what it tried in vain."""

    bytes: int = 0
    failures: Failures = field(default_factory=Failures)


def latest(
    tiers: Sequence[str | Path], *, world: int | None = None, replicas: bool = False, ssh: Sequence[str] = ("ssh",)
) -> Latest | None:
    """The last saved step that every rank of this job can read, or None if no tier has any step.

    It has the highest step number, unless the job went back to an older step and continued from there. A drain records
    when its step was saved; for other steps the mtime of `.metadata` counts.

    ``tiers``: directories of steps, the nearest first; each rank reads from the first tier that has the complete step:
    every file that its `.metadata` names. ``world``: world size of this job; default: that of torch.distributed if it
    is initialised, otherwise that of the launcher. If it is more than one, torch.distributed must be initialised and
    every rank must call this: it is a collective. (Without it, call ``survey`` on each rank, then ``agree``.)

    ``replicas``: also take steps of which each node has, or can get from another node of this job, the files that its
    ranks need, such as from a replica: those that they saved, and those with what they hold too but another rank saved,
    such as an object or a replicated tensor. Then one process of each node brings those that are missing into the first
    tier, by rsync over ``ssh`` (the command, with options; it gets the host names of nodes), and the others wait.
    Nothing is taken that was not verified. If the job has another number of ranks than the one that saved, every node
    gets all files.

    Raises ``CannotJudge`` naming missing shards and nodes if there are steps but none that all ranks can read: training
    must not restart from scratch by mistake.
    """
    distributed = _distributed()
    from_launcher = launcher_ranks(os.environ)
    ranks = distributed.get_world_size() if distributed else (from_launcher["world"] or 1)
    if world is not None and distributed and world != ranks:
        raise UsageProblem(f"`world={world}`, but torch.distributed has {ranks} ranks", "omit `world`")
    ranks = world if world is not None else ranks
    rank = distributed.get_rank() if distributed else (from_launcher["rank"] or 0)
    if ranks > 1 and distributed is None:
        raise UsageProblem(
            f"{ranks} ranks must agree, and torch.distributed is not initialised",
            "call init_process_group first, or gather each rank's survey() and call agree(); or pass `world=1`",
        )

    on_all = functools.partial(_on_all, rank, ranks, distributed)
    tables = Tables()
    every = on_all(functools.partial(_surveyed, tiers, rank, replicas, tables))
    surveys = unpacked(every, tables, functools.partial(_broadcast, ranks, distributed))
    brought, failures = 0, Failures()
    while (agreement := agree(surveys, failures)) is not None:
        outcomes = on_all(functools.partial(_gather, agreement, surveys, rank, ssh)) if agreement.missing else []
        brought += sum(outcome.bytes for outcome in outcomes)
        if not any(outcome.failures for outcome in outcomes):
            return Latest(agreement.step, Path(agreement.paths[rank]), agreement.skipped, brought)
        for outcome in outcomes:
            failures |= outcome.failures
    return None


def _on_all(rank: int, ranks: int, distributed: Any, work: Callable[[], _T]) -> list[_T]:
    """What each rank's ``work`` returns, by rank. All raise an error of one: none is left waiting for another."""
    returned, own = None, None
    try:
        returned = work()
    except Exception as error:
        if distributed is None:
            raise
        own = error
    received: list[Any] = [(returned, None if own is None else _for_all(own, rank))] * ranks
    if ranks > 1:
        distributed.all_gather_object(received, received[0])
    for _, told in received:
        if told is not None:
            raise told from (None if told is own else own)
    return [each for each, _ in received]


def _for_all(error: Exception, rank: int) -> TunetoolError:
    """The error for the other ranks, too: that of a rank which nobody foresaw names it."""
    if isinstance(error, TunetoolError):
        return error
    what = f"`{type(error).__name__}`: {error}" if str(error) else f"`{type(error).__name__}`"
    return Unforeseen(f"rank {rank} on `{socket.gethostname()}` failed: {what}", "look at what that rank printed")


def _surveyed(tiers: Sequence[str | Path], rank: int, replicas: bool, tables: Tables) -> SentSurvey:
    """What this rank can read, and in ``tables`` what of that need not come from each rank."""
    with naming_errors(Path(tiers[0]) if tiers else Path(), "repair the storage, or omit the directory"):
        seen, long = packed(survey(tiers, rank, replicas=replicas))
    tables |= long
    return seen


def _broadcast(ranks: int, distributed: Any, giver: int, given: Tables) -> Tables:
    if ranks == 1:
        return given
    sent = [given]
    distributed.broadcast_object_list(sent, src=giver)
    return sent[0]


def _gather(agreement: Agreement, surveys: Sequence[Survey], rank: int, ssh: Sequence[str]) -> _Gathered:
    """Bring what this rank's node lacks, in the first process there."""
    place = next(each.place for each in surveys if each.rank == rank)
    sources = agreement.missing.get(place, {})
    if not sources or rank != min(each.rank for each in surveys if each.place == place):
        return _Gathered()
    from tunetool.checkpoint.recovering import gather  # noqa: PLC0415  (imports numpy)

    try:
        count, failures = gather(
            Path(agreement.paths[rank]),
            str(agreement.digest),
            sources,
            agreement.held[place],
            agreement.saved_ns,
            here=place[0],
            ssh=ssh,
        )
    except TunetoolError as error:  # of this node, whatever the sources are
        return _Gathered(0, Failures(unable={(place, agreement.step, agreement.digest): error.message}))
    return _Gathered(count, failures)


def survey(tiers: Sequence[str | Path], rank: int = 0, *, replicas: bool = False) -> Survey:
    """What this rank can read. With ``replicas`` also which files its node has, and which replicas of others.

    Raises ``UsageProblem`` if a tier has two directories with the same step number.
    """
    # Absolute where other nodes read there.
    host, roots = socket.gethostname(), [Path(tier).absolute() if replicas else Path(tier) for tier in tiers]
    # All ranks of a node have the same files: one of them lists these.
    with_files = replicas and not launcher_ranks(os.environ)["local_rank"]
    steps = {root: steps_in(root) for root in roots}
    partials = {root: bulk.partials(root) if root.is_dir() else [] for root in roots}
    kept = [copy for root in roots for copy in replicas_in(root)] if with_files else []
    marked = {path: _marker_of(path) for root in roots for path in [*steps[root].values(), *partials[root]]}
    known = [marker for marker in marked.values() if marker is not None]
    # The last of equals counts: that of a drain.
    drained = {marker.digest: marker for marker in sorted(known, key=lambda marker: not marker.is_of_replica)}
    copies: list[StepCopy] = []
    for root in roots:
        copies += [copy_at(number, path, drained, with_files=with_files) for number, path in steps[root].items()]
        copies += [copy_at(number, path, drained) for number, path in replaced_steps(root).items()]
        for partial in partials[root]:
            name, digest = bulk.name_of(partial)
            number = number_or_none(name)
            if number is None:
                continue
            if marked[partial] is not None:
                copies.append(copy_at(number, partial, drained))
            elif number not in steps[root]:
                plan = bulk.plan_of(partial)
                saved = plan.saved if plan else None
                copies.append(
                    StepCopy(number, str(root / name), digest, _incomplete_drain(partial), saved, _mtime_ns(partial))
                )
    return Survey(rank, host, (*copies, *kept), now_ns(), str(roots[0]) if replicas and roots else "")


def replicas_in(root: Path) -> list[StepCopy]:
    """The replicas of other nodes that are kept in a tier, whole or not."""
    try:
        homes = sorted(path for path in (root / bulk.REPLICAS).iterdir() if path.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    copies = []
    for home in homes:
        copies += [_replica_at(number, path) for number, path in steps_in(home, ambiguous=True).items()]
        for partial in bulk.partials(home):
            name, digest = bulk.name_of(partial)
            number = number_or_none(name)
            if number is not None:
                plan, problem = bulk.plan_of(partial), "its replication did not end"
                when = plan.saved.time_ns if plan and plan.saved else _mtime_ns(partial)
                torn = StepCopy(number, str(partial), digest, problem, None, when, replica_of=home.name)
                copies.append(replace(torn, is_useless=True))
    return copies


def _replica_at(number: int, path: Path) -> StepCopy:
    copy = StepCopy(number, str(path), written_ns=_mtime_ns(path), replica_of=path.parent.name)
    try:
        described, marker = _described(path), markers.marker_of(path)
    except OSError as error:
        return replace(copy, problem=f"`{error.filename or path}`: {error.strerror}", is_useless=True)
    except TunetoolError as error:
        return replace(copy, problem=error.message, is_useless=True)
    if marker is None or marker.digest != described["digest"]:
        why = "it has no marker" if marker is None else f"{markers.OTHER_METADATA} in `{path}`"
        return replace(copy, problem=why, is_useless=True)
    problems = [
        f"`{name}` {problem} in `{path}`"
        for name, filed in marker.files.items()
        if (problem := problem_of_file(path, name, filed.size)) is not None
    ]
    if not marker.files or marker.lacks(marker.sources):
        problems.append(f"`{path / markers.MARKER}` does not cover its files")
    # The time is that of the coordinator's clock, if its `.metadata` was there.
    when, saved = marker.saved.time_ns if marker.saved else 0, marker.saved if marker.metadata else None
    return replace(
        copy,
        **described,
        problem=problems[0] if problems else None,
        is_useless=bool(problems),
        recorded=saved,
        written_ns=when,
        files=marker.sources,
        filed=marker.files,
    )


def _described(path: Path) -> dict[str, Any]:
    """What `.metadata` in a step says of the save, as fields of ``StepCopy``. Raises as ``copy_at`` catches it."""
    from tunetool.checkpoint.metadata import loads  # noqa: PLC0415  (imports torch)
    from tunetool.checkpoint.metadata_pickle import SUMS  # noqa: PLC0415  (imports torch)

    metadata = path / markers.METADATA
    content = read_bytes(metadata, markers.LARGEST_METADATA)
    loaded = loads(content, metadata)
    needed = needed_by(loaded)
    ranks = [rank for rank in map(bulk.writer_of, needed) if rank is not None]
    return {
        "digest": digest_of_bytes(content),
        "needed": needed,
        "holders": holders_in(loaded),
        "world": max(ranks) + 1 if ranks else None,
        "has_sums": getattr(loaded, SUMS, None) is not None,
        # Without it, `.metadata` of two saves can have the same bytes.
        "is_distinct": getattr(loaded.storage_meta, "save_id", None) is not None,
    }


def _marker_of(path: Path) -> Marker | None:
    """None for one that cannot be read, too: ``copy_at`` says so."""
    try:
        return markers.sound_marker_of(path)
    except OSError:
        return None


def _mtime_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def copy_at(number: int, path: Path, drained: Mapping[str, Marker], *, with_files: bool = False) -> StepCopy:
    """The copy of step ``number`` in ``path``. ``drained``: the markers of all tiers by digest."""
    broken = StepCopy(number, str(path), written_ns=_mtime_ns(path))
    try:
        described = _described(path)
        marker = markers.marker_of(path)
    except OSError as error:
        metadata = path / markers.METADATA
        problem = f"`{error.filename or metadata}`: {error.strerror}"
        if not with_files or os.path.lexists(metadata):
            return replace(broken, problem=problem)
        return replace(broken, problem=problem, **_files_in(path, None, None))
    except TunetoolError as error:
        return replace(broken, problem=error.message)
    digest, needed = described["digest"], described["needed"]
    if marker is not None and marker.digest != digest:
        problem = f"{markers.OTHER_METADATA} in `{path}`"
        return replace(broken, problem=problem, recorded=marker.saved, written_ns=_mtime_ns(path / markers.METADATA))
    hosts = marker.hosts if marker else {}
    note, replicated = note_in(path), replica_note_in(path)
    drain_record = drained.get(digest) or (note if note is not None and note.digest == digest else None)
    if replicated is not None and replicated.digest != digest:
        replicated = None
    problems = {}
    for name, least in sorted(needed.items()):
        found = problem_of_file(path, name, marker.files[name].size if marker and name in marker.files else least)
        if found is None and marker is None:
            found = _overwritten(path, name, drain_record, "drained") or _overwritten(
                path, name, replicated, "replicated"
            )
        if found:
            writer = bulk.writer_of(name)
            of_rank = f" of rank {writer}" if writer is not None else ""
            node = f" from node `{hosts[name]}`" if name in hosts else ""
            problems[name] = f"shard `{name}`{of_rank}{node} {found}"
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    copy = replace(
        broken,
        digest=digest,
        problem=f"{next(iter(problems.values()))} in `{path}`{more}" if problems else None,
        recorded=drain_record.saved if drain_record else None,
        written_ns=_mtime_ns(path / markers.METADATA),
        world=described["world"],
        drained=any(record is not None and not record.is_of_replica for record in (marker, drain_record)),
    )
    if not with_files:
        return copy
    return replace(copy, **described, **_files_in(path, needed.keys() - problems.keys(), digest))


def _files_in(path: Path, names: Collection[str] | None, digest: str | None) -> dict[str, Any]:
    """These files, as fields of ``StepCopy``; of a directory without `.metadata` (None) all regular ones. Those that
    every save would call so are left out if they were written to since the note of their replication, or, beside a
    later `.metadata` with this ``digest``, if they were not."""
    try:
        if names is None:
            names = [each.name for each in os.scandir(path) if each.is_file(follow_symlinks=False)]
        files = identity.look_at(path, names)
    except OSError:
        return {}
    note = replica_note_in(path)
    if note is None:
        return {"files": files}
    noted = {name for name in files if name in note.sources and files[name].as_written(note.sources[name])}
    if digest not in (None, note.digest):
        return {"files": {name: file for name, file in files.items() if name not in noted}}
    return {
        "files": {name: file for name, file in files.items() if name in noted or name not in note.sources},
        "files_digest": note.digest,
        "filed": {name: filed for name, filed in note.files.items() if name in noted},
    }


def problem_of_file(step: Path, name: str, least: int) -> str | None:
    """Why a file of a step, of at least ``least`` bytes, cannot be read whole; None if it can."""
    try:
        return leads_out(step, name) or _unreadable(step / name, least)
    except ValueError:  # NUL, or half a character
        return "has a name that no file can have"


def _overwritten(path: Path, name: str, record: Marker | None, done: str) -> str | None:
    """The problem of a file that was written after the step was ``done`` from here, by a save of the same step that did
    not get to its `.metadata`; None if it was not."""
    source = record.sources.get(name) if record is not None else None
    if record is None or source is None or record.metadata is None:
        return None
    try:
        same = look(path / markers.METADATA) == record.metadata
        return f"was written to after it was {done}" if same and not look(path / name).as_written(source) else None
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def leads_out(step: Path, name: str) -> str | None:
    """The problem of a file that is not in the step; None if it is."""
    try:
        # Few are links, and to resolve all names of a large checkpoint takes long.
        if "/" in name or (step / name).is_symlink():
            below(step, name)
    except UsageProblem:
        return "is a link that leads out of the step"
    except (OSError, RuntimeError) as error:  # a link to itself
        return f"cannot be read ({getattr(error, 'strerror', None) or error})"
    return None


def _unreadable(path: Path, least: int) -> str | None:
    try:
        handle = open_regular(path)
        try:
            size = os.fstat(handle).st_size
        finally:
            os.close(handle)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return f"has {size} of {least} bytes" if size < least else None


def _incomplete_drain(partial: Path) -> str:
    plan, brought, changed = bulk.plan_of(partial), bulk.deliveries(partial), bulk.changed_error(partial)
    if changed is not None:
        return f"its drain to `{partial.parent}` failed: {changed.message}"
    if plan is None:
        return f"its drain to `{partial.parent}` had only begun"
    needed = plan.needed
    copied = bulk.delivered(partial, brought)
    hosts = {name: delivery.host for delivery in brought for name in delivery.files}
    lacking = sorted(needed.keys() - copied.keys())
    if not lacking:
        return f"its drain to `{partial.parent}` did not end, though all files are there: drain it again"
    name = lacking[0]
    writer = bulk.writer_of(name)
    of_rank = f" of rank {writer}" if writer is not None else ""
    node = f", from node `{hosts[name]}`" if name in hosts else ", from a node that has not reported"
    more = f", and {len(lacking) - 1} more" if len(lacking) > 1 else ""
    return f"its drain to `{partial.parent}` did not end: shard `{name}`{of_rank}{node}, is missing{more}"


def _distributed() -> Any:
    """torch.distributed where this process has initialised it; never imports torch itself."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module
