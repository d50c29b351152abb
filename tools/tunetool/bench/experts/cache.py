"""An LRU cache of experts: which slot of memory holds which. Pure; whoever has the memory reads what is missing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Access(NamedTuple):
    """A wanted expert."""

    expert: int
    slot: int
    is_hit: bool
    """False: it has to be read into the slot first."""


class ExpertCache:
    """``slots`` experts, of which the one that was not wanted for longest goes first.

    All experts of a step are known at once: those that are there stay, and the missing ones replace others. A step
    wants no more than ``slots``; with 0 slots nothing is kept, and each step begins with the first slot again.
    """

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._held: OrderedDict[int, int] = OrderedDict()
        """Slots by expert, the one that goes first at the front."""

    def take(self, wanted: Sequence[int]) -> list[Access]:
        """What a step wants, all different, and where each is; what was there already first."""
        if not self._slots:
            return [Access(expert, slot, False) for slot, expert in enumerate(wanted)]
        there = [expert for expert in wanted if expert in self._held]
        missing = [expert for expert in wanted if expert not in self._held]
        for expert in there:
            self._held.move_to_end(expert)
        for expert in missing:
            self._held[expert] = self._slot()
        return [Access(expert, self._held[expert], expert in there) for expert in [*there, *missing]]

    def fill(self, order: Iterable[int]) -> None:
        """Let the experts of ``order`` take what is free; they go before all others."""
        for expert in order:
            if len(self._held) == self._slots:
                return
            if expert not in self._held:
                self._held[expert] = len(self._held)
                self._held.move_to_end(expert, last=False)

    def held(self) -> list[tuple[int, int]]:
        """Experts and their slots, the one that goes first at the front."""
        return list(self._held.items())

    def _slot(self) -> int:
        # Slots are taken one after the other, and none is ever given back.
        return self._held.popitem(last=False)[1] if len(self._held) == self._slots else len(self._held)
