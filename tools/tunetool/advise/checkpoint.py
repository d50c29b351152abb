"""How often to save a checkpoint: a rule of thumb, and the optima of Young and Daly. Pure.

Times are seconds, sizes bytes. Training is taken to stand still while a checkpoint is written; for an asynchronous
writer put the time for which it holds the loop.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974) 530; J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006) 303.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise.zero import FP32, LOW, STATES

WEIGHTS = LOW
"""Bytes saved of each parameter when only the weights are: bf16."""
FULL_STATE = LOW + STATES * FP32
"""Bytes saved of each parameter to go on training: bf16 weights, and in fp32 the master copy and Adam's two moments.
The 16 bytes of mixed precision with Adam (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1) without gradients.
"""
LEAST_SHARE = 0.05
"""What writing may take of the time, by the rule of thumb."""
ALIKE = 0.1
"""Intervals that differ by less are not worth a sentence: the optimum is flat."""

RULE, YOUNG, DALY = "rule of thumb", "Young", "Daly"


@dataclass(frozen=True)
class Failures:
    """How often the job dies, and what it takes to go on."""

    mtbf: float
    """Mean time between failures of the whole job: a node's over the number of nodes."""
    restart: float
    """From the failure until training goes on from the last checkpoint, reading it included."""


@dataclass(frozen=True)
class Loss:
    """Shares of the whole time, expected, that are no progress."""

    write: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.write + self.rework + self.restart


@dataclass(frozen=True)
class Choice:
    """One way to choose the interval."""

    rule: str
    interval: float
    """Seconds of training between two checkpoints."""
    samples: float
    steps: int | None
    """None without a batch size."""
    loss: Loss


@dataclass(frozen=True)
class State:
    """What is saved, and how often by each rule."""

    name: str
    size: int
    write: float
    """Seconds to write it."""
    choices: tuple[Choice, ...]
    advice: str

    def choice(self, rule: str) -> Choice | None:
        """The one by this rule; Young's and Daly's need a failure rate."""
        return next((each for each in self.choices if each.rule == rule), None)


@dataclass(frozen=True)
class Job:
    """What is asked."""

    parameters: float
    bandwidth: float
    """Of writing a checkpoint, all writers together, bytes per second."""
    samples_per_second: float
    rework: float
    """Training that may be lost in a failure."""
    read_bandwidth: float | None = None
    """As ``bandwidth``, of reading it back; None: as fast as writing."""
    node_mtbf: float | None = None
    nodes: int = 1
    restart: float = 0.0
    """From a failure until the checkpoint is read."""
    batch: int | None = None
    """Samples of a step."""


def rule_of_thumb(write: float, rework: float) -> float:
    """As long as the acceptable rework, but so long that writing stays below 5 % (20 times ``write``)."""
    return max(rework, write / LEAST_SHARE)


def young(write: float, mtbf: float) -> float:
    """Young's first order optimum."""
    return math.sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """Daly's higher order optimum, his equation 37, made for ``write`` below ``mtbf`` / 2."""
    if write >= 2 * mtbf:
        return mtbf
    ratio = write / (2 * mtbf)
    return math.sqrt(2 * write * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write


def loss(interval: float, write: float, failures: Failures | None) -> Loss:
    """Shares of the expected time that are lost when a checkpoint follows each ``interval`` seconds of training.

    Failures are independent of each other and of what is done (Poisson), and also strike during writing and restarts:
    Daly's complete model, in which ``interval`` seconds of progress take M exp(R/M) (exp((interval + write)/M) - 1).
    """
    segment = interval + write
    if failures is None:
        return Loss(write / segment, 0.0, 0.0)
    mtbf, restart = failures.mtbf, failures.restart
    if (segment + restart) / mtbf > 500:
        return Loss(0.0, 1.0, 0.0)  # exp() would overflow: it never gets from one checkpoint to the next
    without_restarts = mtbf * math.expm1(segment / mtbf)
    whole = without_restarts * math.exp(restart / mtbf)
    # Each of the whole / mtbf failures begins a restart, which the next failure may cut short.
    return Loss(write / whole, (without_restarts - segment) / whole, -math.expm1(-restart / mtbf))


def plan(job: Job) -> tuple[State, ...]:
    """The weights alone, and the full state."""
    return tuple(
        _state(name, round(job.parameters * each), job)
        for name, each in (("weights only", WEIGHTS), ("full state", FULL_STATE))
    )


def _state(name: str, size: int, job: Job) -> State:
    write = size / job.bandwidth
    failures = None
    if job.node_mtbf is not None:
        restart = job.restart + size / (job.read_bandwidth or job.bandwidth)
        failures = Failures(job.node_mtbf / job.nodes, restart)
    intervals = {RULE: rule_of_thumb(write, job.rework)}
    if failures is not None:
        intervals |= {YOUNG: young(write, failures.mtbf), DALY: daly(write, failures.mtbf)}
    choices = tuple(
        Choice(
            rule=rule,
            interval=interval,
            samples=interval * job.samples_per_second,
            steps=max(1, round(interval * job.samples_per_second / job.batch)) if job.batch else None,
            loss=loss(interval, write, failures),
        )
        for rule, interval in intervals.items()
    )
    return State(name, size, write, choices, _advice(choices, size, write, job))


def _advice(choices: Sequence[Choice], size: int, write: float, job: Job) -> str:
    """One sentence: what to take, and where the rules contradict each other."""
    by_rule = {choice.rule: choice for choice in choices}
    rule, best = by_rule[RULE], by_rule.get(DALY)
    least, bound = write / LEAST_SHARE, spoken(job.rework)
    over = ""
    if least > job.rework:
        needed = size / (job.rework * LEAST_SHARE) / 1e9
        over = (
            f"writing for {spoken(write)} stays below {LEAST_SHARE:.0%} only every {spoken(least)}, so a failure may "
            f"cost more than the {bound} of --rework; {needed:.3g} GB/s would meet both"
        )
    if best is None:
        return over or f"every {spoken(rule.interval)}; `--mtbf` and `--nodes` tell what failures make of that"
    return _against_the_optimum(rule, best, write, over, bound)


def _against_the_optimum(rule: Choice, best: Choice, write: float, over: str, bound: str) -> str:
    shorter, daly_s = best.interval < rule.interval, f"Daly's {spoken(best.interval)}"
    costs = f"{best.loss.total:.2%} is lost instead of {rule.loss.total:.2%}"
    if best.loss.total > 0.5:
        said = f"failures and checkpoints take {best.loss.total:.0%} of the time at best: "
        said += "storage is too slow, or the nodes fail too often, for this job"
    elif abs(best.interval / rule.interval - 1) < ALIKE:
        said = over or f"the rule and the optimum agree: every {spoken(rule.interval)}"
    elif shorter and over:
        share = write / (best.interval + write)
        said = f"take {daly_s} though writing then takes {share:.0%} of the time: {costs}"
    elif shorter:
        said = f"take {daly_s}, below the acceptable rework of {bound}: {costs}"
    else:
        stay = over or f"stay at {spoken(rule.interval)} if no failure may cost more than {bound}"
        said = f"{stay}; failures are rare enough for {daly_s}, where {costs}"
    return said


def spoken(seconds: float) -> str:
    """``14 s``, ``32.7 min`` or ``2.59 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 100 else f"{hours:,.0f} h"
