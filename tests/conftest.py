"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# A shell that runs the tests in the background has them ignore Ctrl-C, and so would every program that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _ended(number: int, frame: object) -> None:
    raise KeyboardInterrupt


# What a time box stops says which test it was in, and what failed before.
if "PYTEST_XDIST_WORKER" not in os.environ:
    signal.signal(signal.SIGTERM, _ended)
