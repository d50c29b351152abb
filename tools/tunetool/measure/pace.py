"""How many rounds a call makes: as many as it asks for, or a few, and more while figures are undecided and time is
left. Pure but for the clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tunetool.measure.statistics import FEW, LOOKS
from tunetool.node.units import format_count

QUICK_LOOKS = (FEW, *(count for count, _ in LOOKS))
"""After how many rounds a quick call may end because all is decided. After others it is not asked: a figure that is
looked at until it happens to be on one side would be there sooner or later."""
QUICK_SECONDS = 300.0
"""Of a quick call from its start on, unless ``--budget`` says otherwise."""


@dataclass(frozen=True)
class Pace:
    """What a call asks for."""

    rounds: int
    """At most."""
    budget: float | None = None
    """Seconds from the start of the call on: a round that would end later does not begin. None: no limit."""
    looks: Sequence[int] = ()
    """After how many rounds it may end because all is decided; none: it makes all of them."""

    @property
    def fewest(self) -> int:
        """The rounds that it makes where the time suffices."""
        return self.looks[0] if self.looks else self.rounds

    def deadline(self, began: float) -> float | None:
        """On the clock of ``began``, the start of the call; None without a limit."""
        return None if self.budget is None else began + self.budget

    def announcement(self) -> list[str]:
        """Lines: what makes the rounds more, or fewer."""
        more = f"more than {self.fewest} rounds, up to {self.rounds}, while figures are undecided"
        late = f"no further round that would end {self.budget:.0f} s after the start" if self.budget is not None else ""
        return ["; ".join(filter(None, (more if self.looks else "", late)))] if self.looks or late else []


def pace_of(rounds: int | None, budget: float | None, thorough: bool, thorough_rounds: int) -> Pace:
    """What the options ask for. A number of rounds is exact; ``thorough``: ``thorough_rounds`` of them."""
    if rounds is not None or thorough:
        return Pace(rounds or thorough_rounds, budget)
    return Pace(QUICK_LOOKS[-1], QUICK_SECONDS if budget is None else budget, QUICK_LOOKS)


def rounds_of(
    pace: Pace,
    deadline: float | None = None,
    undecided: Callable[[], Sequence[str]] = tuple,
    say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """The numbers of its rounds. What every benchmark does before or after a round belongs here.

    ``undecided``: names of the figures that its rounds so far do not decide. The first round always begins; a later one
    not where it would end after ``deadline``, taking as long as the one before it.
    """
    took = 0.0
    for number in range(1, pace.rounds + 1):
        began = clock()
        if number > 1 and deadline is not None and began + took > deadline:
            say(f"the time is up after {number - 1} of {'at most ' * bool(pace.looks)}{pace.rounds} rounds")
            return
        yield number
        took = clock() - began
        if number in pace.looks and number < pace.rounds:
            left = len(undecided())
            if not left:
                return
            further = next(look for look in pace.looks if look > number)
            say(f"{number} rounds do not decide {format_count(left, 'figure')}: up to {further}, if the time suffices")
