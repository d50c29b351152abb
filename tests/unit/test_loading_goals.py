"""The goals of perf/loading.py: ratios within a round, what is not measured, and the verdicts."""

from __future__ import annotations

import pytest

from goals import HELD, MISSED, OPEN
from loading import GOALS, PEER, judge
from tunetool.bench.loading.engines import DIRECT

Samples = dict[str, list[float]]


def samples(ours: float, peer: float, rounds: int = 6) -> Samples:
    taken = {}
    for medium in ("tmpfs", "huge"):
        taken |= {
            f"{medium}.pinned": [55e9] * rounds,
            f"{medium}.{DIRECT}.first": [0.9 * ours] * rounds,
            f"{medium}.{DIRECT}.warm": [ours] * rounds,
            f"{medium}.{PEER}.first": [0.9 * peer] * rounds,
            f"{medium}.{PEER}.warm": [peer] * rounds,
        }
    return taken | {
        f"cold.{DIRECT}.first": [2e9] * rounds,
        "cold.fio": [2e9] * rounds,
    }


def test_a_goal_compares_within_a_round() -> None:
    taken = {**samples(50e9, 40e9, 2), "tmpfs.pinned": [55e9, 27.5e9], f"tmpfs.{DIRECT}.warm": [50e9, 25e9]}
    by_title = {goal.title: goal.ratios(taken) for goal in GOALS}
    assert by_title["tmpfs, warm, share of pinned copies"] == pytest.approx([50 / 55] * 2)
    assert by_title["tmpfs, warm, against InstantTensor"] == pytest.approx([1.25, 0.625])


def test_a_goal_is_held_missed_or_not_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert judge(samples(50e9, 40e9)) == [HELD] * len(GOALS)
    assert judge(samples(30e9, 40e9)) == [*[MISSED, MISSED, MISSED, HELD] * 2, HELD]
    assert judge(samples(50e9, 40e9, rounds=4)) == [OPEN] * len(GOALS)
    # A loader that failed in a round lacks its figure there, and what is left cannot be paired.
    short = {**samples(50e9, 40e9), f"tmpfs.{PEER}.warm": [40e9] * 5, "cold.fio": []}
    capsys.readouterr()
    assert judge(short) == [HELD, OPEN, HELD, HELD, *[HELD] * 4, OPEN]
    assert capsys.readouterr().out.count(": not measured here\n") == 2
