"""Compares a tree with its manifest by names, sizes and times; ``verify`` also reads the contents."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tunetool.stage.manifest import Manifest
from tunetool.stage.tree import Entry

_SECOND = 10**9


def listing(root: Path) -> Iterator[Entry]:
    """All entries below ``root``; links are not followed."""
    waiting = [""]
    while waiting:
        directory = waiting.pop()
        with os.scandir(root / directory) as entries:
            for entry in entries:
                path = f"{directory}/{entry.name}" if directory else entry.name
                status = entry.stat(follow_symlinks=False)
                if entry.is_symlink():
                    yield Entry(path, "link", target=os.readlink(entry.path))
                elif entry.is_dir(follow_symlinks=False):
                    waiting.append(path)
                    yield Entry(path, "directory")
                else:
                    # Other kinds do not belong in a staged tree; size -1 makes them differ from the file that they
                    # replaced.
                    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                    yield Entry(path, "file", size, status.st_mtime_ns, origin=entry.path)


def changes(root: Path, manifest: Manifest, *, times: bool) -> dict[str, str]:
    """The differences between ``root`` and the manifest: a description by path. ``times``: compare mtimes, too."""
    wanted = {entry.path: entry for entry in manifest.entries if entry.path != "."}
    present = {entry.path: entry for entry in listing(root)}
    differences = {path: "is missing" for path in wanted if path not in present}
    for path, entry in present.items():
        was = wanted.get(path)
        # Most files are as they were: path, kind, size and time in one step.
        if was is not None and was[:4] == entry[:4] and was.target == entry.target:
            continue
        difference = _difference(was, entry, times)
        if difference:
            differences[path] = difference
    return dict(sorted(differences.items()))


def _difference(wanted: Entry | None, present: Entry, times: bool) -> str | None:
    if wanted is None:
        return "was added"
    if wanted.kind != present.kind:
        return f"is a {present.kind}, not a {wanted.kind}"
    if wanted.target != present.target:
        return f"leads to `{present.target}`, not to `{wanted.target}`"
    if wanted.size != present.size:
        return f"has {present.size} bytes, not {wanted.size}"
    return (
        "was changed" if times and wanted.kind == "file" and not _same_time(wanted.mtime_ns, present.mtime_ns) else None
    )


def _same_time(wanted: int, present: int) -> bool:
    # Some file systems keep whole seconds, FAT every other one.
    return wanted == present or (present % _SECOND == 0 and abs(wanted - present) < 2 * _SECOND)


def first(differences: dict[str, str], name: str) -> str:
    """The first difference, and the number of further ones, as text."""
    path, difference = next(iter(differences.items()))
    more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
    return f"`{name}/{path}` {difference}{more}"
