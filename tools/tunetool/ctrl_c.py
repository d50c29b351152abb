"""Ctrl-C while something has to be finished, and Ctrl-C that Python would lose."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FrameType
from typing import TypeVar

from tunetool.node.common.waiting import wait_for

T = TypeVar("T")
Item = TypeVar("Item")
_AGAIN_SECONDS = 0.05


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

    def wait_for(self, ask: Callable[[], T], seconds: float, pause: float = 0.1) -> T:
        """As the function of that name; a Ctrl-C that comes meanwhile is kept, and does not make it shorter."""
        end = time.monotonic() + seconds
        while True:
            with self.held():
                return wait_for(ask, end - time.monotonic(), pause)

    def deliver(self) -> None:
        """Raise ``KeyboardInterrupt`` if one came."""
        if self._pressed is not None:
            raise self._pressed


def uninterrupted(act: Callable[[], T], undo: Callable[[T], None]) -> T:
    """What ``act`` gives. Ctrl-C or SIGTERM that comes meanwhile counts once it is done, and then ``undo`` is called.

    For what forks: Python runs functions of its libraries before and after, and throws away what they raise.
    """
    if threading.current_thread() is not threading.main_thread():
        return act()
    came: list[int] = []
    done: list[T] = []

    def keep(number: int, frame: FrameType | None) -> None:
        came.append(number)

    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler is not None and handler != signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, keep)
        done.append(act())
    finally:
        for replaced, handler in before.items():
            signal.signal(replaced, handler)
        try:
            for each in came:
                signal.raise_signal(each)
        except BaseException:
            for made in done:
                undo(made)
            raise
    return done[0]


def in_threads(pool: Executor, act: Callable[[Item], T], items: Iterable[Item], at_once: int) -> Iterator[T]:
    """What ``act`` gives for each item, in their order, by the threads of ``pool``, ``at_once`` items at a time.

    Ctrl-C counts between those: while a pool takes one of its locks it would leave it locked, and a thread that needs
    it would never end (the locks of ``threading`` are not safe against an exception at every moment).
    """
    rest = iter(items)
    while some := list(islice(rest, at_once)):
        yield from uninterrupted(partial(_all, pool, act, some), lambda made: None)


def _all(pool: Executor, act: Callable[[Item], T], items: list[Item]) -> list[T]:
    return list(pool.map(act, items))


def never_lost() -> None:
    """From now on, a Ctrl-C that Python throws away comes again a moment later.

    Python prints "Exception ignored" and goes on when it comes inside a destructor or another function whose errors
    nobody can catch (https://docs.python.org/3/library/sys.html#sys.unraisablehook).
    """
    before = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # Not at once: this function is one of those whose errors are thrown away.
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
        else:
            before(unraisable)

    signal.signal(signal.SIGALRM, as_interrupt)
    sys.unraisablehook = hook


def as_interrupt(number: int, frame: FrameType | None) -> None:
    """A signal's handler: what unwinds then is what Ctrl-C unwinds."""
    raise KeyboardInterrupt
