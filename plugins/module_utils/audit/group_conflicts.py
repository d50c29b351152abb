"""Groups of one host that set a variable differently: Ansible takes the last by the alphabet, without a word. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Collection, Sequence

_SHOWN = 60


@dataclass(frozen=True)
class Setting:
    """A group that sets a variable."""

    group: str
    rank: tuple[int, int]
    """Its depth in the inventory and its ``ansible_group_priority``: the higher one wins."""
    value: Any
    place: str
    """The file, with its line where that is known; empty if nobody knows."""


def conflict(name: str, settings: Sequence[Setting]) -> str | None:
    """The line about a variable that groups of equal rank set differently, where no group of a higher rank sets it."""
    most = max((setting.rank for setting in settings), default=None)
    winners = [setting for setting in settings if setting.rank == most]
    other = next((each for each in winners if each.value != winners[0].value), None)
    if other is None:
        return None
    return (
        "`%s` is %s and %s, and only the alphabet decides between them. hint: set it in one of them or in host_vars, "
        "or give one of them a higher `ansible_group_priority`" % (name, _shown(winners[0]), _shown(other))
    )


def _shown(setting: Setting) -> str:
    text = setting.value if isinstance(setting.value, str) else repr(setting.value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    where = " (`%s`)" % setting.place if setting.place else ""
    return "`%s` in group `%s`%s" % (text, setting.group, where)


def of_variable(name: str, layers: Sequence[Sequence[Setting]], host_values: Collection[str]) -> str | None:
    """The line about a variable, if there is one.

    ``layers``: who sets it in the inventory's own files, in its group_vars, and in those beside the playbook: a later
    layer wins whatever its groups are. ``host_values``: what is set for the host alone, which wins over all.
    """
    if name in host_values:
        return None
    setting = [layer for layer in layers if layer]
    return conflict(name, setting[-1]) if setting else None
