"""The verdicts of the benchmarks in perf/: an interval on one side of its goal, on the other, or on both."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import goals
from goals import HELD, MISSED, OPEN, VERDICT, line, line_within, status
from host_memory import GOALS, Goal
from tunetool.accept.judge import verdict


@pytest.mark.parametrize(
    ("low", "high", "at_least", "expected"),
    [
        (1.5, 2.0, True, HELD),
        (1.4, 2.0, True, OPEN),
        (1.0, 1.49, True, MISSED),
        (1.0, 1.5, False, HELD),
        (1.4, 1.6, False, OPEN),
        (1.51, 2.0, False, MISSED),
    ],
)
def test_a_goal_is_held_only_by_the_whole_interval(low: float, high: float, at_least: bool, expected: str) -> None:
    assert verdict(low, high, 1.5, at_least) == expected


def test_a_line_has_figure_interval_goal_and_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    assert line("writing", [2.0, 1.9, 2.2, 2.1, 2.0, 2.3], 1.5) == HELD
    assert capsys.readouterr().out == "writing: 2.05 [1.90 to 2.30, 97%], 6 rounds; goal: at least 1.5: held\n"
    assert line("memory", [1.0, 1.2], 1.1, at_least=False) == OPEN
    assert "goal: at most 1.1: not decided" in capsys.readouterr().out


def test_the_verdict_is_read_from_a_line_s_end(capsys: pytest.CaptureFixture[str]) -> None:
    line("writing", [2.0] * 5, 1.5)
    line("writing", [1.0] * 5, 1.5)
    line("what was held: missed", [2.0], 1.5)
    found = [VERDICT.search(each) for each in capsys.readouterr().out.splitlines()]
    assert [each[1] for each in found if each] == [HELD, MISSED, OPEN]
    assert VERDICT.search("round 1: held: 3") is None


def test_a_figure_may_have_a_goal_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    assert line_within("ratio", [0.96, 0.99, 1.0, 1.01, 1.049], 0.95, 1.05) == HELD
    assert line_within("ratio", [0.94, 0.99, 1.0, 1.01, 1.049], 0.95, 1.05) == OPEN
    assert line_within("ratio", [1.06, 1.07, 1.1, 1.2, 1.3], 0.95, 1.05) == MISSED
    assert line_within("ratio", [0.9, 0.91, 0.9, 0.92, 0.94], 0.95, 1.05) == MISSED
    assert line_within("ratio", [1.0] * 4, 0.95, 1.05) == OPEN
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "ratio: 1.000 [0.960 to 1.049, 94%], 5 rounds; goal: 0.95 to 1.05: held"


def test_few_rounds_decide_nothing() -> None:
    """The range of one value is that value: an interval that holds the median with a probability of nothing."""
    assert [line("writing", [2.0] * rounds, 1.5) for rounds in (1, 4, 5)] == [OPEN, OPEN, HELD]
    assert [line("writing", [1.0] * rounds, 1.5) for rounds in (1, 4, 5)] == [OPEN, OPEN, MISSED]


def test_what_is_missed_weighs_more_than_what_is_open() -> None:
    assert (status([HELD]), status([HELD, OPEN]), status([OPEN, MISSED, HELD])) == (0, 3, 1)


def test_huge_pages_are_compared_within_a_round() -> None:
    rounds = [
        {"within_size": {"write": 30.0, "map": 0.01}, "never": {"write": 10.0, "map": 0.4}},
        {"within_size": {"write": 20.0, "map": 0.0}, "never": {"write": 20.0, "map": 0.4}},
    ]
    by_figure = {goal.figure: goal for goal in GOALS}
    assert by_figure["write"].ratios(rounds) == [3.0, 1.0]
    assert by_figure["map"].ratios(rounds) == pytest.approx([40.0, 400000.0])
    # Without a GPU, or without torch, there is no such figure.
    assert by_figure["register"].ratios(rounds) == []
    assert Goal("write", "inverse", 1.0, inverse=True).ratios(rounds) == pytest.approx([1 / 3, 1.0])


def test_a_program_that_is_ended_removes_what_it_made(tmp_path: Path) -> None:
    text = f"""
import tempfile, time
from entry import program
def main():
    with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}):
        print(flush=True)
        time.sleep(600)
        return 0
program(main)
"""
    paths = {"PYTHONPATH": f"{Path(goals.__file__).parent}:{':'.join(sys.path)}"}
    with subprocess.Popen([sys.executable, "-c", text], env=paths, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list(tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())
