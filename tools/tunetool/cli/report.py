"""``tunetool report``: show, list, compare and judge records."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import click

from tunetool.cli.groups import Group
from tunetool.cli.output import write_text
from tunetool.errors import UsageProblem
from tunetool.options.fields import argument, option, takes
from tunetool.options.shared import AsJson, InRuns, command_line, goal_settings
from tunetool.options.values import DIRECTORY, NEW_FILE, PATH

if TYPE_CHECKING:
    from tunetool.record import Record

FORMATS = ("text", "json", "junit", "prometheus", "csv", "markdown")
TABLES = ("text", "csv", "markdown")


@click.group("report", cls=Group)
def command() -> None:
    """Show, list or compare records, or judge them by goals. Measures nothing.

    RECORD is a record.json, its directory, or the name of a directory below the runs directory.

    Exit codes: 0 done; 2 the call was wrong, or a record cannot be read; of judge also 1 and 3.
    """


@dataclass(frozen=True)
class ShowOptions(InRuns):
    """What `report show` takes."""

    record: str = argument("RECORD")
    form: str = option("--format", type=click.Choice(FORMATS), default="text", help="Format of the output.")
    output: Path | None = option("-o", "--output", type=NEW_FILE, help="File for the output. Default: standard output.")


@command.command()
@takes(ShowOptions)
def show(given: ShowOptions) -> int:
    """Print RECORD: tables and verdict, JSON, JUnit XML, Prometheus' textfile format, CSV or Markdown."""
    from tunetool import record as records
    from tunetool.report.flat import record_csv
    from tunetool.report.junit import junit
    from tunetool.report.kinds import markdown_of
    from tunetool.report.prometheus import prometheus
    from tunetool.report.runs import find_record

    path = find_record(given.record, _runs_dir(given.runs_dir))
    shown = records.read(path)
    renderers = {"json": records.dumps, "junit": junit, "prometheus": prometheus}
    renderers |= {"csv": record_csv, "markdown": lambda record: markdown_of(record, path)}
    _put(renderers[given.form](shown) if given.form in renderers else _text(shown, path), given.output)
    return 0


@dataclass(frozen=True)
class ListOptions(InRuns):
    """What `report list` takes."""

    kind: str | None = option("--kind", metavar="KIND", help="Kind of the records to list, such as verify or fleet.")


@command.command("list")
@takes(ListOptions)
def list_records(given: ListOptions) -> int:
    """List the records, the newest first."""
    from tunetool.report.page import table_console
    from tunetool.report.runs import list_runs, print_runs

    print_runs(list_runs(_runs_dir(given.runs_dir), given.kind), table_console())
    return 0


@dataclass(frozen=True)
class CompareOptions(AsJson, InRuns):
    """What `report compare` takes."""

    records: tuple[str, ...] = argument("BASELINE... RECORD", nargs=-1, required=True)
    only: str | None = option(
        "--only", metavar="FIGURE", help="Only these: a name, or a figure and labels, as in `report trend`."
    )
    form: str = option("--format", type=click.Choice(TABLES), default="text", help="Format of the output.")

    def check(self) -> None:
        """Raises ``UsageProblem`` for fewer than two records."""
        if len(self.records) < 2:
            raise UsageProblem("one record has nothing to be compared with", "name a baseline, then the record")


@command.command()
@takes(CompareOptions)
def compare(given: CompareOptions) -> int:
    """Compare RECORD with BASELINE: for each measurement faster, slower or no significant difference.

    With several baselines, a measurement is faster or slower where it is so against each of them.
    """
    from tunetool import record as records
    from tunetool.report.compare import TITLES, as_document, cells, compare_with_all, conditions, print_comparison
    from tunetool.report.flat import csv_text, markdown_table
    from tunetool.report.page import table_console
    from tunetool.report.runs import find_record
    from tunetool.view.figures import selection

    runs = _runs_dir(given.runs_dir)
    *baselines, record = [records.read(find_record(name, runs)) for name in given.records]
    rows = compare_with_all(baselines, record, selection(given.only) if given.only is not None else None)
    if given.only is not None and not rows:
        raise UsageProblem(
            f"no record has a figure `{given.only}`", "`tunetool report show RECORD --format csv` lists them"
        )
    notes = list(dict.fromkeys(line for each in baselines for line in conditions(each, record)))
    write_text(as_document(rows, notes), given.json_to)
    if given.form != "text" and given.json_to != "-":
        click.echo((csv_text if given.form == "csv" else markdown_table)(TITLES, cells(rows)), nl=False)
    elif given.json_to != "-":
        print_comparison(rows, notes, table_console())
    return 0


@dataclass(frozen=True)
class TrendOptions(InRuns):
    """What `report trend` takes."""

    figure: str = argument("FIGURE")
    kind: str | None = option("--kind", metavar="KIND", help="Kind of the records, such as verify or fleet.")
    host: str | None = option("--host", metavar="HOST", help="Only figures of this host.")
    form: str = option("--format", type=click.Choice(TABLES), default="text", help="Format of the output.")
    page: Path | None = option("--page", type=NEW_FILE, help="File for an HTML page with a plot of the figure.")


@command.command()
@takes(TrendOptions)
def trend(given: TrendOptions) -> int:
    """Show FIGURE, such as sequential.read, over the records that have it, the oldest first, with bars.

    FIGURE may be a figure and labels instead of a name: durable,engine=direct or first,subject=loading,state=cold.

    The last column says whether it changed since the record before by more than chance, each pair by itself. --page
    writes an HTML page too: one file, which needs no network.
    """
    from tunetool.report.flat import csv_text, markdown_table
    from tunetool.report.page import table_console
    from tunetool.report.runs import list_runs
    from tunetool.report.trend import TITLES, later, points, print_trend, rows

    runs = list_runs(_runs_dir(given.runs_dir), given.kind)
    shown = points(runs, given.figure, given.host)
    after = later(runs, shown, given.host)
    if given.page is not None:
        from tunetool.report.trend_page import page as page_of

        _put(page_of(shown, given.figure, command_line(), after), given.page)
    if given.form == "text":
        print_trend(shown, table_console(), after)
    else:
        click.echo((csv_text if given.form == "csv" else markdown_table)(TITLES, rows(shown)), nl=False)
    return 0


@dataclass(frozen=True)
class PageOptions(InRuns):
    """What `report page` takes."""

    records: tuple[str, ...] = argument("RECORD...", nargs=-1, required=True)


@command.command()
@takes(PageOptions)
def page(given: PageOptions) -> int:
    """Write a page beside each RECORD, and print its path. The page is one file, which needs no network.

    It is report.html; NAME.html for a record that is called NAME.json, such as a host's own below that of a fleet.
    """
    from tunetool import record as records
    from tunetool.report.kinds import write_any_page
    from tunetool.report.runs import find_record

    runs = _runs_dir(given.runs_dir)
    for name in given.records:
        path = find_record(name, runs)
        shown = records.read(path)
        try:
            click.echo(write_any_page(shown, path))
        except OSError as error:
            hint = "copy the record's directory to where you may write, and name the copy"
            raise UsageProblem(f"`{path.parent}` cannot be written: {error.strerror}", hint) from None
    return 0


@dataclass(frozen=True)
class FleetOptions(InRuns):
    """What `report fleet` takes."""

    records: tuple[str, ...] = argument("RECORD...", nargs=-1, required=True)
    output: Path | None = option(
        "-o", "--output", type=NEW_FILE, help="File for the page. Default: report.html beside the only RECORD."
    )
    inventory: Path | None = option(
        "-i", "--inventory", type=PATH, metavar="INVENTORY", help="Inventory with racks as groups, to filter by."
    )


@command.command()
@takes(FleetOptions)
def fleet(given: FleetOptions) -> int:
    """Write one HTML page of many nodes: a node a row, the bad ones on top, and what differs between them.

    RECORD is the record of a whole fleet, or several are those of single nodes, wherever they were verified.
    """
    from tunetool import record as records
    from tunetool.fleet.groups import groups_of
    from tunetool.fleet.view import of_nodes, view_of_nodes, with_nodes
    from tunetool.record import REPORT
    from tunetool.report.kinds import write_host_pages
    from tunetool.report.render_html import page
    from tunetool.report.runs import find_record

    runs = _runs_dir(given.runs_dir)
    paths = [find_record(name, runs) for name in given.records]
    shown = [records.read(path) for path in paths]
    if len(shown) > 1 and given.output is None:
        raise UsageProblem("several records have one page", "say where with `-o FILE`")
    whole, nodes = with_nodes(shown[0], paths[0]) if len(shown) == 1 else of_nodes(shown)
    groups = groups_of(given.inventory) if given.inventory is not None else {}
    output = given.output or paths[0].parent / REPORT
    if len(shown) == 1:
        own = write_host_pages(whole, paths[0].parent)
    else:
        beside = {each.id: path.parent / REPORT for each, path in zip(shown, paths, strict=True)}
        own = {host.host: beside[host.record_id] for host in whole.hosts or [] if host.record_id in beside}
    here = output.absolute().parent
    pages = {host: quote(os.path.relpath(path, here)) for host, path in own.items() if path.is_file()}
    _put(page(view_of_nodes(whole, nodes, groups, pages), whole), output)
    click.echo(output)
    return 0


@dataclass(frozen=True)
class MlpstorageOptions(AsJson, InRuns):
    """What `report mlpstorage` takes."""

    records: tuple[str, ...] = argument("RECORD...", nargs=-1, required=True)
    to: Path = option("--to", type=DIRECTORY, required=True, help="Directory for the results; nothing is replaced.")


@command.command()
@takes(MlpstorageOptions)
def mlpstorage(given: MlpstorageOptions) -> int:
    """Write RECORD in the result layout of mlpstorage, and say which rules of MLPerf Storage it does not meet.

    RECORD is one of `bench checkpoint`: a result for each engine on drives; or of `bench dataset`: the rules alone,
    since that benchmark emulates no accelerator. Every result says that it is INVALID as a submission, since mlpstorage
    did not run it.
    """
    from tunetool import record as records
    from tunetool.report.mlpstorage import as_document, print_results, results, write
    from tunetool.report.page import table_console
    from tunetool.report.runs import find_record

    runs = _runs_dir(given.runs_dir)
    made = [each for name in given.records for each in results(records.read(find_record(name, runs)), name)]
    write(made, given.to)
    write_text(as_document(made), given.json_to)
    if given.json_to != "-":
        print_results(made, given.to, table_console())
    return 0


@dataclass(frozen=True)
class JudgeOptions(AsJson, InRuns):
    """What `report judge` takes."""

    names: tuple[str, ...] = argument("RECORD... GOALS", nargs=-1, required=True)
    settings: tuple[str, ...] = goal_settings()
    page: Path | None = option("--page", type=NEW_FILE, help="File for the page of the acceptance.")

    def check(self) -> None:
        """Raises ``UsageProblem`` where one of the two is missing."""
        if len(self.names) < 2:
            raise UsageProblem("a goals file without a record judges nothing", "name records, then the goals file")


@command.command()
@takes(JudgeOptions)
def judge(given: JudgeOptions) -> int:
    """Judge what was measured before: RECORD by the goals of GOALS, as `tunetool accept` does, and measure nothing.

    GOALS is a path or a name, as in `tunetool accept`. Several records of one command count together.

    Exit codes: 0 every goal is held; 1 one is missed; 2 the call was wrong; 3 a goal could not be decided.
    """
    from tunetool import record as records
    from tunetool.accept.run import judge_records
    from tunetool.cli.accept import read_goals, text_of
    from tunetool.cli.output import finish
    from tunetool.measure.session import Result
    from tunetool.report.kinds import page_text
    from tunetool.report.runs import find_record

    *names, file = given.names
    goals = read_goals(text_of(file), file, given.settings)
    runs = _runs_dir(given.runs_dir)
    judged = judge_records(goals.goals, [records.read(find_record(name, runs)) for name in names], command_line())
    if given.page is not None:
        _put(page_text(judged, None), given.page)
    return finish(Result(judged), given.json_to)


def _runs_dir(given: Path | None) -> Path:
    from tunetool.user_directories import default_runs_dir

    return given if given is not None else default_runs_dir()


def _text(record: Record, path: Path) -> str:
    import io

    from rich.console import Console

    from tunetool.report.kinds import print_record
    from tunetool.report.page import WIDTH

    # Colours only on a terminal, not in a file or a pipe.
    stream = io.StringIO()
    print_record(record, path, Console(file=stream, width=WIDTH, highlight=False, force_terminal=sys.stdout.isatty()))
    return stream.getvalue()


def _put(text: str, output: Path | None) -> None:
    from tunetool.node.common.files import replace_file

    if output is None:
        sys.stdout.write(text)
        return
    if output.is_dir() or not output.parent.is_dir():
        raise UsageProblem(f"`{output}` cannot be written", "`-o` takes a file in a directory that exists")
    replace_file(str(output), text)
