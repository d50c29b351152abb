"""`bench api` without DeepSpeed: its rows, what an ending means, the verdict, the table, skips and wrong calls."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from click.testing import CliRunner

import builders
from pythons import bare_python, python_that
from shown_records import on_screen
from tunetool.bench.api import child, figures, preflight
from tunetool.bench.api.catalogue import ROWS, VERSION
from tunetool.bench.api.preflight import Plan, Way
from tunetool.bench.api.request import Request
from tunetool.bench.api.samples import Answer, Ending, Gathered
from tunetool.bench.versions import version_of
from tunetool.cli.main import cli
from tunetool.errors import CannotJudge
from tunetool.measure.aio import Probe
from tunetool.node.machine.block_stack import BlockStack, Leaf
from tunetool.record import Record, parse
from tunetool.verdict import Case, judge

DISK = Leaf("vda", "disk", None, True, ("vda",))
STACK = BlockStack("/mnt", None, "xfs", "vda", "254:0", "disk", (DISK,), False, False)
INSTALLED = Probe("/usr/bin/python3", "3.11", torch="2.13.0", deepspeed="0.19.8")
PLAN = Plan(STACK, 512, 2**20, (Way("sync", "sync"),), INSTALLED)


def answers(**other: tuple[Ending, str]) -> Mapping[str, Answer]:
    """All rows as expected, but for those named (with `_` for `-`)."""
    given = {name.replace("_", "-"): value for name, value in other.items()}
    return {row.id: Answer(row, *given.get(row.name, ("pass", "equal"))) for row in ROWS}


def case(**other: tuple[Ending, str]) -> Case:
    return figures.case(PLAN, Gathered(dict(answers(**other))), [])


def record(**other: tuple[Ending, str]) -> Record:
    made = case(**other)
    misuses = figures.checks(PLAN, answers(**other), misuses=True)
    return builders.record(
        *made.measurements, kind="bench.api", target="/mnt", checks=[*made.checks, *misuses], verdict=judge(made)
    )


def test_each_row_has_a_function_and_a_name_of_its_own() -> None:
    from tunetool.bench.api import calls, misuses

    assert [f"{row.group}.{row.name}" for row in ROWS] == [*calls.ROWS, *misuses.ROWS]
    assert len({row.name for row in ROWS if row.group == "call"}) == len([row for row in ROWS if row.group == "call"])
    assert all(row.expected and row.remedy for row in ROWS)


@pytest.mark.parametrize(
    ("name", "ending", "status"),
    [
        ("sync", "fail", "fail"),
        ("sync", "raised", "fail"),
        ("sync", "died", "fail"),
        ("sync", "hung", "fail"),
        ("gpu", "skip", "skip"),
        # Whether GPUDirect Storage can work here is the judgement of `verify --require gds`.
        ("gds", "died", "skip"),
        ("gds", "raised", "skip"),
        ("gds", "fail", "fail"),
        # A wrong use may end its process, but neither hang nor report a success that is none.
        ("short-file", "died", "pass"),
        ("short-file", "raised", "pass"),
        ("short-file", "fail", "fail"),
        ("short-file", "hung", "fail"),
    ],
)
def test_what_an_ending_means(name: str, ending: Ending, status: str) -> None:
    shown = record(**{name.replace("-", "_"): (ending, "the reason")})
    check = next(each for each in shown.checks if each.id.endswith(f".{name}"))
    assert check.status == status
    assert "the reason" in check.found
    assert bool(check.remedy) == (status == "fail")


CAUGHT = """\
Exception ignored in: 'DeepSpeed NVMe write endurance warning'
Traceback (most recent call last):
  File "/opt/deepspeed/utils/__init__.py", line 1, in <module>
    from .logging import logger
ImportError: cannot import name 'logger' from 'deepspeed.utils' (unknown location)
"""


@pytest.mark.parametrize(
    ("number", "words", "said"),
    [
        (signal.SIGSEGV, "", "the process is ended by SIGSEGV"),
        (signal.SIGSEGV, CAUGHT, "the process is ended by SIGSEGV"),
        (
            signal.SIGFPE,
            f"{CAUGHT}deepspeed_aio failure: 3 threads\n",
            "the process is ended by SIGFPE: deepspeed_aio failure: 3 threads",
        ),
        (
            signal.SIGABRT,
            f"{CAUGHT}python: handle.cpp:9: wait: Assertion `_num_pending_ops > 0' failed.\n",
            "the process is ended by SIGABRT: Assertion `_num_pending_ops > 0' failed.",
        ),
        (
            signal.SIGABRT,
            "terminate called after throwing an instance of 'std::runtime_error'\n  what():  io_submit error\n",
            "the process is ended by SIGABRT: what():  io_submit error",
        ),
    ],
)
def test_an_end_is_told_by_what_the_op_said_last(number: signal.Signals, words: str, said: str) -> None:
    assert child._ended(number, words) == said


def test_documented_calls_are_judged_and_wrong_uses_are_noted() -> None:
    assert judge(case()).status == "pass"
    assert judge(case()).reasons == []
    harmful = judge(case(free_view=("fail", "freed"), no_space=("fail", "short")))
    assert harmful.status == "pass"
    assert harmful.reasons == [
        "2 of 13 wrong uses are not refused and do harm, by DeepSpeed on any node: free-view, no-space"
    ]
    wrong = judge(case(offset_read=("fail", "other bytes from offset 4096")))
    assert wrong.status == "fail"
    assert wrong.reasons[0].startswith("api.call.offset-read: other bytes from offset 4096, expected file_offset reads")


def test_without_an_answer_nothing_is_judged() -> None:
    planned = Plan(STACK, 512, 2**20, (), None, missing="deepspeed is not installed", remedy="pip install it")
    made = figures.case(planned, Gathered(), [])
    assert {check.status for check in made.checks} == {"skip"}
    assert {check.found for check in made.checks} == {"deepspeed is not installed"}
    assert judge(made).status == "unproven"


@pytest.mark.parametrize(
    ("text", "numbers"), [("0.17.1", (0, 17, 1)), ("0.19.8+abc.1", (0, 19, 8)), ("0.18.0rc1", (0, 18)), ("unknown", ())]
)
def test_versions(text: str, numbers: tuple[int, ...]) -> None:
    assert version_of(text) == numbers


def shown(made: Record) -> str:
    return " ".join(on_screen(made, None, 100).split())


def test_the_table_says_what_does_harm_and_what_to_do() -> None:
    text = shown(record(free_view=("fail", "it frees the whole tensor"), gds=("skip", "no GPU")))
    assert "call.sync PASS equal" in text
    assert "call.gds skip no GPU" in text
    assert "free-view HARM it frees the whole tensor" in text
    assert "short-file refused equal" in text
    assert "free-view: free only what new_cpu_locked_tensor gave" in text


def call(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["bench", "api", *map(str, arguments)], standalone_mode=False)
    assert result.exception is None
    return int(result.return_value), result.stdout


def test_an_absent_deepspeed_is_a_skip_with_its_line(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    common = ("--target", target, "--runs-dir", tmp_path / "runs", "--size", "1MiB", "--json", "-")
    code, text = call(*common, "--python", bare_python(tmp_path))
    made = parse(text, "stdout")
    assert code == 3
    assert {check.status for check in made.checks} == {"skip"}
    assert len(made.checks) == 1 + len(ROWS)
    assert made.checks[0].id == VERSION
    assert "is not installed in" in made.checks[0].found
    assert "or name the Python that has it with `--python`" in made.checks[0].remedy
    assert list(target.iterdir()) == []


def test_an_older_deepspeed_is_a_skip_that_names_the_version(tmp_path: Path) -> None:
    target, packages = tmp_path / "target", tmp_path / "packages"
    target.mkdir()
    for name, files in {
        "torch": {"version.py": "__version__ = '2.6.0'\ncuda = hip = None\n"},
        "deepspeed": {"git_version_info_installed.py": "version = '0.16.9'\n"},
    }.items():
        (packages / name).mkdir(parents=True)
        for file, text in {"__init__.py": "", **files}.items():
            (packages / name / file).write_text(text)
    op = packages / "deepspeed" / "ops" / "aio"
    op.mkdir(parents=True)
    (op / "async_io_op.so").touch()
    python = python_that(tmp_path, f"export PYTHONPATH={packages}", "-S")
    code, text = call(
        *("--target", target, "--runs-dir", tmp_path / "runs", "--size", "1MiB", "--json", "-", "--python", python)
    )
    assert code == 3
    made = parse(text, "stdout")
    assert made.checks[0].found == "deepspeed 0.16.9 is older than 0.17.1, the first with these calls"
    assert made.checks[0].remedy == "pip install 'deepspeed>=0.17.1'"


def test_more_parts_in_flight_than_a_file_has_are_named(tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="399999996 parts in flight need a file of 419") as caught:
        preflight.plan(Request(target=tmp_path, parallelism=4, pending=99_999_999), os.environ)
    assert "`--pending`" in str(caught.value.hint)


def test_a_dry_run_without_deepspeed_says_so_and_is_not_0(tmp_path: Path) -> None:
    arguments = ["--target", tmp_path, "--dry-run", "--size", "1MiB", "--python", bare_python(tmp_path)]
    result = CliRunner().invoke(cli, ["bench", "api", *map(str, arguments)])
    assert isinstance(result.exception, CannotJudge)
    assert result.exception.message.startswith("nothing can be called: torch is not installed in ")
    assert "or name the Python that has it with `--python`" in str(result.exception.hint)
    assert [entry.name for entry in tmp_path.iterdir()] == ["bare-python"]
