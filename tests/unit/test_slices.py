"""Slices of the slow tests: their order, completeness, and time limit."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
import slices

ROOT = Path(__file__).parents[2]
TABLE = slices.read(ROOT / "tests/slices.toml")
SOME = st.lists(
    st.builds(slices.Slice, st.text(), st.just(()), st.none() | st.integers(1, 2000)), min_size=1, max_size=15
)


def test_every_slow_test_is_in_one_slice() -> None:
    marked = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"^\s*@?(pytestmark = )?.*pytest\.mark\.slow\b", path.read_text(), re.MULTILINE)
        and path != Path(__file__)
    }
    assert Counter(path for row in TABLE for path in row.paths) == Counter(marked)


def test_every_slice_can_run_on_the_slowest_machine() -> None:
    # `make test` aims at 25 minutes.
    timed = [row.seconds for row in TABLE if row.seconds is not None]
    assert all(25 * 60 + slices.SLOWER * seconds <= slices.START_WITHIN for seconds in timed)


def test_every_slice_comes_first_about_equally_often() -> None:
    hashes = [hashlib.sha1(str(number).encode(), usedforsecurity=False).hexdigest() for number in range(1200)]
    first = Counter(slices.in_turn(TABLE, commit)[0].name for commit in hashes)
    assert set(first) == {row.name for row in TABLE}
    assert min(first.values()) > len(hashes) / len(TABLE) / 2
    assert slices.in_turn(TABLE, hashes[0]) == slices.in_turn(TABLE, hashes[0])


@given(SOME, st.floats(0, 5000), st.floats(0, 5000), st.data())
def test_nothing_is_started_that_might_end_too_late(
    some: list[Any], elapsed: float, limit: float, data: st.DataObject
) -> None:
    waiting = list(some)
    while row := slices.next_of(waiting, elapsed, limit):
        waiting.remove(row)
        elapsed += data.draw(st.floats(0, slices.SLOWER * row.seconds))
        assert elapsed <= limit
    # The others would not have fitted, or have an unknown duration.
    assert all(row.seconds is None or elapsed + slices.SLOWER * row.seconds > limit for row in waiting)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with four slices, one of them without a time, whose `make test` only reports that it ran."""
    (tmp_path / "tools/dev").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "bin").mkdir()
    shutil.copy(ROOT / "tools/dev/slices.py", tmp_path / "tools/dev")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = -p no:cacheprovider\n")
    rows = ""
    for name, seconds in (("one", 10), ("two", 100000), ("three", 20), ("four", None)):
        (tmp_path / f"tests/test_{name}.py").write_text(
            f"import pytest\n@pytest.mark.slow\ndef test_{name}(): ...\ndef test_quick(): assert False\n"
        )
        timed = f"seconds = {seconds}\n" if seconds else ""
        rows += f'[{name}]\n{timed}paths = ["tests/test_{name}.py"]\n'
    (tmp_path / "tests/slices.toml").write_text(rows)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    make(tmp_path, "exit 0")
    return tmp_path


def make(checkout: Path, script: str) -> None:
    (checkout / "bin/make").write_text(f'#!/bin/sh\necho "made $@"\n{script}\n')
    (checkout / "bin/make").chmod(0o755)


def ci(checkout: Path, *options: str) -> tuple[int, str, dict[str, str]]:
    command = [sys.executable, "tools/dev/slices.py", "--commit", "2", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    rows = re.findall(
        r"^(make test|slice \S+) .*?(passed|FAILED|stopped|not run(?:: never timed)?)$", done.stdout, re.MULTILINE
    )
    return done.returncode, done.stdout, dict(rows)


def test_ci_runs_what_fits_beginning_with_the_commit_s_slice(checkout: Path) -> None:
    code, text, rows = ci(checkout)
    assert code == 0, text
    assert list(rows) == ["make test", "slice three", "slice one", "slice four", "slice two"]
    assert rows == {
        "make test": "passed",
        "slice three": "passed",
        "slice one": "passed",
        "slice four": "not run: never timed",
        "slice two": "not run",
    }
    assert (
        text.index("made test") < text.index("test_three.py::test_three PASSED") < text.index("test_one.py::test_one")
    )


def test_ci_ends_with_what_failed_and_runs_the_other_slices(checkout: Path) -> None:
    make(checkout, "exit 2")
    code, text, rows = ci(checkout)
    assert (code, rows["make test"], rows["slice one"]) == (1, "FAILED", "not run"), text
    make(checkout, "exit 0")
    (checkout / "tests/test_one.py").write_text("import pytest\n@pytest.mark.slow\ndef test_one(): assert False\n")
    code, text, rows = ci(checkout)
    assert (code, rows["make test"], rows["slice one"]) == (1, "passed", "FAILED"), text


def test_ci_stops_what_does_not_end(checkout: Path) -> None:
    make(checkout, "trap 'echo cleaned up; exit 1' TERM; sleep 600 & wait")
    code, text, rows = ci(checkout, "--limit", "0", "--stop", "1")
    assert (code, rows["make test"]) == (1, "stopped"), text
    assert "cleaned up" in text
    assert "1 failed, 4 not run" in text
