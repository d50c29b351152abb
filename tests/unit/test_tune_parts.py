"""The parts of `tune` that need no drive: sizes, fio's arguments, stored variables, curves."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import pytest

from builders import measurement, record
from tunetool.errors import UsageProblem
from tunetool.measure import Direction
from tunetool.measure.aio.ops import Probe
from tunetool.measure.aio.spec import SMALLEST, Spec
from tunetool.measure.fio import Fio
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Evidence, Node, Record
from tunetool.tune.explain import curve, explain
from tunetool.tune.fio_driver import arguments
from tunetool.tune.goals import Mix
from tunetool.tune.outcome import Work, conclude
from tunetool.tune.pool import Pool, aio_shortage, largest, unit_of
from tunetool.tune.request import Request
from tunetool.tune.run import render
from tunetool.tune.samples import Move, Samples, block_of
from tunetool.tune.search import Plan, Search
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, settings_of
from tunetool.tune.store import check_store, store
from tunetool.verdict import TESTER_CEILING, TESTER_CPU_SHARE, judge

MIB = 2**20
OTHER = AioSettings(8 * MIB, 32, 3, single_submit=True, overlap_events=False)


def rates_of(**rates: float) -> Record:
    measurements = [
        measurement(
            f"tune.{way}.{settings.block_size}x{settings.queue_depth}x{settings.intra_op_parallelism}",
            rate * (2 if settings == OTHER else 1),
            parameters={"direction": way, **settings.block()},
            evidence=Evidence(kind="block"),
        )
        for way, rate in rates.items()
        for settings in (DEFAULTS, OTHER)
    ]
    return record(*measurements, kind="tune", node=Node(host="node1", speed_hash="a" * 64), target="/mnt")


def test_one_size_can_be_moved_by_every_parallelism() -> None:
    unit = unit_of([DEFAULTS, OTHER, *settings_of(SWEEP)])
    assert unit % (24 * MIB) == 0
    assert largest(100 * 2**30, 1000 * 2**30, 8, unit) == 2**30 // unit * unit
    assert largest(10 * 2**30, 1000 * 2**30, 8, unit) <= 2**30 / 8
    assert largest(100 * MIB, 1000 * 2**30, 1, unit) == 0


def test_more_requests_than_the_kernel_grants_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "proc/sys/fs"
    folder.mkdir(parents=True)
    (folder / "aio-max-nr").write_text("1000\n")
    (folder / "aio-nr").write_text("900\n")
    assert aio_shortage(DEFAULTS, 1, str(tmp_path)) is None
    reason = aio_shortage(OTHER, 1, str(tmp_path))
    assert reason is not None
    assert reason.startswith("needs 128 asynchronous requests, fs.aio-max-nr leaves 100")
    assert aio_shortage(DEFAULTS, 8, str(tmp_path)) is not None


def test_fio_asks_as_the_handle_asks() -> None:
    fio = Fio("/usr/bin/fio", "3.33")
    plain = arguments(fio, DEFAULTS, "write", 64 * MIB)
    assert {"--numjobs=1", "--bs=1048576", "--iodepth=8", "--iodepth_batch_submit=8", "--end_fsync=1"} <= set(plain)
    assert "--iodepth_batch_complete_min=1" in plain
    other = arguments(fio, OTHER, "read", 96 * MIB)
    assert {f"--size={32 * MIB}", f"--offset_increment={32 * MIB}", "--iodepth_batch_submit=1"} <= set(other)
    assert {"--iodepth_batch_complete_min=32", "--iodepth_low=1"} <= set(other)
    assert "--bs=1048576" in arguments(fio, OTHER, "read", 3 * MIB)


def test_measurements_of_one_record_have_names_of_their_own() -> None:
    blocks = [block_of(settings) for settings in [*settings_of(SWEEP), OTHER]]
    assert len(set(blocks)) == len(blocks)
    assert block_of(OTHER) == "8388608x32x3-single-sequential"


@dataclass
class Steady:
    """A driver that moves 1 GB/s by every setting, whose clock is its own work."""

    alone: list[float]
    cores: float = 0.3
    io_bytes: int = 64 * MIB
    engine: str = "aio_handle (deepspeed 0.19.8, torch 2.13.0+cpu)"
    now: float = 0.0
    asked: list[tuple[AioSettings, Direction]] = field(default_factory=list)

    def move(self, settings: AioSettings, direction: Direction) -> Move:
        self.now += 0.1
        return Move(10**8, 0.1, self.cores)

    def without_storage(self, settings: AioSettings, direction: Direction) -> list[float]:
        self.asked.append((settings, direction))
        return self.alone


@pytest.mark.parametrize("driver", ["deepspeed", "fio"])
@pytest.mark.parametrize(
    ("alone", "cores", "said"),
    [
        ([1.1e9, 1.0e9, 1.2e9], 0.3, "is near the tester's limit: aio_handle (deepspeed 0.19.8, torch 2.13.0+cpu)"),
        ([], 0.97, "kept 97% of the cores busy"),
        ([9e9, 8e9, 10e9], 0.3, None),
        ([], 0.3, None),
    ],
    ids=["near its ceiling", "no core left", "free", "not known"],
)
def test_a_driver_that_binds_is_named_beside_the_choice(
    alone: list[float], cores: float, said: str | None, driver: Literal["deepspeed", "fio"], tmp_path: Path
) -> None:
    stack, steady = read_stack(str(tmp_path)), Steady(alone, cores)
    request = Request(tmp_path, [DEFAULTS, OTHER], driver=driver)
    samples = Samples(steady, replace(stack, leaves=(), device=None, redundant=False), lambda: steady.now)
    findings = Search(Plan(request.space, Mix(), 30.0), samples.take, lambda: steady.now).run()
    for pair in findings.decided:
        samples.ask_without_storage(*pair)
    assert steady.asked == [(DEFAULTS, "read"), (DEFAULTS, "write")]
    concluded = conclude(request, stack, Work(samples, findings))
    figures = {each.name: each.parameters for each in concluded.case.measurements}
    for direction in ("read", "write"):
        parameters = figures[f"tune.{direction}.{block_of(DEFAULTS)}"]
        assert parameters[TESTER_CPU_SHARE] == cores
        assert parameters.get(TESTER_CEILING) == (sorted(alone)[1] if alone else None)
    # What no choice rests on is not asked for.
    assert TESTER_CEILING not in figures[f"tune.read.{block_of(OTHER)}"]
    verdict = judge(concluded.case)
    assert verdict.status == "pass"
    assert len(verdict.reasons) == (2 if said else 0)
    for reason in verdict.reasons:
        assert said is not None
        assert said in reason
        assert "the storage may be faster" in reason
        assert ("`--processes`" if driver == "deepspeed" else "`--driver fio`") in reason


def test_results_lie_beside_those_of_other_hardware(tmp_path: Path) -> None:
    block = OTHER.block()
    other = json.loads(store(tmp_path, rates_of(), DEFAULTS.block(), "write=1").read_text())
    other["tunetool_tuned"]["b" * 64] = other["tunetool_tuned"].pop("a" * 64)
    (tmp_path / "tunetool_tuned.json").write_text(json.dumps(other))
    stored = json.loads(store(tmp_path, rates_of(), block, "read=1,write=1").read_text())["tunetool_tuned"]
    assert stored["a" * 64]["block"] == block
    assert stored["b" * 64]["block"] == DEFAULTS.block()
    assert json.loads(render(block)) == {"aio": block}
    for wrong in ("{", "[]", '{"tunetool_tuned": {"a": {"block": {"num_threads": 4}}}}'):
        (tmp_path / "tunetool_tuned.json").write_text(wrong)
        with pytest.raises(UsageProblem, match="holds no results"):
            check_store(tmp_path)
    with pytest.raises(UsageProblem, match="is not a directory"):
        check_store(tmp_path / "nowhere")


def test_curves_say_what_was_reached_with_each_value(tmp_path: Path) -> None:
    rates = rates_of(read=1e9, write=2e9)
    points = curve(rates.measurements, "queue_depth", "write")
    assert [(point.value, point.best) for point in points] == [(8, 2e9), (32, 4e9)]
    text = explain(rates, tmp_path / "why").read_text()
    assert "32 write   4.000    4.000  ########################################" in text
    assert "Not varied in this run." in text[text.index("## `use_gds`") :]
    drawn = {path.stem for path in (tmp_path / "why").glob("*.svg")}
    assert drawn == set(DEFAULTS.block()) - {"use_gds"}
    for path in (tmp_path / "why").glob("*.svg"):
        tree = ElementTree.fromstring(path.read_text())
        assert len(tree.findall("{http://www.w3.org/2000/svg}polyline")) == 4


STAND_IN = """#!{python}
import json, os, sys
for line in sys.stdin:
    order = json.loads(line)
    answer = {{"address": 4096}}
    if order["do"] == "open":
        path, size = order["file"], order["io_bytes"]
    elif order["do"] == "move":
        file = order.get("file", path)
        if order["direction"] == "write":
            with open(file, "wb") as stream:
                stream.write(bytes(size))
        answer = {{"bytes": order["stamp"], "seconds": 1.0, "durable_seconds": 1.0, "cpu_seconds": 0.1}}
        if file.endswith("process-0/hole.data"):
            if not os.path.exists("{failed}"):
                open("{failed}", "w").close()
                answer = {{"error": "no such request", "kind": "RuntimeError"}}
    print(json.dumps(answer), flush=True)
"""
"""Answers as the process that runs DeepSpeed's handle; a sample moves as many bytes as orders of samples came."""


@pytest.mark.parametrize("fault", ["of a process", "of the file system"])
def test_after_a_failed_ceiling_no_other_answer_counts(tmp_path: Path, fault: str) -> None:
    python, directory = tmp_path / "python", tmp_path / "files"
    directory.mkdir()
    python.write_text(STAND_IN.format(python=sys.executable, failed=tmp_path / "failed"))
    python.chmod(0o755)
    installed = Probe(str(python), "3.11", torch="2", deepspeed="0", installed={"async_io": "/async_io.so"})
    # "cuda" locks no memory here, whatever the limit on that.
    spec = Spec(directory, 0, python=python, pinned_by="cuda")
    with Pool(spec, 2, [DEFAULTS], installed, read_stack(str(directory)), os.environ, SMALLEST) as pool:
        pool.open()
        # Both processes answer to one order.
        assert pool.move(DEFAULTS, "read").claimed_bytes % 2 == 0
        if fault == "of the file system":
            (directory / "process-0/hole.data").mkdir()
        assert pool.without_storage(DEFAULTS, "read") == []
        assert ("Is a directory" in pool.messages) == (fault == "of the file system")
        assert [rate for rate in pool.without_storage(DEFAULTS, "write") if rate % 2] == []
