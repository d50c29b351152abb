"""What a raw rung may read: ranges of the drives that hold this run's own data, found through file system and stripe.

Blank flash answers without its medium, and data of others must not be read.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.measure.ladder.budget import LEAST_RAW_BYTES, RAW_RANGES
from tunetool.measure.ladder.file_extents import FILE_SYSTEMS, Extent, NoExtents, read_extents
from tunetool.measure.metrics import MIB
from tunetool.node.array.stripe import NoStripe, Stripe, read_stripe
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size_binary

_PAGE = 4096
"""What is compared at each place: a multiple of every logical block."""
_COMPARED_EXTENTS = 8


class NoRawData(Exception):
    """No range of the drives holds this run's data with certainty. The message says why."""


@dataclass(frozen=True)
class Span:
    """Bytes of a block device."""

    device: str
    """Kernel name."""
    offset: int
    length: int


@dataclass(frozen=True)
class RawData:
    """The ranges, and what they were found from."""

    stripe: Stripe
    members: Mapping[str, tuple[Span, ...]]
    """By member's kernel name, in the order of slots."""
    array: tuple[Span, ...]
    extents: Mapping[str, Sequence[Extent]]
    """By path."""

    def bytes_of(self, name: str) -> int:
        """How much of a member is read, over and over."""
        return sum(span.length for span in self.members[name])


def no_raw(stack: BlockStack, is_root: bool | None = None) -> str | None:
    """Why nothing below the file system can be read, as far as that is known before anything is written."""
    try:
        read_stripe(stack.device or "")
    except NoStripe:
        return f"`{stack.directory}` lies on {stack.medium}: raw rungs need an md RAID0 straight under the file system"
    if not (os.geteuid() == 0 if is_root is None else is_root):
        return "only root may read the drives themselves"
    return None


def raw_data(stack: BlockStack, files: Sequence[Path]) -> tuple[RawData | None, str]:
    """Where ``files`` lie on the drives, proven by reading it both ways; or None, and why that is not known."""
    obstacle = no_raw(stack)
    if obstacle:
        return None, obstacle
    try:
        raw = find(stack, files)
        prove(raw)
    except (NoRawData, OSError) as error:
        return None, str(error)
    return raw, ""


def find(stack: BlockStack, files: Sequence[Path]) -> RawData:
    """Ranges for the drives of ``stack`` that ``files`` fill. Raises ``NoRawData``."""
    if stack.mount is None or stack.device is None:
        raise NoRawData(f"`{stack.directory}` lies on {stack.medium}, not on an array")
    try:
        stripe = read_stripe(stack.device)
    except NoStripe as error:
        raise NoRawData(f"{error}: its bytes cannot be found on drives") from None
    if stack.fs_type not in FILE_SYSTEMS:
        raise NoRawData(f"{stack.fs_type} does not say where on its device a file lies")
    if any(option.startswith("rtdev=") for option in stack.mount.options):
        raise NoRawData("the file system has a real-time device: its files lie there")
    strange = [name for name in stripe.members if name not in {leaf.name for leaf in stack.leaves}]
    if strange:
        raise NoRawData(f"member `{strange[0]}` is not a whole drive")
    extents = {}
    for path in files:
        try:
            extents[str(path)] = read_extents(str(path))
        except NoExtents as error:
            raise NoRawData(f"`{path.name}`: {error}") from None
    return choose(stripe, stack.device, extents)


def choose(stripe: Stripe, array: str, extents: Mapping[str, Sequence[Extent]]) -> RawData:
    """The largest ranges of each member, and of the array. Raises ``NoRawData`` where one has too few."""
    everything = [extent for file_extents in extents.values() for extent in file_extents]
    pieces: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(len(stripe.members))}
    for extent in everything:
        for part in stripe.ranges(extent.physical, extent.length):
            pieces[part.member].append((part.offset, part.length))
    members = {
        name: tuple(Span(name, *part) for part in largest(pieces[slot], RAW_RANGES))
        for slot, name in enumerate(stripe.members)
    }
    count = RAW_RANGES * len(stripe.members)
    whole = tuple(Span(array, *part) for part in largest([(e.physical, e.length) for e in everything], count))
    raw = RawData(stripe, members, whole, extents)
    for name in members:
        if raw.bytes_of(name) < LEAST_RAW_BYTES:
            raise NoRawData(
                f"the files are too small: they fill {format_size_binary(raw.bytes_of(name))} of `{name}` in whole "
                f"MiB, {format_size_binary(LEAST_RAW_BYTES)} are needed"
            )
    return raw


def largest(parts: Iterable[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The ``most`` largest of (offset, length), neighbours joined, cut to whole MiB at both ends; by offset."""
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(parts):
        if joined and sum(joined[-1]) == offset:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((offset, length))
    cut = []
    for offset, length in joined:
        first, last = -(-offset // MIB) * MIB, (offset + length) // MIB * MIB
        if last > first:
            cut.append((first, last - first))
    return sorted(sorted(cut, key=lambda part: -part[1])[:most])


def compared_places(raw: RawData) -> list[tuple[str, int, int, int]]:
    """(path, byte of the file, slot, byte of the member): on every member, at both ends of the largest extents."""
    stripe, compared = raw.stripe, []
    owned = [(path, extent) for path, extents in raw.extents.items() for extent in extents]
    for path, extent in sorted(owned, key=lambda each: -each[1].length)[:_COMPARED_EXTENTS]:
        first = -(-extent.physical // stripe.chunk_bytes) * stripe.chunk_bytes
        end = (extent.physical + extent.length) // stripe.chunk_bytes * stripe.chunk_bytes
        row = stripe.chunk_bytes * len(stripe.members)
        for address in (
            *range(first, min(first + row, end), stripe.chunk_bytes),
            *range(max(first, end - row), end, stripe.chunk_bytes),
        ):
            compared.append((path, extent.logical + address - extent.physical, *stripe.locate(address)))
    return list(dict.fromkeys(compared))


def prove(raw: RawData, device_of: Mapping[str, str] | None = None) -> None:
    """Read the same bytes from the file and from the members, and compare. Raises ``NoRawData``."""
    for path, logical, slot, offset in compared_places(raw):
        name = raw.stripe.members[slot]
        device = (device_of or {}).get(name, f"/dev/{name}")
        if _page(path, logical) != _page(device, offset):
            raise NoRawData(f"byte {offset} of `{name}` is not what `{Path(path).name}` holds there")


def unmoved(raw: RawData) -> bool:
    """Whether the files still lie where they lay."""
    try:
        return all(read_extents(path) == list(extents) for path, extents in raw.extents.items())
    except NoExtents:
        return False


def _page(path: str, offset: int) -> bytes:
    """A page as the drive has it now: read-only, past the page cache."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    try:
        with mmap.mmap(-1, _PAGE) as page:
            count = os.preadv(handle, [page], offset)
            return page[:count]
    finally:
        os.close(handle)
