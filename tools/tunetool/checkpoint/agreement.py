"""Decides from what all ranks see from which step they resume, and what each node must bring for it. Pure.

A rank takes a whole copy of the step where there is one. Otherwise its node needs the files of its ranks, which lie on
itself, on another node of the job, or in a replica on one; and the files with what its ranks hold too, but others
wrote. Of a job with another number of ranks than the one that
saved, and where names do not say who wrote a file, every rank needs all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tunetool.checkpoint.bulk import token_of, writer_of
from tunetool.checkpoint.holders import files_of, last_of
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.markers import METADATA
from tunetool.checkpoint.steps import Stamp, number_or_none, stamps
from tunetool.checkpoint.transfer import CopiedFile
from tunetool.errors import CannotJudge

_SHOWN = 3
"""Number of steps that an error message explains."""
Place = tuple[str, str]
"""A node, and its nearest directory of steps: where the ranks share their files."""
Source = tuple[str, str]
"""A node, and a directory of files on it."""


@dataclass(frozen=True)
class StepCopy:
    """One copy of a step, in one tier, as one rank sees it."""

    step: int
    path: str
    digest: str | None = None
    """Digest of its `.metadata`: steps with the same number can be different saves, which must not be mixed."""
    problem: str | None = None
    """Why it cannot be read here; None if it can. Of a replica: why nothing can be taken from it."""
    recorded: Stamp | None = None
    """When it was saved, if a drain recorded it."""
    written_ns: int = 0
    """mtime of its `.metadata`, otherwise of its directory, in nanoseconds since 1970."""
    world: int | None = None
    """Number of ranks that saved it, by the names of its files; None if these say nothing."""
    drained: bool = False
    """Whether this save was drained, by its marker, that of a copy in another tier, or a note."""
    replica_of: str | None = None
    """The node whose part it is, if it is a replica."""
    needed: Mapping[str, int] = field(default_factory=dict)
    """The least bytes of each file that its `.metadata` names. This and the rest only where replicas count."""
    holders: Mapping[str, str] = field(default_factory=dict)
    """The ranks that hold the items of a file too, see ``holders``."""
    is_distinct: bool = False
    """Whether no other save can have the same digest."""
    has_sums: bool = False
    """Whether the save made checksums."""
    is_useless: bool = False
    """Whether nothing can be taken from it."""
    files: Mapping[str, Identity] = field(default_factory=dict)
    """The data files that are there. Of a replica: as they were on the node that saved them."""
    files_digest: str | None = None
    """The digest of the save of which they are, by the note of their replication."""
    filed: Mapping[str, CopiedFile] = field(default_factory=dict)
    """Their checksums: those of a replica, and those that were made for one."""


@dataclass(frozen=True)
class Survey:
    """The copies of steps that one rank sees, tier by tier, the nearest first."""

    rank: int
    host: str
    copies: tuple[StepCopy, ...] = ()
    now_ns: int = 0
    """The time of the survey in nanoseconds since 1970."""
    root: str = ""
    """The nearest tier, to which missing files are brought; empty where replicas do not count."""

    @property
    def place(self) -> Place:
        return self.host, self.root


@dataclass(frozen=True)
class Agreement:
    """The step from which all ranks resume."""

    step: int
    paths: Mapping[int, str]
    """The directory to read, by rank."""
    skipped: tuple[str, ...] = ()
    """Steps that were saved later but that some rank cannot read, each with the reason."""
    digest: str | None = None
    saved_ns: int = 0
    """When it was saved, in nanoseconds since 1970."""
    missing: Mapping[Place, Mapping[Source, Mapping[str, CopiedFile | None]]] = field(default_factory=dict)
    """The files that must be brought to the ``paths`` of a place before its ranks read, by where they are; with their
    checksums, where a replica says them."""
    held: Mapping[Place, Collection[str]] = field(default_factory=dict)
    """The files of the save that are in these ``paths``."""


@dataclass(frozen=True)
class Failures:
    """What was tried in vain, each with the reason."""

    damaged: Mapping[Source, str] = field(default_factory=dict)
    """Directories that gave other bytes than were saved: nothing in them counts, on their own node neither."""
    refused: Mapping[tuple[str, Source], str] = field(default_factory=dict)
    """Nodes that got nothing from a directory. It says nothing against what that holds for its own node, or others."""
    unable: Mapping[tuple[Place, int, str | None], str] = field(default_factory=dict)
    """Places to which nothing of a save can be brought, whatever the source: a full file system, a lock."""

    def __bool__(self) -> bool:
        return bool(self.damaged or self.refused or self.unable)

    def __or__(self, other: Failures) -> Failures:
        return Failures(
            {**self.damaged, **other.damaged}, {**self.refused, **other.refused}, {**self.unable, **other.unable}
        )


def agree(surveys: Sequence[Survey], failures: Failures | None = None) -> Agreement | None:
    """The step that was saved last among those that every rank can read; None if no tier has any step. Pure.

    Every rank reads from its nearest copy. ``failures``: what was tried since the surveys. Raises ``CannotJudge`` if
    there are steps but none that all can read.
    """
    failures = failures or Failures()
    surveys = [_without(each, failures.damaged) for each in surveys]
    skipped: dict[int, str] = {}
    order = _order(surveys)
    for step, digest in sorted(order, key=lambda save: (order[save], save[0]), reverse=True):
        parts = _Parts(surveys, step, digest, failures)
        if not parts.lacking:
            passed_over = tuple(reason for number, reason in skipped.items() if number != step)
            return Agreement(
                step, parts.paths, passed_over, digest, order[step, digest].time_ns, parts.missing, parts.held
            )
        reasons = [*(parts.reasons or _reasons_against(step, surveys)), *_useless(step, surveys, failures.refused)]
        skipped.setdefault(step, f"step {step}: {'; '.join(reasons)}")
    if not order:
        return None
    lines = list(skipped.values())
    more = f"; and {len(lines) - _SHOWN} older ones" if len(lines) > _SHOWN else ""
    raise CannotJudge(
        f"no step can be read by every rank: {'; '.join(lines[:_SHOWN])}{more}",
        "bring the node with the missing shards back, or give another directory; to start from step 0, move these away",
    )


def _without(survey: Survey, damaged: Mapping[Source, str]) -> Survey:
    """The same, but that nothing can be taken from these directories."""
    copies = tuple(
        copy
        if (reason := damaged.get((survey.host, copy.path))) is None
        else replace(copy, problem=reason, is_useless=True)
        for copy in survey.copies
    )
    return replace(survey, copies=copies)


class _Parts:
    """Where the files of one save are, and which each place still needs."""

    def __init__(self, surveys: Sequence[Survey], step: int, digest: str | None, failures: Failures) -> None:
        self._surveys, self._digest, self._failures = surveys, digest, failures
        whole = {each.rank: _nearest_copy(each, step, digest) for each in surveys}
        self.paths = {rank: copy.path for rank, copy in whole.items() if copy is not None}
        self.missing: dict[Place, dict[Source, dict[str, CopiedFile | None]]] = {}
        self.held: dict[Place, set[str]] = {}
        self.lacking: dict[str, str] = {}
        """The files that no node can give, with the node that needs them."""
        self.reasons: list[str] = []
        incomplete = [each for each in surveys if each.rank not in self.paths]
        if not incomplete:
            return
        # Those of the save itself, and directories without `.metadata`, which may be of any save.
        self._copies = [
            (each, copy)
            for each in surveys
            for copy in each.copies
            if copy.step == step and copy.digest in (digest, None) and (copy.digest or not copy.replica_of)
        ]
        described = (copy for _, copy in self._copies if copy.digest == digest and copy.is_distinct)
        known = next(described, StepCopy(step, ""))
        self._needed, self._held_by = known.needed, known.holders
        if not self._needed or digest is None or not all(each.root for each in incomplete):
            self.lacking[METADATA] = incomplete[0].host
            return
        self._has_sums = any(copy.has_sums for _, copy in self._copies)
        # What a marker says of the save holds also where its replica is damaged.
        replicas = [copy for _, copy in self._copies if copy.replica_of]
        self._known = {name: file for copy in replicas for name, file in copy.files.items()}
        self._filed = {
            name: file
            for _, copy in self._copies
            if digest in (copy.digest, copy.files_digest)
            for name, file in copy.filed.items()
        }
        self._holders: dict[str, list[Source]] = {}
        for each, copy in self._copies:
            given = [METADATA] if self._has_metadata(copy) else []
            for file in (*given, *(file for file in copy.files if self._gives(copy, file))):
                self._holders.setdefault(file, []).append((each.host, copy.path))
        name = next(name for _, copy in self._copies if number_or_none(name := Path(copy.path).name) == step)
        self._writers = {name: writer_of(name) for name in self._needed}
        self._at: dict[Place, list[Survey]] = {}
        for each in surveys:
            self._at.setdefault(each.place, []).append(each)
        self._copies_at: dict[tuple[Place, str], list[StepCopy]] = {}
        for each, copy in self._copies:
            self._copies_at.setdefault((each.place, copy.path), []).append(copy)
        ranks: dict[Place, list[int]] = {}
        for each in incomplete:
            ranks.setdefault(each.place, []).append(each.rank)
        for place, theirs in ranks.items():
            self._complete(place, theirs, step, name)
        if self.lacking and not self.reasons:
            file, host = next(iter(self.lacking.items()))
            writer = writer_of(file)
            of_rank = f" of rank {writer}" if writer is not None else ""
            more = f", and {len(self.lacking) - 1} more" if len(self.lacking) > 1 else ""
            self.reasons = [f"`{host}` needs shard `{file}`{of_rank}, and no node of the job has it whole{more}"]

    def _complete(self, place: Place, ranks: Sequence[int], step: int, name: str) -> None:
        """Find every file that these ranks of a place need."""
        host, root = place
        # Also where it has the files of another save.
        theirs = (Path(copy.path) for each in self._at[place] for copy in each.copies if copy.step == step)
        named = (path for path in theirs if str(path.parent) == root and number_or_none(path.name) == step)
        path = str(next(named, Path(root, name)))
        here = self._copies_at.get((place, path), [])
        there = {file for copy in here for file in copy.files if self._holds(copy, file)}
        there |= {METADATA for copy in here if copy.digest == self._digest}
        self.held[place] = there
        wanted: dict[Source, dict[str, CopiedFile | None]] = {}
        for file in [*self._files_of(ranks), METADATA]:
            if file in there:
                continue
            source = self._source(host, file, wanted)
            if source is None:
                self.lacking.setdefault(file, host)
            else:
                wanted.setdefault(source, {})[file] = self._filed.get(file)
        if wanted:
            self.missing[place] = wanted
            why = self._failures.unable.get((place, step, self._digest))
            if why is not None:
                self.lacking.setdefault(next(iter(next(iter(wanted.values())))), host)
                self.reasons.append(f"`{host}` cannot take what it lacks: {why}")
        self.paths |= dict.fromkeys(ranks, path)

    def _files_of(self, ranks: Sequence[int]) -> list[str]:
        writers = self._writers
        # A rank may have written nothing of what it holds.
        known = [*(writer for writer in writers.values() if writer is not None), *map(last_of, self._held_by.values())]
        world = 1 + max(known, default=-1)
        if world != len(self._surveys):
            return sorted(writers)
        return files_of(ranks, writers, self._held_by)

    def _source(self, host: str, file: str, chosen: Mapping[Source, object]) -> Source | None:
        """Where a file comes from: from this node if it can, then from where others come."""
        refused = self._failures.refused
        able = (source for source in self._holders.get(file, ()) if (host, source) not in refused)
        return min(able, key=lambda source: (source[0] != host, source not in chosen), default=None)

    def _has_metadata(self, copy: StepCopy) -> bool:
        return copy.digest == self._digest and copy.is_distinct and not copy.is_useless

    def _gives(self, copy: StepCopy, file: str) -> bool:
        """Whether it can be taken from there, and held against a checksum then."""
        return self._holds(copy, file) and (self._has_sums or file in self._filed)

    def _holds(self, copy: StepCopy, file: str) -> bool:
        """Whether it is there whole, and of this save: by the replica that was made of it, by the save's token in its
        name, by `.metadata` beside it, or by the note of a replication."""
        identity = None if copy.is_useless else copy.files.get(file)
        if identity is None or file not in self._needed or identity.size < self._needed[file]:
            return False
        if file in self._known:
            return identity.as_written(self._known[file])
        return self._digest in (copy.digest, copy.files_digest) or token_of(file) is not None


def _useless(step: int, surveys: Sequence[Survey], refused: Mapping[tuple[str, Source], str]) -> list[str]:
    """The replicas and other directories of a step from which nothing can be taken, each with the reason."""
    lines = []
    takers: dict[Source, list[str]] = {}
    for host, source in refused:
        takers.setdefault(source, []).append(host)
    for each in surveys:
        for copy in each.copies:
            if copy.step != step:
                continue
            what = f"replica of `{copy.replica_of}`" if copy.replica_of else f"`{copy.path}`"
            source = each.host, copy.path
            if copy.is_useless:
                lines.append(f"{what} on `{each.host}`: {copy.problem}")
            elif source in takers:
                first, *others = takers[source]
                more = f" and {len(others)} more" if others else ""
                lines.append(f"{what} on `{each.host}`, for `{first}`{more}: {refused[first, source]}")
    return list(dict.fromkeys(lines))


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
    sound = (copy for copy in survey.copies if copy.problem is None and copy.replica_of is None)
    return next((copy for copy in sound if copy.step == step and copy.digest == digest), None)


def _reasons_against(step: int, surveys: Sequence[Survey]) -> list[str]:
    """Why not every rank can read ``step``: one line per reason, with the ranks that it concerns."""
    reasons: dict[str, list[Survey]] = {}
    for one_survey in surveys:
        copies = [copy for copy in one_survey.copies if copy.step == step and copy.replica_of is None]
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
