"""Is what lies there still what the manifest says? By names, sizes and times alone; reading is `verify`'s."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from tunetool.stage.manifest import Manifest
from tunetool.stage.tree import Entry

_SECOND = 10**9


def listing(root: Path) -> Iterator[Entry]:
    """What lies under ``root`` as it is, links not followed."""
    waiting = [""]
    while waiting:
        place = waiting.pop()
        with os.scandir(root / place) as found:
            for each in found:
                path = f"{place}/{each.name}" if place else each.name
                status = each.stat(follow_symlinks=False)
                if each.is_symlink():
                    yield Entry(path, "link", target=os.readlink(each.path))
                elif each.is_dir(follow_symlinks=False):
                    waiting.append(path)
                    yield Entry(path, "directory")
                else:
                    # What is neither has no place in a staged tree; its size tells it from the file it replaced.
                    size = status.st_size if stat.S_ISREG(status.st_mode) else -1
                    yield Entry(path, "file", size, status.st_mtime_ns, origin=each.path)


def changes(root: Path, manifest: Manifest, *, times: bool) -> dict[str, str]:
    """Path and what is wrong with it, for everything under ``root`` that is not as the manifest says."""
    wanted = {entry.path: entry for entry in manifest.entries if entry.path != "."}
    found = {entry.path: entry for entry in listing(root)}
    wrong = {path: "is missing" for path in wanted if path not in found}
    for path, entry in found.items():
        said = _difference(wanted.get(path), entry, times)
        if said:
            wrong[path] = said
    return dict(sorted(wrong.items()))


def _difference(wanted: Entry | None, found: Entry, times: bool) -> str | None:
    if wanted is None:
        return "was added"
    if wanted.kind != found.kind:
        return f"is a {found.kind}, not a {wanted.kind}"
    if wanted.target != found.target:
        return f"leads to `{found.target}`, not to `{wanted.target}`"
    if wanted.size != found.size:
        return f"has {found.size} bytes, not {wanted.size}"
    return (
        "was changed" if times and wanted.kind == "file" and not _same_time(wanted.mtime_ns, found.mtime_ns) else None
    )


def _same_time(wanted: int, found: int) -> bool:
    # Some file systems keep whole seconds, FAT every other one.
    return wanted == found or (found % _SECOND == 0 and abs(wanted - found) < 2 * _SECOND)


def first(wrong: dict[str, str], name: str) -> str:
    """The first of them, in words, and how many more."""
    path, said = next(iter(wrong.items()))
    more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
    return f"`{name}/{path}` {said}{more}"
