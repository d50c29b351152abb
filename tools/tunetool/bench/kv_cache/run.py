"""``tunetool bench kv-cache``: fill a store for each engine, replay requests in rounds, keep the record."""

from __future__ import annotations

import importlib.util
import itertools
import math
import os
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from tunetool.advise.drive_life import Drives, rated_bytes
from tunetool.advise.read_model import load_model
from tunetool.bench.defaults import KV_BLOCK_TOKENS, KV_BYTES, KV_ENGINES
from tunetool.bench.engine_choice import choose
from tunetool.bench.kv_cache import figures, trace
from tunetool.bench.kv_cache.figures import CACHED, FIO, SLACK_BYTES, Reading, Row, Setting
from tunetool.bench.kv_cache.model import BLOCK_TOKENS, KvCache, kv_of, matrices
from tunetool.bench.kv_cache.request import KIND, Request
from tunetool.bench.kv_cache.store import ENGINES, SLAB
from tunetool.bench.kv_cache.trace import Demand, Index, Step, Wanted
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure import session
from tunetool.measure.fio import Fio, execute, find_fio, shares
from tunetool.measure.pace import rounds_of
from tunetool.measure.page_cache import drop
from tunetool.measure.progress import Progress
from tunetool.measure.rounds import drawn_order, undecided
from tunetool.measure.sampling import Counting, again, judgement
from tunetool.measure.sequential import free_bytes, takes_direct_io
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.target import check_target
from tunetool.measure.worker import Failed, Worker, child_command, foreign_code
from tunetool.node.common.files import read_text
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.node.machine.memory import memory_left, memory_total
from tunetool.node.units import format_count, format_size, parse_size
from tunetool.record import Scalar

_CHILD = Path(__file__).with_name("store.py")
_PATIENCE, _SLOWEST, _GUESS = 120.0, 5e6, 1e9
"""Seconds that an answer may take; the slowest bytes per second, which add to them; those that are assumed."""
_MOST_THREADS, _MOST_REQUESTS, _STEEPEST = 256, 100_000, 4
_RESTORES, _WARM_REQUESTS, _PREFILL_TOKENS = 12, 100_000, 4096
"""Restores of each length in a round, requests that fill a store at most, and tokens that are prefilled at once."""


def bench(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Run it. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    return session.run(KIND, request.run, _KvCache(request), progress, environment)


@dataclass(frozen=True)
class Plan:
    """What is stored, asked for and read."""

    stack: BlockStack
    kv: KvCache
    block_tokens: int
    slots: int
    longest: int
    """Blocks of the longest request."""
    engines: tuple[str, ...]
    device: str
    is_past_memory: bool
    arrivals: Sequence[Wanted]
    """Of a file; none where they are drawn."""

    @property
    def block(self) -> int:
        """Bytes."""
        return self.kv.block_bytes(self.block_tokens)

    @property
    def store_bytes(self) -> int:
        """Of one engine."""
        return self.slots * self.block

    def wanted(self, request: Request) -> Iterator[Wanted]:
        """All requests, without an end."""
        if self.arrivals:
            return trace.repeated(self.arrivals)
        return Demand(self.block_tokens, request.longest, request.zipf, request.seed).requests()


def plan(request: Request) -> Plan:
    """Raises ``UsageProblem`` for a wrong call, ``CannotJudge`` for a target that answers no I/O."""
    for option, value, most in (
        ("--threads", request.threads, _MOST_THREADS),
        ("--requests", request.requests, _MOST_REQUESTS),
    ):
        if value > most:
            raise UsageProblem(f"`{option} {value}` is too many", f"at most {most}")
    if not 0 <= request.zipf <= _STEEPEST:  # NaN is not either
        raise UsageProblem(f"`--zipf {request.zipf}` is not an exponent", f"from 0 to {_STEEPEST}; 0 is an even demand")
    for option, number in (("--prefill-rate", request.prefill_rate), ("--dwpd", request.dwpd)):
        if number is not None and not 0 < number < math.inf:
            raise UsageProblem(f"`{option} {number:g}` is no rate", "a number above 0")
    kv = kv_of(request.model, request.kv_dtype)
    arrivals = trace.read_mooncake(request.trace) if request.trace is not None else []
    tokens = request.block_tokens or (trace.MOONCAKE_TOKENS if arrivals else KV_BLOCK_TOKENS)
    if arrivals and tokens != trace.MOONCAKE_TOKENS:
        raise UsageProblem(
            f"`--block-tokens {tokens}`: each of a trace's `hash_ids` stands for {trace.MOONCAKE_TOKENS} tokens",
            "leave it out with `--trace`",
        )
    longest = trace.longest_of(arrivals) if arrivals else request.longest // tokens
    if not longest:
        raise UsageProblem(f"`--longest {request.longest}` is less than a block of {tokens} tokens", "give more")
    longest = max(longest, *(-(-each // tokens) for each in request.prefix_tokens))
    try:
        check_target(request.target)
    except UsageProblem as error:
        raise UsageProblem(error.message, "`--target` takes a writable directory") from None
    block, memory = kv.block_bytes(tokens), memory_total()
    default = 5 * memory // 4 if request.thorough else max(parse_size(KV_BYTES), 4 * longest * block)
    size = request.size or default
    if size // block < 2 * longest:
        raise UsageProblem(
            f"`--size {size}` holds {size // block} blocks of {format_size(block)}, and a prompt has up to {longest}",
            f"at least {format_size(2 * longest * block)}, or a smaller `--longest`",
        )
    has_gpu = bool(device_nodes("nvidia[0-9]*")) and importlib.util.find_spec("torch") is not None
    if request.device == "cuda" and not has_gpu:
        raise UsageProblem("`--device cuda`: there is no GPU, or no torch", "leave it out")
    return Plan(
        read_stack(str(request.target.resolve())),
        kv,
        tokens,
        size // block,
        longest,
        tuple(choose(ENGINES, request.engines_of(request.engines, KV_ENGINES))),
        "cuda" if has_gpu and request.device != "cpu" else "cpu",
        size > memory,
        arrivals,
    )


def check_room(request: Request, planned: Plan) -> None:
    """Raises ``CannotJudge`` where the stores do not fit on the target, or their buffers into memory."""
    count, free = len(planned.engines) * planned.store_bytes, free_bytes(request.target)
    if count > free:
        raise CannotJudge(
            f"{len(planned.engines)} stores take {format_size(count)}, `{request.target}` has {format_size(free)}",
            "free some, or use a smaller `--size`, or fewer `--engines`",
        )
    needed = len(planned.engines) * planned.longest * planned.block + (count if planned.stack.in_memory else 0)
    left = memory_left()
    if left is not None and needed > left[0]:
        what = "the machine's RAM has" if left[1] == "RAM" else f"the memory limit of `{left[1]}` leaves"
        raise CannotJudge(
            f"what is stored and read takes {format_size(needed)} of memory, {what} {format_size(left[0])}",
            "use a smaller `--longest`, or fewer `--engines`",
        )


def announcement(request: Request, planned: Plan) -> list[str]:
    """What the run will write, read, and how long it takes, a line each."""
    kv, count = planned.kv, len(planned.engines)
    blocks = ", ".join(f"{name} ({of}) {format_size(kv.block_bytes(of))}" for name, of in BLOCK_TOKENS.items())
    lines = [f"`{request.model}`: {format_size(kv.token_bytes)} of KV for a token; blocks by tokens: {blocks}"]
    if kv.windowed:
        need = format_size(kv.needed_bytes(request.longest))
        lines.append(
            f"{kv.windowed} of its layers need the last {kv.window} tokens alone: of {request.longest} tokens {need}; "
            "stores keep all"
        )
    lines.append(
        f"writes to `{request.target}` ({planned.stack.medium}): {format_count(count, 'store')} of {planned.slots} "
        f"blocks, {format_size(count * planned.store_bytes)} in all, removed afterwards"
    )
    # About a quarter of the longest is found; of each length some are read.
    tokens = request.requests * planned.longest * planned.block_tokens // 4 + _RESTORES * sum(request.prefix_tokens)
    a_round = (count + 1) * tokens * kv.token_bytes
    seconds = (count * planned.store_bytes + request.pace.fewest * a_round) / _GUESS
    lines.append(
        f"{format_count(request.pace.fewest, 'round')} of {request.requests} requests, each about "
        f"{format_size(a_round)}; about {seconds:.0f} s at 1 GB/s"
    )
    if not planned.is_past_memory and not planned.stack.in_memory:
        lines.append(
            f"a store is smaller than the memory of {format_size(memory_total())}: what goes through the page cache "
            "begins cold in each round; a larger `--size` fills it"
        )
    return [*lines, *request.pace.announcement()]


@dataclass
class _Opened:
    """An engine with its store."""

    row: Row
    directory: Path
    worker: Worker


class _Round:
    """What every engine does in a round."""

    def __init__(self, steps: Sequence[Step], prefixes: Mapping[int, Sequence[Sequence[tuple[int, int]]]]) -> None:
        self.steps, self.prefixes = steps, prefixes
        self.read = sum(len(step.reads) for step in steps)
        self.all = self.read + sum(len(each) for of_length in prefixes.values() for each in of_length)
        self.written = sum(len(step.writes) for step in steps)


@dataclass
class _KvCache:
    request: Request
    rows: list[Row] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    rounds: dict[int, _Round] = field(default_factory=dict)
    plan: Plan = field(init=False)
    prefill_rate: float | None = None
    facts: dict[str, Scalar] = field(default_factory=dict)
    wanted: Iterator[Wanted] = field(init=False)
    index: Index = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        self.plan = plan(self.request)
        check_room(self.request, self.plan)
        for line in announcement(self.request, self.plan):
            session.progress.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        request = self.request
        self.doubts += foreign_code(session.environment)
        directory = session.directory(request.target, self.plan.stack)
        self._know_prefill(session)
        self.wanted = self.plan.wanted(request)
        self.index = Index(self.plan.slots).warmed(self.wanted, _WARM_REQUESTS)
        takes_direct = not self.plan.stack.in_memory and takes_direct_io(directory)
        opened = [self._open(engine, directory, takes_direct, session) for engine in self.plan.engines]
        running = [each for each in opened if each is not None]
        slab = next((each.directory / SLAB for each in running if each.row.engine == "direct"), None)
        fio = Row(FIO, left_out="it reads the store of `direct`, which is not there" if slab is None else None)
        self.rows.append(fio)
        try:
            program = find_fio(session.environment)
        except CannotJudge as error:
            slab, fio.left_out = None, error.line
        if not running:
            return
        deadline = request.pace.deadline(session.began)
        for number in rounds_of(request.pace, deadline, self._undecided, session.progress.say):
            for each in drawn_order([*running, None], request.seed, number):
                if each is not None:
                    self._sample(each.row, number, session, partial(self._take, each, number, session))
                elif slab is not None:
                    self._sample(fio, number, session, partial(self._fio, program, slab, number, session))

    def _know_prefill(self, session: Session) -> None:
        """By the call, else by the GPU."""
        self.prefill_rate = self.request.prefill_rate
        if self.prefill_rate is not None or self.plan.device != "cuda":
            return
        try:
            shapes = matrices(load_model(self.request.model))
        except UsageProblem as error:
            session.progress.say(f"the GPU's prefill is not measured: {error.line}")
            return
        order = {"do": "prefill", "matrices": shapes, "tokens": _PREFILL_TOKENS}
        with (
            session.progress.step("the matrix products of a prefill", 10) as tick,
            Worker(child_command(Path(sys.executable), _CHILD), "the prefill", session.environment, tick) as worker,
        ):
            try:
                answer = worker.ask(order, _PATIENCE)
            except Failed as error:
                session.progress.say(f"the GPU's prefill is not measured: {error.line}")
                return
        self.prefill_rate, self.facts["prefill_of"] = answer["rate"], f"matrix products on {answer['gpu']}"

    def _open(self, engine: str, parent: Path, takes_direct: bool, session: Session) -> _Opened | None:
        """Fill the store of an engine; None where it cannot run."""
        row, planned = Row(engine), self.plan
        self.rows.append(row)
        needs_direct = engine in ("files-direct", "gds") or (
            engine in ("direct", "vllm") and not planned.stack.in_memory
        )
        if needs_direct and not takes_direct:
            where = "nothing in memory lies" if planned.stack.in_memory else "this file system opens no file"
            row.left_out = f"{where} past the page cache"
            return None
        directory = parent / engine
        directory.mkdir()
        is_theirs = engine in ("lmcache", "vllm") and self.request.engine_python is not None
        python = Path(self.request.engine_python or sys.executable) if is_theirs else Path(sys.executable)
        worker = session.hold(Worker(child_command(python, _CHILD), f"`{engine}`", session.environment))
        order = {
            "do": "open",
            "engine": engine,
            "directory": str(directory),
            "block": planned.block,
            "slots": planned.slots,
            "memory": planned.longest,
            "threads": self.request.threads,
            "device": planned.device,
            "direct": needs_direct,
            "seed": self.request.seed,
        }
        writes = [(slot, block, -1) for slot, block in enumerate(self.index.held())]
        try:
            answer = self._ask(worker, order, planned.store_bytes)
            row.left_out = answer.get("left_out")
            if row.left_out is not None:
                return None
            row.facts = {"buffers": answer["memory"], **answer["facts"]}
            with session.progress.step(f"`{engine}`: its store is filled", planned.store_bytes / _GUESS) as tick:
                worker.tick = tick
                self._ask(worker, {"do": "write", "writes": writes}, planned.store_bytes)
        except Failed as error:
            self._fail(row, error, session)
            return None
        return _Opened(row, directory, worker)

    def _fail(self, row: Row, error: CannotJudge, session: Session) -> None:
        is_full = "No space left" in error.line or "Disk quota exceeded" in error.line
        row.failed = error.line + ("; free some, or use a smaller `--size`" if is_full else "")
        session.raw[f"{row.engine}.txt"] = getattr(error, "raw", "")
        session.progress.say(f"{row.engine}: {row.failed}")

    def _sample(self, row: Row, number: int, session: Session, take: Callable[[str], Reading]) -> None:
        if row.failed is not None or row.left_out is not None:
            return
        try:
            name = f"{row.engine}-{number}"
            row.readings[number] = again(name, take, judgement, row.repeated, session.progress.say)
        except (Failed, OSError) as error:
            self._fail(row, error if isinstance(error, Failed) else Failed(str(error)), session)

    def _round(self, number: int) -> _Round:
        """The same for every engine: what the requests of this round find does not depend on the engine."""
        if number not in self.rounds:
            steps = [self.index.take(each) for each in itertools.islice(self.wanted, self.request.requests)]
            held = list(enumerate(self.index.held()))
            drawn = random.Random(f"{self.request.seed}/{number}")  # noqa: S311  (which blocks, no secret)
            lengths = {tokens: -(-tokens // self.plan.block_tokens) for tokens in self.request.prefix_tokens}
            prefixes = {
                tokens: [drawn.sample(held, blocks) for _ in range(_RESTORES)] for tokens, blocks in lengths.items()
            }
            self.rounds[number] = _Round(steps, prefixes)
        return self.rounds[number]

    def _take(self, opened: _Opened, number: int, session: Session, label: str) -> Reading:
        todo, block, stack = self._round(number), self.plan.block, self.plan.stack
        is_cached = opened.row.engine in CACHED
        is_dropped = is_cached and not (self.plan.is_past_memory or stack.in_memory)
        moved = (todo.all + todo.written) * block
        if label != f"{opened.row.engine}-{number}":
            for writes in trace.undo(todo.steps):
                self._ask(opened.worker, {"do": "write", "writes": writes}, moved)
        steps = [{"reads": step.reads, "writes": step.writes} for step in todo.steps]
        with session.progress.step(label, moved / _GUESS) as tick:
            if is_dropped:
                drop(opened.directory)
            with Counting(stack, f"`{label}`", direct=None if is_cached else opened.directory) as counting:
                opened.worker.tick = counting.ticking(tick)
                answer = self._ask(opened.worker, {"do": "steps", "steps": steps}, moved)
                times, wrong = {}, answer["wrong"]
                for prefixes in todo.prefixes.values():
                    if is_dropped:
                        drop(opened.directory)
                    done = self._ask(opened.worker, {"do": "read", "prefixes": prefixes}, moved)
                    times[len(prefixes[0]) * self.plan.block_tokens] = done["reading"]
                    wrong += done["wrong"]
        counted = counting.count("read", todo.all * block, slack=SLACK_BYTES)
        written = counting.count("write", todo.written * block, slack=SLACK_BYTES)
        return Reading(
            sum(answer["reading"]),
            todo.read * block,
            todo.all * block,
            None if is_cached else counted,
            counting.moment,
            [
                (len(step.reads) * self.plan.block_tokens, seconds)
                for step, seconds in zip(todo.steps, answer["reading"], strict=True)
                if step.reads
            ],
            times,
            todo.written * block,
            answer["writing"],
            counted.counted_bytes if counted is not None else None,
            written.counted_bytes if written is not None else None,
            wrong,
        )

    def _fio(self, fio: Fio, slab: Path, number: int, session: Session, label: str) -> Reading:
        """As many bytes by fio, by blocks of the same size with as many on the way, into huge pages as ours are: direct
        I/O into small ones is half as fast on some machines."""
        planned, threads = self.plan, self.request.threads
        todo = self._round(number)
        argv = [
            fio.path,
            "--name=blocks",
            "--thread=1",
            f"--numjobs={threads}",
            "--group_reporting=1",
            "--ioengine=psync",
            f"--direct={int(not planned.stack.in_memory)}",
            # Reads alone, into buffers that fio has filled before, as those of jobs that might write.
            "--rw=randrw",
            "--rwmixread=100",
            "--iomem_align=2097152",
            "--invalidate=0",
            f"--bs={planned.block}",
            f"--size={planned.store_bytes}",
            f"--io_size={-(-todo.all // threads) * planned.block}",
            # fio takes a colon for the end of a name.
            "--filename=" + str(slab).replace(":", "\\:"),
            f"--randseed={self.request.seed + number}",
            "--output-format=json",
        ]
        environment = {**session.environment, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        patience = _PATIENCE + todo.all * planned.block / _SLOWEST
        with (
            session.progress.step(label, todo.all * planned.block / _GUESS) as tick,
            Counting(planned.stack, f"`{label}`", direct=slab.parent) as counting,
        ):
            printed = execute(fio, argv, Path("/"), environment, patience, counting.ticking(tick))
        (done,) = shares(fio, "read", *printed).values()
        counted = counting.count("read", done.claimed_bytes, slack=SLACK_BYTES)
        return Reading(done.seconds, done.claimed_bytes, done.claimed_bytes, counted, counting.moment)

    def _ask(self, worker: Worker, order: Mapping[str, Any], moved: int) -> dict[str, Any]:
        return worker.ask(order, _PATIENCE + moved / _SLOWEST)

    def _undecided(self) -> list[str]:
        return undecided(self.findings().case.measurements)

    def _drives(self) -> Drives | None:
        """Those below the target, where the call gives their rating."""
        names = [leaf.name for leaf in self.plan.stack.leaves]
        sizes = [int(read_text(f"/sys/class/block/{name}/size") or 0) * 512 for name in names]
        if self.request.dwpd is None or not sizes or not min(sizes):
            return None
        return Drives(len(sizes), min(sizes), rated_bytes(self.request.dwpd, min(sizes)))

    def findings(self) -> Findings:
        """See ``session.Work``."""
        request, planned = self.request, self.plan
        conditions: dict[str, Scalar] = {
            "model": request.model,
            "kv_dtype": request.kv_dtype,
            "token_bytes": planned.kv.token_bytes,
            "block_tokens": planned.block_tokens,
            "block_bytes": planned.block,
            "slots": planned.slots,
            "store_bytes": planned.store_bytes,
            "memory_bytes": memory_total(),
            "is_in_memory": planned.stack.in_memory,
            "is_past_memory": planned.is_past_memory,
            "device": planned.device,
            "threads": request.threads,
            "cores": len(os.sched_getaffinity(0)),
            "requests": request.requests,
            "trace": str(request.trace) if request.trace is not None else f"drawn, zipf {request.zipf:g}",
            "seed": request.seed,
            "prefill_of": "the call" if request.prefill_rate is not None else "",
            **self.facts,
        }
        made = list(self.rounds.values())
        arriving = trace.written_a_second(planned.arrivals, self._all_steps()) if planned.arrivals else None
        setting = Setting(
            planned.stack,
            conditions,
            planned.block_tokens,
            planned.block,
            self.prefill_rate,
            figures.written_a_day(arriving, self.prefill_rate, planned.block, planned.block_tokens),
            self._drives(),
            [trace.hit_rate(each.steps) for each in made],
            [each.written / len(each.steps) for each in made],
        )
        return Findings(
            figures.case(self.rows, setting, self.doubts), target=planned.stack.directory, stack=planned.stack
        )

    def _all_steps(self) -> list[Step]:
        """What the whole trace does to a store of this size."""
        index = Index(self.plan.slots)
        return [index.take(each) for each in self.plan.arrivals]
