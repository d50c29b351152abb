"""States on a GPU, whose bytes are copied by address. See ``gpu_states.py``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skips import no_gpu
from waiting import PATIENCE

pytestmark = pytest.mark.skipif(no_gpu(), reason="it is for a state on a GPU")
PROGRAM = Path(__file__).parent / "gpu_states.py"


@pytest.mark.parametrize(
    "how", [[], ["checksums"], ["refuses"], ["refuses", "checksums"]], ids=lambda how: " ".join(how) or "as it is"
)
@pytest.mark.parametrize("what", ["computes", "changes"])
def test_what_comes_back_is_what_was_there_when_it_was_saved(tmp_path: Path, what: str, how: list[str]) -> None:
    run(what, tmp_path, *how)


def test_memory_that_is_pinned_from_now_on_is_said_to_be(tmp_path: Path) -> None:
    run("pinned", tmp_path)


@pytest.mark.parametrize("how", [[], ["refuses"]], ids=lambda how: " ".join(how) or "as it is")
def test_a_flipped_bit_is_found_by_the_sums_that_a_gpu_makes(tmp_path: Path, how: list[str]) -> None:
    run("damaged", tmp_path, "checksums", *how)


def run(what: str, path: Path, *how: str) -> None:
    command = [sys.executable, str(PROGRAM), what, str(path), *how]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
