"""The marker of a drained step: what is in the step, with every checksum, and whether it still is."""

from __future__ import annotations

import errno
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from tunetool.checkpoint import identity
from tunetool.checkpoint.identity import Identity
from tunetool.checkpoint.steps import Stamp
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.checkpoint.workers import default_threads
from tunetool.ctrl_c import Threads, wait_briefly
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.documents import parse
from tunetool.node.common.files import replace_file
from tunetool.regular_files import read_bytes

METADATA = ".metadata"
LARGEST_METADATA = 1 << 30
"""Bytes, as in ``tunetool.checkpoint.metadata``, which imports torch."""
MARKER = ".tunetool-drained.json"
SCHEMA = "tunetool.drained/1"
OF_THE_SAVE, OF_THE_SOURCE = "checksums of the save", "digests made at the source when the replica was made"
OTHER_METADATA = "`.metadata` belongs to another save than the data"


@dataclass(frozen=True)
class Marker:
    """The record of a complete step."""

    digest: str
    files: Mapping[str, CopiedFile]
    hosts: Mapping[str, str]
    """The host from which it was drained, by file."""
    sources: Mapping[str, Identity] = field(default_factory=dict)
    """Its identity on that host, by file. Markers of earlier versions lack this and the next two fields."""
    saved: Stamp | None = None
    metadata: Identity | None = None
    """Identity of the `.metadata` that was drained."""
    sums: str | None = None
    """What a replica's bytes were verified against: ``OF_THE_SAVE`` or ``OF_THE_SOURCE``."""

    def lacks(self, needed: Iterable[str]) -> list[str]:
        """The files of ``needed`` that it does not cover: nothing is known of their bytes.

        A marker proves a step only if it covers every file that is needed: of a drained step each one that `.metadata`
        names, of a replica those of its node.
        """
        return sorted(set(needed) - self.files.keys())

    @property
    def is_of_replica(self) -> bool:
        """Whether the step is on another node, and not on shared storage."""
        return self.sums is not None


def copied_file(document: Mapping[str, Any]) -> CopiedFile:
    """A file as a manifest or a marker has it. Raises ``KeyError``, ``TypeError``, ``ValueError``."""
    return CopiedFile(int(document["size"]), str(document["xxh3_64"]))


def write(directory: Path, step: str, marker: Marker) -> None:
    """Write the marker, the last file of a step. Raises ``OSError``."""
    document = {
        "schema": SCHEMA,
        "step": step,
        "digest": marker.digest,
        "files": {file: asdict(filed) for file, filed in marker.files.items()},
        "hosts": dict(marker.hosts),
        "sources": identity.rows(marker.sources),
        "saved": marker.saved and marker.saved.row(),
        "metadata": marker.metadata and marker.metadata.row(),
        "sums": marker.sums,
    }
    # The directory is synced too, so `.metadata` and all file names survive a power cut.
    replace_file(str(directory / MARKER), json.dumps(document, indent=1), follow=False)


def replaceable(final: Path) -> None:
    """Raises ``UsageProblem`` for a step that was not drained, which must not be replaced."""
    if not (final / MARKER).exists():
        raise UsageProblem(f"`{final}` exists, and was not drained", "move it away, or drain to another directory")


def read_document(path: Path) -> Any:
    """The JSON in a file of a step, which may be anybody's. Raises ``OSError``, ``ValueError``."""
    return parse(read_bytes(path).decode(), odd_names=True)


def marker_of(directory: Path) -> Marker | None:
    """The marker of a complete step; None if there is none. Raises ``CannotJudge`` for a damaged marker."""
    try:
        document = read_document(directory / MARKER)
        files = {str(name): copied_file(row) for name, row in document["files"].items()}
        metadata = document.get("metadata")
        return Marker(
            str(document["digest"]),
            files,
            dict(document["hosts"]),
            identity.parsed(document.get("sources", {})),
            Stamp.parse(document.get("saved")),
            metadata and Identity.parse(metadata),
            document.get("sums"),
        )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise CannotJudge(f"`{directory / MARKER}` is damaged", "drain the step again, or load another step") from None


def sound_marker_of(directory: Path) -> Marker | None:
    """The marker of a complete step; None if there is none or it is damaged."""
    try:
        return marker_of(directory)
    except CannotJudge:
        return None


def whole(directory: Path, needed: Iterable[str] = ()) -> Marker | None:
    """The marker of a step if it covers what is ``needed``, its files have their full size and `.metadata` matches;
    otherwise None."""
    marker = sound_marker_of(directory)
    try:
        if marker is None or marker.lacks(needed) or digest_of_metadata(directory) != marker.digest:
            return None
        sizes = all((directory / name).stat().st_size == filed.size for name, filed in marker.files.items())
    except OSError:
        return None
    return marker if sizes else None


def digest_of_metadata(directory: Path) -> str:
    """The digest (xxh3_64) of `.metadata` in ``directory``. Raises ``OSError``."""
    return xxhash.xxh3_64_hexdigest(read_bytes(directory / METADATA, LARGEST_METADATA))


def changes(
    directory: Path, marker: Marker, threads: int | None = None, tick: Callable[[int], None] | None = None
) -> dict[str, str]:
    """What is not as it was drained, by file: each is read with O_DIRECT, ``threads`` of them at a time.

    ``tick`` gets the number of bytes read so far, several times a second, from this thread.
    """
    reading = _Reading(directory)
    with Threads(threads or default_threads()) as pool:
        try:
            asked = {file: pool.begin(reading.change, (file, filed)) for file, filed in sorted(marker.files.items())}
            while wait_briefly(asked.values())[1]:
                if tick is not None:
                    tick(reading.bytes)
        finally:
            reading.stopped = True
    found = {name: change for name, future in asked.items() if (change := future.result()) is not None}
    try:
        if digest_of_metadata(directory) != marker.digest:
            found = {METADATA: OTHER_METADATA, **found}
    except OSError as error:
        found = {METADATA: f"`{METADATA}` cannot be read: {error.strerror}", **found}
    return found


class _Reading:
    """Reads files in several threads, until it is ``stopped``; ``bytes``: so far."""

    def __init__(self, directory: Path) -> None:
        self._directory, self.stopped, self.bytes = directory, False, 0
        self._lock = threading.Lock()

    def change(self, item: tuple[str, CopiedFile]) -> str | None:
        """What is not as it was drained; None if all is."""
        name, filed = item
        try:
            read = digest_of(self._directory / name, self._count)
        except OSError as error:
            return f"`{name}` cannot be read: {error.strerror}"
        if read == filed:
            return None
        difference = "has other bytes" if read.size == filed.size else f"has {read.size} of {filed.size} bytes"
        return f"`{name}` {difference}"

    def _count(self, more: int) -> None:
        if self.stopped:
            raise InterruptedError(errno.EINTR, "interrupted")
        with self._lock:
            self.bytes += more


def verify_drained(directory: str | Path) -> int:
    """Read a drained step with O_DIRECT and verify its checksums; returns the number of bytes read.

    Raises ``CannotJudge`` naming the files that changed, ``UsageProblem`` for a directory that is not a drained step.
    """
    step_dir = Path(directory)
    marker = marker_of(step_dir)
    if marker is None:
        raise UsageProblem(f"`{step_dir}` was not drained: it has no checksums", "name a step on shared storage")
    changed = list(changes(step_dir, marker).values())
    if changed:
        more = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
        raise CannotJudge(
            f"`{step_dir}` differs from what was drained: {changed[0]}{more}",
            "load another step; if this one is still on its node, remove it here and drain it again",
        )
    return sum(filed.size for filed in marker.files.values())
