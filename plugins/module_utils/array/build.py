"""Decides from facts how the array that is asked for comes to be, or why it does not. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Mapping, Sequence

from ..common.drift import Difference, Drifted
from ..common.refusal import Refusal
from ..machine.drives import Drive
from .drift import GIVE_UP, name_hint
from .md_arrays import Array, Step, Superblock, Wanted, decide


class ArrayRefusal(Refusal):
    """A refusal whose line names the array itself."""


@dataclass(frozen=True)
class Facts:
    """What is asked for and what is there, read at one time."""

    wanted: Wanted
    """With the name that its members carry, where that is to be adopted."""
    members: tuple[Drive, ...]
    """In slot order."""
    doomed: tuple[Drive, ...]
    """Members that an applied plan lets us wipe; they count as blank."""
    superblocks: Mapping[str, Superblock]
    arrays: Sequence[Array]
    serials: Mapping[str, str]
    """The drives' serials by kernel name, for messages."""
    differences: Sequence[Difference] | None = None
    """Of a built node from what is asked; None where nothing was built, or where it is given up."""
    held: str = ""
    """What the doomed drives hold, a line each."""
    volume: str = ""
    """The name of the volume on it, where it is one of several: such a one is not adopted."""

    @property
    def spared(self) -> list[Drive]:
        """Members that must be blank already."""
        return [drive for drive in self.members if drive not in self.doomed]


def decide_build(facts: Facts) -> tuple[Step, list[Difference]]:
    """What to do, and the differences that are mended by it.

    Raises ``Drifted`` on a built node where one cannot be mended, and ``ArrayRefusal``: nothing was changed then.
    """
    doomed = {drive.name for drive in facts.doomed}
    stopped = {array for drive in facts.doomed for array in drive.idle_arrays}
    step = decide(
        facts.wanted,
        {name: block for name, block in facts.superblocks.items() if name not in doomed},
        [array for array in facts.arrays if array.device not in stopped],
        facts.serials,
    )
    making = step.action == "create"
    differences = [] if making else list(facts.differences or ())
    if facts.differences is not None and not making:
        if step.action == "refuse" and all(difference.mended for difference in differences):
            reasons, hint = "; ".join(step.reasons), "look at `mdadm --examine`"
            differences.append(Difference("array", "as asked", reasons, mended=False, hint=hint))
        if not all(difference.mended for difference in differences):
            raise Drifted(differences)
    if step.action == "refuse" or (facts.doomed and not making):
        reasons = "; ".join(step.reasons) or "a plan cannot wipe members of an array that stays"
        cure = "put back what is missing, or ask for what is there%s. %s" % (_by_name(facts, step), GIVE_UP)
        emptied = [each for each in facts.arrays if making and each.name == facts.wanted.name and each.empty]
        if emptied:
            # What lay on it is gone with its drives: there is nothing to give up.
            cure = "then run it again"
        raise ArrayRefusal(
            "array `%s` is not as asked: %s. hint: nothing was changed; %s" % (facts.wanted.name, reasons, cure)
        )
    return step, differences


def _by_name(facts: Facts, step: Step) -> str:
    """How to ask for an array that is as asked but for its name."""
    if len(step.reasons) != 1 or not step.reasons[0].startswith("name:"):
        return ""
    if not facts.volume:
        return ", with `raid_array_adopt: true` under its own name"
    found = next(block.name for name, block in facts.superblocks.items() if name in facts.wanted.members)
    return ": " + name_hint(facts.wanted.name, found, facts.volume)
