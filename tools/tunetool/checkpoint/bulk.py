"""What lies on shared storage: drained steps, and steps that are on their way.

    step_100/                       complete: data files, `.metadata`, and the marker with every checksum
    .draining-step_100-<digest>/    on its way: data files, plan.json, ranks/00000.json ...

The digest is that of the step's `.metadata`, so that two saves of one step are never mixed. A step becomes complete by
one rename of its directory, after the marker in it was written last.

Plan, manifests and marker also hold what the copied files were (inode, size, times) and when the step was saved.
Markers of earlier versions do not.
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
from typing import Any

import xxhash

from tunetool.checkpoint import identity
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.save_order import Stamp
from tunetool.checkpoint.steps import (
    fsync_directory,
    number_or_none,
    remove_step,
    same_step,
    step_number,
    two_names,
)
from tunetool.checkpoint.transfer import PART, Filed, Gone, digest_of, remove_parts
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.files import replace_file

METADATA = ".metadata"
MARKER = ".tunetool-drained.json"
SCHEMA = "tunetool.drained/1"
OTHER_METADATA = "`.metadata` is of another save than the data"
_PLAN = "plan.json"
_HELD = ".metadata-of-the-step"
"""`.metadata` under another name: a reader must not take for a checkpoint what is still on its way."""
_CHANGED = "changed.json"
"""Why a step on its way may not become complete: its source changed."""
_RANKS = "ranks"
_ON_ITS_WAY = ".draining-"
_WRITER = re.compile(r"__(?P<rank>\d+)_\d+(\.[0-9a-f]+)?\.distcp")


@dataclass(frozen=True)
class Delivery:
    """What one rank brings: its files, None until they are there."""

    rank: int
    host: str
    files: Mapping[str, Filed | None] = field(default_factory=dict)
    sources: Mapping[str, Identity] = field(default_factory=dict)
    """What those files were on the node when the drain was asked for."""


@dataclass(frozen=True)
class Plan:
    """What a step on its way is to hold."""

    needed: Mapping[str, int]
    """By file, the least bytes that it must have."""
    saved: Stamp | None = None
    metadata: Identity | None = None
    """Of the `.metadata` that is drained."""


@dataclass(frozen=True)
class Marker:
    """What a complete step holds."""

    digest: str
    files: Mapping[str, Filed]
    hosts: Mapping[str, str]
    """By file, the host that it was drained from."""
    sources: Mapping[str, Identity] = field(default_factory=dict)
    """By file, what it was on that host; empty in markers of earlier versions, as are the next two."""
    saved: Stamp | None = None
    metadata: Identity | None = None
    """Of the `.metadata` that was drained."""


def writer_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None for a name that is not of torch's writers."""
    match = _WRITER.fullmatch(Path(name).name)
    return int(match["rank"]) if match else None


def partial_of(bulk: Path, name: str, digest: str) -> Path:
    """Where a step is while it is on its way."""
    return bulk / f"{_ON_ITS_WAY}{name}-{digest}"


def partials(bulk: Path, name: str | None = None) -> list[Path]:
    """Steps that are on their way, or that one; the newest first."""
    by_time = []
    for path in bulk.glob(f"{_ON_ITS_WAY}{name or 'step*'}-*"):
        with contextlib.suppress(OSError):
            by_time.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(by_time, reverse=True)]


def name_of(partial: Path) -> tuple[str, str]:
    """Step directory's name and digest of a step that is on its way."""
    name, _, digest = partial.name[len(_ON_ITS_WAY) :].rpartition("-")
    return name, digest


def two_names_of(bulk: Path, name: str) -> UsageProblem | None:
    """What to say when another name of the same step is there, or on its way."""
    namesake = same_step(bulk / name)
    if namesake is None:
        number = step_number(name)
        others = (path for path in partials(bulk) if name_of(path)[0] != name)
        namesake = next((path for path in others if number_or_none(name_of(path)[0]) == number), None)
    return two_names(namesake, Path(name)) if namesake is not None else None


def begin(bulk: Path, name: str, digest: str, metadata: bytes, plan: Plan) -> Path:
    """Make room for a step, or take up where an earlier drain of the same save was interrupted.

    What other saves of this step left on its way is removed. Raises ``UsageProblem`` for another name of the same step,
    ``CannotJudge`` when the storage fails.
    """
    partial = partial_of(bulk, name, digest)
    try:
        for earlier in partials(bulk, name):
            if earlier == partial and not _of_another_save(earlier, plan):
                continue
            if sound_marker_of(earlier) is not None:
                publish(bulk, earlier, ())  # complete, but for its name: it stays until the new one is
            else:
                shutil.rmtree(earlier, ignore_errors=True)
        (partial / _RANKS).mkdir(parents=True, exist_ok=True)
        # Asked once it is there: of two that come at once under two names, one at least sees the other.
        problem = two_names_of(bulk, name)
        if problem is not None:
            shutil.rmtree(partial, ignore_errors=True)
            raise problem
        for stale in (_CHANGED, MARKER):
            (partial / stale).unlink(missing_ok=True)
        with (partial / _HELD).open("wb") as stream:
            stream.write(metadata)
            stream.flush()
            os.fsync(stream.fileno())
        document = {
            "needed": dict(plan.needed),
            "saved": plan.saved and plan.saved.row(),
            "metadata": plan.metadata and plan.metadata.row(),
        }
        # Last: who finds it may deliver.
        _put(partial / _PLAN, document)
    except OSError as error:
        raise _failed(bulk, error) from error
    return partial


def _of_another_save(partial: Path, plan: Plan) -> bool:
    """Whether what lies there is not known to be of this `.metadata`: another save's can have the same bytes."""
    begun = plan_of(partial)
    return begun is None or begun.metadata != plan.metadata


def spoil(partial: Path, why: CannotJudge) -> None:
    """Say for all ranks that a step on its way may not become complete. What each file was stays recorded there."""
    with contextlib.suppress(OSError):
        _put(partial / _CHANGED, {"error": why.message, "hint": why.hint})


def spoilt(partial: Path) -> CannotJudge | None:
    """Why a step on its way may not become complete; None when it may."""
    try:
        document = json.loads((partial / _CHANGED).read_text())
        return CannotJudge(str(document["error"]), str(document["hint"]))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        return CannotJudge(f"`{partial}` is damaged", "drain the step again")


def _put(path: Path, document: object) -> None:
    """Replace a file that need not outlive a power cut: what is lost with it is copied again."""
    temporary = path.with_name(f"{PART}{path.stem}-{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


def plan_of(partial: Path) -> Plan | None:
    """None while there is no plan, or only what a power cut left of it."""
    try:
        document = json.loads((partial / _PLAN).read_text())
        needed = {str(name): int(size) for name, size in document["needed"].items()}
        metadata = document.get("metadata")
        return Plan(needed, Stamp.parse(document.get("saved")), metadata and Identity.parse(metadata))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def deliver(partial: Path, delivery: Delivery) -> None:
    """Write a rank's manifest. Raises ``Gone`` when the step is not on its way any more."""
    if not (partial / _RANKS).is_dir():
        raise Gone(partial)
    document = {
        "rank": delivery.rank,
        "host": delivery.host,
        "files": {name: filed and asdict(filed) for name, filed in delivery.files.items()},
        "sources": identity.rows(delivery.sources),
    }
    try:
        _put(manifest_path(partial, delivery.rank), document)
    except FileNotFoundError:
        raise Gone(partial) from None
    except OSError as error:
        raise _failed(partial, error) from error


def manifest_path(partial: Path, rank: int) -> Path:
    """A rank's manifest."""
    return partial / _RANKS / f"{rank:05d}.json"


def deliveries(partial: Path) -> list[Delivery]:
    """The manifests that are there. Of one that a power cut spoilt the files are copied again."""
    manifests = []
    for path in sorted((partial / _RANKS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(path.read_text())
            files = {name: _filed(row) if row else None for name, row in document["files"].items()}
            sources = identity.parsed(document.get("sources", {}))
            manifests.append(Delivery(int(document["rank"]), str(document["host"]), files, sources))
    return manifests


def _filed(document: Mapping[str, Any]) -> Filed:
    return Filed(int(document["size"]), str(document["xxh3_64"]))


def delivered(partial: Path, brought: Iterable[Delivery]) -> dict[str, Filed]:
    """The files that lie there as their manifest says."""
    copied = {}
    for delivery in brought:
        for name, filed in delivery.files.items():
            with contextlib.suppress(OSError):
                if filed is not None and (partial / name).stat().st_size == filed.size:
                    copied[name] = filed
    return copied


def lacking(needed: Mapping[str, int], brought: Iterable[Delivery], world: int) -> list[str]:
    """A line for each rank or host that owes files, and which. Pure."""
    brought = list(brought)
    copied = {name for delivery in brought for name, filed in delivery.files.items() if filed is not None}
    owners = {name: delivery for delivery in brought for name in delivery.files}
    owed: dict[str, list[str]] = {}
    for name in sorted(needed.keys() - copied):
        owner, rank = owners.get(name), writer_of(name)
        who = f"rank {rank}, of which nothing was heard" if rank is not None else "a rank that was not heard of"
        if owner is not None:
            who = f"rank {owner.rank} on `{owner.host}`"
        elif rank is not None and rank >= world:
            who = f"rank {rank} of the job that saved it; this one has {world}"
        owed.setdefault(who, []).append(name)
    return [f"{shown(names)} of {who}" for who, names in owed.items()]


def shown(names: list[str]) -> str:
    """The first of them, and how many more."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"`{names[0]}`{more}"


def publish(bulk: Path, partial: Path, brought: Iterable[Delivery]) -> Path:
    """Make a step complete whose files are all there. For one process alone: the coordinator's."""
    name, _ = name_of(partial)
    final = bulk / name
    try:
        if sound_marker_of(partial) is None:
            _seal(partial, list(brought))
        for leftover in (_PLAN, _RANKS, _HELD, _CHANGED):
            path = partial / leftover
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        if final.exists():
            replaceable(final)
            remove_step(final)
        partial.rename(final)
        fsync_directory(bulk)
    except OSError as error:
        raise _failed(bulk, error) from error
    return final


def _seal(partial: Path, brought: list[Delivery]) -> None:
    name, digest = name_of(partial)
    plan = plan_of(partial)
    hosts = {file: delivery.host for delivery in brought for file in delivery.files}
    sources = {file: source for delivery in brought for file, source in delivery.sources.items()}
    files = {file: asdict(filed) for file, filed in delivered(partial, brought).items()}
    remove_parts(partial)
    for folder in {(partial / file).parent for file in files}:
        fsync_directory(folder)
    (partial / _HELD).replace(partial / METADATA)
    document = {
        "schema": SCHEMA,
        "step": name,
        "digest": digest,
        "files": files,
        "hosts": hosts,
        "sources": identity.rows(sources),
        "saved": plan and plan.saved and plan.saved.row(),
        "metadata": plan and plan.metadata and plan.metadata.row(),
    }
    # Synced with its directory, which so holds `.metadata` and all files too.
    replace_file(str(partial / MARKER), json.dumps(document, indent=1))


def replaceable(final: Path) -> None:
    """Raises ``UsageProblem`` for a step that no drain has put there."""
    if not (final / MARKER).exists():
        raise UsageProblem(f"`{final}` is there, and was not drained", "move it away, or drain to another directory")


def marker_of(directory: Path) -> Marker | None:
    """The marker of a complete step; None without one. Raises ``CannotJudge`` for one that is damaged."""
    try:
        document = json.loads((directory / MARKER).read_text())
        files = {str(name): _filed(row) for name, row in document["files"].items()}
        metadata = document.get("metadata")
        return Marker(
            str(document["digest"]),
            files,
            dict(document["hosts"]),
            identity.parsed(document.get("sources", {})),
            Stamp.parse(document.get("saved")),
            metadata and Identity.parse(metadata),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotJudge(f"`{directory / MARKER}` is damaged", "drain the step again, or load another one") from None


def sound_marker_of(directory: Path) -> Marker | None:
    """The marker of a complete step; None without one, or with one that is damaged."""
    try:
        return marker_of(directory)
    except CannotJudge:
        return None


def whole(directory: Path) -> Marker | None:
    """The marker of a complete step whose files are there at their full length, with its own `.metadata`; else None."""
    marker = sound_marker_of(directory)
    try:
        if marker is None or digest_of_metadata(directory) != marker.digest:
            return None
        sizes = all((directory / name).stat().st_size == filed.size for name, filed in marker.files.items())
    except OSError:
        return None
    return marker if sizes else None


def digest_of_metadata(directory: Path) -> str:
    """Raises ``OSError``."""
    return xxhash.xxh3_64_hexdigest((directory / METADATA).read_bytes())


def verify_drained(directory: str | Path) -> int:
    """Read a drained step past the page cache and hold it against its checksums; return the bytes that were read.

    Raises ``CannotJudge`` naming the files that changed since, and ``UsageProblem`` for a directory that no drain made.
    """
    step_dir = Path(directory)
    marker = marker_of(step_dir)
    if marker is None:
        raise UsageProblem(f"`{step_dir}` was not drained: it has no checksums", "name a step on shared storage")
    changed = []
    try:
        if digest_of_metadata(step_dir) != marker.digest:
            changed.append(OTHER_METADATA)
    except OSError as error:
        changed.append(f"`{METADATA}` cannot be read: {error.strerror}")
    for name, filed in sorted(marker.files.items()):
        try:
            read = digest_of(step_dir / name)
        except OSError as error:
            changed.append(f"`{name}` cannot be read: {error.strerror}")
            continue
        if read != filed:
            difference = "has other bytes" if read.size == filed.size else f"has {read.size} of {filed.size} bytes"
            changed.append(f"`{name}` {difference}")
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CannotJudge(
            f"`{step_dir}` is not what was drained: {changed[0]}{more}",
            "load another step; if this one is still on its node, remove it here and drain it again",
        )
    return sum(filed.size for filed in marker.files.values())


def _failed(path: Path, error: OSError) -> CannotJudge:
    return CannotJudge(
        f"`{error.filename or path}` cannot be written: {error.strerror}",
        "the checkpoint on the node is untouched; mend the storage, then drain it again",
    )
