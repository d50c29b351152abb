"""Which path I/O between files and GPU memory takes, or could take, and what blocks the better ones.

Pure: ``facts`` reads. What each blocker rests on is in ``requirements`` and docs/concepts/gpudirect-storage.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

from .facts import GdsFacts
from .requirements import RULES, Blocker, notes_on

NVIDIA_FS = "nvidia-fs"
P2PDMA = "p2pdma"
COMPAT = "compat"
OFF = "off"
AUTO = "auto"

MODES = (NVIDIA_FS, P2PDMA, COMPAT, OFF)
"""Best first."""

_SAYS = {
    NVIDIA_FS: "drives and GPUs exchange data directly, through nvidia-fs",
    P2PDMA: "drives and GPUs exchange data directly, through the kernel's P2PDMA",
    COMPAT: "cuFile moves data through memory of the host",
    OFF: "nothing is set up",
}

__all__ = ["MODES", "Blocker", "Decision", "GdsFacts", "Impossible", "Path", "choose", "current"]


@dataclass(frozen=True)
class Path:
    """A path that I/O can take, with what blocks it. Without blockers I/O can take it now."""

    mode: str
    blockers: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()
    """What does not stop it, but may slow it down or could not be seen."""

    @property
    def curable(self) -> bool:
        """Whether the role can bring it about."""
        return all(blocker.curable for blocker in self.blockers)


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
    paths = all_paths(facts)
    if forced == AUTO:
        return _decide(paths, next(path for path in paths if path.curable and not _idle(path)))
    if forced not in MODES:
        raise Impossible("`gpudirect_storage_mode` is `%s`. hint: auto, %s" % (forced, ", ".join(MODES)))
    path = next(path for path in paths if path.mode == forced)
    stuck = [blocker for blocker in path.blockers if not blocker.curable]
    if stuck:
        raise Impossible(
            "`gpudirect_storage_mode: %s` cannot be had here: %s. hint: %s; or `gpudirect_storage_mode: auto`"
            % (
                forced,
                "; ".join("%s (`%s`)" % (blocker.found, blocker.id) for blocker in stuck),
                "; ".join(dict.fromkeys(blocker.remedy for blocker in stuck)),
            )
        )
    return _decide(paths, path, asked=True)


def _idle(path: Path) -> bool:
    """Installing libcufile for bounce buffers alone gains nothing: programs that want that bring their own."""
    return path.mode == COMPAT and any(blocker.id == "libcufile" for blocker in path.blockers)


def current(facts: GdsFacts) -> Decision:
    """The path that I/O takes now: the best one without any blocker."""
    paths = all_paths(facts)
    return _decide(paths, next(path for path in paths if not path.blockers))


def all_paths(facts: GdsFacts) -> tuple[Path, ...]:
    """Every path with its blockers and notes, best first. ``off`` has none."""
    paths = []
    for mode in MODES:
        answers = [rule.judge(facts) for rule in RULES if mode in rule.modes]
        blockers = tuple(answer for answer in answers if answer is not None)
        paths.append(Path(mode, blockers, () if mode == OFF else notes_on(mode, facts)))
    return tuple(paths)


def _decide(paths: tuple[Path, ...], path: Path, asked: bool = False) -> Decision:
    reasons = ["%s: %s" % (path.mode, _SAYS[path.mode]) + (", as asked for" if asked else "")]
    reasons += ["%s still needs %s" % (path.mode, blocker) for blocker in path.blockers]
    reasons += ["%s, to be known: %s" % (path.mode, note) for note in path.notes]
    if not asked:
        for better in paths[: paths.index(path)]:
            # What the role could cure is no reason against a path, while something else is.
            stuck = [blocker for blocker in better.blockers if not blocker.curable] or list(better.blockers)
            reasons += ["no %s, %s" % (better.mode, blocker) for blocker in stuck]
    return Decision(path.mode, tuple(_without_doubles(reasons, paths)), paths)


def _without_doubles(reasons: list[str], paths: tuple[Path, ...]) -> list[str]:
    """Without a GPU every path is blocked by that alone: say it once."""
    for blocker in paths[0].blockers:
        if blocker.id == "gpu":
            return [reasons[0], str(blocker)]
    return reasons
