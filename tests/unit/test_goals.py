"""The verdicts of the benchmarks in perf/: an interval on one side of its goal, on the other, or on both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from goals import HELD, MISSED, OPEN, line, status, verdict
from host_memory import GOALS, Goal

ROOT = Path(__file__).parents[2]


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


def test_every_goal_has_a_command_and_make_bench_runs_those_without_a_gpu() -> None:
    table = (ROOT / "perf/README.md").read_text().partition("## Costs")[0]
    listed = re.findall(r"^\|.*\| `[^`]*?perf/(\w+\.py)[^`]*` \|([^|]*)\|", table, re.MULTILINE)
    programs = {path.name for path in (ROOT / "perf").glob("*.py") if "from goals import" in path.read_text()}
    assert {name for name, _ in listed} == programs
    recipe = (ROOT / "Makefile").read_text().partition("\nbench:")[2].partition("\n\n")[0]
    assert all(name in recipe for name, needs in listed if "GPU" not in needs)
