"""What lies on shared storage: drained steps, and steps that are on their way.

    step_100/                       complete: data files, `.metadata`, and the marker with every checksum
    .draining-step_100-<digest>/    on its way: data files, plan.json, ranks/00000.json ...

The digest is that of the step's `.metadata`, so that two saves of one step are never mixed. A step becomes complete by
one rename of its directory, after the marker in it was written last.
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

from tunetool.checkpoint.steps import fsync_directory, remove_step, steps_in
from tunetool.checkpoint.transfer import PART, Filed, Gone, digest_of, remove_parts
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.files import replace_file

METADATA = ".metadata"
MARKER = ".tunetool-drained.json"
SCHEMA = "tunetool.drained/1"
_PLAN = "plan.json"
_HELD = ".metadata-of-the-step"
"""`.metadata` under another name: a reader must not take for a checkpoint what is still on its way."""
_RANKS = "ranks"
_ON_ITS_WAY = ".draining-"
_WRITER = re.compile(r"__(?P<rank>\d+)_\d+(\.[0-9a-f]+)?\.distcp")


@dataclass(frozen=True)
class Delivery:
    """What one rank brings: its files, None until they are there."""

    rank: int
    host: str
    files: Mapping[str, Filed | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Marker:
    """What a complete step holds."""

    digest: str
    files: Mapping[str, Filed]
    hosts: Mapping[str, str]
    """By file, the host that it was drained from."""


def writer_of(name: str) -> int | None:
    """The rank that wrote a data file, by its name; None for a name that is not of torch's writers."""
    match = _WRITER.fullmatch(Path(name).name)
    return int(match["rank"]) if match else None


def partial_of(bulk: Path, name: str, digest: str) -> Path:
    """Where a step is while it is on its way."""
    return bulk / f"{_ON_ITS_WAY}{name}-{digest}"


def partials(bulk: Path, name: str | None = None) -> list[Path]:
    """Steps that are on their way, or that one; the newest first."""
    found = []
    for path in bulk.glob(f"{_ON_ITS_WAY}{name or 'step*'}-*"):
        with contextlib.suppress(OSError):
            found.append((path.stat().st_mtime, path))
    return [path for _, path in sorted(found, reverse=True)]


def name_of(partial: Path) -> tuple[str, str]:
    """Step directory's name and digest of a step that is on its way."""
    name, _, digest = partial.name[len(_ON_ITS_WAY) :].rpartition("-")
    return name, digest


def begin(bulk: Path, name: str, digest: str, metadata: bytes, needed: Mapping[str, int]) -> Path:
    """Make room for a step, or take up where an earlier drain of the same save was interrupted.

    What other saves of this step left on its way is removed. Raises ``CannotJudge`` when the storage fails.
    """
    partial = partial_of(bulk, name, digest)
    try:
        for other in partials(bulk, name):
            if other == partial:
                continue
            if marker_of(other) is not None:
                publish(bulk, other, ())  # complete, but for its name: it stays until the new one is
            else:
                shutil.rmtree(other, ignore_errors=True)
        (partial / _RANKS).mkdir(parents=True, exist_ok=True)
        with (partial / _HELD).open("wb") as stream:
            stream.write(metadata)
            stream.flush()
            os.fsync(stream.fileno())
        # Last: who finds it may deliver.
        _put(partial / _PLAN, {"needed": dict(needed)})
    except OSError as error:
        raise _failed(bulk, error) from error
    return partial


def _put(path: Path, document: object) -> None:
    """Replace a file that need not outlive a power cut: what is lost with it is copied again."""
    temporary = path.with_name(f"{PART}{path.stem}-{secrets.token_hex(4)}")
    temporary.write_text(json.dumps(document))
    temporary.replace(path)


def plan_of(partial: Path) -> dict[str, int] | None:
    """By file, the least bytes that it must have; None while there is no plan, or only what a power cut left of it."""
    try:
        needed = json.loads((partial / _PLAN).read_text())["needed"]
        return {str(name): int(size) for name, size in needed.items()}
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
    found = []
    for path in sorted((partial / _RANKS).glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            document = json.loads(path.read_text())
            files = {name: _filed(each) if each else None for name, each in document["files"].items()}
            found.append(Delivery(int(document["rank"]), str(document["host"]), files))
    return found


def _filed(document: Mapping[str, Any]) -> Filed:
    return Filed(int(document["size"]), str(document["xxh3_64"]))


def delivered(partial: Path, brought: Iterable[Delivery]) -> dict[str, Filed]:
    """The files that lie there as their manifest says."""
    found = {}
    for delivery in brought:
        for name, filed in delivery.files.items():
            with contextlib.suppress(OSError):
                if filed is not None and (partial / name).stat().st_size == filed.size:
                    found[name] = filed
    return found


def lacking(needed: Mapping[str, int], brought: Iterable[Delivery], world: int) -> list[str]:
    """A line for each rank or host that owes files, and which. Pure."""
    brought = list(brought)
    there = {name for each in brought for name, filed in each.files.items() if filed is not None}
    owners = {name: each for each in brought for name in each.files}
    owed: dict[str, list[str]] = {}
    for name in sorted(needed.keys() - there):
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
    name, digest = name_of(partial)
    final = bulk / name
    brought = list(brought)
    try:
        if marker_of(partial) is None:
            hosts = {file: each.host for each in brought for file in each.files}
            files = {file: asdict(filed) for file, filed in delivered(partial, brought).items()}
            remove_parts(partial)
            for folder in {(partial / file).parent for file in files}:
                fsync_directory(folder)
            (partial / _HELD).replace(partial / METADATA)
            document = {"schema": SCHEMA, "step": name, "digest": digest, "files": files, "hosts": hosts}
            # Synced with its directory, which so holds `.metadata` and all files too.
            replace_file(str(partial / MARKER), json.dumps(document, indent=1))
        for leftover in (_PLAN, _RANKS, _HELD):
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


def replaceable(final: Path) -> None:
    """Raises ``UsageProblem`` for a step that no drain has put there."""
    if marker_of(final) is None:
        raise UsageProblem(f"`{final}` is there, and was not drained", "move it away, or drain to another directory")


def marker_of(directory: Path) -> Marker | None:
    """The marker of a complete step; None without one. Raises ``CannotJudge`` for one that is damaged."""
    try:
        document = json.loads((directory / MARKER).read_text())
        files = {str(name): _filed(each) for name, each in document["files"].items()}
        return Marker(str(document["digest"]), files, dict(document["hosts"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotJudge(f"`{directory / MARKER}` is damaged", "drain the step again, or load another one") from None


def verify_drained(directory: str | Path) -> int:
    """Read a drained step past the page cache and hold it against its checksums; return the bytes that were read.

    Raises ``CannotJudge`` naming the files that changed since, and ``UsageProblem`` for a directory that no drain made.
    """
    place = Path(directory)
    marker = marker_of(place)
    if marker is None:
        raise UsageProblem(f"`{place}` was not drained: it has no checksums", "name a step on shared storage")
    changed = []
    for name, filed in sorted(marker.files.items()):
        try:
            found = digest_of(place / name)
        except OSError as error:
            changed.append(f"`{name}` cannot be read: {error.strerror}")
            continue
        if found != filed:
            what = "has other bytes" if found.size == filed.size else f"has {found.size} of {filed.size} bytes"
            changed.append(f"`{name}` {what}")
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CannotJudge(
            f"`{place}` is not what was drained: {changed[0]}{more}",
            "load another step; if this one is still on its node, remove it here and drain it again",
        )
    return sum(filed.size for filed in marker.files.values())


def complete_steps(bulk: Path) -> dict[int, Path]:
    """The drained steps by number."""
    return {number: path for number, path in steps_in(bulk).items() if marker_of(path) is not None}


def _failed(place: Path, error: OSError) -> CannotJudge:
    return CannotJudge(
        f"`{error.filename or place}` cannot be written: {error.strerror}",
        "the checkpoint on the node is untouched; mend the storage, then drain it again",
    )
