"""What a group of tests runs: after a clone of the same files passed elsewhere, only what that run could not show."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/dev"))
import groups

sys.path.remove(str(Path(__file__).parents[2] / "tools/dev"))

WHOLE = "tests/unit"


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(groups, "SKIPPED_IN_FRESH", tmp_path / "skipped")
    return tmp_path / "skipped"


def test_all_unit_tests_run_where_no_clone_passed() -> None:
    assert WHOLE in groups.commands_of("unit", slow=False, pythons=False)[0]
    assert len(groups.commands_of("lint", slow=False, pythons=False)) > 5


def test_after_a_clone_passed_those_run_that_it_skipped(skipped: Path) -> None:
    skipped.write_text("tests/unit/test_a.py::test_one[a b]\ntests/unit/test_b.py\n")
    assert groups.commands_of("lint", slow=False, pythons=False, fresh_passed=True) == []
    first, *others = groups.commands_of("unit", slow=False, pythons=False, fresh_passed=True)
    assert {"tests/unit/test_a.py::test_one[a b]", "tests/unit/test_b.py"} < set(first)
    assert not any(WHOLE in command for command in (first, *others))


def test_all_run_here_whatever_passed_there_where_slow_tests_are_wanted(skipped: Path) -> None:
    skipped.write_text("")
    commands = groups.commands_of("unit", slow=True, pythons=False, fresh_passed=True)
    assert [WHOLE in command for command in commands].count(True) == 1
    assert not any("not slow" in command for command in commands)


def test_a_clone_that_did_not_write_its_list_is_a_fault(skipped: Path) -> None:
    with pytest.raises(FileNotFoundError):
        groups.commands_of("unit", slow=False, pythons=False, fresh_passed=True)
