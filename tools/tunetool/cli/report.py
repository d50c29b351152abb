"""``tunetool report``: look at records again, list them, compare two."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from tunetool.cli.groups import Group
from tunetool.errors import UsageProblem

FORMATS = ("text", "json", "junit", "prometheus")


@click.group("report", cls=Group)
def command() -> None:
    """Look at records: show one, list them, compare two. Judges nothing and measures nothing.

    RECORD is a record.json, its directory, or a directory's name under the runs directory.
    """


@command.command()
@click.argument("record")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True, help="What to print.")
@click.option("-o", "--output", metavar="FILE", help="Write it there, whole or not at all, instead of to stdout.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
def show(record: str, form: str, output: str | None, runs_dir: str | None) -> None:
    """Print RECORD: the verdict's table, the JSON, JUnit XML, or a file for Prometheus' textfile collector."""
    from tunetool import record as records
    from tunetool.report.junit import junit
    from tunetool.report.prometheus import prometheus
    from tunetool.report.runs import find_record

    path = find_record(record, _runs_dir(runs_dir))
    found = records.read(path)
    renderers = {"json": records.dumps, "junit": junit, "prometheus": prometheus}
    if form in renderers:
        _put(renderers[form](found), output)
        return
    _put(_text(found, path), output)


@command.command("list")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
@click.option("--kind", metavar="KIND", help="Only this kind, such as verify or fleet.")
def list_records(runs_dir: str | None, kind: str | None) -> None:
    """List the records, the newest first."""
    from tunetool.report.runs import list_runs, print_runs
    from tunetool.report.table import table_console

    print_runs(list_runs(_runs_dir(runs_dir), kind), table_console())


@command.command()
@click.argument("first")
@click.argument("second")
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of the table.")
@click.option("--runs-dir", metavar="DIR", help="Where records are kept.")
def compare(first: str, second: str, as_json: bool, runs_dir: str | None) -> None:
    """Compare record SECOND with FIRST: for each measurement faster, slower or no significant difference."""
    from tunetool import record as records
    from tunetool.report.compare import as_document, conditions, print_comparison
    from tunetool.report.compare import compare as compare_records
    from tunetool.report.runs import find_record
    from tunetool.report.table import table_console

    place = _runs_dir(runs_dir)
    both = [records.read(find_record(name, place)) for name in (first, second)]
    rows, notes = compare_records(*both), conditions(*both)
    if as_json:
        sys.stdout.write(as_document(rows, notes))
    else:
        print_comparison(rows, notes, table_console())


def _runs_dir(given: str | None) -> Path:
    from tunetool.record import default_runs_dir

    if given is not None and not given.strip():
        raise UsageProblem("`--runs-dir` is empty", "give a path, or leave the option out")
    return Path(given) if given is not None else default_runs_dir()


def _text(record: object, path: Path) -> str:
    import io

    from rich.console import Console

    from tunetool.record import Record
    from tunetool.report.checkpoint import print_checkpoint
    from tunetool.report.ds_io import print_ds_io
    from tunetool.report.finetune import print_finetune
    from tunetool.report.page import WIDTH
    from tunetool.report.reference import print_reference
    from tunetool.report.stage import print_stage
    from tunetool.report.staging import print_staging
    from tunetool.report.strategies import print_strategies
    from tunetool.report.table import print_fleet_verdict, print_hosts, print_verdict
    from tunetool.report.tune import print_tune

    if not isinstance(record, Record):
        raise TypeError(record)
    # On a terminal the words are coloured; a file or pipe gets them bare.
    colour = sys.stdout.isatty()
    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, force_terminal=colour)
    if record.hosts is not None:
        print_hosts(record, console)
        print_fleet_verdict(record, path, console)
    elif record.kind == "bench.ds-io":
        print_ds_io(record, path, console)
    elif record.kind == "bench.checkpoint":
        print_checkpoint(record, path, console)
    elif record.kind == "bench.finetune":
        print_finetune(record, path, console)
    elif record.kind == "bench.reference":
        print_reference(record, path, console)
    elif record.kind == "bench.staging":
        print_staging(record, path, console)
    elif record.kind == "bench.strategies":
        print_strategies(record, path, console)
    elif record.kind == "stage":
        print_stage(record, path, console)
    elif record.kind == "tune":
        print_tune(record, path, None, console)
    else:
        print_verdict(record, path, console)
    return stream.getvalue()


def _put(text: str, output: str | None) -> None:
    from tunetool.node.common.files import replace_file

    if output is None:
        sys.stdout.write(text)
        return
    path = Path(output)
    if path.is_dir() or not path.parent.is_dir():
        raise UsageProblem(f"`{path}` cannot be written", "`-o` takes a file in a directory that exists")
    replace_file(output, text)
