"""Finds the step from which a new job can resume: the last saved one that all of its ranks can read.

A tier is a directory of steps, for example scratch on the node, then shared storage. ``survey`` lists what one rank can
read; ``agree`` (pure) decides from the surveys of all ranks.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.checkpoint import bulk, markers
from tunetool.checkpoint.draining import launcher_ranks, named_by
from tunetool.checkpoint.identity import look
from tunetool.checkpoint.markers import Marker
from tunetool.checkpoint.os_errors import naming_errors
from tunetool.checkpoint.retention import note_in
from tunetool.checkpoint.steps import Stamp, now_ns, number_or_none, replaced_steps, stamps, steps_in
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.regular_files import below, open_regular, read_bytes

_SHOWN = 3
"""Number of steps that an error message explains."""


@dataclass(frozen=True)
class StepCopy:
    """One copy of a step, in one tier, as one rank sees it."""

    step: int
    path: str
    digest: str | None = None
    """Digest of its `.metadata`: steps with the same number can be different saves, which must not be mixed."""
    problem: str | None = None
    """Why it cannot be read here; None if it can."""
    recorded: Stamp | None = None
    """When it was saved, if a drain recorded it."""
    written_ns: int = 0
    """mtime of its `.metadata`, otherwise of its directory, in nanoseconds since 1970."""
    world: int | None = None
    """Number of ranks that saved it, by the names of its files; None if these say nothing."""
    drained: bool = False
    """Whether this save was drained, by its marker, that of a copy in another tier, or a note."""


@dataclass(frozen=True)
class Survey:
    """The copies of steps that one rank sees, tier by tier, the nearest first."""

    rank: int
    host: str
    copies: tuple[StepCopy, ...] = ()
    now_ns: int = 0
    """The time of the survey in nanoseconds since 1970."""


@dataclass(frozen=True)
class Agreement:
    """The step from which all ranks resume."""

    step: int
    paths: Mapping[int, str]
    """The directory to read, by rank."""
    skipped: tuple[str, ...] = ()
    """Steps that were saved later but that some rank cannot read, each with the reason."""


@dataclass(frozen=True)
class Latest:
    """The step from which this rank resumes, together with all others."""

    step: int
    path: Path
    skipped: tuple[str, ...] = field(default=())
    """Steps that were saved later but cannot be read, each with the missing shard and node. Log these."""


def latest(tiers: Sequence[str | Path], *, world: int | None = None) -> Latest | None:
    """The last saved step that every rank of this job can read, or None if no tier has any step.

    It has the highest step number, unless the job went back to an older step and continued from there. A drain records
    when its step was saved; for other steps the mtime of `.metadata` counts.

    ``tiers``: directories of steps, the nearest first; each rank reads from the first tier that has the complete step:
    every file that its `.metadata` names. ``world``: world size of this job; default: that of torch.distributed if it
    is initialised, otherwise that of the launcher. If it is more than one, torch.distributed must be initialised and
    every rank must call this: it is a collective. (Without it, call ``survey`` on each rank, then ``agree``.)

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
    try:
        with naming_errors(Path(tiers[0]) if tiers else Path(), "repair the storage, or omit the directory"):
            this_survey: Survey | TunetoolError = survey(tiers, rank)
    except TunetoolError as error:
        if distributed is None:
            raise
        # The other ranks wait in the collective below: they must get the error, too.
        this_survey = error
    if ranks == 1:
        gathered: list[Any] = [this_survey]
    elif distributed is None:
        raise UsageProblem(
            f"{ranks} ranks must agree, and torch.distributed is not initialised",
            "call init_process_group first, or gather each rank's survey() and call agree(); or pass `world=1`",
        )
    else:
        gathered = [None] * ranks
        distributed.all_gather_object(gathered, this_survey)
    for received in gathered:
        if isinstance(received, TunetoolError):
            raise received
    agreement = agree(gathered)
    return Latest(agreement.step, Path(agreement.paths[rank]), agreement.skipped) if agreement else None


def survey(tiers: Sequence[str | Path], rank: int = 0) -> Survey:
    """What this rank can read. Raises ``UsageProblem`` if a tier has two directories with the same step number."""
    host, roots = socket.gethostname(), list(map(Path, tiers))
    steps = {root: steps_in(root) for root in roots}
    partials = {root: bulk.partials(root) if root.is_dir() else [] for root in roots}
    marked = {path: _marker_of(path) for root in roots for path in [*steps[root].values(), *partials[root]]}
    known = [marker for marker in marked.values() if marker is not None]
    # The last of equals counts: that of a drain.
    drained = {marker.digest: marker for marker in sorted(known, key=lambda marker: not marker.is_of_replica)}
    copies: list[StepCopy] = []
    for root in roots:
        copies += [copy_at(number, path, drained) for number, path in steps[root].items()]
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
    return Survey(rank, host, tuple(copies), now_ns())


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


def copy_at(number: int, path: Path, drained: Mapping[str, Marker]) -> StepCopy:
    """The copy of step ``number`` in ``path``. ``drained``: the markers of all tiers by digest."""
    metadata = path / markers.METADATA
    try:
        content = read_bytes(metadata, markers.LARGEST_METADATA)
        digest, needed = named_by(content, metadata)
        marker = markers.marker_of(path)
    except OSError as error:
        return StepCopy(
            number, str(path), None, f"`{error.filename or metadata}`: {error.strerror}", None, _mtime_ns(path)
        )
    except TunetoolError as error:
        return StepCopy(number, str(path), None, error.message, None, _mtime_ns(path))
    if marker is not None and marker.digest != digest:
        problem = f"{markers.OTHER_METADATA} in `{path}`"
        return StepCopy(number, str(path), None, problem, marker.saved, _mtime_ns(metadata))
    hosts = marker.hosts if marker else {}
    note = note_in(path)
    drain_record = drained.get(digest) or (note if note is not None and note.digest == digest else None)
    problems = []
    for name, least in sorted(needed.items()):
        found = problem_of_file(path, name, marker.files[name].size if marker and name in marker.files else least)
        if found is None and marker is None and drain_record is not None:
            found = _overwritten(path, name, drain_record)
        if found:
            writer = bulk.writer_of(name)
            of_rank = f" of rank {writer}" if writer is not None else ""
            node = f" from node `{hosts[name]}`" if name in hosts else ""
            problems.append(f"shard `{name}`{of_rank}{node} {found}")
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    shown = f"{problems[0]} in `{path}`{more}" if problems else None
    saved = drain_record.saved if drain_record else None
    ranks = [rank for rank in map(bulk.writer_of, needed) if rank is not None]
    world = max(ranks) + 1 if ranks else None
    return StepCopy(
        number,
        str(path),
        digest,
        shown,
        saved,
        _mtime_ns(metadata),
        world,
        any(record is not None and not record.is_of_replica for record in (marker, drain_record)),
    )


def problem_of_file(step: Path, name: str, least: int) -> str | None:
    """Why a file of a step, of at least ``least`` bytes, cannot be read whole; None if it can."""
    return leads_out(step, name) or _unreadable(step / name, least)


def _overwritten(path: Path, name: str, drained: Marker) -> str | None:
    """The problem of a file that was written after the step was drained from here; None if it was not."""
    source = drained.sources.get(name)
    if source is None or drained.metadata is None:
        return None
    try:
        same = look(path / markers.METADATA) == drained.metadata
        return "was written to after it was drained" if same and not look(path / name).as_written(source) else None
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


def agree(surveys: Sequence[Survey]) -> Agreement | None:
    """The last saved step that every rank can read, from the same save; None if no rank sees any step. Pure.

    Every rank reads from its nearest copy. Raises ``CannotJudge`` if there are steps but none that all can read.
    """
    skipped: dict[int, str] = {}
    order = _order(surveys)
    for step, digest in sorted(order, key=lambda save: (order[save], save[0]), reverse=True):
        chosen = {one_survey.rank: _nearest_copy(one_survey, step, digest) for one_survey in surveys}
        paths = {rank: copy.path for rank, copy in chosen.items() if copy is not None}
        if len(paths) == len(surveys):
            return Agreement(step, paths, tuple(reason for number, reason in skipped.items() if number != step))
        skipped.setdefault(step, f"step {step}: {'; '.join(_reasons_against(step, surveys))}")
    if not order:
        return None
    lines = list(skipped.values())
    more = f"; and {len(lines) - _SHOWN} older ones" if len(lines) > _SHOWN else ""
    raise CannotJudge(
        f"no step can be read by every rank: {'; '.join(lines[:_SHOWN])}{more}",
        "bring the node with the missing shards back, or give another directory; to start from step 0, move these away",
    )


def _order(surveys: Sequence[Survey]) -> dict[tuple[int, str | None], Stamp]:
    """When each save was saved. The earliest time of its copies counts: it is that of the save itself."""
    recorded: dict[tuple[int, str | None], Stamp] = {}
    times: dict[tuple[int, str | None], int] = {}
    for copy in (copy for one_survey in surveys for copy in one_survey.copies):
        save = copy.step, copy.digest
        if copy.recorded is not None:
            recorded[save] = max(recorded.get(save, copy.recorded), copy.recorded)
        times[save] = min(times.get(save) or copy.written_ns, copy.written_ns or times.get(save, 0))
    with_metadata = {step for step, digest in times if digest is not None}
    # A copy without `.metadata` may belong to any save.
    unrecorded = {
        (step, digest): when
        for (step, digest), when in times.items()
        if (step, digest) not in recorded and (digest is not None or step not in with_metadata)
    }
    return stamps(recorded, unrecorded, max((one_survey.now_ns for one_survey in surveys), default=0))


def _nearest_copy(survey: Survey, step: int, digest: str | None) -> StepCopy | None:
    return next((p for p in survey.copies if p.step == step and p.digest == digest and p.problem is None), None)


def _reasons_against(step: int, surveys: Sequence[Survey]) -> list[str]:
    """Why not every rank can read ``step``: one line per reason, with the ranks that it concerns."""
    reasons: dict[str, list[Survey]] = {}
    for one_survey in surveys:
        copies = [copy for copy in one_survey.copies if copy.step == step]
        if any(copy.problem is None for copy in copies):
            continue
        problems = " and ".join(copy.problem or "" for copy in copies) or "it is not there"
        reasons.setdefault(problems, []).append(one_survey)
    lines = [f"{_ranks_and_hosts(ranks)}: {reason}" for reason, ranks in reasons.items()]
    return lines or ["the ranks have different saves of it: its directories were saved to more than once"]


def _ranks_and_hosts(surveys: Sequence[Survey]) -> str:
    hosts = ", ".join(f"`{host}`" for host in dict.fromkeys(one_survey.host for one_survey in surveys))
    ranks = [str(one_survey.rank) for one_survey in surveys]
    shown = ", ".join(ranks[:4]) + (f" and {len(ranks) - 4} more" if len(ranks) > 4 else "")
    return f"rank {shown} on {hosts}"


def _distributed() -> Any:
    """torch.distributed where this process has initialised it; never imports torch itself."""
    module = sys.modules.get("torch.distributed")
    if module is None or not module.is_available() or not module.is_initialized():
        return None
    return module
