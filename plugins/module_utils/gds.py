"""Which path I/O between files and GPU memory takes, or could take, and what stands in the way of the better ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .gds_facts import GdsFacts

NVIDIA_FS = "nvidia-fs"
P2PDMA = "p2pdma"
COMPAT = "compat"
OFF = "off"
AUTO = "auto"

MODES = (NVIDIA_FS, P2PDMA, COMPAT, OFF)
"""Best first."""


@dataclass(frozen=True)
class Blocker:
    """One thing that stands in the way of a path."""

    id: str
    found: str
    remedy: str
    curable: bool
    """The role gpudirect_storage can cure it: install, load, render, build anew, or ask for a reboot."""

    def __str__(self) -> str:
        return "%s: %s. hint: %s" % (self.id, self.found, self.remedy)


@dataclass(frozen=True)
class Path:
    """A way for the bytes, with everything that stands in it. No blocker: I/O can take it now."""

    mode: str
    blockers: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()
    """What does not stop it, but may slow it down or could not be seen."""


@dataclass(frozen=True)
class Decision:
    """The path, why, and all of them with their blockers, best first."""

    mode: str
    reasons: tuple[str, ...]
    paths: tuple[Path, ...]

    def path(self, mode: Optional[str] = None) -> Path:
        """The chosen path, or the one of ``mode``."""
        return next(path for path in self.paths if path.mode == (mode or self.mode))


class Impossible(Exception):
    """The mode that was asked for cannot be had here. The message is one line with every reason and a hint."""


def choose(facts: GdsFacts, forced: str = AUTO) -> Decision:
    """What the role sets up: the best path whose blockers it can cure. Raises ``Impossible`` for a forced one."""
    raise NotImplementedError


def current(facts: GdsFacts) -> Decision:
    """The path that I/O takes now: the best one without any blocker."""
    raise NotImplementedError
