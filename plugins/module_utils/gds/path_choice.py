"""Which path I/O between files and GPU memory takes, or could take, and what blocks the better ones.

Pure, but for ``check_mode``: ``facts`` reads. What each blocker rests on is in ``requirements`` and
docs/concepts/gpudirect-storage.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Mapping, Optional

from ..common.check_result import SKIP, Check, judged
from ..common.refusal import Expected
from .facts import GdsFacts, read_gds_facts
from .requirements import RULES, Blocker, notes_on

NVIDIA_FS = "nvidia-fs"
P2PDMA = "p2pdma"
COMPAT = "compat"
OFF = "off"
AUTO = "auto"
CHECK_ID = "gds.mode"

MODES = (NVIDIA_FS, P2PDMA, COMPAT, OFF)
"""Best first."""

_SAYS = {
    NVIDIA_FS: "drives and GPUs exchange data directly, through nvidia-fs",
    P2PDMA: "drives and GPUs exchange data directly, through the kernel's P2PDMA",
    COMPAT: "cuFile moves data through memory of the host",
    OFF: "nothing is set up",
}


@dataclass(frozen=True)
class Path:
    """A path that I/O can take, with what blocks it. Without blockers I/O can take it now."""

    mode: str
    blockers: tuple[Blocker, ...] = ()
    notes: tuple[str, ...] = ()
    """Facts that do not block it, but may slow it down or are unknown."""

    @property
    def curable(self) -> bool:
        """Whether the role can remove all of its blockers."""
        return all(blocker.curable for blocker in self.blockers)


@dataclass(frozen=True)
class Decision:
    """The chosen path, the reasons, and all paths with their blockers, best first."""

    mode: str
    reasons: tuple[str, ...]
    paths: tuple[Path, ...]

    def path(self, mode: Optional[str] = None) -> Path:
        """The chosen path, or the one of ``mode``."""
        return next(path for path in self.paths if path.mode == (mode or self.mode))


class Impossible(Expected):
    """The requested mode is not possible here. The message is one line with every reason and a hint."""


def choose(facts: GdsFacts, forced: str = AUTO) -> Decision:
    """The path to set up: the best one whose blockers the role can remove. Raises ``Impossible`` for a forced one."""
    paths = all_paths(facts)
    if forced == AUTO:
        return _decide(paths, next(path for path in paths if path.curable and not _idle(path)))
    if forced not in MODES:
        raise Impossible("`gpudirect_storage_mode` is `%s`. hint: auto, %s" % (forced, ", ".join(MODES)))
    path = next(path for path in paths if path.mode == forced)
    stuck = [blocker for blocker in path.blockers if not blocker.curable]
    if stuck:
        raise Impossible(
            "`gpudirect_storage_mode: %s` is not possible here: %s. hint: %s; or `gpudirect_storage_mode: auto`"
            % (
                forced,
                "; ".join("%s (`%s`)" % (blocker.found, blocker.id) for blocker in stuck),
                "; ".join(dict.fromkeys(blocker.remedy for blocker in stuck)),
            )
        )
    return _decide(paths, path, asked=True)


def _idle(path: Path) -> bool:
    """Whether setting up ``compat`` gains nothing: it would install libcufile, which programs that want it bring
    along."""
    return path.mode == COMPAT and any(blocker.id == "libcufile" for blocker in path.blockers)


def current(facts: GdsFacts) -> Decision:
    """The path that I/O takes now: the best one without any blocker."""
    paths = all_paths(facts)
    return _decide(paths, next(path for path in paths if not path.blockers))


def check_mode(manifest: Mapping[str, Any], root: str = "/") -> Check:
    """Whether I/O still takes the path that was set up. Looks at the volume, unless that is none."""
    mode = manifest["gds"]["mode"]
    if mode == OFF:
        return Check(CHECK_ID, SKIP, "nothing was set up", "off")
    now = current(read_gds_facts(root, manifest["filesystem"]["mount_point"]))
    blockers = now.path(mode).blockers
    state = now.mode
    if blockers:
        state += ": " + "; ".join("%s (`%s`)" % (blocker.found, blocker.id) for blocker in blockers)
    remedy = "; ".join(dict.fromkeys(blocker.remedy for blocker in blockers)) or "run `tunetool provision`"
    return judged(CHECK_ID, MODES.index(now.mode) <= MODES.index(mode), mode, state, remedy)


def all_paths(facts: GdsFacts) -> tuple[Path, ...]:
    """Every path with its blockers and notes, best first. ``off`` has none."""
    paths = []
    for mode in MODES:
        answers = [rule.judge(facts) for rule in RULES if mode in rule.modes]
        blockers = tuple(answer for answer in answers if answer is not None)
        notes = () if mode == OFF else [note for each in facts.volumes for note in notes_on(mode, each)]
        paths.append(Path(mode, blockers, tuple(dict.fromkeys(notes))))
    return tuple(paths)


def _decide(paths: tuple[Path, ...], path: Path, asked: bool = False) -> Decision:
    reasons = ["%s: %s" % (path.mode, _SAYS[path.mode]) + (", as asked for" if asked else "")]
    reasons += ["%s still needs %s" % (path.mode, blocker) for blocker in path.blockers]
    reasons += ["%s, to be known: %s" % (path.mode, note) for note in path.notes]
    if not asked:
        for better in paths[: paths.index(path)]:
            # If there are other blockers, leave out those that the role can remove.
            stuck = [blocker for blocker in better.blockers if not blocker.curable] or list(better.blockers)
            reasons += ["no %s, %s" % (better.mode, blocker) for blocker in stuck]
    return Decision(path.mode, tuple(_without_doubles(reasons, paths)), paths)


def _without_doubles(reasons: list[str], paths: tuple[Path, ...]) -> list[str]:
    """Reasons against the better paths; without a GPU only that, once."""
    for blocker in paths[0].blockers:
        if blocker.id == "gpu":
            return [reasons[0], str(blocker)]
    return reasons
