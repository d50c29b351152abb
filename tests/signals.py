"""How tests end: at Ctrl-C also where a shell started them in the background, and by a time box as by Ctrl-C.

And apart from other runs of tunetool on this machine: with locks of their own.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile


def pytest_configure() -> None:
    # Such a shell has them ignore Ctrl-C, and so would every program that they start.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # What a time box stops says which test it was in, and what failed before.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        signal.signal(signal.SIGTERM, _ended)
        # Else a run that somebody else has on the same disk would be in the way.
        os.environ["TUNETOOL_LOCK_DIR"] = tempfile.mkdtemp(prefix="tunetool-tests-locks-")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop("TUNETOOL_LOCK_DIR", ""), ignore_errors=True)


def _ended(number: int, frame: object) -> None:
    raise KeyboardInterrupt
