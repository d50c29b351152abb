"""`make bench`: which word each program gets, what is shown of it, and what makes the whole fail."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
import benchmarks
import steps
from benchmarks import BROKE, HELD, MISSED, OPEN, Program, judge, programs
from waiting import gone

ROOT = Path(__file__).parents[2]
FAULT = "error: a fault of tunetool itself: `KeyError`: 'x'"
GOOD, BAD, WIDE = (f"cpu part=x: 1.5; goal: at most 2: {word}" for word in (HELD, MISSED, OPEN))


@pytest.mark.parametrize(
    ("code", "lines", "word", "reasons"),
    [
        (0, [GOOD], HELD, []),
        (3, [GOOD, WIDE, "", "a remark"], OPEN, [WIDE]),
        (1, [GOOD, WIDE, BAD], MISSED, [WIDE, BAD]),
        # What it needs is not here: no goal was measured.
        (3, ["error: no such network", ""], OPEN, ["error: no such network"]),
        # Python ends with 1 after an exception, and so do `sys.exit(text)` and a wrong call by another number.
        (1, [GOOD, "Traceback ...", "KeyError: 'x'"], BROKE, ["ended with 1", "KeyError: 'x'"]),
        (1, [], BROKE, ["ended with 1"]),
        (2, ["usage: ..."], BROKE, ["ended with 2", "usage: ..."]),
        (3, [FAULT, "hint: report it"], BROKE, ["ended with 3", FAULT]),
        (-11, [GOOD], BROKE, ["ended with -11", GOOD]),
        (124, ["round 1"], BROKE, ["stopped after 90 s", "round 1"]),
    ],
)
def test_missed_is_neither_not_decided_nor_broken(code: int, lines: list[str], word: str, reasons: list[str]) -> None:
    assert judge(code, lines, 90) == (word, reasons)


def script(name: str, code: int, lines: Sequence[str]) -> Program:
    return python(name, f"import sys\nfor line in {list(lines)!r}: print(line)\nsys.exit({code})", 60)


def python(name: str, text: str, seconds: float) -> Program:
    return Program(name, [sys.executable, "-u", "-c", text], seconds)


def ran(*wanted: Program) -> tuple[int, list[str]]:
    shown: list[str] = []
    code = steps.finish(benchmarks.run_all(wanted, shown.append))
    return code, shown


def test_not_decided_fails_nothing_and_each_program_has_its_line() -> None:
    code, shown = ran(script("first", 0, [GOOD]), script("second", 3, [GOOD, WIDE]))
    assert code == 0
    assert shown[:4] == ["--- [1/2] first", GOOD, shown[2], "--- [2/2] second"]
    end = [re.sub(r" +\d+ s", "", line) for line in shown[shown.index("") + 1 :]]
    assert end == ["held  first", "not decided  second", f"{'':22}{WIDE}"]


@pytest.mark.parametrize(("end", "word"), [((1, [BAD]), MISSED), ((1, [GOOD]), BROKE), ((5, []), BROKE)])
def test_a_missed_goal_or_a_broken_program_fails_alone(end: tuple[int, list[str]], word: str) -> None:
    code, shown = ran(script("first", *end), script("second", 0, [GOOD]))
    assert code == 1
    assert [line.split("  ")[0].strip() for line in shown if re.search(r" s  \w+$", line)] == [word, HELD]


def test_what_does_not_end_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    started = tmp_path / "pid"
    text = (
        "import pathlib, subprocess\nchild = subprocess.Popen(['sleep', '3600'])\n"
        f"pathlib.Path({str(started)!r}).write_text(str(child.pid))\nchild.wait()"
    )
    code, shown = ran(python("first", text, 5))
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

    wanted = [script(name, 0, [GOOD]) for name in ("first", "second", "third")]
    assert steps.finish(benchmarks.run_all(wanted, show)) == 130
    assert [line.split() for line in shown[-2:]] == [["not", "run", "second"], ["not", "run", "third"]]
    assert shown[-3].startswith("held ")


def test_make_bench_runs_all_that_needs_no_gpu_on_the_target() -> None:
    found = [program.shown for program in programs("/mnt/x")]
    assert found[0] == benchmarks.ACCEPT
    assert "stage --target /mnt/x" in found
    assert not [each for each in found if "cuda" in each or "HOST" in each]
    assert "tools/dev/benchmarks.py" in (ROOT / "Makefile").read_text()
