"""Deletes old steps from the node and from shared storage after a drain.

The steps that were saved last are kept. The step just drained is never deleted, nor a step that is not complete on
shared storage, which may be the only copy.

A drained step may be deleted from shared storage before it is deleted from the node. So a drain leaves a note in the
step's directory on the node once the step is complete on shared storage.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from tunetool.checkpoint import bulk as on_bulk
from tunetool.checkpoint import identity, markers
from tunetool.checkpoint.identity import Identity, look
from tunetool.checkpoint.markers import METADATA, Marker
from tunetool.checkpoint.steps import Key, Stamp, now_ns, remove_step, stamp, stamps, steps_in, surplus, sweep
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.node.common.file_lock import FileLock
from tunetool.node.common.files import replace_file

NOTE = ".tunetool-was-drained.json"
REPLICATED = ".tunetool-was-replicated.json"
_DATA = "*.distcp"
_SAVE_IN_PROGRESS = ("*.tmp", ".tunetool-save.lock")
"""Files that exist only while a save to the directory runs, or after it died."""


@dataclass(frozen=True)
class Keep:
    """How many steps to keep in each tier (None: all), and whether steps that were never drained may be deleted from
    the node."""

    on_node: int
    on_bulk: int | None = None
    delete_undrained: bool = False


def stamp_of(step_dir: Path, bulk: Path, saved_ns: int, digest: str, now: int | None = None) -> Stamp:
    """The stamp of the save in ``step_dir``: from an earlier drain of it, otherwise computed from the known saves.

    ``now``: what the clock showed where it was saved, after that; default: this one's.
    """
    earlier = on_bulk.plan_of(on_bulk.partial_of(bulk, step_dir.name, digest))
    if earlier is not None and earlier.saved is not None and earlier.saved.time_ns == saved_ns:
        return earlier.saved
    drained = [markers.sound_marker_of(path) for path in steps_in(bulk, ambiguous=True).values()]
    stamps_known = [marker.saved for marker in drained if marker is not None and marker.saved is not None]
    for partial in on_bulk.partials(bulk):
        plan, marker = on_bulk.plan_of(partial), markers.sound_marker_of(partial)
        stamps_known += [
            document.saved for document in (plan, marker) if document is not None and document.saved is not None
        ]
    unstamped = [
        when
        for path in steps_in(step_dir.parent, ambiguous=True).values()
        if path != step_dir and (when := _mtime_ns(path / METADATA)) is not None
    ]
    # Read the clock last, so that a save since the drain was requested is not ahead of it.
    return stamp(saved_ns, stamps_known, unstamped, now_ns() if now is None else now)


def retain_on_bulk(bulk: Path, keep: int, drained: str) -> None:
    """Keep the ``keep`` complete steps that were saved last, and the step named ``drained``. Incomplete steps do not
    count and are not deleted."""
    steps = steps_in(bulk, ambiguous=True)
    if len(steps) <= keep:
        return
    complete = _complete_steps(steps)
    recorded = {number: marker.saved for number, (_, marker) in complete.items() if marker.saved is not None}
    order = stamps(recorded, _save_times({number: path for number, (path, _) in complete.items()}, recorded), now_ns())
    spared = [number for number, (path, _) in complete.items() if path.name == drained]
    for number in surplus(order, complete, spared, keep):
        remove_step(complete[number][0])


def leave_note(step_dir: Path, bulk: Path, sources: Mapping[str, Identity], metadata: Identity | None) -> None:
    """Write a note into ``step_dir``: its files are complete on shared storage. Without it, the step is kept longer."""
    marker = markers.sound_marker_of(bulk / step_dir.name)
    if marker is None:
        return
    document = {
        "digest": marker.digest,
        "bulk": str(bulk),
        "saved": marker.saved and marker.saved.row(),
        "sources": identity.rows(sources),
        "metadata": metadata.row() if metadata else None,
    }
    with contextlib.suppress(OSError):
        replace_file(str(step_dir / NOTE), json.dumps(document), follow=False)


def note_in(step_dir: Path, bulk: Path | None = None) -> Marker | None:
    """The note of a drain (to ``bulk``) in a step on the node: digest, stamp and file identities. None without one."""
    try:
        document = markers.read_document(step_dir / NOTE)
        if bulk is not None and document["bulk"] != str(bulk):
            return None
        sources = identity.parsed(document["sources"])
        metadata = document["metadata"]
        saved = Stamp.parse(document["saved"])
        return Marker(str(document["digest"]), {}, {}, sources, saved, metadata and Identity.parse(metadata))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def leave_replica_note(
    step_dir: Path,
    digest: str,
    sources: Mapping[str, Identity],
    files: Mapping[str, CopiedFile],
    metadata: Identity | None,
) -> None:
    """Write into ``step_dir`` of which save its files are, since `.metadata` may be on another node, and their
    checksums where the save made none. Without it, they are not known again."""
    document = {
        "digest": digest,
        "sources": identity.rows(sources),
        "files": {name: asdict(filed) for name, filed in files.items()},
        "metadata": metadata and metadata.row(),
    }
    with contextlib.suppress(OSError):
        replace_file(str(step_dir / REPLICATED), json.dumps(document), follow=False)


def replica_note_in(step_dir: Path) -> Marker | None:
    """What ``leave_replica_note`` wrote; None without it."""
    try:
        document = markers.read_document(step_dir / REPLICATED)
        files = {str(name): markers.copied_file(row) for name, row in document["files"].items()}
        metadata = document.get("metadata")
        sources = identity.parsed(document["sources"])
        return Marker(str(document["digest"]), files, {}, sources, None, metadata and Identity.parse(metadata))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def retain_on_node(step_dir: Path, bulk: Path, keep: Keep, wait: Callable[[int], None]) -> None:
    """Delete surplus steps beside ``step_dir``, which was just drained. The last step that is complete on shared
    storage also remains on the node.

    A step that was complete on shared storage, and was or would be deleted there, may be deleted here.
    """
    scratch = step_dir.parent
    sweep(scratch)
    on_node = steps_in(scratch, ambiguous=True)
    if (step_dir / METADATA).exists():
        # On the node with `.metadata`, a step without it is not a checkpoint yet.
        on_node = {number: path for number, path in on_node.items() if (path / METADATA).exists()}
    steps_on_bulk = steps_in(bulk, ambiguous=True)
    complete = _complete_steps(
        {number: path for number, path in steps_on_bulk.items() if number in on_node or keep.on_bulk is not None}
    )
    drained = {
        number: complete[number][1]
        for number, path in on_node.items()
        if number in complete and complete[number][0].name == path.name and _has_metadata(path, complete[number][1])
    }
    notes = {number: note_in(path, bulk) for number, path in on_node.items() if not (bulk / path.name).exists()}
    gone_from_bulk = {
        number: note for number, note in notes.items() if note is not None and _has_metadata(on_node[number], note)
    }
    order, bulk_order = _save_orders(on_node, {**gone_from_bulk, **drained}, complete)
    spared = [number for number, path in on_node.items() if path == step_dir]
    last = sorted(drained, key=lambda number: order[number])[-1:]
    undrained = on_node.keys() - drained.keys() if keep.delete_undrained else ()
    superseded = {number for number in undrained if any(order[number] < order[each] for each in last)}
    if keep.on_bulk is not None:
        newer = {number: sum(each > order[number] for each in bulk_order.values()) for number in gone_from_bulk}
        drained |= {number: note for number, note in gone_from_bulk.items() if newer[number] >= keep.on_bulk}
    for number in surplus(order, drained.keys() | superseded, [*spared, *last], keep.on_node):
        wait(0)
        # A drain of this step holds a lock on it; another process may delete it at the same time.
        with contextlib.suppress(OSError), FileLock.on(on_node[number]) as lock:
            if not lock.take(patience=0):
                continue
            marker = drained.get(number)
            if is_being_saved(on_node[number]) or (marker and not is_what_was_drained(on_node[number], marker, wait)):
                continue
            remove_step(on_node[number])


def _save_orders(
    on_node: Mapping[int, Path], node_markers: Mapping[int, Marker], complete: Mapping[int, tuple[Path, Marker]]
) -> tuple[dict[int, Stamp], dict[int, Stamp]]:
    """The stamps of the steps on the node and on shared storage, which can be different saves with the same number."""
    recorded = {("here", number): marker.saved for number, marker in node_markers.items() if marker.saved is not None}
    recorded |= {
        ("there", number): marker.saved for number, (_, marker) in complete.items() if marker.saved is not None
    }
    paths = {("here", number): path for number, path in on_node.items()}
    paths |= {("there", number): path for number, (path, _) in complete.items()}
    order = stamps(recorded, _save_times(paths, recorded), now_ns())
    return {number: order["here", number] for number in on_node}, {
        number: order["there", number] for number in complete
    }


def _complete_steps(steps: Mapping[int, Path]) -> dict[int, tuple[Path, Marker]]:
    """The drained steps that are complete, with their markers."""
    marked = {number: (path, markers.whole(path)) for number, path in steps.items()}
    return {number: (path, marker) for number, (path, marker) in marked.items() if marker is not None}


def _has_metadata(path: Path, marker: Marker) -> bool:
    """Whether `.metadata` in ``path`` is the one that was drained; True if it is on another node."""
    try:
        return markers.digest_of_metadata(path) == marker.digest
    except FileNotFoundError:
        return True
    except OSError:
        return False


def is_being_saved(step_dir: Path) -> bool:
    """Whether a save to ``step_dir`` is running, or has died."""
    return any(next(step_dir.glob(pattern), None) for pattern in _SAVE_IN_PROGRESS)


def is_what_was_drained(step_dir: Path, marker: Marker, wait: Callable[[int], None]) -> bool:
    """Whether all data files were drained: by inode, size and times, otherwise by their checksum. Raises
    ``OSError``."""
    names = [str(path.relative_to(step_dir)) for path in step_dir.rglob(_DATA)]
    identities = {name: look(step_dir / name) for name in names}
    named = marker.files.keys() | marker.sources.keys()
    return bool(identities) and identities.keys() <= named and same_data(step_dir, identities, marker, wait)


def same_data(step_dir: Path, files: Mapping[str, Identity], marker: Marker, wait: Callable[[int], None]) -> bool:
    """Whether these files, which ``marker`` names, hold the drained data. Raises ``OSError``."""
    unknown = [name for name, identity_now in files.items() if marker.sources.get(name) != identity_now]
    if any(name not in marker.files or files[name].size != marker.files[name].size for name in unknown):
        return False
    return all(digest_of(step_dir / name, wait) == marker.files[name] for name in unknown)


def _save_times(steps: Mapping[Key, Path], recorded: Collection[Key]) -> dict[Key, int]:
    """When the steps without a recorded stamp were saved: the mtime of `.metadata`, otherwise of the newest file."""
    times = {}
    for key, path in steps.items():
        if key in recorded:
            continue
        written = _mtime_ns(path / METADATA)
        if written is None:
            written = max((mtime_ns for mtime_ns in map(_mtime_ns, path.glob("*")) if mtime_ns is not None), default=0)
        times[key] = written
    return times


def _mtime_ns(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
