"""The goals of perf/loading.py: ratios within a round, what is not measured, and which loader to use."""

from __future__ import annotations

import pytest

from loading import GOALS, OURS, PEER, report, which_to_use


def row(ours: float, peer: float, pinned: float = 55e9) -> dict[str, float]:
    return {
        "pinned": pinned,
        f"tmpfs {OURS} first": 0.9 * ours,
        f"tmpfs {OURS} warm": ours,
        f"tmpfs {PEER} first": 0.9 * peer,
        f"tmpfs {PEER} warm": peer,
        f"cold {OURS} first": 2e9,
        "fio": 2e9,
    }


def test_a_goal_compares_within_a_round() -> None:
    rows = [row(50e9, 40e9), row(25e9, 20e9, pinned=27.5e9), {"pinned": 55e9}]
    by_title = {goal.title: goal.ratios(rows) for goal in GOALS}
    assert by_title["tmpfs, warm, share of pinned copies"] == pytest.approx([50 / 55] * 2)
    assert by_title["tmpfs, warm, against InstantTensor"] == pytest.approx([1.25] * 2)


def test_what_is_held_missed_and_not_measured_decides_the_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([row(50e9, 40e9)] * 6, {}) == 0
    assert capsys.readouterr().out.count(": held\n") == len(GOALS)
    assert report([row(30e9, 40e9)] * 6, {}) == 1
    assert report([row(50e9, 40e9)] * 6, {f"tmpfs {OURS}": "its tensors are not those of the files"}) == 1
    assert report([row(50e9, 40e9)] * 6, {f"tmpfs {PEER}": "ImportError"}) == 0
    without = {name: value for name, value in row(50e9, 40e9).items() if name != "pinned"}
    capsys.readouterr()
    assert report([without] * 6, {}) == 3
    assert "share of pinned copies: not measured here" in capsys.readouterr().out


def test_only_a_decided_comparison_names_a_loader() -> None:
    assert which_to_use([row(50e9, 40e9)] * 6) == f"tmpfs: use {OURS}"
    assert which_to_use([row(50e9, 40e9)] * 4).endswith("these rounds do not decide which")
    mixed = [row(50e9, 40e9), row(40e9, 50e9)] * 3
    assert which_to_use(mixed).endswith("these rounds do not decide which")
    assert which_to_use([{"pinned": 1.0}]) == "which to use: nothing was compared"
