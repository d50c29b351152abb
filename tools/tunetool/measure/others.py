"""Who moved bytes on the drives beside a measurement. Nobody looks before a sample was disturbed."""

from __future__ import annotations

import os
from collections.abc import Sequence

from tunetool.measure.direction import Direction
from tunetool.node.array.md_arrays import sync_actions
from tunetool.node.machine.block_stack import BlockStack, devices_under
from tunetool.node.machine.process_io import Mover, look, movers
from tunetool.node.units import format_size

_NAMED = 3
"""Processes that are named; further ones are counted."""
_WORTH_NAMING = 0.05
"""Share of the bytes to explain: every node has daemons that write a log."""
_EXPLAINS = 0.5
"""Share of the bytes that the processes must have moved, of all devices together, to be taken for the cause."""
_VERBS = {"read": "read", "write": "wrote"}


class Others:
    """A look at all processes now, to be compared with one at the end."""

    def __init__(self, stack: BlockStack, root: str = "/", own: int | None = None) -> None:
        """``own``: the process that measures, which is left out with all of its descendants; None: this one."""
        self._stack, self._root = stack, root
        self._own = os.getpid() if own is None else own
        self._before = self._after = look(root)
        self._syncs: list[str] = []

    def end(self) -> None:
        """The second look."""
        self._after = look(self._root)
        self._syncs = self._find_syncs()

    def in_words(self, foreign: int, *directions: Direction) -> str:
        """Who moved the ``foreign`` bytes that the drives counted besides the program's own; empty where the kernel
        counts nothing."""
        if not self._after.counts:
            return "; ".join(self._syncs)
        found = movers(self._before, self._after, directions, self._own)
        parts = [*_named(found, foreign, directions), *self._syncs]
        if sum(mover.bytes for mover in found) < _EXPLAINS * foreign and not self._syncs:
            parts.append(self._nobody(bool(parts)))
        return "; ".join(parts)

    def _nobody(self, partly: bool) -> str:
        text = "no process that can be read moved " + ("the rest" if partly else "so much")
        if self._after.hidden and os.geteuid() != 0:
            return text + ", and root sees those of other users"
        return text + ", so it may be the kernel itself, as in write-back, or another container"

    def _find_syncs(self) -> list[str]:
        """The arrays on the same drives that the kernel itself reads or writes."""
        ours = {leaf.name for leaf in self._stack.leaves} | ({self._stack.device} if self._stack.device else set())
        return [
            f"array `{device}` does a `{action}`"
            for device, action in sync_actions(self._root).items()
            if ours & set(devices_under(device, self._root))
        ]


def _named(found: Sequence[Mover], foreign: int, directions: Sequence[Direction]) -> list[str]:
    """The processes that matter, as one text; none if there are none."""
    worth = [mover for mover in found if mover.bytes >= _WORTH_NAMING * foreign]
    if not worth:
        return []
    verb = _VERBS[directions[0]] if len(directions) == 1 else "moved"
    names = [f"`{mover.name}` (pid {mover.pid}) {verb} {format_size(mover.bytes)}" for mover in worth[:_NAMED]]
    more = f" and {len(worth) - _NAMED} more" if len(worth) > _NAMED else ""
    return [", ".join(names) + more]
