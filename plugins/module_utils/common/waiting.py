"""Waiting for something that this program does not cause, with a limit."""

from __future__ import annotations

import time
from typing import Callable, Optional, Tuple, Type, TypeVar, Union

Answer = TypeVar("Answer")


def wait_for(
    ask: Callable[[], Answer], seconds: Optional[float], pause: float = 0.1, tick: Callable[[], object] = lambda: None
) -> Answer:
    """The first answer of ``ask`` that counts as true; its last one where none did within ``seconds``.

    It is asked at least once, and once more at the end. ``seconds`` may be None: without a limit. ``pause``: seconds
    between two questions; ``tick`` is called in each, and what it raises ends the wait.
    """
    end = None if seconds is None else time.monotonic() + seconds
    while True:
        # Before the question: an answer from before the end would be too old.
        left = pause if end is None else end - time.monotonic()
        answer = ask()
        if answer or left <= 0:
            return answer
        tick()
        time.sleep(min(pause, left))


def try_for(
    act: Callable[[], Answer],
    errors: Union[Type[Exception], Tuple[Type[Exception], ...]],
    seconds: float,
    pause: float = 0.1,
) -> Answer:
    """What ``act`` gives once it raises none of ``errors``; raises its last one where it still does after
    ``seconds``."""
    end = time.monotonic() + seconds
    while True:
        left = end - time.monotonic()
        try:
            return act()
        except errors:
            if left <= 0:
                raise
        time.sleep(min(pause, left))
