"""The programs of perf/: arms in rounds, which goals are judged, and how a program ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

import rounds
import two_nodes
from rounds import Samples, figure_of, goals_of, measured, read_goals, sample
from tunetool import record as records
from tunetool.accept.goal import parse_expectation
from tunetool.accept.goals_file import figures_of
from tunetool.cli.accept import read_goals as goals_of_tunetool

PERF = Path(rounds.__file__).parent
RECORD = Path(__file__).parents[1] / "data/records/bench.strategies.json"


def test_every_arm_has_its_turn_in_every_round_in_orders_drawn() -> None:
    order: list[str] = []

    def arm(name: str) -> Samples:
        order.append(name)
        yield sample("time", len(order), engine=name)

    taken = measured({name: lambda name=name: arm(name) for name in "abc"}, 20, 1)
    assert [sorted(order[at : at + 3]) for at in range(0, 60, 3)] == [["a", "b", "c"]] * 20
    assert len({tuple(order[at : at + 3]) for at in range(0, 60, 3)}) > 3
    assert [len(values) for values in taken.values()] == [20, 20, 20]


def test_every_line_of_goals_names_a_program_and_its_figures() -> None:
    programs = {path.stem for path in PERF.glob("*.py")} - {"rounds", "two_nodes"}
    assert {goal.run[0] for goal in read_goals({}).goals} == programs


@pytest.mark.parametrize("name", ["goals.toml", "gpu.toml"])
def test_tunetool_takes_the_goals_of_its_own_commands(name: str, tmp_path: Path) -> None:
    settings = [f"huge={tmp_path}"] if name == "gpu.toml" else []
    assert goals_of_tunetool((PERF / name).read_text(), name, settings).goals


def test_the_goals_of_two_nodes_are_of_figures_of_its_benchmark() -> None:
    figures, record = figures_of(["bench", "strategies"]) or {}, records.read(RECORD)
    goals = [parse_expectation(each, figures) for each in two_nodes.GOALS]
    assert all(goal.pick.of(record.measurements) for goal in goals if goal.pick.labels["layout"] == "2x1")


def test_only_the_goals_of_what_was_measured_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "lacks", lambda needs: "")  # as a machine that has fio, rclone and rsync
    cpu = figure_of("shapes", "tmpfs", ("cpu", (("block", "1344"), ("place", "cpu"), ("state", "first"))), [1e-6])
    assert {goal.pick.labels["place"] for goal in goals_of("shapes", [cpu])} == {"cpu"}
    assert len(goals_of("export", [figure_of("export", "disk", ("bandwidth", (("way", "export"),)), [1.0])])) == 1
    engine, part = ("engine", "tunetool stage"), ("part", "small files")
    small = figure_of("stage", "disk", ("time", (engine, part)), [1.0])
    assert {goal.pick.labels["part"] for goal in goals_of("stage", [small])} == {"small files"}


PROGRAM = """
import time
from rounds import program, sample
def prepare(call):
    (call.folder / "data").touch()
    print(flush=True)
    time.sleep(call.asked.seconds)
    return {"arm": lambda: [sample("cpu", call.asked.value, part="checks of an hour")]}
program(prepare, seconds=600, value=1.0)
"""


def started(tmp_path: Path, *words: str) -> subprocess.Popen[str]:
    (tmp_path / "target").mkdir()
    (tmp_path / "health.py").write_text(PROGRAM)
    paths = {"PYTHONPATH": f"{PERF}:{':'.join(sys.path)}"}
    argv = [sys.executable, tmp_path / "health.py", "--target", tmp_path / "target", "--runs-dir", tmp_path / "runs"]
    return subprocess.Popen([*argv, *words], env=paths, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("value", "rounds", "code"), [("1", "5", 0), ("1", "4", 3), ("3", "5", 1), ("x", "5", 2)])
def test_a_program_ends_as_its_goals_say(tmp_path: Path, value: str, rounds: str, code: int) -> None:
    with started(tmp_path, "--seconds", "0", "--value", value, "--rounds", rounds) as process:
        printed, _ = process.communicate()
    assert process.returncode == code
    assert ("cpu part=checks of an hour" in printed) == (code != 2)
    assert not list((tmp_path / "target").iterdir())
    assert len(list(tmp_path.glob("runs/*/record.json"))) == (code != 2)


def test_a_program_that_is_ended_removes_what_it_made(tmp_path: Path) -> None:
    with started(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert list((tmp_path / "target").iterdir())
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 130
    assert not list((tmp_path / "target").iterdir())
