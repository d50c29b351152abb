"""The RAID levels that an array is made with: what each means for its members, its stripe and its data.

Everything that depends on the level asks here. A level that is not in ``LEVELS`` is somebody else's array.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Sequence


@dataclass(frozen=True)
class Level:
    """A level, by the name that the kernel, mdadm and the manifest have for it."""

    name: str
    data_members: Callable[[int], int]
    """Of so many members, how many hold distinct data: the width of a stripe."""
    redundant: bool
    """Whether the array serves, with all its data, after the loss of a member."""
    located: bool
    """Whether every byte lies on one member, found by counting chunks round the members (``array.stripe``)."""
    loss: str
    """What a lost member means for the data, for the remedy of a check."""
    remedy: str
    """What to do about a member that is missing."""
    fewest: int = 1
    pairs: bool = False
    """Whether the members come in pairs, so that their number is even."""
    chunked: bool = True
    """Whether a chunk applies."""
    title: str = ""
    """For people, where it is not the name in capitals."""
    create: tuple[str, ...] = ()
    """Arguments of ``mdadm --create`` that this level needs beside its name and chunk."""

    def __str__(self) -> str:
        return self.title or self.name.upper()

    def chunk(self, asked: int) -> int:
        """The chunk in bytes that the kernel shows for an array that was asked for with ``asked``."""
        return asked if self.chunked else 0

    def serves(self, present: Sequence[bool]) -> bool:
        """Whether members at these slots have all the data. Copies lie side by side: md's layout `near`."""
        groups = self.data_members(len(present))
        copies = len(present) // groups if groups else 0
        return bool(copies) and all(any(present[start : start + copies]) for start in range(0, len(present), copies))

    def lacks(self, members: int) -> str | None:
        """What an array of so many members lacks, or None where it can be made."""
        if members < self.fewest:
            return (
                "an array needs at least one drive"
                if self.fewest == 1
                else "%s needs at least %d" % (self, self.fewest)
            )
        return "%s needs an even number" % self if self.pairs and members % 2 else None

    def create_arguments(self, chunk_bytes: int) -> list[str]:
        """For ``mdadm --create``."""
        chunk = ["--chunk=%dK" % (chunk_bytes // 1024)] if self.chunked else []
        return ["--level=" + self.name, *chunk, *self.create]


RAID0 = Level(
    "raid0",
    data_members=lambda members: members,
    redundant=False,
    located=True,
    loss="its data is lost",
    remedy="put back what is missing. A drive that is lost takes the data with it: "
    "`ansible-playbook tunetool.node.replace_drive` rebuilds the scratch over another one",
)
SINGLE = Level(
    "single",
    data_members=lambda members: members,
    redundant=False,
    located=True,
    loss="the data of this volume is lost, and no other's",
    remedy="put the drive back. One that is lost takes its volume with it: "
    "`ansible-playbook tunetool.node.replace_drive` makes that volume again on another one",
    chunked=False,
    title="a volume on each drive",
)
"""No level of md: the file system lies on one drive itself. The manifest has it in place of an array, with the file
system's UUID."""
_BITMAP = "--bitmap=internal"
"""A write-intent bitmap: after a power cut or a drive's return only what was being written is compared, not every
block, which takes a drive of 3.84 TB hours. mdadm would ask where none is named."""
_STANDS_IN = "its data is on another member: the volume still serves, and the loss of that one too takes the data"
_REPLACED = (
    "put the drive back, or replace it without loss: `ansible-playbook tunetool.node.replace_drive` adds another one"
)
RAID1 = Level(
    "raid1",
    data_members=lambda members: 1,
    redundant=True,
    located=False,
    loss=_STANDS_IN,
    remedy=_REPLACED,
    fewest=2,
    chunked=False,
    create=(_BITMAP,),
)
RAID10 = Level(
    "raid10",
    data_members=lambda members: members // 2,
    redundant=True,
    located=False,
    loss=_STANDS_IN,
    remedy=_REPLACED,
    fewest=4,
    pairs=True,
    create=("--layout=n2", _BITMAP),
)
LEVELS = {level.name: level for level in (RAID0, RAID1, RAID10)}
BUILT_LEVELS = {**LEVELS, SINGLE.name: SINGLE}
"""What a manifest may name."""
DEFAULT = RAID0.name
ACCEPTED = (*(name[len("raid") :] for name in LEVELS), *LEVELS)
"""As an inventory may write a level: its number or its name."""
_NEAR_2 = 0x102
"""``md/layout`` of a RAID10: the near copies in its low byte, the far ones above (kernel: drivers/md/raid10.c)."""


def canonical(text: str) -> str:
    """The name of a level that an inventory writes in one of the ways of ``ACCEPTED``."""
    return text if text.startswith("raid") else "raid" + text


def with_layout(level: str, layout: int | str | None) -> str:
    """The level's name, with a layout that we never make: no level of ``LEVELS`` then.

    ``layout``: as ``md/layout`` has it, or as mdadm prints it.
    """
    ours = level != RAID10.name or layout in (None, _NEAR_2, "near=2")
    return level if ours else "%s of layout %s" % (level, layout)


def data_members(level: str, members: int) -> int:
    """The members that hold distinct data; all of them where the level is none of ours."""
    return LEVELS[level].data_members(members) if level in LEVELS else members


def copies(level: str) -> bool:
    """Whether md writes more than it is asked to, or reads elsewhere, under a level as the kernel names it."""
    return level != "linear" and (level not in LEVELS or LEVELS[level].redundant)


def needs_every_member(level: str) -> bool:
    """Whether an array of ours does not serve once a member is gone."""
    return level in LEVELS and not LEVELS[level].redundant
