"""``tunetool advise expect``: its options, and the call."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from tunetool.cli.output import write_text
from tunetool.options.fields import argument, option, takes
from tunetool.options.shared import AsJson, InRuns
from tunetool.options.values import PATH, TOLERANCE

SCHEMA = "tunetool.advise.expect/1"


@dataclass(frozen=True)
class Options(AsJson, InRuns):
    """What `advise expect` takes."""

    records: tuple[str, ...] = argument("[RECORD]...", nargs=-1)
    root: Path | None = option(
        "--root", type=PATH, help="Recording of a node whose links are the ceiling: a directory or *.json of `inspect`."
    )
    margin: float = option(
        "--margin",
        type=TOLERANCE,
        default="10%",
        help="Part of the best node's speed that a healthy node may lack; drives of one model differ by less than 10%.",
    )


@click.command("expect")
@takes(Options)
def expect(given: Options) -> int:
    """Propose the speed that `verify` is to expect of a kind of node: tunetool_expect_read and tunetool_expect_write.

    RECORD is a record of `verify` of a node or of a fleet: the best node's figure less --margin is proposed, and every
    node is shown with whether it reaches that. Only figures with proof count, and none of a node that a check fails.
    The nodes must have the same kind of drives.

    Without RECORD, the links of the drives decide, of this node or of --root: a share of what they carry, as
    published for eight Gen5 drives. It is a value to begin with.

    Exit codes: 0 computed; 2 the call was wrong.
    """
    from tunetool import record as records
    from tunetool.advise import expect as advice
    from tunetool.inspect.collect import inspect
    from tunetool.inspect.source import opened
    from tunetool.report.advise_expect import print_expect
    from tunetool.report.page import table_console
    from tunetool.report.runs import find_record
    from tunetool.user_directories import default_runs_dir

    runs = given.runs_dir or default_runs_dir()
    nodes = [node for name in given.records for node in advice.nodes_of(records.read(find_record(name, runs)))]
    ceiling = advice.common_ceiling(nodes)
    if given.root is not None or not nodes:
        with opened(given.root) as source:
            ceiling = advice.ceiling_of(inspect(source))
    proposals = (
        advice.from_best(nodes, ceiling, given.margin)
        if nodes
        else advice.from_links(ceiling)
        if ceiling is not None
        else []
    )
    document = {"schema": SCHEMA, **advice.as_document(nodes, ceiling, proposals)}
    write_text(json.dumps(document, indent=2) + "\n", given.json_to)
    if given.json_to != "-":
        print_expect(nodes, ceiling, proposals, table_console())
    return 0
