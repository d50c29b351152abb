"""Goals files are checked whole before anything runs: every problem, each with its line and the nearest name."""

from __future__ import annotations

import contextlib
import string
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from refusals import Refusals
from tunetool import record as records
from tunetool.accept.files import NAMES
from tunetool.accept.goal import parse_bound, parse_expectation
from tunetool.accept.goals_file import GoalsFile, Problems, figures_of
from tunetool.cli.accept import read_goals, text_of
from tunetool.errors import UsageProblem
from tunetool.record import LABELS

RECORDS = Path(__file__).parents[1] / "data/records"
HEAD = 'schema = "tunetool.goals/1"\ntitle = "A node"\n[values]\ntarget = "/mnt/data"\n'
GOOD = {
    "run": '"bench checkpoint --model tiny --target {target} --rounds 6"',
    "figure": '{figure = "durable", engine = "direct"}',
    "at_least": '"5GBps"',
}


def goal(**changes: str | None) -> str:
    lines = {**GOOD, **changes}
    return "".join(["[[goal]]\n", *(f"{key} = {value}\n" for key, value in lines.items() if value is not None)])


def read(text: str, *settings: str) -> GoalsFile:
    return read_goals(text, "dir/goals.toml", settings)


def refused(text: str, *settings: str) -> UsageProblem:
    with pytest.raises(UsageProblem) as caught:
        read(text, *settings)
    return caught.value


def lines_of(text: str) -> list[str]:
    """The problems, however many."""
    problem = refused(text)
    assert isinstance(problem, Problems)
    return problem.lines or [problem.message]


def test_a_goal_has_its_values_in_their_places() -> None:
    made = read(HEAD + goal(), "target=/mnt/other")
    assert " ".join(made.goals[0].run) == "bench checkpoint --model tiny --target /mnt/other --rounds 6"
    assert (made.goals[0].bound, made.goals[0].unit, made.goals[0].sense) == (5e9, "B/s", "at least")


@pytest.mark.parametrize(
    ("changes", "line", "message", "hint"),
    [
        ({"run": '"bench chekpoint"'}, 6, "`tunetool bench chekpoint` is not a command", "did you mean `checkpoint`?"),
        ({"run": '"verfy"'}, 6, "`verfy` is not a command that measures", "did you mean `verify`?"),
        ({"run": '"inspect"'}, 6, "`inspect` is not a command that measures", "one of bench"),
        ({"run": '"bench checkpoint --model tiny --taget /x"'}, 6, "`--taget` is not an option", "`--target`"),
        ({"run": '"bench checkpoint --target /x"'}, 6, "`--model` is missing", "--help"),
        ({"run": '"bench checkpoint --model tiny --rounds six"'}, 6, "six", "--help"),
        ({"run": '"verify --duration 4"'}, 6, "`4` is not a duration", "seconds"),
        ({"run": '"verify --target {taget}"'}, 6, "`taget` is not a value of this file", "did you mean `target`?"),
        ({"run": '"verify --json x"'}, 6, "`--json` does not go into `run`", "gives it itself"),
        ({"run": '"verify -i inventory"'}, 6, "`-i` does not go into `run`", "gives it itself"),
        ({"run": '"verify --help"'}, 6, "only prints a help text", "leave"),
        ({"run": '"verify \'"'}, 6, "No closing quotation", "close"),
        ({"run": "3"}, 6, "`run` is no command line", "such as"),
        ({"figure": '{figure = "durabel"}'}, 7, "`durabel` is not a figure of this command", "did you mean `durable`"),
        ({"figure": '{figure = "durable", engin = "direct"}'}, 7, "`engin` is not a label", "did you mean `engine`"),
        ({"figure": '{figure = "durable", direction = "wirte"}'}, 7, "`wirte` is not a direction", "`write`"),
        ({"figure": '"durable"'}, 7, "`figure` names no figure", "such as"),
        ({"of": '{figure = "bandwith"}'}, 9, "`bandwith` is not a figure", "did you mean `bandwidth`?"),
        (
            {"of": '{figure = "stall"}', "at_least": "0.9"},
            9,
            "`durable` is in B/s, and `stall` in s",
            "in the same unit",
        ),
        ({"at_least": '"5Gbps"'}, 8, "`5Gbps` is in bits", "bits"),
        ({"at_least": '"5"'}, 8, "`5` has no unit", "write a bandwidth"),
        ({"at_least": "5"}, 8, "`5` has no unit", "such as `50GBps`"),
        ({"at_least": '"5s"'}, 8, "`5s` is not a bandwidth", "use"),
        ({"at_least": "true"}, 8, "`at_least` is no number or quantity", "such as"),
        ({"at_least": None}, 5, "a goal has one of `at_least` and `at_most`", "give one"),
        ({"at_most": '"6GBps"'}, 5, "a goal has one of `at_least` and `at_most`", "give one"),
        ({"needs": '["gpu", "grot"]'}, 9, "`grot` is not something that a goal can need", "`root`"),
        ({"needs": '"gpu"'}, 9, "`needs` is no list", "such as"),
        ({"why": "3"}, 9, "`why` is no text", "write"),
        ({"whi": '"x"'}, 9, "`whi` is not a key of a goal", "did you mean `why`"),
    ],
)
def test_a_problem_has_its_line_and_a_near_name(
    changes: dict[str, str | None], line: int, message: str, hint: str
) -> None:
    problem = refused(HEAD + goal(**changes))
    assert problem.message.startswith(f"`goals.toml`, line {line}: ")
    assert message in problem.message
    assert hint in str(problem.hint)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("title = x\n", "line 1: not TOML"),
        (HEAD, "line 1: it has no goal"),
        (HEAD.replace("goals/1", "goals/2") + goal(), "line 1: the schema is another"),
        (HEAD.replace('"A node"', "3") + goal(), "line 2: `title` is no text"),
        (
            HEAD.replace("[values]", "[vlues]") + goal(run='"verify"', figure='{figure = "bandwidth"}'),
            "line 3: `vlues`",
        ),
        (HEAD.replace('"/mnt/data"', "3") + goal(run='"verify"', figure='{figure = "bandwidth"}'), "line 3: `values`"),
    ],
)
def test_the_file_itself_is_checked(text: str, said: str) -> None:
    assert said in refused(text).message


LINE = '[runs]\nsave = "bench checkpoint --model tiny --target {target} --rounds 6"\n'


def test_a_line_of_several_goals_is_said_once() -> None:
    made = read(HEAD + LINE + goal(run='"save"') + goal(run='"save"', at_least='"6GBps"'), "target=/mnt/other")
    assert [" ".join(each.run) for each in made.goals] == [
        " ".join(read(HEAD + goal(), "target=/mnt/other").runs[0])
    ] * 2


@pytest.mark.parametrize(
    ("runs", "run", "said"),
    [
        (LINE, "svae", "line 8: `svae` is not a command that measures"),
        (LINE.replace("--model", "--modl"), "save", "line 6: `--modl` is not an option"),
        (LINE.replace("--target", "--python x --target"), "save", "line 6: `--python` in `run` starts what the file"),
        (LINE.replace("save", "verify"), "verify", "line 5: `verify` in `runs` is a command"),
        ("[runs]\nsave = 3\n", "save", "line 5: `runs` is no table of texts"),
        ('[runs]\n\n"save" = "verify --nope"\n', "save", "line 7: `--nope` is not an option"),
        ('[runs]\ntitle = "verify --nope"\n', "title", "line 6: `--nope` is not an option"),
        ('[runs]\ntarget = "verify --nope"\n', "target", "line 6: `--nope` is not an option"),
        (LINE + 'other = "verify --nope"\n', "save", "line 7: no goal has the run `other`"),
        ('[runs]\n"verify --fast" = "verify --thorough"\n', "verify --fast", "line 5: `verify --fast` is no name in"),
    ],
)
def test_a_wrong_line_of_several_goals_has_its_own_line(runs: str, run: str, said: str) -> None:
    (first, *_) = [*(lines_of(HEAD + runs + goal(run=f'"{run}"')))]
    assert said in first


@pytest.mark.parametrize("runs", ['runs.v = "verify --nope"', 'runs = {s = "verify", v = "verify --nope"}'])
def test_a_name_in_one_line_has_that_line(runs: str) -> None:
    text = HEAD.replace("[values]", f"{runs}\n[values]") + goal(run='"v"') + (goal(run='"s"') if "s =" in runs else "")
    assert any("line 3: `--nope` is not an option" in each for each in lines_of(text))


def test_a_name_is_no_hint_for_its_own_line() -> None:
    assert "`a`" not in str(refused(HEAD + '[runs]\na = "a"\n' + goal(run='"a"')).hint)


def test_a_setting_that_the_file_lacks_is_refused() -> None:
    assert "`taget` is not a value of this file" in refused(HEAD + goal(), "taget=/x").message
    assert "`--set target` sets nothing" in refused(HEAD + goal(), "target").message


def test_all_problems_are_said_at_once_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    problem = refused(HEAD + goal(at_least='"5Gbps"', whi='"x"') + goal(figure='{figure = "durabel"}'))
    assert problem.message == "`goals.toml` has 3 problems"
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said] == [f"`goals.toml`, line {at}" for at in (8, 9, 12)]
    assert all("; hint: " in line for line in said)


def test_a_wrong_call_of_accept_changes_nothing(refusals: Refusals, tmp_path: Path) -> None:
    (tmp_path / "goals.toml").write_text(HEAD + goal(at_least='"5Gbps"'))
    assert "line 8" in refusals.refused("accept", str(tmp_path / "goals.toml"))
    assert "did you mean `rented`?" in refusals.refused("accept", "rentd")
    assert "cannot be read" in refusals.refused("accept", "./rented.toml")
    assert "needs an inventory" in refusals.refused("accept", "rented", "--limit", "n1")


@pytest.mark.parametrize("name", NAMES)
def test_the_files_that_come_with_it_are_right(name: str) -> None:
    made = read(text_of(name))
    assert all(each.why for each in made.goals)


@pytest.mark.parametrize("path", sorted(RECORDS.glob("*.json")), ids=lambda path: path.stem)
def test_each_figure_of_a_record_may_be_a_goal(path: Path) -> None:
    record = records.read(path)
    figures = figures_of(record.kind.split(".") if record.kind != "fleet" else ["verify"]) or {}
    # `bench inference` also keeps what its handle reached alone, of another subject.
    assert [each.name for each in record.measurements if each.figure not in figures.get(each.unit, ())] == []
    labels = {label for each in (*record.measurements, *record.checks) for label in each.labels}
    assert labels <= set(LABELS)


@given(st.text(max_size=200))
def test_any_text_is_a_file_or_a_problem(text: str) -> None:
    with pytest.raises(Problems):
        read(text)


@given(
    st.dictionaries(st.sampled_from([*GOOD, "of", "at_most", "why", "needs"]), st.text(string.printable, max_size=30))
)
def test_any_values_are_a_goal_or_a_problem(changes: dict[str, str]) -> None:
    with contextlib.suppress(UsageProblem):
        assert len(read(HEAD + goal(**changes)).goals) >= 1


@given(st.integers(1, 10**6), st.sampled_from(["us", "ms", "s", "min", "h"]))
def test_a_time_is_in_seconds(number: int, unit: str) -> None:
    seconds = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}
    assert parse_bound(f"{number}{unit}", ["s"], of=False) == (number * seconds[unit], "s")


def test_an_expectation_is_a_goal_in_one_word() -> None:
    figures = figures_of(["bench", "checkpoint"]) or {}
    made = parse_expectation("stall,engine=direct-async<=50ms", figures)
    assert (made.pick.words(), made.sense, made.bound, made.unit) == ("stall engine=direct-async", "at most", 0.05, "s")
    for wrong in ("durable", "durable>=5", "durabel>=5GBps", "durable,engin=direct>=5GBps"):
        with pytest.raises(UsageProblem):
            parse_expectation(wrong, figures)
