"""The search on simulated drives, which are slower, noisier and flatter than real ones."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import Direction
from tunetool.tune.goals import Mix, parse_mix
from tunetool.tune.pairs import choose
from tunetool.tune.race import Rounds, distance
from tunetool.tune.search import Findings, Plan, Search, SettingFailed
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, from_block, read_space, settings_of

SPACE = settings_of(SWEEP)
BASE = 2e9
TRANSFER = 128 * 2**20


@dataclass
class Drive:
    """Speeds by parameter values, with noise on each sample, sometimes a sample at half speed, and a clock."""

    seed: int
    noise: float
    effects: Mapping[tuple[Direction, str, int | bool], float]
    """Factors."""
    hiccups: float = 0.05
    now: float = 0.0
    samples: int = 0
    failing: set[AioSettings] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def true(self, settings: AioSettings, direction: Direction) -> float:
        factors = [self.effects.get((direction, name, value), 1.0) for name, value in settings.block().items()]
        return BASE * math.prod(factors)

    def take(self, settings: AioSettings, direction: Direction) -> float:
        if settings in self.failing:
            raise SettingFailed("it went away")
        self.samples += 1
        rate = self.true(settings, direction) * math.exp(self.noise * self.random.gauss(0, 1))
        if self.random.random() < self.hiccups:
            rate /= 2
        self.now += TRANSFER / rate + 0.02
        return rate

    def search(self, seconds: float = 45.0, mix: Mix | None = None, **options: bool) -> Findings:
        plan = Plan(SPACE, mix or Mix(), seconds, seed=self.seed, **options)
        return Search(plan, self.take, lambda: self.now).run()

    def share(self, settings: AioSettings, mix: Mix) -> float:
        """Share of the best speed in the space."""

        def speed(each: AioSettings) -> float:
            return mix.speed(self.true(each, "read"), self.true(each, "write"))

        return speed(settings) / max(map(speed, SPACE))


effects = st.dictionaries(
    st.sampled_from(
        [
            (direction, name, value)
            for direction in ("read", "write")
            for name, values in SWEEP.items()
            for value in values
        ]
    ),
    st.floats(0.4, 1.3),
    max_size=14,
)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 0.03, 0.1]), effects)
def test_never_worse_than_the_default_and_never_over_the_budget(
    seed: int, noise: float, made: Mapping[tuple[Direction, str, int | bool], float]
) -> None:
    drive = Drive(seed, noise, made)
    result = drive.search(30.0)
    slowest = max(TRANSFER / drive.true(each, way) for each in SPACE for way in ("read", "write"))  # type: ignore[arg-type]
    assert drive.now <= 30.0 + 10 * slowest
    for goal, choice in result.choices.items():
        mix = Mix(goal != "write", goal != "read")
        if choice.significant:
            ahead = mix.speed(drive.true(choice.settings, "read"), drive.true(choice.settings, "write"))
            behind = mix.speed(drive.true(DEFAULTS, "read"), drive.true(DEFAULTS, "write"))
            assert ahead > behind * (1 - noise)
        else:
            assert choice.settings == DEFAULTS


def test_what_is_much_faster_is_found() -> None:
    made: dict[tuple[Direction, str, int | bool], float] = {
        ("read", "intra_op_parallelism", 4): 1.5,
        ("read", "intra_op_parallelism", 8): 1.45,
        ("write", "intra_op_parallelism", 4): 1.3,
        ("read", "block_size", 8 * 2**20): 0.7,
        ("read", "overlap_events", False): 0.8,
        ("write", "overlap_events", False): 0.7,
        ("write", "single_submit", True): 0.95,
    }
    for seed in range(3):
        drive = Drive(seed, 0.03, made)
        choice = drive.search().choices["mix"]
        assert choice.significant
        assert choice.gain.ratio > 1.2
        assert drive.share(choice.settings, Mix()) >= 0.97


def test_where_nothing_matters_the_default_is_kept() -> None:
    kept = [Drive(seed, 0.004, {}, hiccups=0.0) for seed in range(6)]
    results = [drive.search() for drive in kept]
    assert all(choice.settings == DEFAULTS for each in results for choice in each.choices.values())
    assert all(drive.now < 35 for drive in kept)


def test_time_goes_to_what_could_still_be_best() -> None:
    made: dict[tuple[Direction, str, int | bool], float] = {("read", "intra_op_parallelism", 8): 2.0}
    result = Drive(1, 0.1, made).search(mix=Mix(1, 0))
    samples = {each: len(sides["read"]) for each, sides in result.screened.rates.items()}
    fast = [count for each, count in samples.items() if each.intra_op_parallelism == 8]
    slow = [count for each, count in samples.items() if each.intra_op_parallelism != 8]
    assert sum(slow) / len(slow) < 3 < sum(fast) / len(fast)


def test_too_large_a_space_is_entered_by_a_part() -> None:
    result = Drive(3, 0.02, {("write", "queue_depth", 128): 1.5}).search(8.0, Mix(0, 1))
    tried = {*result.screened.rates, *result.paired.rates}
    assert 2 < len(tried) < len(SPACE)
    assert DEFAULTS in tried


def test_all_of_it_when_that_is_asked_for() -> None:
    result = Drive(3, 0.02, {}).search(10.0, Mix(1, 0), exhaustive=True)
    assert set(result.screened.rates) == set(SPACE)
    assert {len(sides["read"]) for sides in result.screened.rates.values()} == {6}


def test_settings_that_fail_are_left_out_but_for_the_default() -> None:
    best = AioSettings(2**20, 32, 8, single_submit=False, overlap_events=True)
    drive = Drive(5, 0.02, {("read", "intra_op_parallelism", 8): 2.0}, failing={best})
    result = drive.search(mix=Mix(1, 0))
    assert result.failed == {best: "it went away"}
    assert result.choices["read"].settings not in (best, DEFAULTS)
    with pytest.raises(SettingFailed):
        Drive(5, 0.02, {}, failing={DEFAULTS}).search()


def test_a_budget_that_allows_no_answer_is_said() -> None:
    drive = Drive(5, 0.02, {(way, "block_size", 2**20): 0.01 for way in ("read", "write")})  # type: ignore[misc]
    with pytest.raises(CannotJudge, match="the time was too short"):
        drive.search(5.0)


def test_thrown_away_samples_leave_holes_and_no_wrong_answer() -> None:
    drive = Drive(7, 0.02, {("read", "intra_op_parallelism", 4): 1.5})

    def take(settings: AioSettings, direction: Direction) -> float | None:
        rate = drive.take(settings, direction)
        return None if drive.random.random() < 0.3 else rate

    result = Search(Plan(SPACE, Mix(), 45.0), take, lambda: drive.now).run()
    assert result.choices["read"].settings.intra_op_parallelism == 4
    with pytest.raises(CannotJudge, match="samples of DeepSpeed's default could be proven"):
        Search(Plan(SPACE, Mix(), 20.0), lambda *_: drive.take(DEFAULTS, "read") and None, lambda: drive.now).run()


def test_the_block_is_spelt_as_deepspeed_reads_it() -> None:
    block = SPACE[-1].block()
    assert list(block) == [
        "block_size",
        "queue_depth",
        "intra_op_parallelism",
        "single_submit",
        "overlap_events",
        "use_gds",
    ]
    assert [type(value) for value in block.values()] == [int, int, int, bool, bool, bool]
    assert from_block(json.loads(json.dumps(block))) == SPACE[-1]
    assert distance(DEFAULTS) == 0 < distance(SPACE[-1])


def test_a_mix_is_the_time_of_its_parts() -> None:
    assert parse_mix("read=3,write=1").speed(3e9, 1e9) == pytest.approx(2e9)
    assert parse_mix("write=1").goals == ("write",)
    for text in ("", "read", "read=0", "read=1,read=2", "both=1", "read=-1"):
        with pytest.raises(UsageProblem):
            parse_mix(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"io_parallel": [1]}', "unknown key `io_parallel`"),
        ('{"queue_depth": 8}', "not a list of values"),
        ('{"queue_depth": [0]}', "is `0`"),
        ('{"queue_depth": [true]}', "is `true`"),
        ('{"single_submit": ["true"]}', 'is `"true"`'),
        ('{"block_size": ["1000"]}', "block_size"),
        ('{"block_size": [1000]}', "is `1000`"),
        ('{"intra_op_parallelism": [1000000]}', "is `1000000`"),
        ("[1]", "is not a space"),
        ("{", "is not JSON"),
    ],
)
def test_a_space_that_cannot_be_searched_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "space.json"
    path.write_text(text)
    with pytest.raises(UsageProblem, match="`") as refused:
        read_space(path)
    assert said in refused.value.message
    assert refused.value.hint


def test_a_space_always_holds_the_default(tmp_path: Path) -> None:
    path = tmp_path / "space.json"
    path.write_text('{"block_size": ["1M", 8388608], "single_submit": [true]}')
    space = settings_of(read_space(path))
    assert space[0] == DEFAULTS
    assert {each.block_size for each in space[1:]} == {2**20, 2**23}
    assert {each.queue_depth for each in space} == {8}


def test_slow_samples_are_still_spent_on_others_than_the_default() -> None:
    made = {(way, "intra_op_parallelism", 2): 1.5 for way in ("read", "write")}
    drive = Drive(1, 0.02, made, hiccups=0.0)  # type: ignore[arg-type]
    space = settings_of({"queue_depth": (8, 32), "intra_op_parallelism": (1, 2)})

    def slow(settings: AioSettings, direction: Direction) -> float:
        drive.now += 0.5
        return drive.take(settings, direction)

    result = Search(Plan(space, Mix(), 40.0), slow, lambda: drive.now).run()
    assert result.choices["mix"].settings.intra_op_parallelism == 2
    # If only the default could be measured, nothing can be said about the others.
    with pytest.raises(CannotJudge, match="the time was too short"):
        Search(Plan(SPACE, Mix(), 2.0), slow, lambda: drive.now).run()


@pytest.mark.parametrize(("slow", "faster"), [(6, False), (2, True)])
def test_what_is_called_faster_is_so_by_the_interval_beside_it(slow: int, faster: bool) -> None:
    # All samples together differ by the rank sum; in `slow` of 24 pairs the default was the faster one.
    rounds, other = Rounds(), dataclasses.replace(DEFAULTS, intra_op_parallelism=8)
    for number in range(24):
        rounds.count = number
        rounds.add(DEFAULTS, "read", 1.0 + number / 1000)
        rounds.add(other, "read", 0.98 if number < slow else 1.1 + number / 1000)
    choice = choose(rounds, "read", Mix(1, 0), [other])
    assert choice.significant is faster
    assert (choice.interval.low > 1.0) is faster
    assert choice.settings == (other if faster else DEFAULTS)
