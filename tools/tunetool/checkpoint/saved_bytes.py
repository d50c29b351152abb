"""Whether a whole data file of ``DirectWriter`` still holds the bytes of its save: in one pass, and without torch.

Tensors are held against the table at the file's end, what is around them against what is written there, and objects
against their checksums in `.metadata`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tunetool.checkpoint import sums_table
from tunetool.checkpoint.checksums import Saved, Turns, Verified, hasher
from tunetool.checkpoint.checksums import key_of as sums_key_of
from tunetool.checkpoint.items import archive
from tunetool.checkpoint.raw_bytes import ITEM_SIZES
from tunetool.checkpoint.source import Files
from tunetool.checkpoint.sums_table import Table
from tunetool.checkpoint.transfer import CopiedFile, pieces_of
from tunetool.errors import CannotJudge

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

_ANOTHER = "load another checkpoint, and look at the health of the drives: `tunetool verify`"


class SavedItem(NamedTuple):
    """An item of a file as `.metadata` describes it: its range, the tensor's name and offset, and either the checksum
    of all its bytes, or dtype and shape of the tensor whose checksums are in the file's table."""

    offset: int
    length: int
    name: str
    at: Sequence[int] | None
    sum: str | None
    dtype: str
    shape: Sequence[int]


def items_in(metadata: Metadata, sums: Mapping[Any, str], files: Mapping[str, object]) -> dict[str, list[SavedItem]]:
    """The items in these files, by file. ``sums``: those that the metadata has."""
    items: dict[str, list[SavedItem]] = {name: [] for name in files}
    for index, stored in (metadata.storage_data or {}).items():
        if stored.relative_path not in items:
            continue
        described, at = metadata.state_dict_metadata.get(index.fqn), tuple(index.offset or ())
        chunks = getattr(described, "chunks", ())
        shape = next((tuple(chunk.sizes) for chunk in chunks if tuple(chunk.offsets) == at or not at), ())
        dtype = str(described.properties.dtype).removeprefix("torch.") if chunks else ""
        where = stored.offset, stored.length, index.fqn, None if index.offset is None else at
        items[stored.relative_path].append(SavedItem(*where, sums.get(sums_key_of(index)), dtype, shape))
    return items


class _Range(NamedTuple):
    """A range of the file. ``feed`` takes its bytes in order, each time with the position in it."""

    start: int
    stop: int
    feed: Callable[[int, memoryview], None]
    end: Callable[[], None] = lambda: None


def check_file(
    directory: Path,
    name: str,
    items: Sequence[SavedItem],
    save: str | None,
    wait: Callable[[int], None] = lambda count: None,
    take: Callable[[memoryview], object] = lambda piece: None,
) -> CopiedFile:
    """Read the file ``name`` past the page cache; returns its size and checksum. ``save``: the token of the save;
    ``take`` gets the bytes, in order, each piece before it is checked.

    Raises ``CannotJudge`` for the first bytes that are not as saved, with tensor and file; ``OSError``.
    """
    ranges = sorted(_ranges(directory, name, items, save), key=lambda each: each.start)
    for before, after in itertools.pairwise(ranges):
        if after.start < before.stop:
            raise CannotJudge(f"`{directory / name}`: two items overlap at {after.start}", "the metadata is damaged")
    hashed, position, number = hasher(), 0, 0
    for piece in pieces_of(directory / name, wait):
        take(piece)
        hashed.update(piece)
        end = position + len(piece)
        while number < len(ranges) and ranges[number].start < end:
            each = ranges[number]
            first = max(each.start, position)
            each.feed(first - each.start, piece[first - position : min(each.stop, end) - position])
            if each.stop > end:
                break
            each.end()
            number += 1
        position = end
    if number < len(ranges):
        raise CannotJudge(f"`{directory / name}` has {position} bytes: it is cut short", _ANOTHER)
    return CopiedFile(position, hashed.hexdigest())


def _ranges(directory: Path, name: str, items: Sequence[SavedItem], save: str | None) -> Iterator[_Range]:
    table: Table | None = None
    for item in items:
        if not item.length:
            continue
        if item.sum is not None:
            yield _object(directory / name, item, item.sum)
            continue
        if table is None:
            files = Files(directory, contained=True)
            try:
                table = sums_table.read(files, name, item.name, save)
            finally:
                files.close()
        yield from _tensor(directory, name, item, table)


def _object(path: Path, item: SavedItem, saved: str) -> _Range:
    hashed = hasher()

    def end() -> None:
        if hashed.hexdigest() != saved:
            raise CannotJudge(
                f"`{item.name}` is damaged: its {item.length} bytes from {item.offset} on in `{path}` have checksum "
                f"{hashed.hexdigest()}, and were saved with {saved}",
                _ANOTHER,
            )

    return _Range(item.offset, item.offset + item.length, lambda _, piece: hashed.update(piece), end)


def _tensor(directory: Path, name: str, item: SavedItem, table: Table) -> Iterator[_Range]:
    stop = item.offset + item.length
    if item.dtype in ITEM_SIZES:
        count = math.prod(item.shape) * ITEM_SIZES[item.dtype]
        place = item.offset + len(archive(item.dtype, tuple(item.shape), count).head)
    else:
        place = table.place_within(item.offset, stop) or stop
    row = table.row(place)
    if row is None or row.key != sums_table.key_of(item.name, item.at):
        raise CannotJudge(
            f"`{directory / name}` holds another tensor, or one of another save, where `{item.name}` must be",
            "data files were swapped or replaced: load another checkpoint",
        )
    around = archive(item.dtype, tuple(item.shape), row.length)
    if around.length != item.length or place - item.offset != len(around.head):
        raise CannotJudge(f"`{directory / name}`: `{item.name}` has another shape in `.metadata`", _ANOTHER)
    yield _written(directory / name, item, item.offset, around.head)
    if row.length:
        saved = Saved(row.sums, row.length, item.name, directory, name, place)
        yield _Range(place, place + row.length, Verified(saved, Turns()).feed)
    yield _written(directory / name, item, stop - around.tail_bytes, around.tail)


def _written(path: Path, item: SavedItem, start: int, expected: bytes) -> _Range:
    def feed(at: int, piece: memoryview) -> None:
        if piece != expected[at : at + len(piece)]:
            raise CannotJudge(
                f"`{path}`: `{item.name}` is damaged: what is around its data is not what was saved", _ANOTHER
            )

    return _Range(start, start + len(expected), feed)
