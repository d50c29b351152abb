"""No garbage collection while very many objects are made that are all kept, or while threads read. Nothing else of the
package turns it off."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

_users: set[object] = set()
"""Who has turned it off. Without a lock, which a Ctrl-C could leave held."""


def _on_in_child() -> None:
    """After a fork: the other threads, which would turn it on again, do not exist here."""
    if _users:
        gc.enable()
    _users.clear()


os.register_at_fork(after_in_child=_on_in_child)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection: it would look at the new objects again and again, and hold up all threads meanwhile.

    Whoever turns it off turns it on again, and nobody else touches it, so no order of threads leaves it off. It may be
    on early, where two threads are here at the same time.
    """
    user, was_on = object(), gc.isenabled()
    try:
        try:
            if was_on:
                _users.add(user)
                gc.disable()
            yield
        finally:
            if was_on:
                gc.enable()
    finally:
        # A Ctrl-C may have cut the first call short.
        if was_on:
            gc.enable()
        _users.discard(user)
