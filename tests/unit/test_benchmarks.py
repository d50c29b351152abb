"""`make bench`: which word each program gets, what is shown of it, and what makes the whole fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
import benchmarks
import steps
from benchmarks import BROKE, HELD, MISSED, OPEN, PROGRAMS, Program, judge
from waiting import gone

ROOT = Path(__file__).parents[2]
GOOD = "writing: 2.05 [1.90 to 2.30, 97%], 6 rounds; goal: at least 1.5: held"
BAD = "reading: 1.05 [1.00 to 1.30, 97%], 6 rounds; goal: at least 1.5: missed"
WIDE = "mapping: 1.55 [1.00 to 2.30, 97%], 6 rounds; goal: at least 1.5: not decided"


@pytest.mark.parametrize(
    ("code", "lines", "word", "reasons"),
    [
        (0, [GOOD], HELD, []),
        (0, ["round 1"], BROKE, ["ended with 0 and judged no goal", "round 1"]),
        (3, [GOOD, WIDE, "", "a remark"], OPEN, [WIDE]),
        (1, [GOOD, WIDE, BAD], MISSED, [BAD, WIDE]),
        # What it needs is not here: no goal was measured.
        (3, ["error: no such network", ""], OPEN, ["error: no such network"]),
        # Python ends with 1 after an exception, and so do `sys.exit(text)` and a wrong call by another number.
        (1, [GOOD, "Traceback ...", "KeyError: 'x'"], BROKE, ["ended with 1", "KeyError: 'x'"]),
        (1, [], BROKE, ["ended with 1"]),
        (2, ["usage: ..."], BROKE, ["ended with 2", "usage: ..."]),
        (-11, [GOOD], BROKE, ["ended with -11", GOOD]),
        (124, ["round 1"], BROKE, ["stopped after 90 s", "round 1"]),
    ],
)
def test_missed_is_neither_not_decided_nor_broken(code: int, lines: list[str], word: str, reasons: list[str]) -> None:
    assert judge(code, lines, 90) == (word, reasons)


@dataclass(frozen=True)
class Script(Program):
    """A program that is a few lines here."""

    text: str = ""

    def command(self, target: str) -> list[str]:
        return [sys.executable, "-u", "-c", self.text, target]


def ran(*programs: Program) -> tuple[int, list[str]]:
    shown: list[str] = []
    code = steps.finish(benchmarks.run_all(programs, "somewhere", shown.append))
    return code, shown


def script(name: str, code: int, lines: Sequence[str], seconds: float = 60) -> Script:
    return Script(name, seconds, text=f"import sys\nfor line in {list(lines)!r}: print(line)\nsys.exit({code})")


def test_not_decided_fails_nothing_and_each_program_has_its_line() -> None:
    code, shown = ran(script("first", 0, [GOOD]), script("second", 3, [GOOD, WIDE]))
    assert code == 0
    assert shown[:4] == ["--- [1/2] perf/first, at most 1 min", GOOD, shown[2], "--- [2/2] perf/second, at most 1 min"]
    end = shown[shown.index("") + 1 :]
    assert [re.sub(r" +\d+ s", "", line) for line in end] == [
        "held  perf/first",
        "not decided  perf/second",
        f"{'':22}{WIDE}",
    ]


@pytest.mark.parametrize(("end", "word"), [((1, [BAD]), MISSED), ((1, [GOOD]), BROKE), ((5, []), BROKE)])
def test_a_missed_goal_or_a_broken_program_fails_alone(end: tuple[int, list[str]], word: str) -> None:
    code, shown = ran(script("first", *end), script("second", 0, [GOOD]))
    assert code == 1
    assert [line.split("  ")[0].strip() for line in shown if "  perf/" in line] == [word, HELD]


def test_what_does_not_end_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    text = (
        "import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '3600'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\nchild.wait()"
    )
    code, shown = ran(Script("first", 5, text=text))
    assert code == 1
    assert f"{'':22}stopped after 5 s" in shown
    # On a machine that is busy enough it may have started nothing yet.
    assert not started.exists() or gone(int(started.read_text()))


def test_an_interruption_shows_what_ran_and_what_did_not() -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.startswith("--- [2/3]"):
            raise KeyboardInterrupt

    programs = [script(name, 0, [GOOD]) for name in ("first", "second", "third")]
    assert steps.finish(benchmarks.run_all(programs, "", show)) == 130
    assert [line.split() for line in shown[-2:]] == [["not", "run", f"perf/{name}"] for name in ("second", "third")]
    assert shown[-3].startswith("held ")


def test_the_target_is_given_to_the_programs_that_have_one() -> None:
    stage = next(program for program in PROGRAMS if program.name == "stage")
    assert "TARGET" not in stage.command("/mnt/x")
    assert stage.command("/mnt/x")[-6:-4] == ["--source", "/mnt/x"]


def test_every_goal_has_a_command_and_make_bench_runs_it() -> None:
    table = (ROOT / "perf/README.md").read_text()
    listed = re.findall(r"^\|.*\| `[^`]*?perf/(\w+)\.py[^`]*` \|([^|\n]*)\|", table, re.MULTILINE)
    sources = {path.stem: path.read_text() for path in (ROOT / "perf").glob("*.py")}
    with_goals = {
        name for name, text in sources.items() if re.search(r"^(from goals import|import goals$)", text, re.M)
    }
    assert {name for name, _ in listed} == with_goals
    assert {program.name for program in PROGRAMS} == {name for name, needs in listed if "GPU" not in needs} & with_goals
    assert "tools/dev/benchmarks.py" in (ROOT / "Makefile").read_text()
