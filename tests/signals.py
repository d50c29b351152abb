"""How tests end: at Ctrl-C, even if a shell started them in the background, and at a time box in the same way.

Tests also have their own locks, apart from other runs of tunetool on this machine.
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile


def pytest_configure() -> None:
    # Such a shell makes them ignore Ctrl-C, and every program that they start would ignore it too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # At a time box the run says in which test it was, and which tests failed before.
    if "PYTEST_XDIST_WORKER" not in os.environ:
        signal.signal(signal.SIGTERM, _ended)
        # Otherwise another user's run on the same disk would be in the way.
        os.environ["TUNETOOL_LOCK_DIR"] = tempfile.mkdtemp(prefix="tunetool-tests-locks-")


def pytest_unconfigure() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ.pop("TUNETOOL_LOCK_DIR", ""), ignore_errors=True)


def _ended(number: int, frame: object) -> None:
    raise KeyboardInterrupt
