"""Handles of kernel locks that this process holds, and that a forked child closes."""

from __future__ import annotations

import os

HELD: set[int] = set()


def _forget_in_child() -> None:
    # A forked data loader would hold the lock for as long as it lives, even after its parent's death, or release it
    # while its parent still saves.
    for handle in HELD:
        os.close(handle)
    HELD.clear()


os.register_at_fork(after_in_child=_forget_in_child)
