"""What every benchmark promises: its help, wrong calls, its dry run, what is shown of its record, its documents.

A new benchmark passes this by its entry in ``tunetool.bench.registry``, a line in ``DRY_RUNS`` and a record in
tests/data/records. What its own wrong calls are told: rows of test_wrong_calls.py. What is left of a real run that is
stopped: tests/measurement/test_stopped_benchmarks.py.
"""

from __future__ import annotations

import csv
import io
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
import pytest

from calls import ROOT, TUNETOOL, call
from parsed_page import Parsed
from refusals import Refusals
from shown_records import all_kinds, hostile
from tunetool import record as records
from tunetool.bench.registry import BENCHMARKS, Benchmark
from tunetool.cli import bench
from tunetool.record import Record
from tunetool.report.flat import record_csv
from tunetool.report.kinds import VIEWS, markdown_of, page_text, print_record, view_of
from tunetool.report.page import WIDTH, PipeConsole
from tunetool.report.render_markdown import markdown
from tunetool.view import figures

HELP_WIDTH = 80
DRY_RUNS: Mapping[str, str] = {
    "checkpoint": "--model tiny --engines dcp-t?-multi",
    "loading": "--model tiny",
    "offload": "--model tiny",
    "dataset": "--size 1MiB",
    "finetune": "--model tiny --target {target}/new",
    "staging": "--model tiny --device cpu --images 8 --target {target}/new",
    "reference": "--skip strategies",
    "strategies": "--model tiny --matrix 1x1:z2,1x8:z3,2x8:z3 --ranks-per-node 2 --target {target}/new",
    "ds-io": "--io_size 1MiB",
    "experts": "--expert-bytes 4MiB --experts 8 --top-k 2",
    "kv-cache": "--model llama-tiny --size 200MB --prefix-tokens 1024",
    "inference": "--model llama-tiny",
    "api": "--size 1MiB",
    "drives": "--virtual 2 --layout ext4-per-drive",
}
"""By benchmark, options beside ``--target`` that make a call complete, and small."""
ANNOUNCED: Mapping[str, Sequence[str]] = {
    "checkpoint": ["3 rounds of 4 engines", "up to 15, while figures are undecided", "B in all", "{target}"],
    "staging": [
        "made first: `{target}/new/qwen2.5-vl-tiny` and `{target}/new/colours-8x448x280`",
        "left out: many nodes: only one machine",
    ],
    "strategies": ["1x8:z3 -> 1x2:z3", "2x8:z3 is left out: it needs 2 nodes"],
    "experts": ["33.55 MB, removed afterwards"],
    "kv-cache": ["8.192 kB of KV for a token", "5 stores of 95 blocks", "removed afterwards"],
    "drives": ["makes 2 sparse files of 1.074 GB"],
}
"""What such a call, with torch and on a drive, says that it would do."""
HOSTILE = "<script>*x*|[/red]:smile:</td>"
"""Markup of a page, of Markdown and of a terminal."""
COMMANDS = "\x1b\x9b\u202e\u2066"
"""A terminal's beginnings of commands, and marks that turn the order in which letters are shown."""

every = pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda benchmark: str(benchmark.name))


def command_of(benchmark: Benchmark) -> click.Command:
    command = bench.command.get_command(click.Context(bench.command), benchmark.name)
    assert command is not None
    return command


def recorded(benchmark: Benchmark) -> Record:
    return records.read(ROOT / "tests/data/records" / f"{benchmark.kind}.json")


def below(directory: Path) -> list[str]:
    paths = sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))
    # CUDA keeps a cache in the home of whoever asks for a GPU.
    return [path for path in paths if ".nv" not in path.split("/")]


# -- the command line


@every
def test_the_help_fits_and_says_what_each_exit_code_means(benchmark: Benchmark) -> None:
    done = call(*TUNETOOL, "bench", benchmark.name, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line for line in done.stdout.splitlines() if len(line) > HELP_WIDTH] == []
    said = " ".join(done.stdout.partition("Options:")[0].split())
    codes = re.search("Exit codes.*", said)
    assert codes is not None, said
    assert {"0", "2", "3"} <= set(re.findall(r"\b([0-9]+)\b", codes[0]))
    assert "2 the call was wrong" in codes[0]


@every
def test_an_unknown_option_is_refused(benchmark: Benchmark, refusals: Refusals) -> None:
    said = refusals.refused("bench", benchmark.name, "--nonsense", "--dry-run")
    assert said.startswith("error: `--nonsense` is not an option\n")


def wrong_values(command: click.Command) -> Iterator[tuple[str, str]]:
    """Each option that does not take just any text, with one that it does not take."""
    for option in command.params:
        if not isinstance(option, click.Option) or option.is_flag or option.type is click.STRING:
            continue
        name = max(option.opts, key=len)
        if option.type.name != "names":
            yield name, ""
        if isinstance(option.type, (click.Choice, click.types.IntParamType, click.types.FloatParamType)):
            yield name, "nonsense"
        if isinstance(option.type, click.IntRange) and option.type.min is not None:
            yield name, str(option.type.min - 1)
        if option.type.name in ("size", "time", "counts", "numbers"):
            yield name, "nonsense"


@every
def test_a_wrong_value_is_refused_and_named(benchmark: Benchmark, refusals: Refusals) -> None:
    wrong = list(wrong_values(command_of(benchmark)))
    assert len(wrong) > 3
    for option, text in wrong:
        # A call that is not refused must not begin.
        error, _ = refusals.refused("bench", benchmark.name, option, text, "--dry-run").splitlines()
        assert option in error or f"`{text}`" in error, (option, text)


@every
def test_a_dry_run_says_what_it_would_do_and_writes_nothing(benchmark: Benchmark, tmp_path: Path) -> None:
    for name in ("target", "temporary", "home"):
        (tmp_path / name).mkdir()
    target = tmp_path / "target"
    options = DRY_RUNS[benchmark.name].format(target=target)
    given = ["--target", target, "--runs-dir", tmp_path / "runs", *shlex.split(options)]
    places = f"env -u XDG_STATE_HOME TMPDIR={tmp_path}/temporary HOME={tmp_path}/home".split()
    done = call(*places, *TUNETOOL, "bench", benchmark.name, "--dry-run", *given, cwd=tmp_path)
    assert done.stdout == ""
    # Without what it needs, such as DeepSpeed or a directory on drives, it says so.
    no_drive = any(words in done.stderr for words in ("in memory", "on no drive"))
    assert done.returncode in (0, 3) or no_drive, done.stderr
    assert done.stderr
    if find_spec("torch") and not no_drive:
        said = [words.format(target=target) for words in ANNOUNCED.get(benchmark.name, [])]
        assert [words for words in said if words not in done.stderr] == [], done.stderr
    assert below(tmp_path) == ["home", "target", "temporary"]


# -- its record


@every
def test_a_record_is_read_as_it_was_written(benchmark: Benchmark) -> None:
    record = recorded(benchmark)
    assert record.kind == benchmark.kind
    assert records.parse(records.dumps(record), "again") == records.parse(records.dumps(record), "once")


records_of_all = pytest.mark.parametrize(
    "record", [*map(recorded, BENCHMARKS), *all_kinds()], ids=lambda record: str(record.kind)
)
"""Of every benchmark, and of what else has a view."""
names = pytest.mark.parametrize("named", [False, True], ids=["texts", "names and labels too"])


@records_of_all
@names
def test_no_text_of_a_record_is_markup_of_the_terminal(record: Record, named: bool) -> None:
    stream = io.StringIO()
    print_record(hostile(record, HOSTILE, named), None, PipeConsole(file=stream, width=WIDTH))
    assert HOSTILE in re.sub(r"\s+", "", stream.getvalue())


@records_of_all
@names
def test_no_text_of_a_record_is_markup_of_the_page(record: Record, named: bool) -> None:
    plain, spoiled = (Parsed(page_text(hostile(record, text, named), None)) for text in ("x", HOSTILE))
    assert spoiled.shape() == plain.shape()
    # There is no page where no label is one that the kind knows.
    assert HOSTILE in re.sub(r"\s+", "", spoiled.words) or not plain.words


@records_of_all
@names
def test_no_text_of_a_record_is_markup_of_markdown(record: Record, named: bool) -> None:
    def both(text: str) -> str:
        made = hostile(record, text, named)
        return markdown(view_of(made, None), made) + markdown(figures.view(made), made)

    spoiled = both(HOSTILE)
    assert spoiled.count("\n") == both("x").count("\n")
    assert "<" not in spoiled
    assert r"&lt;script&gt;\*x\*\|\[/red\]:smile:&lt;/td&gt;" in spoiled


@records_of_all
def test_no_text_of_a_record_commands_a_terminal(record: Record) -> None:
    made = hostile(record, COMMANDS)
    stream = io.StringIO()
    print_record(made, None, PipeConsole(file=stream, width=WIDTH))
    for shown in (stream.getvalue(), page_text(made, None), markdown_of(made, None)):
        assert not {*COMMANDS} & {*shown}
        assert r"\u202e" in shown


@records_of_all
@names
def test_every_figure_is_one_row_of_the_csv(record: Record, named: bool) -> None:
    made = hostile(record, f'{HOSTILE},"\n', named)
    titles, *rows = csv.reader(io.StringIO(record_csv(made)))
    assert len(rows) == len(made.measurements)
    assert {len(row) for row in rows} <= {len(titles)}


# -- where it is listed


@every
def test_its_records_have_a_view(benchmark: Benchmark) -> None:
    assert benchmark.kind in VIEWS


@every
def test_the_index_of_the_documents_leads_to_its_call(benchmark: Benchmark) -> None:
    listed = re.findall(r"\]\(([^)#]*)\)", (ROOT / "docs/README.md").read_text())
    line = re.compile(rf"^(?:[$#] )?tunetool bench {benchmark.name}\b", re.M)
    # The reference pages are made; git has the guides.
    pages = [ROOT / "docs" / page for page in listed if page.endswith(".md")]
    assert [page for page in pages if page.is_file() and line.search(page.read_text())]


@every
def test_the_description_of_records_has_its_figures(benchmark: Benchmark) -> None:
    assert f"in `{benchmark.kind}`" in (ROOT / "docs/reference/record.md").read_text()
