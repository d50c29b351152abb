"""The override of the distribution's udev rule for md arrays (GDS troubleshooting guide, 5.15).

udev takes the file of one name in /etc before that in /usr/lib, so a copy without `--no-devices` is enough, and the
distribution's own file stays as it is.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Optional

from ..common.check_result import FAIL, Check
from ..common.files import content, lines
from ..common.refusal import Refusal
from .volume_facts import MD_RULE, UDEV_PLACES, lists_members

CHECK_ID = "gds.md_rule"
PATH = "/etc/udev/rules.d/" + MD_RULE
HEADER = "# Written by tunetool (role gpudirect_storage) from the distribution's own rule, without --no-devices."
_MARK = "# sha256 of that rule: "


@dataclass(frozen=True)
class Override:
    """The present and the wanted text of the file; empty: no file."""

    before: str
    after: str


def wanted_override(root: str = "/", asked: bool = True) -> Override:
    """The wanted override. Raises ``Refusal`` if a foreign one hides the members."""
    before = content(os.path.join(root, PATH.lstrip("/")))
    if before and not before.startswith(HEADER):
        if asked and lists_members(before) is False:
            raise Refusal(
                "`%s` is not tunetool's and calls mdadm with --no-devices. hint: remove that option, or the file" % PATH
            )
        return Override(before, before)
    source = distributions_rule(root)
    if not asked or source is None or lists_members(source) is not False:
        return Override(before, "")
    return Override(before, render(source))


def render(source: str) -> str:
    """The distribution's rule without --no-devices, with the hash of that rule."""
    kept = [line if line.lstrip().startswith("#") else line.replace(" --no-devices", "") for line in lines(source)]
    end = "" if source.endswith("\n") else "\n"
    return "%s\n%s%s\n%s%s" % (HEADER, _MARK, _hash(source), "".join(kept), end)


def outdated(root: str = "/") -> bool:
    """Whether the distribution has changed its rule since ours was made from it."""
    ours = content(os.path.join(root, PATH.lstrip("/")))
    source = distributions_rule(root)
    return ours.startswith(HEADER) and (source is None or _MARK + _hash(source) + "\n" not in lines(ours))


def check_md_rule(root: str = "/") -> list[Check]:
    """That our override of the udev rule is from the present one; no check where it is."""
    expected, found = (
        "the udev rule for arrays made from the distribution's own",
        "the distribution has changed its rule since",
    )
    return [Check(CHECK_ID, FAIL, expected, found, "run `tunetool provision`")] if outdated(root) else []


def distributions_rule(root: str = "/") -> Optional[str]:
    """Path of the rule that would be in force without one in /etc."""
    for directory in UDEV_PLACES:
        path = os.path.join(root, directory, MD_RULE)
        if directory not in ("etc/udev/rules.d", "run/udev/rules.d") and os.path.isfile(path):
            return content(path)
    return None


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
