"""How often to save a checkpoint: a rule of thumb, and the optima of Young and Daly, for a measured speed. Pure.

Times are in seconds, sizes in bytes. The formulas assume that training stops while a checkpoint is written; for an
asynchronous writer, use the time for which it stalls the training loop.

Sources: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974) 530; J. T. Daly, A
higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006) 303.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise.zero import FP32, LOW, STATES
from tunetool.errors import UsageProblem
from tunetool.measure.figures import is_sequential
from tunetool.node.units import format_bandwidth, format_size
from tunetool.record import Measurement, Record, chosen

WEIGHTS = LOW
"""Bytes saved per parameter when only the weights are saved, in bf16."""
FULL_STATE = LOW + STATES * FP32
"""Bytes saved per parameter to resume training: bf16 weights, and in fp32 the master copy and Adam's two moments.
These are the 16 bytes of mixed precision with Adam (Rajbhandari et al., ZeRO, arXiv 1910.02054, section 3.1) without
the gradients.
"""
WRITE_SHARE = 0.05
"""The rule of thumb: writing may take at most this share of the time."""
ALIKE = 0.1
"""Intervals whose ratio differs from 1 by less than this count as equal: the optimum is flat."""

RULE, YOUNG, DALY = "rule of thumb", "Young", "Daly"


@dataclass(frozen=True)
class Failures:
    """How often the job fails, and how long a restart takes."""

    mtbf: float
    """Mean time between failures of the whole job in seconds: one node's, divided by the number of nodes."""
    restart: float
    """Seconds from the failure until training resumes from the last checkpoint, reading it included."""


@dataclass(frozen=True)
class Loss:
    """Expected shares of the total time, each from 0 to 1, that make no progress."""

    write: float
    rework: float
    restart: float

    @property
    def total(self) -> float:
        """Share of the total time that is lost for any reason."""
        return self.write + self.rework + self.restart


@dataclass(frozen=True)
class Choice:
    """The interval that one rule chooses, and what it costs."""

    rule: str
    interval: float
    """Seconds of training between two checkpoints."""
    samples: float
    steps: int | None
    """Steps between two checkpoints; None where the batch size is unknown."""
    loss: Loss


@dataclass(frozen=True)
class State:
    """One kind of checkpoint (weights only, full state) with the interval that each rule chooses for it."""

    name: str
    size: int
    write: float
    """Seconds to write one checkpoint."""
    choices: tuple[Choice, ...]
    advice: str

    def choice(self, rule: str) -> Choice | None:
        """The choice that ``rule`` makes; None for Young's and Daly's where no failure rate is known."""
        return next((each for each in self.choices if each.rule == rule), None)


@dataclass(frozen=True)
class Job:
    """The training job that the advice is for."""

    parameters: float
    bandwidth: float
    """Speed at which all writers together write a checkpoint, bytes per second."""
    samples_per_second: float
    rework: float
    """Seconds of training that one failure may cost."""
    read_bandwidth: float | None = None
    """Speed at which a checkpoint is read back, bytes per second; None: as fast as writing."""
    node_mtbf: float | None = None
    """Mean time between failures of one node, seconds; None: unknown."""
    nodes: int = 1
    restart: float = 0.0
    """Seconds from a failure until reading of the checkpoint begins."""
    batch: int | None = None
    """Samples per optimizer step."""


def rule_of_thumb(write: float, rework: float) -> float:
    """The interval in seconds: the acceptable rework, or 20 times ``write`` (writing at 5 %) where that is longer."""
    return max(rework, write / WRITE_SHARE)


def young(write: float, mtbf: float) -> float:
    """Young's first-order optimum interval in seconds."""
    return math.sqrt(2 * write * mtbf)


def daly(write: float, mtbf: float) -> float:
    """Daly's higher-order optimum interval in seconds (his equation 37).

    The approximation holds for ``write`` below ``mtbf`` / 2; from 2 ``mtbf`` on, the interval is ``mtbf``.
    """
    if write >= 2 * mtbf:
        return mtbf
    ratio = write / (2 * mtbf)
    return math.sqrt(2 * write * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - write


def loss(interval: float, write: float, failures: Failures | None) -> Loss:
    """Shares of the expected time that are lost when a checkpoint follows every ``interval`` seconds of training.

    Failures are a Poisson process, and also occur during writing and restarts. This is Daly's complete model, in which
    ``interval`` seconds of progress take M exp(R/M) (exp((interval + write)/M) - 1) seconds, where M is the MTBF and R
    the restart time.
    """
    segment = interval + write
    if failures is None:
        return Loss(write / segment, 0.0, 0.0)
    mtbf, restart = failures.mtbf, failures.restart
    if (segment + restart) / mtbf > 500:
        return Loss(0.0, 1.0, 0.0)  # exp() would overflow: the job never reaches its next checkpoint
    without_restarts = mtbf * math.expm1(segment / mtbf)
    whole = without_restarts * math.exp(restart / mtbf)
    # Each of the whole / mtbf failures starts a restart, which the next failure may interrupt.
    return Loss(write / whole, (without_restarts - segment) / whole, -math.expm1(-restart / mtbf))


def plan(job: Job) -> tuple[State, ...]:
    """How often to save the weights alone, and how often the full state, by each rule."""
    return tuple(
        _state(name, round(job.parameters * parameter_bytes), job)
        for name, parameter_bytes in (("weights only", WEIGHTS), ("full state", FULL_STATE))
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
    """One sentence: which interval to use, and where the rules contradict each other."""
    by_rule = {choice.rule: choice for choice in choices}
    rule, best = by_rule[RULE], by_rule.get(DALY)
    shortest, bound = write / WRITE_SHARE, format_duration(job.rework)
    over = ""
    if shortest > job.rework:
        needed = size / (job.rework * WRITE_SHARE) / 1e9
        over = (
            f"a write takes {format_duration(write)}, which stays below {WRITE_SHARE:.0%} of the time only at one save "
            f"every {format_duration(shortest)}, so a failure may cost more than the {bound} of `--rework`; "
            f"{needed:.3g} GB/s would meet both"
        )
    if best is None:
        return (
            over or f"every {format_duration(rule.interval)}; give `--mtbf` and `--nodes` to take failures into account"
        )
    return _against_the_optimum(rule, best, write, over, bound)


def _against_the_optimum(rule: Choice, best: Choice, write: float, over: str, bound: str) -> str:
    shorter, daly_interval = best.interval < rule.interval, f"Daly's {format_duration(best.interval)}"
    costs = f"{best.loss.total:.2%} is lost instead of {rule.loss.total:.2%}"
    if best.loss.total > 0.5:
        sentence = f"failures and checkpoints take {best.loss.total:.0%} of the time at best: "
        sentence += "storage is too slow, or the nodes fail too often, for this job"
    elif abs(best.interval / rule.interval - 1) < ALIKE:
        sentence = over or f"the rule and the optimum agree: every {format_duration(rule.interval)}"
    elif shorter and over:
        share = write / (best.interval + write)
        sentence = f"use {daly_interval}, although writing then takes {share:.0%} of the time: {costs}"
    elif shorter:
        sentence = f"use {daly_interval}, which is below the acceptable rework of {bound}: {costs}"
    else:
        stay = over or f"keep {format_duration(rule.interval)} if no failure may cost more than {bound}"
        sentence = f"{stay}; failures are rare enough for {daly_interval}, where {costs}"
    return sentence


def format_duration(seconds: float) -> str:
    """A duration for people: ``14 s``, ``32.7 min`` or ``2.59 h``."""
    if seconds < 120:
        return f"{seconds:.3g} s"
    if seconds < 7200:
        return f"{seconds / 60:.3g} min"
    hours = seconds / 3600
    return f"{hours:.3g} h" if hours < 100 else f"{hours:,.0f} h"


_OF_ENGINES = ("durable", "restore")
"""Figures of an engine of `bench checkpoint`."""


@dataclass(frozen=True)
class Measured:
    """Write and read bandwidth in bytes per second; ``source`` names the figure, medium, host and size."""

    write: float
    read: float | None
    source: str


def measured(record: Record, engine: str | None = None) -> Measured:
    """The speed of writing a checkpoint durably, and of reading it back where that was measured too.

    A record of ``bench.checkpoint`` gives that of ``engine``, by default the fastest; one of ``verify`` gives
    torch.save's, or else fio's. Raises ``UsageProblem`` for a record whose verdict is not pass, and for one without
    such a figure.
    """
    figures = _choose(record, engine)
    # Figures of a record without the verdict "pass" may be wrong.
    if record.verdict is not None and record.verdict.status != "pass":
        reason = f": {record.verdict.reasons[0]}" if record.verdict.reasons else ""
        raise UsageProblem(
            f"the record of `{record.node.host}` cannot be used: its verdict is {record.verdict.status}{reason}",
            f"measure again, or use its figure at your own risk: `--bandwidth {figures[0].value / 1e9:.4g}GBps`",
        )
    write, read = figures
    source = f"`{write.name}` ({write.engine}) on {write.medium} of `{write.host or record.node.host}`"
    size = write.parameters.get("state_bytes")
    if isinstance(size, int):
        # A few megabytes are taken by a drive's own memory: what they show does not hold for a job's checkpoint.
        source += f", with a state of {format_size(size)}"
    return Measured(write.value, read.value if read else None, source)


def _choose(record: Record, engine: str | None) -> tuple[Measurement, Measurement | None]:
    counting = [each for each in record.measurements if _counts(each)]
    durable, restore = ({each.labels["engine"]: each for each in chosen(counting, name)} for name in _OF_ENGINES)
    if engine is not None:
        if engine not in durable:
            known = (
                f"it has {', '.join(sorted(durable))}" if durable else "only records of `bench checkpoint` have engines"
            )
            raise UsageProblem(f"the record has no checkpoint engine `{engine}`", known)
        return durable[engine], restore.get(engine)
    if durable:
        fastest = max(durable, key=lambda name: durable[name].value)
        return durable[fastest], restore.get(fastest)
    # Of `verify`: torch.save and torch.load (level full), fio's (every level that measures).
    for pair in ([*chosen(counting, "save"), *chosen(counting, "load")], list(filter(is_sequential, counting))):
        ways = {each.labels["direction"]: each for each in pair}
        if "write" in ways:
            return ways["write"], ways.get("read")
    raise UsageProblem(
        f"the record of `{record.node.host}` (kind `{record.kind}`) has no write bandwidth",
        "give a record of `tunetool bench checkpoint` or `tunetool verify`, or a figure with `--bandwidth`",
    )


def _counts(figure: Measurement) -> bool:
    """Whether it is a bandwidth of storage, not of a file system in memory, which loses a checkpoint with its node."""
    in_memory = figure.evidence is not None and figure.evidence.kind == "memory"
    return figure.quantity == "bandwidth" and figure.value > 0 and not in_memory and "stand_in" not in figure.parameters


def bandwidth_source(speed: Measured, requested: float | None) -> str:
    """The measured bandwidth with its source, compared with the ``requested`` one where there is one."""
    comparison = f"; this is {speed.write / requested:.0%} of `--bandwidth`" if requested is not None else ""
    return f"{format_bandwidth(speed.write)}, measured: {speed.source}{comparison}"
