"""The checks whether I/O still takes the path to the GPU that was set up."""

from __future__ import annotations

from typing import Any, Mapping

from ..common.check_result import FAIL, SKIP, Check, judged
from .facts import read_gds_facts
from .md_udev_override import outdated
from .path_choice import MODES, OFF, current

MODE, MD_RULE = "gds.mode", "gds.md_rule"


def check_mode(manifest: Mapping[str, Any], root: str = "/") -> Check:
    """Looks at the volume, unless nothing was set up."""
    mode = manifest["gds"]["mode"]
    if mode == OFF:
        return Check(MODE, SKIP, "nothing was set up", "off")
    now = current(read_gds_facts(root, manifest["filesystem"]["mount_point"]))
    blockers = now.path(mode).blockers
    state = now.mode
    if blockers:
        state += ": " + "; ".join("%s (`%s`)" % (blocker.found, blocker.id) for blocker in blockers)
    remedy = "; ".join(dict.fromkeys(blocker.remedy for blocker in blockers)) or "run `tunetool provision`"
    return judged(MODE, MODES.index(now.mode) <= MODES.index(mode), mode, state, remedy)


def check_md_rule(root: str = "/") -> list[Check]:
    """That our override of the udev rule is from the present one; no check where it is."""
    expected, found = (
        "the udev rule for arrays made from the distribution's own",
        "the distribution has changed its rule since",
    )
    return [Check(MD_RULE, FAIL, expected, found, "run `tunetool provision`")] if outdated(root) else []
