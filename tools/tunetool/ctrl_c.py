"""Ctrl-C while something has to be finished, while threads are waited for, and Ctrl-C that Python would lose."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import FrameType, TracebackType
from typing import Any, TypeVar

from tunetool.node.common.waiting import wait_for

T = TypeVar("T")
Item = TypeVar("Item")
_AGAIN_SECONDS = 0.05
_MOMENT = 0.2
"""Seconds for which a wait for threads may keep Ctrl-C."""
_AHEAD = 4
"""Items for each thread of a pool that are begun before the first result is taken."""


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


def uninterrupted(act: Callable[[], T], undo: Callable[[T], None] = lambda _: None) -> T:
    """What ``act`` gives. Ctrl-C or SIGTERM that comes meanwhile counts once it is done, and then ``undo`` is called.

    For what forks: Python runs functions of its libraries before and after, and throws away what they raise. And for
    what takes locks of ``threading``: Ctrl-C as one is taken leaves it locked, and who needs it waits for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        return act()
    came: list[int] = []
    done: list[T] = []
    before: dict[signal.Signals, Callable[[int, FrameType | None], object] | int] = {}
    is_over = False

    def keep(number: int, frame: FrameType | None) -> None:
        if is_over:  # several that came as the handlers were put back have left this one in its place
            signal.signal(number, before[signal.Signals(number)])
            signal.raise_signal(number)
        else:
            came.append(number)

    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            handler = signal.getsignal(number)
            # That of ``never_lost``; any other timer is its owner's, such as the time limit of a test.
            counts = number != signal.SIGALRM or handler is as_interrupt
            if counts and handler is not None and handler != signal.SIG_IGN:
                before[number] = handler
                signal.signal(number, keep)
        done.append(act())
    finally:
        try:
            try:
                _put_back(before)
            finally:
                is_over = True
            for each in came:
                signal.raise_signal(each)
        except BaseException:
            for made in done:
                undo(made)
            raise
    return done[0]


def _put_back(handlers: Mapping[signal.Signals, Callable[[int, FrameType | None], object] | int]) -> None:
    """All of them, and only then what a signal raises that comes meanwhile."""
    came: BaseException | None = None
    for _ in range(3):
        try:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            break
        except BaseException as error:
            came = error
    if came is not None:
        raise came


def until(wait: Callable[[float], bool]) -> None:
    """Call ``wait``, such as an event's, until it returns True. Ctrl-C ends that, and leaves no lock behind."""
    while not uninterrupted(partial(wait, _MOMENT)):
        pass


def until_over(future: futures.Future[T]) -> T:
    """What a future gives or raises, in place of its ``result``. Ctrl-C ends the wait, and the work goes on."""
    until_all_over([future])
    return future.result()


def until_all_over(some: Collection[futures.Future[T]]) -> None:
    """Wait for all of them. Ctrl-C ends that, and their work goes on."""
    until(lambda seconds: not futures.wait(some, seconds).not_done)


def wait_briefly(some: Collection[futures.Future[T]]) -> tuple[set[futures.Future[T]], set[futures.Future[T]]]:
    """Wait until all are over, but no longer than a moment. Returns those that are over, and the others.

    What is over may be asked in any way: no thread needs its locks any more.
    """
    over, waiting = uninterrupted(partial(futures.wait, some, _MOMENT))
    return over, waiting


class Threads:
    """A pool of threads for which the main thread may wait: Ctrl-C counts between two calls of the pool.

    As it leaves the context, what has not begun is cancelled, and what runs is waited for until one more Ctrl-C.
    """

    def __init__(self, count: int, name: str = "") -> None:
        self._count = count
        self._pool = futures.ThreadPoolExecutor(count, name)  # noqa: TID251  (its calls are below, none interrupted)
        self._begun: set[futures.Future[Any]] = set()

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        uninterrupted(partial(self._pool.shutdown, wait=False, cancel_futures=True))
        until_all_over([*self._begun])
        uninterrupted(self._pool.shutdown)

    def begin(self, act: Callable[[Item], T], item: Item) -> futures.Future[T]:
        """Have ``act`` called with the item; give the future to ``wait_briefly`` or ``until_over``."""

        def submit() -> futures.Future[T]:
            future = self._pool.submit(act, item)
            self._begun.add(future)
            future.add_done_callback(self._begun.discard)
            return future

        return uninterrupted(submit)

    def each(self, act: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """What ``act`` gives for each item, in their order. Few items are begun ahead of what is taken."""
        rest, begun = iter(items), deque[futures.Future[T]]()
        while True:
            begun.extend(self.begin(act, item) for item in islice(rest, self._count * _AHEAD - len(begun)))
            if not begun:
                return
            yield until_over(begun.popleft())


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
