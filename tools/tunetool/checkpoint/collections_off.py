"""No garbage collection while very many objects are made that are all kept."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Switch:
    """Off while any thread asks for it, then as it was before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users: set[object] = set()
        self._was_on = False

    def off(self, user: object) -> None:
        with self._lock:
            if not self._users:
                self._was_on = gc.isenabled()
            self._users.add(user)
            gc.disable()

    def release(self, user: object) -> None:
        with self._lock:
            if self._was_on and self._users == {user}:
                gc.enable()
            self._users.discard(user)

    def reset_in_child(self) -> None:
        """After a fork: the other threads do not exist here, and one of them may hold the lock."""
        if self._was_on and self._users:
            gc.enable()
        self._lock = threading.RLock()
        self._users.clear()


_switch = _Switch()
os.register_at_fork(after_in_child=_switch.reset_in_child)


@contextmanager
def without_collections() -> Iterator[None]:
    """Disable garbage collection: it would look at the new objects again and again, and all of them are kept."""
    user = object()
    try:
        try:
            _switch.off(user)
            yield
        finally:
            _switch.release(user)
    finally:
        _switch.release(user)  # a Ctrl-C may have cut the first call short
