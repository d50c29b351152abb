"""The whole command tree: help, misspelt names, closed pipes, renamed commands, and how fast `--help` is."""

from __future__ import annotations

import gc
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import calls
from calls import ROOT, TUNETOOL, imported_by
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.advise.read_model import NAMES, load_model
from tunetool.bench.checkpoint.states import BYTES_PER_PARAMETER, shape
from tunetool.cli import main as entry
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.training.model.reference_model import describe


def walk(command: click.Command, path: tuple[str, ...], parent: click.Context | None) -> Iterator[tuple[str, ...]]:
    yield path
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=path[-1] if path else "tunetool", parent=parent)
        hidden = entry.HIDDEN if command is cli else ()
        for name in (*command.list_commands(context), *hidden):
            child = command.get_command(context, name)
            assert child is not None
            yield from walk(child, (*path, name), context)


TREE = list(walk(cli, (), None))
PURE = [
    *[(*path, "--help") for path in TREE],
    ("--version",),
    ("advise", "checkpoint", "--model", "70b", "--bandwidth", "1GBps", "--samples-per-second", "1"),
    ("advise", "checkpoint", "--model", "70b", "--bandwidth", "1GBps", "--samples-per-second", "1", "--json", "-"),
    ("inspect", "--root", "docs/machines/h100-made.json"),
    ("inspect", "--root", "docs/machines/h100-made.json", "--json", "-"),
    ("report", "list", "--runs-dir", "/nonexistent"),
]


def call(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return calls.call(*TUNETOOL, *arguments, stdout=stdout, cwd=ROOT)


def closed(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run with a standard output whose reader has closed it."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return call(*arguments, stdout=writer)
    finally:
        os.close(writer)


@pytest.mark.parametrize("arguments", PURE, ids=" ".join)
def test_what_judges_nothing_is_done_when_nobody_reads_its_pipe(arguments: tuple[str, ...]) -> None:
    done = closed(*arguments)
    assert (done.returncode, done.stderr) == (0, "")


FULL = "error: `standard output` cannot be written: No space left on device\n"


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("--help",), *PURE[len(TREE) :], ("doctor", "inspect")], ids=" ".join)
def test_a_full_output_is_one_line_and_no_pass(arguments: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = calls.call(*TUNETOOL, *arguments, stdout=full.fileno(), cwd=ROOT, env=environment)
    assert (done.returncode, done.stderr.partition("hint: ")[0]) == (3, FULL)


def test_what_was_judged_holds_although_its_output_is_full() -> None:
    # The record's page, too: what is judged to fall short ends with 1 for a closed pipe as well.
    line = " ".join([*TUNETOOL, "doctor tune --json - > /dev/full; echo $?"])
    code = closed("doctor", "tune", "--json", "-").returncode
    assert calls.call("bash", "-c", line, cwd=ROOT).stdout == f"{code}\n"


def test_the_stream_of_whoever_calls_main_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    below = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(below, encoding="utf-8"))
        patched.setattr(sys, "argv", ["tunetool", "--version"])
        given = sys.stdout
        with pytest.raises(SystemExit):
            entry.main()
    gc.collect()
    given.write("still")
    given.flush()
    assert below.getvalue().endswith(b"still")


def test_both_outputs_full_is_no_verdict() -> None:
    line = " ".join([*TUNETOOL, "report list > /dev/full 2> /dev/full; echo $?"])
    assert calls.call("bash", "-c", line, cwd=ROOT).stdout == "3\n"


def test_a_file_without_room_is_named(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    line = " ".join([*TUNETOOL, "advise io --json", str(path)])
    done = calls.call("bash", "-c", f"ulimit -f 0; exec {line}", cwd=ROOT)
    assert (done.returncode, done.stderr) == (3, f"error: `{path}`: File too large\n")
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_no_file_system_takes_has_its_hint(tmp_path: Path) -> None:
    name = "x" * 300
    done = call("verify", "--target", name, "--runs-dir", tmp_path)
    assert (done.returncode, done.stderr) == (3, f"error: `{name}`: File name too long\nhint: name a shorter path\n")


@pytest.mark.parametrize("arguments", ["--root docs/machines/h100-made.json --json -", "--help"])
def test_a_pipe_that_closes_after_the_first_line_is_no_fault(arguments: str) -> None:
    line = " ".join([*TUNETOOL, f"inspect {arguments} | head -1; echo ${{PIPESTATUS[0]}}"])
    done = calls.call("bash", "-c", line, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("words", "offered"),
    [("tunetool prov", {"provision"}), ("tunetool init --pro", {"--profile"}), ("tunetool stage ev", {"evict"})],
)
def test_a_shell_completes_commands_and_options(words: str, offered: set[str]) -> None:
    given = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_TUNETOOL_COMPLETE": "bash_complete"}
    done = calls.call(*TUNETOOL, cwd=ROOT, env={**os.environ, **given})
    assert (done.returncode, done.stderr) == (0, "")
    assert {line.partition(",")[2] for line in done.stdout.splitlines()} == offered


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_documented_line_sets_completion_up(shell: str) -> None:
    documented = (ROOT / "docs/guides/connect.md").read_text()
    assert 'eval "$(_TUNETOOL_COMPLETE=bash_source tunetool)"' in documented
    assert f"{shell}_source" in documented
    done = calls.call(*TUNETOOL, cwd=ROOT, env={**os.environ, "_TUNETOOL_COMPLETE": f"{shell}_source"})
    assert done.returncode == 0
    assert f"_TUNETOOL_COMPLETE={shell}_complete" in done.stdout


FAULTY = """
import sys
from tunetool.cli.main import main
from tunetool.inspect import collect
collect.inspect = lambda source: 1 // 0
sys.argv = ["tunetool", *sys.argv[1:]]
main()
"""


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_of_tunetool_itself_is_no_shortfall(debug: bool) -> None:
    options = ["--debug"] if debug else []
    done = calls.call(sys.executable, "-c", FAULTY, *options, "inspect")
    assert done.returncode == 3, done.stderr
    *shown, message, hint = done.stderr.splitlines()
    assert message == "error: a fault of tunetool itself: `ZeroDivisionError`: integer division or modulo by zero"
    assert hint == "hint: report it with what `tunetool --debug` prints"
    assert any(line.startswith("Traceback") for line in shown) == debug


def test_what_was_judged_before_the_pipe_was_found_closed_holds(tmp_path: Path) -> None:
    source, copy, runs = tmp_path / "source", tmp_path / "copy", ("--runs-dir", str(tmp_path / "runs"))
    source.mkdir()
    (source / "data").write_bytes(b"a" * 1000)
    assert call("stage", str(source), str(copy), *runs).returncode == 0
    # If nobody got the verdict, a good copy is not known to be good; a bad one stays bad.
    assert closed("stage", "verify", str(copy), *runs).returncode == 3
    (copy / "data").write_bytes(b"b" * 1000)
    assert closed("stage", "verify", str(copy), *runs).returncode == 1
    assert closed("stage", "verify", str(copy), "--json", "-", *runs).returncode == 1
    assert closed("stage", "verify", str(tmp_path / "none"), *runs).returncode == 2
    assert len(list((tmp_path / "runs").iterdir())) == 4


@pytest.mark.parametrize(
    "path", [path for path in TREE if path[:1] in ((), ("bench",), ("advise",), ("report",)) and len(path) < 2]
)
def test_a_group_alone_prints_its_help(path: tuple[str, ...]) -> None:
    done = call(*path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"Usage: {' '.join(('tunetool', *path))} [OPTIONS] COMMAND")


def options_of(path: tuple[str, ...]) -> dict[str, click.Option]:
    command: click.Command = cli
    for name in path:
        assert isinstance(command, click.Group)
        child = command.get_command(click.Context(command), name)
        assert child is not None
        command = child
    return {name: each for each in command.params if isinstance(each, click.Option) for name in each.opts}


def test_a_device_or_a_pipe_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    done = call("report", "compare", "one", "other", "--json", str(pipe))
    assert done.returncode == 2
    said = [f"error: `{pipe}` is not a regular file", "hint: `--json` takes a file, or `-` for stdout"]
    assert done.stderr.splitlines() == said
    written = {"--json", "--page", "--output", "--plan"}
    asked = {(path, name): each for path in TREE for name, each in options_of(path).items() if name in written}
    assert {name for _, name in asked} == written
    for where, option in asked.items():
        with pytest.raises(UsageProblem, match="is not a regular file"):
            pytest.fail(f"{where} takes {option.type.convert(str(pipe), option, None)}")
    assert pipe.is_fifo()


def test_one_spelling_means_one_thing() -> None:
    metavars: dict[str, set[str | None]] = {}
    for path in TREE:
        for name, each in options_of(path).items():
            metavars.setdefault(name, set()).add(each.metavar)
    for name in ("--json", "--target", "--runs-dir", "--memory-target", "--limit", "--micro-batch", "--matrix"):
        assert len(metavars[name]) == 1, (name, metavars[name])
    assert metavars["--json"] == {"FILE|-"}
    helps = {
        name: {options_of(path)[name].help for path in TREE if name in options_of(path)}
        for name in ("--rounds", "--json")
    }
    assert {name: len(texts) for name, texts in helps.items()} == {"--rounds": 1, "--json": 1}


@pytest.mark.parametrize("path", TREE, ids=" ".join)
def test_every_option_says_what_it_is(path: tuple[str, ...]) -> None:
    for name, each in options_of(path).items():
        assert each.help, name
        assert each.help.endswith((".", "?")), name
        assert each.help[0].isupper() or each.help.split()[0].endswith(":"), name
        for word in ("so many", "told", "stands", "Instead:"):
            assert word not in each.help, (name, word)


def test_a_name_is_the_same_model_in_every_command() -> None:
    for path in (("advise", "checkpoint"), ("ds-config",), ("bench", "checkpoint")):
        shown = options_of(path)["--model"].help or ""
        for name in NAMES:
            assert f"{name} " in shown or f"{name}," in shown or f"{name}." in shown, (path, name)
    for name in CONFIGURATIONS:
        built = describe(name).parameters
        assert load_model(name).numel == built
        assert shape(name).bytes == BYTES_PER_PARAMETER * built


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    heavy = {"torch", "numpy", "pydantic", "rich", "jinja2", "yaml", "deepspeed", "transformers", "ansible_runner"}
    for path in TREE:
        done, imported = imported_by(*path, "--help")
        assert done.returncode == 0, done.stderr
        assert {name.partition(".")[0] for name in imported} & heavy == set(), path
        assert path or not any(name.startswith("tunetool.cli.verify") for name in imported)


def test_json_of_a_comparison_and_of_advice_can_be_a_file(tmp_path: Path) -> None:
    arguments = ("--model", "70b", "--bandwidth", "1GBps", "--samples-per-second", "1")
    alone = call("advise", "checkpoint", *arguments, "--json", "-")
    beside = call("advise", "checkpoint", *arguments, "--json", str(tmp_path / "advice.json"))
    assert json.loads(alone.stdout) == json.loads((tmp_path / "advice.json").read_text())
    assert beside.stdout[:1] not in ("", "{")


def test_a_call_without_any_search_path_finds_what_is_installed() -> None:
    code = "import os, sys; sys.argv = ['tunetool', '--version']\nfrom tunetool.cli.main import main\n"
    code += "try: main()\nexcept SystemExit: print(os.environ['PATH'])"
    bare = {name: value for name, value in os.environ.items() if name != "PATH"}
    done = calls.call(sys.executable, "-c", code, env=bare)
    assert "/usr/sbin" in done.stdout.split(":"), done.stderr
