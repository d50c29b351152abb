"""`tunetool advise checkpoint`: how often to save, by published formulas."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from builders import measurement, record
from tunetool.advise.checkpoint import RULE, YOUNG, Failures, Job, State, daly, loss, plan, young
from tunetool.advise.read_model import load_model
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.record import Evidence, Measurement, Node, Status, Verdict, dumps

HOUR = 3600.0
EXAMPLE = ("--model-size", "140GB", "--bandwidth", "10GBps", "--samples-per-second", "100", "--rework", "0.5h")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["advise", "checkpoint", *arguments], standalone_mode=False)


def document(*arguments: str) -> Any:
    done = run(*arguments, "--json", "-")
    assert done.exception is None, done.exception
    return json.loads(done.stdout)


def states(**changes: Any) -> tuple[State, State]:
    job = {"parameters": 70e9, "bandwidth": 10e9, "samples_per_second": 100.0, "rework": 0.5 * HOUR, **changes}
    weights, full = plan(Job(**job))
    return weights, full


def interval(state: State, rule: str) -> float:
    choice = state.choice(rule)
    assert choice is not None
    return choice.interval


def test_the_published_example_gives_180000_samples() -> None:
    weights, _ = states()
    choice = weights.choice(RULE)
    assert choice is not None
    assert (weights.size, weights.write, choice.interval) == (140 * 10**9, 14.0, 1800.0)
    assert choice.samples == 180_000
    assert "180,000" in run(*EXAMPLE).stdout


def test_writing_stays_below_five_per_cent() -> None:
    # 980 GB at 10 GB/s take 98 s; twenty times that is more than half an hour.
    _, full = states()
    assert full.size == 980 * 10**9
    assert interval(full, RULE) == pytest.approx(98 * 20)
    assert "so a failure may cost more than the 30 min of `--rework`; 10.9 GB/s would meet both" in full.advice


# Daly 2006, figures 3 to 5: a dump of 5 minutes, failures every 24 h, 6 h and 15 min.
@pytest.mark.parametrize(("mtbf_minutes", "optimum_minutes"), [(24 * 60, 117), (6 * 60, 57), (15, 9.1)])
def test_daly_s_own_examples(mtbf_minutes: float, optimum_minutes: float) -> None:
    assert daly(5 * 60, mtbf_minutes * 60) / 60 == pytest.approx(optimum_minutes, rel=0.006)


def test_daly_gives_up_where_a_write_takes_twice_the_mtbf() -> None:
    assert daly(200.0, 100.0) == 100.0
    assert daly(1000.0, 100.0) == 100.0


@given(st.floats(1.0, 1e4), st.floats(1e2, 1e8), st.floats(0.0, 1e3))
def test_no_interval_near_daly_s_loses_noticeably_less(write: float, mtbf: float, restart: float) -> None:
    if write > mtbf / 2:
        return
    failures, best = Failures(mtbf, restart), daly(write, mtbf)
    least = min(loss(best * factor, write, failures).total for factor in (0.25, 0.5, 0.8, 1.25, 2.0, 4.0))
    assert loss(best, write, failures).total <= least + 1e-4
    assert best <= young(write, mtbf) + 1e-9 or write > mtbf / 10


@given(st.floats(1.0, 1e6), st.floats(0.1, 1e5), st.floats(1.0, 1e9), st.floats(0.0, 1e5))
def test_shares_of_lost_time_are_shares(interval_: float, write: float, mtbf: float, restart: float) -> None:
    lost = loss(interval_, write, Failures(mtbf, restart))
    assert min(lost.write, lost.rework, lost.restart) >= -1e-6
    assert 0 <= lost.total <= 1 + 1e-6
    # The cost of rare failures vanishes.
    rare = loss(interval_, write, Failures(1e15, restart))
    assert rare.total == pytest.approx(loss(interval_, write, None).total, abs=1e-3)


def test_lost_time_is_what_a_simulation_loses() -> None:
    import random

    source, write, mtbf, restart, length = random.Random(7), 60.0, 3600.0, 120.0, 600.0
    clock = progress = 0.0
    spent = {"write": 0.0, "rework": 0.0, "restart": 0.0}
    fails_at = source.expovariate(1 / mtbf)
    while clock < 40_000_000:
        if fails_at > clock + length + write:
            clock += length + write
            progress += length
            spent["write"] += write
            continue
        spent["rework"] += fails_at - clock
        clock = fails_at
        while True:
            fails_at = clock + source.expovariate(1 / mtbf)
            took = min(restart, fails_at - clock)
            spent["restart"] += took
            clock += took
            if took == restart:
                break
    expected = loss(length, write, Failures(mtbf, restart))
    for name, seconds in spent.items():
        assert seconds / clock == pytest.approx(getattr(expected, name), rel=0.03)
    assert 1 - progress / clock == pytest.approx(expected.total, rel=0.02)


def test_a_job_fails_as_often_as_its_nodes_together() -> None:
    weights, _ = states(node_mtbf=50000 * HOUR, nodes=400)
    assert interval(weights, YOUNG) == pytest.approx(math.sqrt(2 * 14 * 125 * HOUR))
    more, _ = states(node_mtbf=50000 * HOUR, nodes=1600)
    assert interval(more, YOUNG) == pytest.approx(interval(weights, YOUNG) / 2)


# The advice for the weights, then for the full state.
@pytest.mark.parametrize(
    ("changes", "said", "of_the_full_state"),
    [
        ({}, "every 30 min; give `--mtbf` and `--nodes`", "10.9 GB/s would meet both"),
        (
            {"node_mtbf": 50000 * HOUR, "nodes": 400},
            "keep 30 min if no failure may cost more than 30 min; failures are rare enough for Daly's 59 min",
            "failures are rare enough for Daly's 2.59 h, where 2.09% is lost instead of 5.00%",
        ),
        (
            {"node_mtbf": 50000 * HOUR, "nodes": 4000},
            "use Daly's 18.6 min, which is below the acceptable rework of 30 min: 2.50% is lost instead of 2.79%",
            "failures are rare enough for Daly's 48.4 min",
        ),
        ({"node_mtbf": 50000 * HOUR, "nodes": 1550}, "the rule and the optimum agree: every 30 min", ""),
        (
            {"node_mtbf": 50000 * HOUR, "nodes": 40000},
            "use Daly's 5.76 min",
            "use Daly's 14.6 min, although writing then takes 10% of the time",
        ),
        ({"node_mtbf": 100 * HOUR, "nodes": 4000}, "of the time at best: storage is too slow", "at best: storage is"),
    ],
)
def test_advice_says_where_the_rules_contradict_each_other(
    changes: dict[str, Any], said: str, of_the_full_state: str
) -> None:
    weights, full = states(**changes)
    assert said in weights.advice
    assert of_the_full_state in full.advice


def test_steps_are_samples_over_the_batch() -> None:
    advice = document(*EXAMPLE, "--batch", "1024")
    assert advice["states"][0]["choices"][0]["steps"] == round(180_000 / 1024)
    assert "steps" not in document(*EXAMPLE)["states"][0]["choices"][0]


def test_a_known_model_takes_the_place_of_its_size() -> None:
    advice = document("--model", "7b", *EXAMPLE[2:])
    numel = load_model("7b").numel
    assert [state["bytes"] for state in advice["states"]] == [numel * 2, numel * 14]


def test_nodes_that_write_at_once_add_up() -> None:
    alone, together = document(*EXAMPLE), document(*EXAMPLE, "--writers", "8")
    assert together["states"][1]["write_seconds"] == pytest.approx(alone["states"][1]["write_seconds"] / 8)


def test_the_table_stays_on_its_page() -> None:
    done = run(*EXAMPLE, "--mtbf", "50000h", "--nodes", "400", "--batch", "1024")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    every = next(line for line in lines if line.startswith("save every"))
    assert every.split("  ")[0] == "save every"
    assert [word.strip() for word in every[10:].split("  ") if word] == ["30 min", "59.2 min", "59 min", "32.7 min", "2.61 h", "2.59 h"]  # fmt: skip


def test_json_goes_to_a_file_beside_the_table(tmp_path: Path) -> None:
    done = run(*EXAMPLE, "--json", str(tmp_path / "plan.json"))
    assert "save every" in done.stdout
    assert json.loads((tmp_path / "plan.json").read_text()) == document(*EXAMPLE)


def kept(path: Path, *figures: Measurement, status: Status | None = "pass", kind: str = "verify") -> str:
    verdict = Verdict(status=status, reasons=["too slow"] if status != "pass" else []) if status else None
    path.write_text(dumps(record(*figures, kind=kind, node=Node(host="node7"), verdict=verdict)))
    return str(path)


ENGINES = (
    measurement("checkpoint.direct.durable", 20e9),
    measurement("checkpoint.direct.restore", 40e9),
    measurement("checkpoint.direct.stall", 1.0, "duration"),
    measurement("checkpoint.torch-save-zip.durable", 1e9),
)


def test_a_record_gives_the_bandwidth_of_its_fastest_engine(tmp_path: Path) -> None:
    path = kept(tmp_path / "record.json", *ENGINES, status=None, kind="bench.checkpoint")
    rest = (*EXAMPLE[:2], *EXAMPLE[4:], "--record", path)
    advice = document(*rest)
    assert advice["job"]["bandwidth"] == 20e9
    assert advice["job"]["read_bandwidth"] == 40e9
    assert "`checkpoint.direct.durable` (fio 3.33) on disk of `node7`" in advice["job"]["bandwidth_source"]
    assert document(*rest, "--engine", "torch-save-zip")["states"][0]["write_seconds"] == 140.0
    small = ENGINES[0].model_copy(update={"parameters": {"state_bytes": 2_083_000}})
    kept(tmp_path / "small.json", small, kind="bench.checkpoint")
    source = document(*rest[:-1], str(tmp_path / "small.json"))["job"]["bandwidth_source"]
    assert "on disk of `node7`, with a state of 2.083 MB" in source
    both = run(*EXAMPLE, "--record", path)
    assert "this is 200% of `--bandwidth`" in " ".join(both.stdout.split())


def test_a_stand_in_for_storage_in_memory_is_no_storage(tmp_path: Path) -> None:
    memory = measurement("checkpoint.memory.direct.durable", 90e9).model_copy(update={"parameters": {"stand_in": True}})
    proven = memory.model_copy(update={"parameters": {}, "evidence": Evidence(kind="memory")})
    for figure in (memory, proven):
        path = kept(tmp_path / "record.json", figure, *ENGINES)
        assert document(*EXAMPLE, "--record", path)["job"]["bandwidth"] == 20e9
        refused = run(*EXAMPLE, "--record", kept(tmp_path / "a", figure)).exception
        assert isinstance(refused, UsageProblem)


def test_verifys_record_gives_torch_saves_speed_before_fios(tmp_path: Path) -> None:
    rest = (*EXAMPLE[:2], *EXAMPLE[4:], "--record")
    fio = measurement("sequential.write", 26e9)
    assert document(*rest, kept(tmp_path / "a", fio))["job"]["bandwidth"] == 26e9
    torch = measurement("checkpoint.save", 1e9)
    assert document(*rest, kept(tmp_path / "b", fio, torch))["job"]["bandwidth"] == 1e9


@pytest.mark.parametrize("status", ["fail", "unstable", "unproven", "error"])
def test_a_record_that_does_not_hold_is_refused(tmp_path: Path, status: Status) -> None:
    done = run(*EXAMPLE, "--record", kept(tmp_path / "a", measurement("sequential.write", 26e9), status=status))
    refused = done.exception
    assert isinstance(refused, UsageProblem)
    assert refused.exit_code == 2
    assert f"its verdict is {status}: too slow" in refused.message
    assert "`--bandwidth 26GBps`" in str(refused.hint)


def test_a_record_without_a_speed_of_writing_is_refused(tmp_path: Path) -> None:
    read = measurement("sequential.read", 26e9)
    for figures in ((), (read,), (measurement("checkpoint.direct.durable", 3.0, "duration"),)):
        refused = run(*EXAMPLE, "--record", kept(tmp_path / "a", *figures)).exception
        assert isinstance(refused, UsageProblem)
        assert "has no write bandwidth" in refused.message
    damaged = tmp_path / "b"
    damaged.write_text(Path(kept(tmp_path / "a", read)).read_text().replace("26000000000", "36000000000"))
    refused = run(*EXAMPLE, "--record", str(damaged)).exception
    assert isinstance(refused, UsageProblem)
    assert "damaged" in refused.message
    unknown = run(*EXAMPLE, "--record", kept(tmp_path / "a", *ENGINES), "--engine", "orbax").exception
    assert isinstance(unknown, UsageProblem)
    assert unknown.hint == "it has direct, torch-save-zip"
