"""What an I/O setting is worth on a machine: each alone against what is there now, interleaved, proven, put back.

The program is perf/io_tuning.py.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from put_back import STATE, Touched, deaf, orderly_end
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import busy, rundir
from tunetool.measure.evidence import REPEATS, obstacles
from tunetool.measure.fio import Fio, Job, arguments, execute, find_fio, parse
from tunetool.measure.ladder.calls import random_io
from tunetool.measure.metrics import EXPECTABLE
from tunetool.measure.sampling import Counting
from tunetool.measure.statistics import difference, estimate, significant
from tunetool.node.common.io_settings import ARGUMENTS, ROWS, SETTINGS
from tunetool.node.common.refusal import Refusal
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.tuning.settings import Machine, impossible, normal_form, read_cpus, shown, wanted

CHOSEN = tuple(f"{row.name}={value}" for row in ROWS.values() for value in row.tried)
DIRECT = ("read", "write", "randread")
BUFFERED = {row.name: (f"buffered {row.page_cache}",) for row in ROWS.values() if row.page_cache}
"""Workloads for settings of the page cache, which direct I/O bypasses."""
JOBS = 4
RANDOM = EXPECTABLE["randread-4k"]


@dataclass(frozen=True)
class Options:
    """The settings to measure, the place, and the duration."""

    target: Path
    candidates: Sequence[str] = CHOSEN
    """``SETTING=VALUE``."""
    pairs: int = 6
    """Six are the fewest that reach 95 %."""
    duration: float = 1.5
    """Seconds of a sample."""
    size_mib: int = 1024
    """Of all files together."""
    seed: int = 1
    allow_busy: bool = False


@dataclass
class Row:
    """One candidate under one workload."""

    setting: str
    default: str
    value: str
    workload: str
    unit: str
    defaults: list[float] = field(default_factory=list)
    candidates: list[float] = field(default_factory=list)
    unproven: int = 0
    conclusion: str = ""

    def ratios(self) -> list[float]:
        return [mine / theirs for theirs, mine in zip(self.defaults, self.candidates, strict=True)]


def machine_under(stack: BlockStack) -> Machine:
    """The places by kernel name: a measurement outlives no reboot."""
    leaves = {leaf.name: leaf.name for leaf in stack.leaves}
    # Read-ahead belongs to what is mounted; a partition has that of its disk.
    top = stack.device if Path(f"/sys/block/{stack.device}").exists() else next(iter(leaves), None)
    return Machine(drives=leaves, arrays={top: top} if top else {}, cpus=read_cpus())


def unwritable(machine: Machine, setting: str) -> str | None:
    """Why a setting cannot be tried here."""
    targets = machine.targets(setting)
    if not targets:
        return "this machine has none"
    for target in targets:
        value = machine.read(setting, target)
        if value is None:
            return f"`/{machine.file(setting, target)}` is not there"
        try:
            Path(f"/{machine.file(setting, target)}").open("w", encoding="ascii").close()
        except OSError as error:
            return f"`/{machine.file(setting, target)}` cannot be written: {error.strerror}"
    return None


@dataclass(frozen=True)
class Bench:
    stack: BlockStack
    fio: Fio
    directory: Path
    file_bytes: int
    duration: float

    def argv(self, workload: str) -> tuple[list[str], Job]:
        if workload == "randread":
            job = Job("read", JOBS, self.file_bytes, self.duration, block_bytes=RANDOM.block_bytes)
            return random_io(self.fio, RANDOM, "libaio", JOBS, self.file_bytes, self.duration), job
        direction: Any = workload.rsplit(maxsplit=1)[-1]
        buffered = workload.startswith("buffered")
        # Once over the file: what is read or written twice in the page cache reaches no drive twice.
        seconds = None if buffered else self.duration
        engine = "psync" if buffered else "libaio"
        job = Job(direction, JOBS, self.file_bytes, seconds, direct=not buffered, engine=engine)
        return arguments(self.fio, job), job

    def once(self, workload: str) -> tuple[float, bool]:
        """Bytes per second, or requests per second of random reads, and whether the drives' counters prove it."""
        argv, job = self.argv(workload)
        for _ in range(1 + REPEATS):
            with Counting(self.stack, workload) as counting:
                outcome = parse(
                    self.fio, job, *execute(self.fio, argv, self.directory, os.environ, self.duration + 300)
                )
            counted = counting.count(job.direction, outcome.claimed_bytes)
            proven = counted is not None and counted.judgement == "proven"
            if proven:
                break
        rate = outcome.bandwidth / (RANDOM.block_bytes if workload == "randread" else 1)
        return rate, proven


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """The setting of one candidate, and its normal form. Raises ``UsageProblem``."""
    name, _, asked = text.partition("=")
    if name not in SETTINGS:
        raise UsageProblem(f"`{name}` is not a setting", f"one of {', '.join(SETTINGS)}")
    try:
        return name, normal_form({**dict.fromkeys(ARGUMENTS, ""), name: asked})
    except Refusal as error:
        raise UsageProblem(*str(error).split(". hint: ", 1)) from None


def measure(
    options: Options, touched: Touched, machine: Machine, bench: Bench, say: Callable[[str], None]
) -> tuple[list[Row], list[str]]:
    """The rows of the table, and the reason for each candidate that was left out."""
    order = random.Random(options.seed)
    rows: list[Row] = []
    left_out: list[str] = []
    for text in options.candidates:
        name, tuning = parsed(text)
        value = str(wanted(tuning, name))
        problem = unwritable(machine, name) or next(iter(impossible(tuning, machine)), None)
        before = {target: str(machine.read(name, target)) for target in machine.targets(name)}
        if not problem and set(before.values()) == {value}:
            problem = "it is what the machine has"
        if problem:
            left_out.append(f"`{text}`: {problem}")
            continue
        touched.remember(machine, name)
        default = ", ".join(sorted({shown(name, each) for each in before.values()}))
        kinds = BUFFERED.get(name, DIRECT)
        mine = [Row(name, default, shown(name, value), kind, "1/s" if kind == "randread" else "B/s") for kind in kinds]
        for number in range(options.pairs):
            for side in order.sample(("default", "candidate"), 2):
                touched.put(machine)
                for target in before if side == "candidate" else ():
                    machine.write(name, target, value)
                for row in mine:
                    rate, proven = bench.once(row.workload)
                    (row.candidates if side == "candidate" else row.defaults).append(rate)
                    row.unproven += not proven
            say(f"{text}: pair {number + 1} of {options.pairs}")
        with deaf():
            touched.restore(machine)
        rows += mine
    return rows, left_out


def conclude(rows: Sequence[Row]) -> None:
    """A gain must show twice: by its interval, and among all comparisons of the table together."""
    real = significant([difference(row.defaults, row.candidates).probability for row in rows])
    for row, counts in zip(rows, real, strict=True):
        interval = estimate(row.ratios())
        row.conclusion = "no difference shown"
        if row.unproven:
            row.conclusion = f"unproven ({row.unproven} samples)"
        elif counts and interval.low > 1:
            row.conclusion = "faster"
        elif counts and interval.high < 1:
            row.conclusion = "slower"


def run(options: Options, say: Callable[[str], None]) -> dict[str, Any]:
    """Measure every candidate; returns the table and what it was measured on. Raises ``TunetoolError``."""
    if os.geteuid() != 0:
        raise UsageProblem("settings can be changed by root alone", "run it with sudo")
    if STATE.exists():
        raise UsageProblem(f"`{STATE}` is left from a run that was killed", "run it with --restore first")
    candidates = [parsed(text) for text in options.candidates]
    stack = read_stack(str(options.target))
    problems = obstacles(stack)
    if problems:
        raise CannotJudge(problems[0], "choose another `--target`")
    machine, fio = machine_under(stack), find_fio(os.environ)
    reasons = {name: unwritable(machine, name) for name, _ in candidates}
    if reasons and all(reasons.values()):
        raise CannotJudge("no setting can be changed here", "; ".join(sorted(set(map(str, reasons.values())))))
    size = options.size_mib * 2**20 // JOBS
    load, started, touched = os.getloadavg()[0], time.time(), Touched()
    with contextlib.ExitStack() as held:
        held.enter_context(orderly_end())
        held.enter_context(busy.device_lock(str(stack.device_number), busy.lock_directory(os.environ, True)))
        rundir.remove_stale(rundir.stale_directories(options.target))
        if not options.allow_busy:
            busy.refuse(busy.look(stack, lambda: None))
        directory = held.enter_context(rundir.run_directory(options.target, uuid.uuid4().hex))
        bench = Bench(stack, fio, directory, size, options.duration)
        try:
            for kind in ("buffered write", "read"):
                bench.once(kind)
            rows, left_out = measure(options, touched, machine, bench, say)
        finally:
            with deaf():
                touched.restore(machine)
    conclude(rows)
    table = []
    for row in rows:
        interval, ends = estimate(row.ratios()), (estimate(row.defaults).value, estimate(row.candidates).value)
        more = {"ratio": interval.value, "low": interval.low, "high": interval.high, "level": interval.level}
        table.append({**asdict(row), "default_median": ends[0], "median": ends[1], **more})
    return {
        "target": str(options.target),
        "medium": stack.medium,
        "kernel": os.uname().release,
        "fio": fio.version,
        "cpus": os.cpu_count(),
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "seconds": round(time.time() - started),
        "pairs": options.pairs,
        "duration": options.duration,
        "seed": options.seed,
        "left_out": left_out,
        "rows": table,
    }
