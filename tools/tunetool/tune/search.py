"""The search: rounds that drop significantly slower settings, then fresh pairs with DeepSpeed's default. Pure.

Time comes from ``clock`` and samples from ``take``, so that tests search a simulated drive with the same code.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, log2
from statistics import median

from tunetool.measure import Direction
from tunetool.tune.goals import Goal, Mix, parts
from tunetool.tune.pairs import PAIRS, Choice, choose, too_few
from tunetool.tune.race import ENOUGH, Rounds, Standing, neighbours, standing
from tunetool.tune.settings import DEFAULTS, AioSettings

FINALISTS = 2
"""Finalists of each goal, beside the default."""
CONFIRM_SHARE = 0.35
"""Share of the time that is kept for the pairs."""
FIRST_SHARE = 0.5
"""Share of the time before the pairs for the first round; of a larger space it takes a random part."""
EXHAUSTIVE_ROUNDS = 6
WARM_UPS, WARM_UP_SHARE = 3, 0.05
_RECENT = 64
"""Number of latest samples that predict the time of the next ones."""


class SettingFailed(Exception):
    """This setting cannot be used here; others may work."""


Take = Callable[[AioSettings, Direction], float | None]
"""Bytes per second of one sample; None if it proves nothing and was discarded."""


@dataclass(frozen=True)
class Plan:
    """The space, goals and time of a search."""

    space: Sequence[AioSettings]
    """Settings to try, including the default."""
    mix: Mix
    seconds: float
    exhaustive: bool = False
    seed: int = 0


@dataclass
class Progressing:
    """The present state of a search, for a progress line."""

    phase: str = "warming up"
    settings: int = 0
    tried: int = 0
    alive: int = 0
    best: dict[Goal, tuple[AioSettings, float]] = field(default_factory=dict)
    """The fastest setting of each goal so far, with its median speed."""
    left: float = 0.0
    """Seconds left."""


@dataclass
class Findings:
    """The result of a search, with every measured rate."""

    choices: dict[Goal, Choice] = field(default_factory=dict)
    screened: Rounds = field(default_factory=Rounds)
    paired: Rounds = field(default_factory=Rounds)
    failed: dict[AioSettings, str] = field(default_factory=dict)
    rounds: int = 0

    @property
    def decided(self) -> list[tuple[AioSettings, Direction]]:
        """What the choices rest on: each chosen setting in the directions of its goal."""
        pairs = [(choice.settings, direction) for choice in self.choices.values() for direction in parts(choice.goal)]
        return list(dict.fromkeys(pairs))


class Search:
    """One search. Call ``run`` once."""

    def __init__(
        self, plan: Plan, take: Take, clock: Callable[[], float], watch: Callable[[Progressing], None] = lambda _: None
    ) -> None:
        self.plan, self.clock, self.watch = plan, clock, watch
        self.findings = Findings()
        self.seen = Progressing(settings=len(plan.space))
        self._take = take
        self._random = random.Random(plan.seed)  # noqa: S311  (an order, not a secret)
        self._start = clock()
        self._hasty: list[AioSettings] = []
        self._proven = False
        self._spent: dict[Direction, list[float]] = {direction: [] for direction in plan.mix.directions}

    def run(self) -> Findings:
        """Search. Raises ``CannotJudge`` if the time allows no answer, ``SettingFailed`` if the default fails."""
        plan = self.plan
        # Learns the cost of a sample, and warms everything up.
        for turn in range(WARM_UPS):
            if turn and self.clock() - self._start > WARM_UP_SHARE * plan.seconds:
                break
            for direction in plan.mix.directions:
                self._sample(Rounds(), DEFAULTS, direction)
        order = self._exhaust() if plan.exhaustive else self._screen()
        finalists = self._finalists(order)
        if len(self._usable(plan.space)) > 1 and not any(finalists.values()):
            # Nothing was compared with the default: that is not a result.
            raise too_few(0, 0 if self._proven else PAIRS[0])
        self._confirm(finalists)
        return self.findings

    def _finalists(self, order: dict[Goal, list[AioSettings]]) -> dict[Goal, list[AioSettings]]:
        """The best settings of each goal, as many as the time allows with enough pairs."""
        candidates = {goal: [each for each in ranked if each != DEFAULTS] for goal, ranked in order.items()}
        anyone = next((each for each in reversed(candidates.values()) if each), [])
        candidates = {goal: each or anyone for goal, each in candidates.items()}
        left = self._start + self.plan.seconds - self.clock()
        for count in range(FINALISTS, 0, -1):
            finalists = {goal: each[:count] for goal, each in candidates.items()}
            needed = self._needed({goal: [DEFAULTS, *each] for goal, each in finalists.items()})
            if PAIRS[0] * self._cost(needed) <= left:
                return finalists
        return dict.fromkeys(candidates, candidates[self.plan.mix.goals[-1]][:1])

    # -- the rounds

    def _exhaust(self) -> dict[Goal, list[AioSettings]]:
        self.seen.phase = "every setting"
        rounds = self.findings.screened
        for _ in range(EXHAUSTIVE_ROUNDS):
            self._round(rounds, {direction: self._usable(self.plan.space) for direction in self.plan.mix.directions})
        return {goal: self._standing(rounds, goal, self._usable(self.plan.space)).order for goal in self.plan.mix.goals}

    def _screen(self) -> dict[Goal, list[AioSettings]]:
        plan = self.plan
        room = self._room()
        field_ = list(plan.space)
        if len(field_) > room:
            drawn = self._random.sample([each for each in plan.space if each != DEFAULTS], room - 1)
            field_ = [DEFAULTS, *drawn]
        tried: set[AioSettings] = set()
        while True:
            tried.update(field_)
            left = [each for each in plan.space if each not in tried]
            now, end = self.clock(), self._screen_end()
            # The rest of a space that did not fit is tried in half of the time.
            order = self._race(field_, (now + end) / 2 if left else end)
            room = self._room()
            # One slow sample says little: a setting dropped for it gets another one after all had their first.
            left = self._usable(left or self._hasty)
            self._hasty = []
            if not left or room < 2 + FINALISTS:
                return order
            leaders = [each for goal in plan.mix.goals for each in order[goal][: FINALISTS + 1]]
            near = [each for goal in plan.mix.goals for each in neighbours((order[goal] or [DEFAULTS])[0], left)]
            self._random.shuffle(left)
            fresh = list(dict.fromkeys([*near, *left]))[:room]
            field_ = list(dict.fromkeys([DEFAULTS, *leaders, *fresh]))

    def _screen_end(self) -> float:
        """Time at which the pairs must begin."""
        plan = self.plan
        pairs = PAIRS[0] * self._cost_of_one() * (1 + FINALISTS)
        return self._start + plan.seconds - min(max(CONFIRM_SHARE * plan.seconds, pairs), 0.6 * plan.seconds)

    def _room(self) -> int:
        """Number of settings that a round may have."""
        return max(2, int(FIRST_SHARE * (self._screen_end() - self.clock()) / max(self._cost_of_one(), 1e-9)))

    def _cost_of_one(self) -> float:
        return self._cost({direction: [DEFAULTS] for direction in self.plan.mix.directions})

    def _race(self, field_: Sequence[AioSettings], end: float) -> dict[Goal, list[AioSettings]]:
        """Run rounds until ``end`` or until they can change nothing. Returns the order for each goal, best first."""
        self.seen.phase = "racing"
        goals = self.plan.mix.goals
        rounds = Rounds()
        alive = {goal: list(field_) for goal in goals}
        dropped: dict[Goal, list[AioSettings]] = {goal: [] for goal in goals}
        began = self.clock()
        while True:
            self._round(rounds, self._needed(alive), end)
            self._keep(rounds)
            open_goals = []
            for goal in goals:
                alive[goal] = self._usable(alive[goal])
                now = self._standing(rounds, goal, alive[goal])
                alive[goal] = [each for each in alive[goal] if each in now.scores]
                out = now.out(alive[goal]) if alive[goal] else []
                dropped[goal] += sorted(out, key=lambda each: now.scores[each])
                alive[goal] = [each for each in alive[goal] if each not in out]
                if rounds.count < 3 or not now.settled(alive[goal]):
                    open_goals.append(goal)
            if not open_goals:
                break
            halvings = max(0, ceil(log2(max(*(len(alive[goal]) for goal in goals), 1) / (FINALISTS + 1))))
            spent, left = self.clock() - began, end - self.clock()
            cost = self._cost(self._needed(alive))
            # Each halving gets the same time; the present one has used `spent`.
            while halvings and (spent + cost > (spent + left) / (halvings + 1) or cost > left):
                for goal in goals:
                    self._halve(rounds, goal, alive, dropped)
                began, spent = self.clock(), 0.0
                halvings -= 1
                cost = self._cost(self._needed(alive))
            if cost > left:
                break
        orders = {}
        for goal in goals:
            now = self._standing(rounds, goal, alive[goal])
            orders[goal] = [each for each in now.order if each in alive[goal]] + dropped[goal][::-1]
        return orders

    def _halve(
        self,
        rounds: Rounds,
        goal: Goal,
        alive: dict[Goal, list[AioSettings]],
        dropped: dict[Goal, list[AioSettings]],
    ) -> None:
        now = self._standing(rounds, goal, alive[goal])
        order = [each for each in now.order if each in alive[goal]]
        kept = order[: max(FINALISTS + 1, ceil(len(order) / 2))]
        if rounds.count < 2:
            self._hasty += [each for each in order[len(kept) :] if each not in self._hasty]
        dropped[goal] += order[len(kept) :][::-1]
        alive[goal] = kept

    def _needed(self, alive: dict[Goal, list[AioSettings]]) -> dict[Direction, list[AioSettings]]:
        needed: dict[Direction, list[AioSettings]] = {}
        for direction in self.plan.mix.directions:
            wanted = [each for goal in alive if direction in parts(goal) for each in alive[goal]]
            needed[direction] = list(dict.fromkeys(wanted))
        return needed

    # -- the pairs

    def _confirm(self, finalists: dict[Goal, list[AioSettings]]) -> None:
        self.seen.phase = "against the default"
        rounds = self.findings.paired
        end = self._start + self.plan.seconds
        goals = {goal: [DEFAULTS, *candidates] for goal, candidates in finalists.items()}
        grace = max(5.0, 0.5 * self.plan.seconds)
        while True:
            needed = self._needed(goals)
            pairs = min(len(rounds.speeds(DEFAULTS, goal, self.plan.mix)) for goal in goals)
            late = self.clock() + self._cost(needed) - end if not self.plan.exhaustive else -1.0
            if rounds.count >= PAIRS[-1] or (pairs >= PAIRS[0] and late > 0):
                break
            if pairs < PAIRS[0] and late > grace:
                raise too_few(pairs, rounds.count)
            self._round(rounds, needed)
            if rounds.count in PAIRS and pairs + 1 >= PAIRS[0]:
                self._conclude(finalists, last=False)
                if all(self._decided(choice) for choice in self.findings.choices.values()):
                    break
        self._conclude(finalists, last=True)

    def _decided(self, choice: Choice) -> bool:
        """Whether the pairs decide: a significant gain, or the certainty that there is no worthwhile one."""
        return not choice.rivals if choice.significant else choice.interval.high < 1 + ENOUGH

    def _conclude(self, finalists: dict[Goal, list[AioSettings]], *, last: bool) -> None:
        for goal, candidates in finalists.items():
            self.findings.choices[goal] = choose(
                self.findings.paired, goal, self.plan.mix, self._usable(candidates), last=last
            )

    # -- one sample

    def _round(self, rounds: Rounds, needed: dict[Direction, list[AioSettings]], end: float | None = None) -> None:
        """Measure each of ``needed`` once; settings without time before ``end`` are left out of this round."""
        for direction, wanted in needed.items():
            order = self._usable(wanted)
            self._random.shuffle(order)
            for settings in order:
                if settings not in self.findings.failed and (end is None or self.clock() < end):
                    self._sample(rounds, settings, direction)
        rounds.count += 1
        self.findings.rounds += 1

    def _sample(self, rounds: Rounds, settings: AioSettings, direction: Direction) -> None:
        began = self.clock()
        try:
            rate = self._take(settings, direction)
        except SettingFailed as error:
            if settings == DEFAULTS:
                raise
            self.findings.failed[settings] = str(error)
            return
        self._spent[direction].append(self.clock() - began)
        if rate is not None:
            self._proven = True
            rounds.add(settings, direction, rate)
            self._tell(rounds, settings)

    def _cost(self, needed: dict[Direction, list[AioSettings]]) -> float:
        """Expected seconds of a round, from the samples so far."""
        return sum(
            len(wanted) * median(self._spent[direction][-_RECENT:])
            for direction, wanted in needed.items()
            if self._spent[direction]
        )

    def _usable(self, wanted: Sequence[AioSettings]) -> list[AioSettings]:
        return [each for each in wanted if each not in self.findings.failed]

    def _standing(self, rounds: Rounds, goal: Goal, alive: Sequence[AioSettings]) -> Standing:
        return standing(rounds, goal, self.plan.mix, alive)

    def _keep(self, rounds: Rounds) -> None:
        """Keep the rates of this round with those of the others."""
        kept = self.findings.screened
        for settings, sides in rounds.rates.items():
            for direction, rates in sides.items():
                if rounds.count - 1 in rates:
                    kept.add(settings, direction, rates[rounds.count - 1])
        kept.count += 1

    def _tell(self, rounds: Rounds, settings: AioSettings) -> None:
        seen = self.seen
        seen.tried = len({*self.findings.screened.rates, *rounds.rates})
        seen.left = max(0.0, self._start + self.plan.seconds - self.clock())
        for goal in self.plan.mix.goals:
            speeds = list(rounds.speeds(settings, goal, self.plan.mix).values())
            best = seen.best.get(goal)
            if speeds and (best is None or median(speeds) > best[1] or best[0] == settings):
                seen.best[goal] = (settings, median(speeds))
        self.watch(seen)
