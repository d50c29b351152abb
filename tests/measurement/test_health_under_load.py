"""The health check beside fio, on a full volume and beside busy CPUs: by perf/no_false_fail.py, in fewer rounds."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from calls import call
from programs import need_program
from skips import no_mounts

pytestmark = pytest.mark.slow  # each check is a process of its own

PROGRAM = Path(__file__).parents[2] / "perf/no_false_fail.py"


def test_no_load_makes_a_check_fail(tmp_path: Path) -> None:
    need_program("fio", "unshare", "mount")
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if no_mounts():
        pytest.skip("may not make a mount namespace")
    done = call(sys.executable, PROGRAM, "--target", tmp_path, "--rounds", "5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line.strip() for line in done.stdout.splitlines() if line.startswith(" ")] == [
        "5 x pass",
        "5 x unproven: filesystem.answers: it is full, so nothing could be written: No space left on device (write)",
        "5 x pass",
    ]
    assert list(tmp_path.iterdir()) == []
