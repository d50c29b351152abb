"""How tests end: at Ctrl-C also where a shell started them in the background, and by a time box as by Ctrl-C."""

from __future__ import annotations

import os
import signal


def pytest_configure() -> None:
    # Such a shell has them ignore Ctrl-C, and so would every program that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a time box stops says which test it was in, and what failed before.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        signal.signal(signal.SIGTERM, _ended)


def _ended(number: int, frame: object) -> None:
    raise KeyboardInterrupt
