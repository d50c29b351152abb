"""Which ranks hold the same items, so that what several of them need lies in files of its own. Pure.

A rank that resumes needs the files that it wrote, and those with items that it holds too but another rank wrote. What
one rank alone holds is in other files, so a node needs few bytes of the others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

HOLDERS = "tunetool_holders"
"""An attribute of `.metadata`, which torch ignores: of each file whose items other ranks hold too, these ranks, as
``text_of`` has them. It is there where several ranks saved, and all of them by this version or a later one."""
TOGETHER = "tunetool_together"
"""An attribute of what ``DirectSavePlanner`` plans: the names of what several ranks hold. torch's writer, whose
files are not by who holds what, keeps it in `.metadata`."""
EVERY = "*"
"""All ranks."""
_MOST = 4
"""Groups of a rank that get files of their own. A mesh gives about as many as it has dimensions."""
_LONGEST = 1 << 16
"""Characters of a text. What takes more, such as ten thousand ranks without a pattern, is for all."""
_RUN = r"\d{1,9}(-\d{1,9}(:[1-9]\d{0,8})?)?"
_TEXT = re.compile(rf"\*|{_RUN}(,{_RUN})*")


class ByItem(NamedTuple):
    """The number of the group of each item, and by group the ranks; empty for what no other rank holds."""

    numbers: list[int]
    ranks: tuple[str, ...]


@dataclass(frozen=True)
class Groups:
    """The items of a rank's plan by who holds them: how many follow each other, and the ranks. Those that no other rank
    holds come first; their text is empty."""

    counts: tuple[int, ...]
    ranks: tuple[str, ...]

    def by_item(self) -> ByItem:
        return ByItem([number for number, count in enumerate(self.counts) for _ in range(count)], self.ranks)


def text_of(ranks: Iterable[int]) -> str:
    """The ranks in few characters: `0-7`, `0-1016:8`, `3,5`."""
    rest, runs = sorted(set(ranks)), list[str]()
    while rest:
        step = rest[1] - rest[0] if len(rest) > 1 else 1
        count = next((at for at in range(1, len(rest)) if rest[at] - rest[at - 1] != step), len(rest))
        if count == 2:
            # They may begin a longer run each.
            count = 1
        first, last = rest[0], rest[count - 1]
        runs.append(str(first) if count == 1 else f"{first}-{last}" + (f":{step}" if step > 1 else ""))
        rest = rest[count:]
    text = ",".join(runs)
    return text if len(text) <= _LONGEST else EVERY


def is_text(text: object) -> bool:
    """Whether ``ranks_of`` reads it."""
    # The match takes 150 bytes of memory for each character.
    return type(text) is str and len(text) <= _LONGEST and _TEXT.fullmatch(text) is not None


def holds(text: str, ranks: Collection[int]) -> bool:
    """Whether any of these ranks is among those of the text."""
    return text == EVERY or any(rank in held for held in _runs(text) for rank in ranks)


def last_of(text: str) -> int:
    """The highest rank that the text names; -1 if it names none."""
    return -1 if text == EVERY else max(held.stop - 1 for held in _runs(text))


def _runs(text: str) -> Iterator[range]:
    for run in text.split(","):
        bounds, _, step = run.partition(":")
        first, _, last = bounds.partition("-")
        yield range(int(first), int(last or first) + 1, int(step or 1))


class HolderSets:
    """The sets of ranks that hold items together, by numbers."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._texts: dict[int, str] = {}

    def number(self, ranks: tuple[int, ...]) -> int:
        """Sets are numbered in the order in which they are met first."""
        return self._numbers.setdefault(ranks, len(self._numbers))

    def groups(self, own: int, shared: Iterable[int]) -> Groups:
        """The groups of a rank with so many items of its own. ``shared``: the sets of the others, in ascending order of
        their numbers."""
        counts = Counter(shared)
        if len(counts) > _MOST:
            met = [ranks for ranks, number in self._numbers.items() if number in counts]
            return Groups((own, counts.total()), ("", text_of(rank for ranks in met for rank in ranks)))
        return Groups((own, *counts.values()), ("", *map(self._text, counts)))

    def _text(self, number: int) -> str:
        if not self._texts:
            self._texts = {at: text_of(ranks) for ranks, at in self._numbers.items()}
        return self._texts[number]


def files_of(ranks: Collection[int], writers: Mapping[str, int | None], holders: Mapping[str, str]) -> list[str]:
    """The files that these ranks need: those that they wrote, those of which it is not known who did, and those with
    items that they hold too. ``writers``: the rank that wrote each file; ``holders``: as in `.metadata`."""
    return sorted(
        name
        for name, writer in writers.items()
        if writer is None or writer in ranks or (name in holders and holds(holders[name], ranks))
    )
