"""Ctrl-C while something has to be finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class CtrlC:
    """Ctrl-C that waits: the caller's loop tries again what ``held`` encloses, and ``deliver`` raises once all is done.

    It may be the first Ctrl-C, which comes while a program ends as it should: it must never be lost.
    """

    def __init__(self) -> None:
        self._pressed: KeyboardInterrupt | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep a Ctrl-C that comes inside."""
        try:
            yield
        except KeyboardInterrupt as error:
            self._pressed = error

    def deliver(self) -> None:
        """Raise ``KeyboardInterrupt`` if one came."""
        if self._pressed is not None:
            raise self._pressed
