"""The layout of shared storage: drained steps (complete), and partial steps, whose drain has not finished.

    step_100/                       complete: data files, `.metadata`, and the marker with every checksum
    .replaced-step_100-<random>/    the step before, for a moment, where the file system cannot exchange two names
    .draining-step_100-<digest>/    partial: data files, plan.json, ranks/00000.json ...

The digest is that of the step's `.metadata`, so that two saves of one step are never mixed. A step becomes complete by
one rename of its directory, after the marker was written as its last file.

Replicas of a node's part are laid out the same way on its peer, in a directory that no reader of steps sees:
`.replicas/<host>/step_100`.

The plan, the manifests and the marker also record the identity of the source files (inode, size, times) and when the
step was saved. Markers of earlier versions do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tunetool.checkpoint import identity, markers
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.markers import MARKER, METADATA, Marker, copied_file, replaceable, sound_marker_of
from tunetool.checkpoint.os_errors import WRITING, naming_errors
from tunetool.checkpoint.steps import (
    Stamp,
    fsync_directory,
    number_or_none,
    put_step,
    same_step,
    same_step_error,
    step_number,
)
from tunetool.checkpoint.transfer import PART, CopiedFile, Gone, remove_parts
from tunetool.errors import CannotJudge, UsageProblem

_REPAIR = "the checkpoint on the node is unchanged; repair the storage, then drain it again"
_PLAN = "plan.json"
METADATA_COPY = ".metadata-of-the-step"
"""`.metadata` under another name, so that readers do not take a partial step for a checkpoint."""
_CHANGED = "changed.json"
"""The error for which a partial step must not become complete: its source changed."""
_RANKS = "ranks"
_PARTIAL = ".draining-"
_WRITER = re.compile(r"__(?P<rank>\d{1,9})_\d+(\.(?P<token>[0-9a-f]+))?\.distcp")
REPLICAS = ".replicas"


@dataclass(frozen=True)
class Delivery:
    """The manifest of one rank: the files that it copies, None until a file is copied."""

    rank: int
    host: str
    files: Mapping[str, CopiedFile | None] = field(default_factory=dict)
    sources: Mapping[str, Identity] = field(default_factory=dict)
    """The identities of these files on the node when the drain was requested."""


@dataclass(frozen=True)
class Plan:
    """What a partial step must contain to become complete."""

    needed: Mapping[str, int]
    """Minimum size in bytes, by file."""
    saved: Stamp | None = None
    metadata: Identity | None = None
    """Identity of the `.metadata` that is drained."""
    sums: str | None = None
    """As in the marker."""


def writer_of(name: str) -> int | None:
    """The rank that wrote a data file, from its name; None for names that no writer uses."""
    match = _WRITER.fullmatch(Path(name).name)
    return int(match["rank"]) if match else None


def token_of(name: str) -> str | None:
    """The token of the save that wrote a data file, from its name; None for a name that every save gives."""
    match = _WRITER.fullmatch(Path(name).name)
    return match["token"] if match else None


def replicas_of(directory: Path, host: str) -> Path:
    """Where the replicas of a node are, in its peer's directory of steps."""
    return directory / REPLICAS / host


def partial_of(bulk: Path, name: str, digest: str) -> Path:
    """The directory of a partial step."""
    return bulk / f"{_PARTIAL}{name}-{digest}"


def partials(bulk: Path, name: str | None = None) -> list[Path]:
    """The directories of partial steps, or of those with the step name ``name``; the newest first."""
    by_time = []
    for path in bulk.glob(f"{_PARTIAL}{name or 'step*'}-*"):
        with contextlib.suppress(OSError):
            by_time.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(by_time, reverse=True)]


def name_of(partial: Path) -> tuple[str, str]:
    """The step name and the digest of a partial step, from the name of its directory."""
    name, _, digest = partial.name[len(_PARTIAL) :].rpartition("-")
    return name, digest


def same_step_problem(bulk: Path, name: str) -> UsageProblem | None:
    """The error if ``bulk`` has the same step under another name, complete or partial; otherwise None."""
    namesake = same_step(bulk / name)
    if namesake is None:
        number = step_number(name)
        unfinished = (path for path in partials(bulk) if name_of(path)[0] != name)
        namesake = next((path for path in unfinished if number_or_none(name_of(path)[0]) == number), None)
    return same_step_error(namesake, Path(name)) if namesake is not None else None


def begin(bulk: Path, name: str, digest: str, metadata: bytes, plan: Plan) -> Path:
    """Create the directory of a partial step, or continue that of an interrupted drain of the same save.

    Removes partial steps of other saves with the same name. Raises ``UsageProblem`` if the same step has another name
    there, ``CannotJudge`` when the storage fails.
    """
    partial = partial_of(bulk, name, digest)
    with naming_errors(bulk, _REPAIR, WRITING):
        for earlier in partials(bulk, name):
            if earlier == partial and not _of_another_save(earlier, plan):
                continue
            if sound_marker_of(earlier) is not None:
                publish(bulk, earlier, ())  # complete except for its name: keep it until the new one is complete
            else:
                shutil.rmtree(earlier, ignore_errors=True)
        (partial / _RANKS).mkdir(parents=True, exist_ok=True)
        # Check after creating it: of two concurrent drains under two names, at least one sees the other.
        problem = same_step_problem(bulk, name)
        if problem is not None:
            shutil.rmtree(partial, ignore_errors=True)
            raise problem
        for stale in (_CHANGED, MARKER, METADATA_COPY):
            (partial / stale).unlink(missing_ok=True)
        with (partial / METADATA_COPY).open("xb") as stream:  # never through a link of somebody else
            stream.write(metadata)
            stream.flush()
            os.fsync(stream.fileno())
        document = {
            "needed": dict(plan.needed),
            "saved": plan.saved and plan.saved.row(),
            "metadata": plan.metadata and plan.metadata.row(),
            "sums": plan.sums,
        }
        # Written last: ranks start to copy when they find it.
        _replace_json(partial / _PLAN, document)
    return partial


def _of_another_save(partial: Path, plan: Plan) -> bool:
    """Whether a partial step may belong to another save: `.metadata` of two saves can have the same bytes."""
    begun = plan_of(partial)
    return begun is None or begun.metadata != plan.metadata


def mark_changed(partial: Path, why: CannotJudge) -> None:
    """Record for all ranks that a partial step must not become complete. The recorded file identities remain."""
    with contextlib.suppress(OSError):
        _replace_json(partial / _CHANGED, {"error": why.message, "hint": why.hint})


def changed_error(partial: Path) -> CannotJudge | None:
    """The error for which a partial step must not become complete; None if there is none."""
    try:
        document = markers.read_document(partial / _CHANGED)
        return CannotJudge(str(document["error"]), str(document["hint"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return CannotJudge(f"`{partial}` is damaged", "drain the step again")


def _replace_json(path: Path, document: object) -> None:
    """Replace a JSON file without a sync: after a power cut, the files that it lists are copied again."""
    temporary = path.with_name(f"{PART}{path.stem}-{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


def plan_of(partial: Path) -> Plan | None:
    """The plan of a partial step; None if it does not exist yet or a power cut damaged it."""
    try:
        document = markers.read_document(partial / _PLAN)
        needed = {str(name): int(size) for name, size in document["needed"].items()}
        metadata = document.get("metadata")
        saved = Stamp.parse(document.get("saved"))
        return Plan(needed, saved, metadata and Identity.parse(metadata), document.get("sums"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def deliver(partial: Path, delivery: Delivery) -> None:
    """Write a rank's manifest. Raises ``Gone`` if the partial step does not exist any more."""
    if not (partial / _RANKS).is_dir():
        raise Gone(partial)
    document = {
        "rank": delivery.rank,
        "host": delivery.host,
        "files": {name: filed and asdict(filed) for name, filed in delivery.files.items()},
        "sources": identity.rows(delivery.sources),
    }
    with naming_errors(partial, _REPAIR, WRITING):
        try:
            _replace_json(manifest_path(partial, delivery.rank), document)
        except FileNotFoundError:
            raise Gone(partial) from None


def manifest_path(partial: Path, rank: int) -> Path:
    """The path of a rank's manifest in a partial step."""
    return partial / _RANKS / f"{rank:05d}.json"


def deliveries(partial: Path) -> list[Delivery]:
    """All readable manifests of a partial step. The files of a damaged manifest are copied again."""
    manifests = []
    for path in sorted((partial / _RANKS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = markers.read_document(path)
            files = {name: copied_file(row) if row else None for name, row in document["files"].items()}
            sources = identity.parsed(document.get("sources", {}))
            manifests.append(Delivery(int(document["rank"]), str(document["host"]), files, sources))
    return manifests


def delivered(partial: Path, brought: Iterable[Delivery]) -> dict[str, CopiedFile]:
    """The copied files of a partial step that have the size in their manifest."""
    copied = {}
    for delivery in brought:
        for name, filed in delivery.files.items():
            with contextlib.suppress(OSError):
                if filed is not None and (partial / name).stat().st_size == filed.size:
                    copied[name] = filed
    return copied


def lacking(needed: Mapping[str, int], brought: Iterable[Delivery], world: int) -> list[str]:
    """The missing files, one line per rank that must copy them. Pure."""
    brought = list(brought)
    copied = {name for delivery in brought for name, filed in delivery.files.items() if filed is not None}
    owners = {name: delivery for delivery in brought for name in delivery.files}
    owed: dict[str, list[str]] = {}
    for name in sorted(needed.keys() - copied):
        owner, rank = owners.get(name), writer_of(name)
        who = f"rank {rank}, which has not reported" if rank is not None else "a rank that has not reported"
        if owner is not None:
            who = f"rank {owner.rank} on `{owner.host}`"
        elif rank is not None and rank >= world:
            who = f"rank {rank} of the job that saved it; this one has {world}"
        owed.setdefault(who, []).append(name)
    return [f"{shown(names)} of {who}" for who, names in owed.items()]


def shown(names: list[str]) -> str:
    """The first name, and the number of further ones."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"`{names[0]}`{more}"


def publish(bulk: Path, partial: Path, brought: Iterable[Delivery]) -> Path:
    """Make a partial step complete once all its files are copied. Only the coordinator's process may call this."""
    name, _ = name_of(partial)
    final = bulk / name
    with naming_errors(bulk, _REPAIR, WRITING):
        if sound_marker_of(partial) is None:
            _write_marker(partial, list(brought))
        for leftover in (_PLAN, _RANKS, METADATA_COPY, _CHANGED):
            path = partial / leftover
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if final.exists():
            replaceable(final)
        put_step(partial, final)
    return final


def _write_marker(partial: Path, brought: list[Delivery]) -> None:
    name, digest = name_of(partial)
    plan = plan_of(partial)
    hosts = {file: delivery.host for delivery in brought for file in delivery.files}
    sources = {file: source for delivery in brought for file, source in delivery.sources.items()}
    files = delivered(partial, brought)
    remove_parts(partial)
    for folder in {(partial / file).parent for file in files}:
        fsync_directory(folder)
    (partial / METADATA_COPY).replace(partial / METADATA)
    saved, metadata, sums = (plan.saved, plan.metadata, plan.sums) if plan else (None, None, None)
    marker = Marker(digest, files, hosts, sources, saved, metadata, sums)
    markers.write(partial, name, marker)
