"""Empties a directory that holds what a hostile user left: of any depth, with any names, flags and mounts in it.

Every call is made on an open directory and never follows a link. Each directory becomes root's before it is read: no
process that is still in it adds to it. One that is not empty is moved up beside the first ones, so nothing is nested in
the end: no path grows, two directories are open at a time, and what a run has done stays done when its time is over.
A full volume may have no room for the move: then a few levels are gone down, whose end makes room.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import time
from typing import Callable

from . import kernel

Clock = Callable[[], float]
STACKED = 2048
"""Mounts one over the other that are taken down; users make up to 1000 (mount_max of FUSE)."""
_SHOWN = 8
"""Troubles that are kept."""
_LEVELS = 64
"""Directories that are open at a time on a full volume."""


class Emptying:
    """Of one directory to which no path leads a user. ``troubles``: what stays, a line each."""

    def __init__(self, directory: int, until: float, clock: Clock = time.monotonic) -> None:
        self.troubles: list[str] = []
        self._directory, self._until, self._clock = directory, until, clock
        self._steps = self._level = 0
        self._late = False

    def finish(self) -> bool:
        """Remove all that it holds, or as much as time allows; whether nothing is left."""
        kernel.seize(self._directory)
        before = -1
        while before < self._steps and not self._over():
            before, self.troubles = self._steps, []
            names = os.listdir(self._directory)
            if not names:
                return True
            for name in names:
                self._remove(self._directory, name)
        return False

    def _over(self) -> bool:
        # The rest of a long list is passed over without asking again.
        self._late = self._late or self._clock() >= self._until
        return self._late

    def _remove(self, directory: int, name: str) -> None:
        """Remove a file, a link, or a directory; one that is nested and not empty is moved up instead."""
        for _ in range(STACKED):
            if self._over():
                return
            try:
                self._take(directory, name)
                self._steps += 1
                return
            except FileNotFoundError:
                return
            except OSError as error:
                if not _helped(directory, name, error):
                    if len(self.troubles) < _SHOWN:
                        self.troubles.append("`%s`: %s" % (ascii(name)[1:-1], error.strerror))
                    return

    def _take(self, directory: int, name: str) -> None:
        # What a name is may change between two calls, so none is asked before.
        try:
            os.unlink(name, dir_fd=directory)
            return
        except IsADirectoryError:
            pass
        try:
            os.rmdir(name, dir_fd=directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if directory != self._directory and self._moved_up(directory, name):
            return
        inside = kernel.open_inside(directory, name)
        self._level += 1
        try:
            kernel.seize(inside)
            with os.scandir(inside) as entries:
                for entry in entries:
                    self._remove(inside, entry.name)
        finally:
            self._level -= 1
            os.close(inside)
        if not self._over():
            os.rmdir(name, dir_fd=directory)

    def _moved_up(self, directory: int, name: str) -> bool:
        try:
            os.rename(name, secrets.token_hex(16), src_dir_fd=directory, dst_dir_fd=self._directory)
        except OSError as error:
            if error.errno != errno.ENOSPC or self._level >= _LEVELS:
                raise
            return False
        return True


def _helped(directory: int, name: str, error: OSError) -> bool:
    """Whether what stood against it is gone: a mount, or a flag of the entry or of the directory."""
    with contextlib.suppress(OSError):
        if error.errno in (errno.EBUSY, errno.EXDEV):
            kernel.detach(directory, name)
            return True
        if error.errno == errno.EPERM:
            return kernel.unprotect_open(directory) or kernel.unprotect(directory, name)
    return False
