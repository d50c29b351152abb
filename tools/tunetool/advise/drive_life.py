"""How long drives last by their rating, when checkpoints and replicas are written to them. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tunetool.advise.checkpoint import Job, State
from tunetool.advise.node_loss import DAY, Copies, LostNode, lost_node
from tunetool.errors import UsageProblem
from tunetool.node.health.wear_forecast import days_left

if TYPE_CHECKING:
    from tunetool.inspect.model import Inspection

YEAR = 365.25 * DAY
WARRANTY = 5 * 365 * DAY
"""What vendors of drives for data centres usually give, and what their DWPD counts for."""


@dataclass(frozen=True)
class Drives:
    """The drives of one node, over which writes are spread evenly, as a RAID0 does."""

    count: int
    size: int | None
    """Of one; None: unknown."""
    rated: float
    """Bytes that may be written to one in its life."""
    used: float | None = None
    """Share of its life that the most worn one has used, by its own account; None: unknown, taken as new."""
    warranty: float = WARRANTY
    """Seconds."""


@dataclass(frozen=True)
class Life:
    """What writes cost the drives' life."""

    bytes_a_day: float
    """Written to all drives of a node."""
    drive_writes_a_day: float | None
    """The same in sizes of the drives; None where these are unknown."""
    years: float
    """Until the rating is used up, from now on."""
    outlives_warranty: bool
    """Whether the rating of a new drive lasts as long as its warranty."""


@dataclass(frozen=True)
class Guarded:
    """One kind of checkpoint against the loss of a node, and what that costs the drives."""

    lost: LostNode
    life: Life | None
    """None where the drives' rating is unknown."""


def rated_bytes(dwpd: float, size: int, warranty: float = WARRANTY) -> float:
    """What a rating in drive writes a day allows one drive over its warranty."""
    return dwpd * size * warranty / DAY


def life(bytes_a_day: float, drives: Drives) -> Life:
    """How long the ``drives`` last by their rating. ``bytes_a_day``: above zero."""
    rated = drives.count * drives.rated
    new, left = (DAY * days_left(rated * (1 - used), bytes_a_day) for used in (0.0, drives.used or 0.0))
    writes = bytes_a_day / (drives.count * drives.size) if drives.size else None
    return Life(bytes_a_day, writes, left / YEAR, new >= drives.warranty)


def guard(
    job: Job, states: Sequence[State], copies: Copies | None, drives: Drives | None
) -> tuple[Guarded, ...] | None:
    """By state, what the loss of a node costs, and how long the drives last; None where copies go nowhere."""
    if copies is None:
        return None
    lost = [lost_node(job, state, copies) for state in states]
    return tuple(Guarded(each, None if drives is None else life(each.written_a_day, drives)) for each in lost)


def in_inspection(shown: Inspection) -> tuple[int, int, float | None]:
    """Of the data drives that ``tunetool inspect`` saw: how many, the size of the smallest, and the largest share of
    life used, if any says it. Raises ``UsageProblem`` where there are none."""
    drives = [each for each in shown.drives if each.data]
    if not drives:
        raise UsageProblem(
            "`--inspection` shows no data drives", "give `--drives` and `--drive-size`, or another node's"
        )
    used = [each.health.used_percent for each in drives if each.health and each.health.used_percent is not None]
    return len(drives), min(each.size_bytes for each in drives), max(used) / 100 if used else None
