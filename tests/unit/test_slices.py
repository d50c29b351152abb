"""Slices of the slow tests: their order, completeness, and time limit."""

from __future__ import annotations

import ast
import gc
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
import steps

ROOT = Path(__file__).parents[2]
TABLE = slices.read(ROOT / "tests/slices.toml")
SOME = st.lists(
    st.builds(slices.Slice, st.text(), st.just(()), st.none() | st.integers(1, 2000)), min_size=1, max_size=15
)
SLOW = re.compile(r"pytest\.mark\.slow\b")


def slow_tests(path: Path) -> list[str]:
    """The tests of a file that are marked slow, or of which a case is."""
    gc.disable()  # Hypothesis hooks into the collector, and CPython 3.11 refuses a tree during which a hook ran
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    whole = any(isinstance(each, ast.Assign) and SLOW.search(ast.unparse(each)) for each in tree.body)
    tests = [each for each in tree.body if isinstance(each, ast.FunctionDef) and each.name.startswith("test_")]
    names = [each.name for each in tests if whole or any(map(SLOW.search, map(ast.unparse, each.decorator_list)))]
    # Where something else than a decorator marks them, only the file as a whole can be listed.
    return names or ["all"]


def test_every_slow_test_is_in_one_slice() -> None:
    marked = {
        str(path.relative_to(ROOT)): slow_tests(path)
        for path in (ROOT / "tests").rglob("test_*.py")
        if SLOW.search(path.read_text()) and path != Path(__file__)
    }
    listed = Counter[str]()
    for path in (path for row in TABLE for path in row.paths):
        listed.update([path] if "::" in path else [f"{path}::{name}" for name in marked.get(path, ["no slow test"])])
    assert listed == Counter(f"{path}::{name}" for path, tests in marked.items() for name in tests)


def test_every_slice_can_run_on_the_slowest_machine() -> None:
    # `make test` aims at 25 minutes.
    timed = [row.seconds for row in TABLE if row.seconds is not None]
    assert all(25 * 60 + slices.SLOWER * seconds <= slices.START_WITHIN for seconds in timed)


def test_whatever_runs_ends_within_75_minutes() -> None:
    assert slices.START_WITHIN <= slices.STOP_AFTER <= 75 * 60 - slices.CLEAN_UP_SECONDS
    assert slices.CLEAN_UP_SECONDS > steps.CLEAN_UP_SECONDS


@given(SOME.map(lambda some: [part for part in some if part.seconds is not None]), st.integers(0, 100))
def test_turns_that_follow_one_another_begin_with_every_slice(some: list[Any], turn: int) -> None:
    turns = -(-len(some) // slices.A_TURN)
    begun = [
        part
        for number in range(turn, turn + turns)
        for part in slices.in_turn(some, number)[: min(slices.A_TURN, len(some))]
    ]
    assert set(begun) == set(some)


def test_the_next_turn_changes_the_turn_alone() -> None:
    table = f"# turn = 5\nturn = 9\n{BEFORE}"
    assert slices.next_turn(table) == f"# turn = 5\nturn = 10\n{BEFORE}"


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


LOG = """
10:01 === slices of 0123456789abcdef at 2026-11-27 10:01
step                                used recorded  status
make test                          1700s        -  passed
slice one                            12s      10s  passed
slice one-more                       13s      10s  FAILED
slice three                            -      20s  not run
"""
BEFORE = """# All of it.

[one]
seconds = 10
ran = "2026-11-26 09:00 aaaaaaaa"
# Beside a load of 3.
paths = ["tests/one.py"]

[one-more]
seconds = 10
paths = ["tests/more.py"]

[three]
paths = ["tests/three.py"]
"""


def test_what_passed_is_recorded_and_all_else_stays() -> None:
    changed = BEFORE.replace('10\nran = "2026-11-26 09:00 aaaaaaaa"', '12\nran = "2026-11-27 10:01 01234567"')
    assert slices.recorded(BEFORE, LOG) == changed
    once = slices.recorded(BEFORE, LOG.replace("FAILED", "passed").replace("-      20s  not run", "9s       -  passed"))
    assert '[three]\nseconds = 9\nran = "2026-11-27 10:01 01234567"\npaths' in once
    assert '[one-more]\nseconds = 13\nran = "2026-11-27 10:01 01234567"\npaths' in once


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout with four slices, one of them without a time, whose `make test` only reports that it ran."""
    (tmp_path / "tools/dev").mkdir(parents=True)
    (tmp_path / "tests").mkdir()
    (tmp_path / "bin").mkdir()
    for name in ("slices", "steps"):
        shutil.copy(ROOT / f"tools/dev/{name}.py", tmp_path / "tools/dev")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\naddopts = -p no:cacheprovider\n")
    rows = "turn = 1\n"
    for name, seconds, ran in (
        ("two", 100000, ""),
        ("three", 20, "2026-11-26"),
        ("one", 10, "2026-11-27"),
        ("four", None, ""),
    ):
        (tmp_path / f"tests/test_{name}.py").write_text(
            f"import pytest\n@pytest.mark.slow\ndef test_{name}(): ...\ndef test_quick(): assert False\n"
        )
        timed = f"seconds = {seconds}\n" if seconds else ""
        rows += f'[{name}]\n{timed}ran = "{ran}"\npaths = ["tests/test_{name}.py"]\n'
    (tmp_path / "tests/slices.toml").write_text(rows)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    make(tmp_path, "exit 0")
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (["init", "-q"], [*identity, "commit", "-q", "--allow-empty", "-m", "all"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    return tmp_path


def make(checkout: Path, script: str) -> None:
    (checkout / "bin/make").write_text(f'#!/bin/sh\necho "made $@"\n{script}\n')
    (checkout / "bin/make").chmod(0o755)


def ci(checkout: Path, *options: str) -> tuple[int, str, dict[str, str]]:
    command = [sys.executable, "tools/dev/slices.py", *options]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    rows = re.findall(
        r"^(make test|slice \S+) .*?  (passed|FAILED.*|stopped.*|not run(?:: never timed)?)$", done.stdout, re.MULTILINE
    )
    return done.returncode, done.stdout, dict(rows)


def test_ci_runs_what_fits_beginning_where_its_turn_says(checkout: Path) -> None:
    code, text, rows = ci(checkout)
    assert code == 0, text
    assert rows == {
        "make test": "passed",
        "slice three": "passed",
        "slice one": "passed",
        "slice two": "not run",
        "slice four": "not run: never timed",
    }
    begun = ["made test", "=== slice three", "=== slice one"]
    assert sorted(begun, key=text.index) == begun
    for name in ("three", "one"):
        assert re.search(rf"^{name} +\| tests/test_{name}.py::test_{name} PASSED", text, re.MULTILINE), text
    assert "seen longest ago: two (never)\n" in text
    (checkout / "log").write_text(text)
    assert ci(checkout, "--ran", "log")[0] == 0
    written = {part.name: (part.seconds, part.ran) for part in slices.read(checkout / "tests/slices.toml")}
    assert written["two"] == (100000, "")
    assert written["one"][1] == written["three"][1]
    assert f"slice one {written['one'][0]:>29}s" in text
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d [0-9a-f]{8}", written["one"][1])


def test_slices_by_hand_are_those_that_were_named_and_no_others(checkout: Path) -> None:
    code, text, rows = ci(checkout, "four", "two")
    assert (code, rows) == (0, {"slice four": "passed", "slice two": "passed"}), text
    assert ci(checkout, "five")[0] == 2


def test_ci_ends_with_what_failed_and_runs_the_other_slices(checkout: Path) -> None:
    make(checkout, "exit 2")
    code, text, rows = ci(checkout)
    assert (code, rows["make test"], rows["slice one"]) == (1, "FAILED", "not run"), text
    make(checkout, "exit 0")
    (checkout / "tests/test_three.py").write_text("import pytest\n@pytest.mark.slow\ndef test_three(): assert 1 == 2\n")
    code, text, rows = ci(checkout)
    assert (code, rows["slice three"], rows["slice one"]) == (1, "FAILED", "passed"), text
    assert "slice three: E   " in text.rpartition("status")[2]


def test_what_never_passed_before_fails_by_name_alone(checkout: Path) -> None:
    table = checkout / "tests/slices.toml"
    table.write_text(table.read_text().replace('ran = "2026-11-26"\n', ""))
    (checkout / "tests/test_three.py").write_text("import pytest\n@pytest.mark.slow\ndef test_three(): assert 1 == 2\n")
    code, text, rows = ci(checkout)
    assert (code, rows["slice three"], rows["slice one"]) == (0, "FAILED, and never passed before", "passed"), text
    assert "slice three: E   " in text.rpartition("status")[2]
    assert "2 passed, 1 failed" in text
    assert ci(checkout, "three")[0] == 1
    assert slices.recorded(table.read_text(), text).count("ran = ") == 3


def test_ci_stops_what_does_not_end(checkout: Path) -> None:
    make(checkout, "trap 'echo cleaned up; exit 1' TERM; sleep 600 & wait")
    code, text, rows = ci(checkout, "--limit", "0", "--stop", "1")
    assert (code, rows["make test"]) == (1, "stopped"), text
    assert "cleaned up" in text
    assert "1 failed, 4 not run" in text
