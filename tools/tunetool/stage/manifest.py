"""The manifest beside a staged tree: its source, all entries with checksums, and what a tree has that it does not say.

A tree is compared by names, sizes and times; ``verify`` also reads the contents.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from tunetool import __version__
from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.node.common.files import replace_file
from tunetool.stage.pieces import Checksum
from tunetool.stage.tree import Entry, Kind

SCHEMA = "tunetool.stage/1"
_LARGEST = 8 << 30
"""Bytes, for millions of files."""
_DAMAGED = "stage it again with `--replace`"


@dataclass(frozen=True)
class Manifest:
    """``inode``: inode of the tree's directory, which identifies it since a rename keeps it. ``replaces``: inode of the
    directory that the tree replaces, None if there is none.

    ``digests``: for each file, one hexadecimal digest per ``piece_bytes`` bytes, or one for the whole file (None).
    """

    source: str
    inode: int
    replaces: int | None
    staged: str
    checksum: Checksum
    piece_bytes: int | None
    bytes: int
    entries: Sequence[Entry]
    digests: Sequence[Sequence[str]]


def write(manifest: Manifest, path: Path) -> None:
    """Replace the manifest at ``path`` atomically."""
    digests = iter(manifest.digests)
    document = {
        "schema": SCHEMA,
        "tool_version": __version__,
        **{name: getattr(manifest, name) for name in _HEAD},
        "entries": [_as_row(entry, next(digests) if entry.kind == "file" else None) for entry in manifest.entries],
    }
    # The JSON is ASCII; names that are not UTF-8 are kept as escapes. Without any, it is the text that the checksum is
    # of, so that 100,000 rows are written once; the line breaks and the checksum itself come after.
    text = json.dumps(document, separators=(",", ":"), sort_keys=True)
    checksum = documents.checksum(document) if "\\u" in text else _sha256(text)
    for row in _ROWS:
        text = text.replace(row, "\n" + row)
    text = f"{text[:-1]}{_CHECKSUM}{checksum}{_END}"
    # Others may write beside the copy, in /dev/shm for one.
    replace_file(str(path), text, follow=False)


def read(path: Path) -> Manifest | None:
    """The manifest at ``path``; None if there is none. Raises ``UsageProblem`` if it is damaged, has another schema or
    no checksum, as those of earlier versions."""
    try:
        text = documents.read_bytes(path, _LARGEST, os.O_NOFOLLOW).decode()
        whole = _as_written(text)
        # Of 100,000 files the strict reader takes half a second, which shows nothing more about a text of ours. Whoever
        # computes the checksum of another text may repeat a name in it, of which readers take different values.
        document = (
            json.loads(text, object_pairs_hook=documents.unrepeated) if whole else documents.parse(text, odd_names=True)
        )
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", _DAMAGED) from None
    except (ValueError, RecursionError):
        raise UsageProblem(f"`{path}` is damaged: it is not JSON", _DAMAGED) from None
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema != SCHEMA:
        raise UsageProblem(f"`{path}` has schema `{schema}`, this version reads `{SCHEMA}`", _DAMAGED)
    if documents.CHECKSUM not in document:
        raise UsageProblem(f"`{path}` has no checksum: an earlier version wrote it, or it was edited", _DAMAGED)
    if not whole and document[documents.CHECKSUM] != documents.checksum(document):
        raise UsageProblem(f"`{path}` was edited after it was written: its checksum does not match", _DAMAGED)
    try:
        rows = document["entries"]
        entries = [_entry(values) for values in map(_values, rows)]
        digests = [row["digests"] for row in rows if row["kind"] == "file"]
        for each in digests:
            _typed(each, list)
        for digest in itertools.chain.from_iterable(digests):
            _typed(digest, str)
        head = {name: _typed(document[name], kind) for name, kind in _HEAD.items()}
        if head["checksum"] not in get_args(Checksum):
            raise ValueError(head["checksum"])
    except (KeyError, TypeError, ValueError) as error:
        raise UsageProblem(f"`{path}` is damaged: {type(error).__name__} at {error}", _DAMAGED) from None
    return Manifest(entries=entries, digests=digests, **head)


_HEAD: dict[str, Any] = {
    "source": str,
    "inode": int,
    "replaces": (int, type(None)),
    "staged": str,
    "checksum": str,
    "piece_bytes": (int, type(None)),
    "bytes": int,
}
_FIELDS = Entry._fields[:6]
"""What of an entry is kept: ``path`` to ``target``."""
_values = operator.itemgetter(*_FIELDS)
_TYPES = (str, str, int, int, int, str)
_ROWS = ('{"digests"', '{"kind"')
"""How the row of a file and that of any other entry begin. In a text of JSON a quotation mark has a backslash."""
_CHECKSUM, _END = f',"{documents.CHECKSUM}":"', '"}\n'
_KINDS = frozenset(get_args(Kind))


def _as_row(entry: Entry, digests: Sequence[str] | None) -> dict[str, object]:
    row: dict[str, object] = dict(zip(_FIELDS, entry, strict=False))
    if digests is not None:
        row["digests"] = digests
    return row


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _as_written(text: str) -> bool:
    """Whether ``write`` wrote it, and nobody changed a byte of it since: its checksum is that of the text.

    False where its names have escapes: its checksum is then of what the text says.
    """
    body, _, checksum = text.rpartition(_CHECKSUM)
    return checksum == _sha256(body.replace("\n", "") + "}") + _END


def _entry(values: tuple[Any, ...]) -> Entry:
    if tuple(map(type, values)) != _TYPES:
        raise TypeError(f"{values!r}")
    entry = Entry(*values)
    if entry.kind not in _KINDS:
        raise ValueError(entry.kind)
    # The manifest may have been tampered with: accept only paths below the tree.
    if entry.path.startswith("/") or (".." in entry.path and ".." in entry.path.split("/")):
        raise ValueError(entry.path)
    return entry


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r}")
    return value


def rooted(entries: Sequence[Entry], root: Path) -> list[Entry]:
    """The same entries, their files read under ``root``."""
    return [entry._replace(origin=f"{root}/{entry.path}") for entry in entries]


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
