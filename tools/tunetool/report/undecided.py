"""What the rounds of a benchmark did not decide, and the call that measures more of them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from tunetool.measure.rounds import undecided
from tunetool.measure.statistics import next_look
from tunetool.node.units import format_count
from tunetool.record import Record

_NAMED = 2
_REPLACED = ("--rounds", "--budget")
"""Options with a value that ``--rounds`` makes void, or that would end the further rounds."""


def what_is_open(record: Record) -> list[str]:
    """A line; none where every comparison of the record is decided, or it has none."""
    names = undecided(record.measurements)
    if not names:
        return []
    left_open = (each for each in record.measurements if each.parameters.get("decided") is False)
    made = max(int(each.parameters.get("pairs", 0)) for each in left_open)
    shown = "; ".join([*names[:_NAMED], *([f"{len(names) - _NAMED} more"] if len(names) > _NAMED else [])])
    more = f"--rounds {next_look(made) or 2 * made}"
    command = _call(record.command)
    call = f"`{command} {more}`" if command else f"the same call with `{more}`"
    return [f"not decided by {format_count(made, 'round')}: {shown}; more of them: {call}"]


def _call(command: Sequence[str]) -> str:
    """The command of the record without the options that are replaced; empty where it is no benchmark's."""
    if "bench" not in command:
        return ""
    words, left = iter(command[command.index("bench") :]), []
    for word in words:
        if word in _REPLACED:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in _REPLACED)):
            left.append(word)
    return shlex.join(["tunetool", *left])
