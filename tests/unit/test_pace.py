"""How many rounds a call makes, by a clock that stands still but for the rounds; and what few rounds decide."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import pytest

import builders
from tunetool.bench.checkpoint import engines as checkpoint
from tunetool.bench.dataset import engines as dataset
from tunetool.bench.defaults import CHECKPOINT_ENGINES, DATASET_ENGINES, DRIVES_ENGINES, LOADING_ENGINES
from tunetool.bench.drives import preflight as drives
from tunetool.bench.engine_choice import choose
from tunetool.bench.loading import engines as loading
from tunetool.measure.pace import QUICK_LOOKS, QUICK_SECONDS, Pace, pace_of, rounds_of
from tunetool.measure.rounds import ratio, undecided
from tunetool.measure.statistics import FEW, LOOKS, WIDENING, coverage, estimate, excludes_one
from tunetool.options.shared import InRounds
from tunetool.record import Measurement
from tunetool.report.undecided import what_is_open

QUICK = pace_of(None, None, thorough=False, thorough_rounds=6)


@dataclass
class Call:
    """A call whose rounds take the seconds that are given; each look is noted."""

    pace: Pace
    seconds: Callable[[int], float] = lambda number: 1.0
    open_until: int = 100
    """Rounds before which something is undecided."""
    before: float = 0.0
    """Seconds from the start of the call to the first round."""
    now: float = 1000.0
    looked: list[int] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    made: list[int] = field(default_factory=list)

    def run(self) -> list[int]:
        deadline = self.pace.deadline(self.now)
        self.now += self.before
        for number in rounds_of(self.pace, deadline, self.undecided, self.said.append, lambda: self.now):
            self.made.append(number)
            self.now += self.seconds(number)
        return self.made

    def undecided(self) -> Sequence[str]:
        self.looked.append(self.made[-1])
        return [] if self.made[-1] >= self.open_until else ["speed against `other`"]


@pytest.mark.parametrize(
    ("open_until", "rounds", "looks"),
    [
        (0, 3, [3]),
        (3, 3, [3]),
        (4, 6, [3, 6]),
        (7, 9, [3, 6, 9]),
        (11, 12, [3, 6, 9, 12]),
        (100, 15, [3, 6, 9, 12]),
    ],
)
def test_rounds_go_on_while_figures_are_undecided(open_until: int, rounds: int, looks: list[int]) -> None:
    """Decided after round 4 is not asked before round 6: only planned looks may end a call."""
    call = Call(QUICK, open_until=open_until)
    assert call.run() == list(range(1, rounds + 1))
    assert call.looked == looks


@pytest.mark.parametrize(
    ("seconds", "before", "rounds"),
    [
        (100.0, 0.0, 3),
        (101.0, 0.0, 2),
        (60.0, 0.0, 5),
        (60.0, 61.0, 3),
        (20.0, 0.0, 15),
        (1000.0, 0.0, 1),
        (1.0, 1000.0, 1),
    ],
)
def test_a_round_that_would_end_too_late_does_not_begin(seconds: float, before: float, rounds: int) -> None:
    """The time is that of the whole call, what comes before the rounds included. The first round always begins."""
    call = Call(QUICK, lambda number: seconds, before=before)
    assert len(call.run()) == rounds
    assert call.now - 1000 <= QUICK_SECONDS or rounds == 1
    late = f"the time is up after {rounds} of at most 15 rounds"
    assert (late in call.said) == (rounds < 15)


def test_the_last_round_says_how_long_the_next_one_takes() -> None:
    # The first makes what the others have.
    call = Call(Pace(6, 300.0), lambda number: 150.0 if number == 1 else 40.0)
    assert len(call.run()) == 4, "150, 190, 230, 270: one of 40 s more would end after 300"
    assert len(Call(Pace(6, 320.0), lambda number: 120.0 if number == 1 else 40.0).run()) == 6


@pytest.mark.parametrize(
    ("rounds", "budget", "thorough", "expected"),
    [
        (None, None, False, Pace(15, QUICK_SECONDS, QUICK_LOOKS)),
        (None, 60.0, False, Pace(15, 60.0, QUICK_LOOKS)),
        (4, None, False, Pace(4)),
        (4, 60.0, False, Pace(4, 60.0)),
        (None, None, True, Pace(6)),
        (None, 60.0, True, Pace(6, 60.0)),
        (4, None, True, Pace(4)),
    ],
)
def test_a_number_of_rounds_is_exact(rounds: int | None, budget: float | None, thorough: bool, expected: Pace) -> None:
    assert pace_of(rounds, budget, thorough, 6) == expected
    call = Call(expected)
    if not expected.looks:
        assert len(call.run()) == expected.rounds
        assert call.looked == []


def test_it_is_announced_what_makes_rounds_more_or_fewer() -> None:
    assert QUICK.announcement() == [
        "more than 3 rounds, up to 15, while figures are undecided; no further round that would end 300 s after the start"
    ]
    assert Pace(6).announcement() == []
    assert Pace(6, 60.0).announcement() == ["no further round that would end 60 s after the start"]


def test_a_call_says_which_engines_or_takes_the_few_that_matter() -> None:
    few = ("direct", "other-*")
    assert InRounds().engines_of((), few) == few
    assert InRounds(rounds=9).engines_of((), few) == few
    assert InRounds(thorough=True).engines_of((), few) == (), "all"
    assert InRounds(thorough=True).engines_of(("one",), few) == ("one",)


@pytest.mark.parametrize(
    ("few", "every"),
    [
        (CHECKPOINT_ENGINES, checkpoint.ENGINES),
        (LOADING_ENGINES, loading.ENGINES),
        (DRIVES_ENGINES, drives.ENGINES),
        (DATASET_ENGINES, dataset.engines((0, 2), huge_pool=False)),
    ],
)
def test_the_few_engines_are_engines(few: Sequence[str], every: Collection[str]) -> None:
    assert 0 < len(choose(every, few)) < len(every)


def decided(*ratios: float) -> bool:
    return excludes_one(estimate(ratios), len(ratios))


def test_three_rounds_decide_only_what_is_far_from_one() -> None:
    assert decided(5.0, 5.2, 4.9)
    assert decided(1 / 5.0, 1 / 5.2, 1 / 4.9)
    # All on one side of 1, which chance brings in one of four.
    assert not decided(1.2, 1.5, 1.3)
    assert not decided(5.0, 9.0, 7.0)
    assert decided(5.0, 5.2, 4.9, 5.1)
    assert not decided(1.2, 1.5, 1.3, 1.3)
    assert decided(1.2, 1.5, 1.3, 1.3, 1.4), "five: the interval itself"
    assert not decided(5.0, 5.0), "two decide nothing"
    assert not decided(0.0, 0.0, 0.0)


def test_all_looks_together_err_in_one_of_twenty() -> None:
    """The range of three widened, then the intervals of ``LOOKS``: Bonferroni's sum."""
    assert 0.25 / (1 + WIDENING) ** 2 + sum(1 - coverage(*look) for look in LOOKS) <= 0.05
    assert (FEW, *(count for count, _ in LOOKS)) == QUICK_LOOKS


@pytest.mark.parametrize("spread", ["even", "normal", "heavy"])
def test_equal_engines_are_seldom_told_apart(spread: str) -> None:
    """Whole calls of two engines of one speed, with seeds: at whatever look a call ends, or would go on, its figure may
    say that one is faster in one of twenty calls at most."""
    drawn = random.Random(spread)
    draw = {
        "even": lambda: drawn.uniform(0.8, 1.2),
        "normal": lambda: drawn.lognormvariate(0, 0.1),
        "heavy": lambda: 1 + 0.02 * drawn.paretovariate(1.5),
    }[spread]
    wrong, calls = 0, 2000
    for _ in range(calls):
        ours: dict[int, float] = {}
        theirs: dict[int, float] = {}

        def left(ours: dict[int, float] = ours, theirs: dict[int, float] = theirs) -> Sequence[str]:
            compared = ratio("theirs", theirs, ours)
            return [] if compared is not None and compared.decided else ["speed"]

        for number in rounds_of(QUICK, None, left, clock=lambda: 0.0):
            ours[number], theirs[number] = draw(), draw()
        wrong += not left()
    assert wrong / calls <= 0.05


def test_what_is_left_open_is_said_with_the_call_for_more() -> None:
    made = builders.record(
        comparison("direct", "other", False),
        comparison("direct", "other", False, "cold"),
        comparison("direct", "other", False, "cached"),
        kind="bench.loading",
        command=[
            "/usr/bin/tunetool",
            "bench",
            "loading",
            "--budget",
            "2m",
            "--model",
            "a b",
            "--budget=3m",
            "--rounds",
            "2",
        ],
    )
    names = [f"loading.{state}.direct.first_versus_best_other against `other`" for state in ("tmpfs", "cold")]
    line = (
        f"not decided by 3 rounds: {names[0]}; {names[1]}; 1 more; more of them: "
        "`tunetool bench loading --model 'a b' --rounds 6`"
    )
    assert what_is_open(made) == [line]
    assert what_is_open(made.model_copy(update={"command": ["python", "x.py"]}))[0].endswith("call with `--rounds 6`")
    assert what_is_open(builders.record(comparison("direct", "other", True), kind="bench.loading")) == []


def comparison(engine: str, against: str, is_decided: bool, state: str = "tmpfs") -> Measurement:
    made = builders.measurement(f"loading.{state}.{engine}.first_versus_best_other", 1.0, "ratio")
    return made.model_copy(
        update={
            "labels": {"subject": "loading", "state": state, "engine": engine},
            "parameters": {"against": against, "decided": is_decided, "pairs": 3},
        }
    )


def test_what_two_engines_leave_open_is_named_once() -> None:
    figures = [
        comparison("direct", "other", False),
        comparison("other", "direct", False),
        comparison("slow", "direct", True),
        comparison("direct", "other", False, "cold"),
        # How near something comes to a ceiling is no question.
        comparison("direct", "fio", False),
        comparison("direct", "pinned", False),
        builders.measurement("loading.tmpfs.direct.first", 1e9),
    ]
    assert undecided(figures) == [
        "loading.tmpfs.direct.first_versus_best_other against `other`",
        "loading.cold.direct.first_versus_best_other against `other`",
    ]
