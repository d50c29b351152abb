"""One way to take a sample: it is repeated, with a message, if others used the drives, and stops if bytes are missing.

Every measurement that holds a program against the drives' counters is a row of one table. The programs are fakes, and
so are the counters; everything between is real.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tunetool.bench.checkpoint.fio_best import FioBest
from tunetool.bench.checkpoint.request import Request
from tunetool.bench.checkpoint.samples import Matrix
from tunetool.bench.checkpoint.site import Site
from tunetool.errors import CannotJudge
from tunetool.measure import aio
from tunetool.measure.evidence import REPEATS
from tunetool.measure.fio import Fio
from tunetool.measure.gds import driver as gds
from tunetool.measure.gds.spec import Spec
from tunetool.measure.ladder.budget import SAMPLES
from tunetool.measure.ladder.checkpoint import TorchCheckpoint
from tunetool.measure.ladder.files import Random
from tunetool.measure.ladder.rung import Context
from tunetool.measure.ladder.sampler import Call, Part, Sampler
from tunetool.measure.ladder.sequential import Sequential
from tunetool.measure.metrics import EXPECTABLE
from tunetool.measure.sequential import FEWEST, Plan, Results
from tunetool.node.machine import block_stack
from tunetool.node.machine.block_stack import BlockStack, Counters, Leaf
from tunetool.tune.fio_driver import FioDriver
from tunetool.tune.samples import Samples, figures
from tunetool.tune.search import SettingFailed
from tunetool.tune.settings import DEFAULTS, AioSettings
from tunetool.verdict import TESTER_CPU_SHARE

MIB = 2**20
OTHERS, MISSING = 1.5, 0.5
"""Ratio of counted to claimed bytes, for each program."""
SAID = "something else used the drives meanwhile: repeated"

_COUNT = '''
import os
from pathlib import Path

HERE = Path({place!r})


def count(direction, size, scripted=True):
    """Claim ``size``; have the drives count as much of it as the script says for the next write."""
    ratio = 1.0
    script = HERE / "script"
    if scripted and direction == "write":
        with (HERE / "writes").open("a") as stream:
            stream.write("x")
        ratios = script.read_text().split()
        ratio = float(ratios[0]) if ratios else 1.0
        script.write_text(" ".join(ratios[1:]))
    with (HERE / "counted").open("a") as stream:
        stream.write(f"{{direction}} {{int(size * ratio)}}\\n")
    return size
'''

_FIO = """
import json, sys

argv = sys.argv[1:]
if "--version" in argv:
    sys.exit(print("fio-3.33"))
options = dict(word.split("=", 1) for word in argv if "=" in word)
direction = options["--rw"].replace("rand", "")
if options.get("--ioengine") == "null":
    side = {{"io_bytes": 10**12, "runtime": 1000, "total_ios": 10**9}}
    sys.exit(print(json.dumps({{"jobs": [{{"jobname": "a", "error": 0, "read": side, "write": side}}]}})))
size = int(options["--size"]) * int(options["--numjobs"])
for name in ("data.0", "aio.data"):
    with open(name, "wb") as stream:
        if size <= 2**26:
            os.posix_fallocate(stream.fileno(), 0, size)
claimed = count(direction, size, "--time_based" in options or not {timed})
side = {{"io_bytes": claimed, "runtime": 1000, "total_ios": 1000}}
job = {{"jobname": options["--name"], "error": 0, "usr_cpu": 40, "sys_cpu": 10, "job_runtime": 1000}}
print(json.dumps({{"jobs": [{{**job, "read": side, "write": side}}]}}))
"""

_PACED_FIO = """
import json, sys, time

if "--version" in sys.argv:
    sys.exit(print("fio-3.33"))
options = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
if options.get("--ioengine") == "null":
    sys.exit("no null engine")
direction = options["--rw"].replace("rand", "")
looks = HERE / "looks"
seen, began = len(looks.read_text()), time.monotonic()
while len(looks.read_text()) < seen + 5:
    time.sleep(0.01)
began, claimed = time.monotonic(), 0
for part in range({parts}):
    seen = len(looks.read_text())
    while len(looks.read_text()) == seen:
        time.sleep(0.01)
    claimed += count(direction, 2**20)
milliseconds = round((time.monotonic() - began) * 1000 / {faster})
while len(looks.read_text()) < seen + 5:
    time.sleep(0.01)
side = {{"io_bytes": claimed, "runtime": milliseconds, "total_ios": 256 * {parts}}}
print(json.dumps({{"jobs": [{{"jobname": options["--name"], "error": 0, "read": side, "write": side}}]}}))
"""
"""A program that moves a part after each look at the counters, and nothing for a while before and after."""

_WORKER = """
import hashlib, json, sys

for line in sys.stdin:
    order = json.loads(line)
    do, answer = order["do"], {{}}
    if do == "open":
        file, size = Path(order["file"]), order["io_bytes"]
        data, answer = os.urandom(size), {{"address": 0}}
    elif do == "move":
        if order["direction"] == "write":
            file.write_bytes(data)
        claimed = count(order["direction"], size, order["loops"] is None)
        answer = {{"bytes": claimed, "seconds": 0.1, "durable_seconds": 0.1, "passes": [0.1], "cpu_seconds": 0.05}}
    elif do == "digest":
        answer = {{"sha256": hashlib.sha256(data).hexdigest()}}
    elif do == "start":
        answer = {{"device": "cpu", "torch": "2"}}
    elif do == "make":
        ready = False
    elif do in ("save", "load"):
        claimed = count({{"save": "write", "load": "read"}}[do], {mib}, ready)
        ready, answer = True, {{"bytes": claimed, "seconds": 0.1, "cores": 1.0, "equal": True}}
    print(json.dumps(answer), flush=True)
"""


@dataclass
class Told:
    """A progress that keeps its lines."""

    lines: list[str] = field(default_factory=list)

    def say(self, line: str) -> None:
        self.lines.append(line)

    def step(self, name: str, seconds: float) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)


@dataclass
class Bench:
    """Fakes: a drive whose counters follow a file, and programs that write to it."""

    directory: Path
    progress: Told = field(default_factory=Told)
    busy: bool = False
    """Whether the drive is busy all the time, also with the work of others."""

    @property
    def target(self) -> Path:
        path = self.directory / "target"
        path.mkdir(exist_ok=True)
        return path

    @property
    def stack(self) -> BlockStack:
        leaf = Leaf("nvme0n1", "nvme", "SER0", True, ("nvme0n1",))
        return BlockStack(
            str(self.target), None, "xfs", "nvme0n1", "9:0", "nvme disk", (leaf,), redundant=False, in_memory=False
        )

    def program(self, name: str, text: str, **words: object) -> Path:
        path = self.directory / name
        path.write_text(f"#!{sys.executable}\n{(_COUNT + text).format(place=str(self.directory), **words)}")
        path.chmod(0o755)
        return path

    def fio(self, timed: bool) -> Fio:
        """``timed``: only runs with a duration are samples; the others lay out files."""
        return Fio(str(self.program("fio", _FIO, timed=timed)), "3.33")

    def python(self) -> Path:
        return self.program("python", _WORKER, mib=MIB)

    def script(self, ratios: Sequence[float]) -> None:
        (self.directory / "script").write_text(" ".join(map(str, ratios)))

    @property
    def writes(self) -> int:
        path = self.directory / "writes"
        return len(path.read_text()) if path.exists() else 0

    def counters(self, name: str, root: str = "/") -> Counters:
        with (self.directory / "looks").open("a") as stream:
            stream.write("x")
        path = self.directory / "counted"
        moved = {"read": 0, "write": 0}
        for line in path.read_text().splitlines() if path.exists() else ():
            direction, size = line.split()
            moved[direction] += int(size)
        busy = round(time.monotonic() * 1000) if self.busy else 0
        return Counters(0, moved["read"] // 512, 0, 0, moved["write"] // 512, 0, busy)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(block_stack, "read_counters", made.counters)
    return made


def _probe(python: Path) -> aio.Probe:
    op = {"async_io": str(python)}
    return aio.Probe(str(python), "3.11", torch="2", deepspeed="0.18", installed=op)


def sequential(bench: Bench) -> None:
    shape = Plan(str(bench.target), "nvme disk", 1, MIB, 1.0, None)
    sampler = Sampler(bench.stack, bench.fio(timed=True), bench.target, dict(os.environ), bench.progress)
    Sequential().run(Context(shape, bench.stack, bench.target, sampler, dict(os.environ)))


def deepspeed(bench: Bench) -> None:
    python = bench.python()
    spec = aio.Spec(bench.target, MIB, intra_op_parallelism=1, python=python, directions=("write",), samples=3)
    outcome = aio.Outcome()
    aio.run(spec, bench.stack, dict(os.environ), bench.progress, outcome, _probe(python))
    # The handle has no null target; the share of its cores that it kept busy is in the record.
    (figure,) = aio.measurements(spec, bench.stack, outcome)
    assert figure.parameters[TESTER_CPU_SHARE] == 0.5


def gpudirect(bench: Bench) -> None:
    spec = Spec(bench.target, MIB, cufile=False, directions=("write",), samples=3)
    with gds.start(bench.python(), os.environ) as child:
        gds.Run(spec, bench.stack, bench.progress, gds.Outcome(), child).execute()


def _sampler(bench: Bench) -> Sampler:
    return Sampler(bench.stack, bench.fio(timed=False), bench.target, dict(os.environ), bench.progress)


def ladder_fio(bench: Bench) -> None:
    sampler = _sampler(bench)
    argv = [sampler.fio.path, "--name=a", "--rw=write", f"--size={MIB}", "--numjobs=1"]
    part = Part("", bench.stack)
    sampler.rounds(lambda label: Call(label, argv, "write", 1.0, [part]), "write-io_uring")


def ladder_checkpoint(bench: Bench) -> None:
    python = bench.python()
    shape = Plan(str(bench.target), "nvme disk", 1, MIB, 1.0, None)
    context = Context(shape, bench.stack, bench.target, _sampler(bench), dict(os.environ), python=python)
    context.installed = _probe(python)
    TorchCheckpoint().run(context)


def tune(bench: Bench) -> None:
    driver = FioDriver(bench.fio(timed=False), bench.target, [DEFAULTS], dict(os.environ), MIB)
    other = AioSettings(2 * MIB, 8, 1, single_submit=False, overlap_events=True)
    samples = Samples(driver, bench.stack, time.monotonic, bench.progress.say)
    samples.take(other, "write")
    for figure in figures(samples, {"processes": 1}):
        assert figure.parameters[TESTER_CPU_SHARE] == 0.5


class _Ranks:
    """One rank that saves a file, and loads it."""

    starts, raw, tick = 1, {}, staticmethod(lambda: None)  # type: ignore[var-annotated]

    def __init__(self, bench: Bench) -> None:
        space: dict[str, Any] = {}
        exec(_COUNT.format(place=str(bench.directory)), space)
        self.count = space["count"]

    def ask(self, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        answer: dict[str, Any] = {"began": 0.0, "returned": 1.0, "ended": 1.0, "cpu_seconds": 1.0, "peak_bytes": 1}
        if order["do"] == "place":
            state = {"family": "torch", "remark": "", "unavailable": None}
            return [{"engines": dict.fromkeys(order["engines"], state)}]
        if order["do"] == "save":
            Path(order["directory"]).mkdir()
            with (Path(order["directory"]) / "data").open("wb") as stream:
                stream.truncate(2**30)
            self.count("write", 2**30)
        if order["do"] == "load":
            self.count("read", 2**30)
        return [{**answer, "different": None}]


class _Searched(FioBest):
    """fio with a known best number of files."""

    def search(self) -> None:
        self.searched = {"write": {1: 1.0}, "read": {1: 1.0}}


def _site(bench: Bench, engines: Sequence[str], fio: FioBest | None = None) -> None:
    request = Request(model="tiny", target=bench.target, rounds=3)
    ranks: Any = _Ranks(bench)
    Site(request, ranks, bench.target, engines, Matrix(bench.stack, False, 2**30), bench.progress, fio).run()


def bench_checkpoint(bench: Bench) -> None:
    _site(bench, ["torch-save-zip"])


def bench_checkpoint_fio(bench: Bench) -> None:
    fio = bench.fio(timed=False)
    _site(bench, [], _Searched(fio, bench.target, bench.stack, 2**30, True, dict(os.environ)))


CALLERS: Mapping[str, tuple[Callable[[Bench], None], int, bool]] = {
    "sequential": (sequential, FEWEST, True),
    "deepspeed": (deepspeed, 3, True),
    "gpudirect": (gpudirect, 3, True),
    "ladder, fio": (ladder_fio, SAMPLES, True),
    "ladder, checkpoint": (ladder_checkpoint, SAMPLES, True),
    "tune": (tune, 1, True),
    # Its rounds go on: a pair of engines is compared round by round, and what is missing may be a restore's alone.
    "bench checkpoint": (bench_checkpoint, 3, False),
    "bench checkpoint, fio": (bench_checkpoint_fio, 3, False),
}
"""By name: what measures, how many samples it takes, and whether it ends where bytes are missing."""

every_caller = pytest.mark.parametrize(("measure", "goal", "stops"), CALLERS.values(), ids=CALLERS)


@every_caller
@pytest.mark.parametrize(
    ("others", "again", "most"),
    [([], 0, 0), ([OTHERS], 1, 1), ([OTHERS] * 100, REPEATS, REPEATS + 1)],
    ids=["a quiet drive", "others once", "others that stay"],
)
def test_a_sample_beside_others_is_taken_again_and_not_for_ever(
    bench: Bench, measure: Callable[[Bench], None], goal: int, stops: bool, others: list[Any], again: int, most: int
) -> None:
    bench.script(others)
    measure(bench)
    assert bench.writes == goal + again
    said = [line for line in bench.progress.lines if SAID in line]
    assert bool(others) <= len(said) <= most
    assert all(line.endswith(SAID) for line in said)


@every_caller
def test_it_ends_where_bytes_are_missing(
    bench: Bench, measure: Callable[[Bench], None], goal: int, stops: bool
) -> None:
    bench.script([MISSING])
    if measure is tune:
        with pytest.raises(SettingFailed, match="the rest never reached a drive"):
            measure(bench)
    else:
        measure(bench)
    assert bench.writes == (1 if stops else goal)
    assert not [line for line in bench.progress.lines if SAID in line]


@every_caller
def test_a_drive_that_goes_away_ends_it_with_a_message(
    bench: Bench, measure: Callable[[Bench], None], goal: int, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanishes(name: str, root: str = "/") -> Counters:
        if bench.writes:
            raise block_stack.CountersChanged("`nvme0n1` has no counters")
        return bench.counters(name)

    bench.script([])
    monkeypatch.setattr(block_stack, "read_counters", vanishes)
    with pytest.raises(CannotJudge, match="the drives changed during"):
        measure(bench)
    assert bench.writes == 1


def _random_reads(bench: Bench, faster: int) -> dict[str, str]:
    """The doubts about random reads with a fio that claims to be ``faster`` times as fast as it was."""
    fio = Fio(str(bench.program("fio", _PACED_FIO, parts=6, faster=faster)), "3.33")
    bench.script([])
    shape = Plan(str(bench.target), "nvme disk", 1, MIB, 1.0, None)
    sampler = Sampler(bench.stack, fio, bench.target, dict(os.environ), bench.progress)
    context = Context(shape, bench.stack, bench.target, sampler, dict(os.environ), sequential=Results(file_bytes=MIB))
    return Random(EXPECTABLE["randread-4k"]).run(context).unproven


def test_a_slow_noisy_disk_does_not_make_fio_s_clock_wrong(bench: Bench) -> None:
    # Busy from before fio moves its first byte until after its last.
    bench.busy = True
    assert _random_reads(bench, 1) == {}


def test_a_wrong_clock_is_seen_beside_idle_drives(bench: Bench) -> None:
    assert "its clock is wrong" in _random_reads(bench, 10)["random.read.4k"]
