"""What a machine lacks, as a table, with the line that installs each thing."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from tunetool.doctor import Answer, lacks
from tunetool.report.page import new_table, print_block

_SHOWN = {"there": "there", "missing": "MISSING", "unknown": "unknown"}


def print_doctor(answers: Sequence[Answer], console: Console) -> None:
    """Print the table, the remedies, and what each command lacks."""
    table = new_table()
    for title, width in (("what", 15), ("kind", 7), ("state", 7), ("here", 27), ("needed by (used by)", 35)):
        table.add_column(title, width=width, overflow="fold")
    for each in answers:
        here = each.detail if each.status == "there" else "-"
        table.add_row(*map(Text, (each.name, each.kind, _state(each), here, _commands(each))))
    console.print(table)
    # What stops a command comes first.
    for each in sorted(answers, key=lambda answer: not answer.needed_by):
        if each.status != "there":
            print_block(console, f"{each.name}: {each.detail}", 2)
            if each.remedy:
                print_block(console, f"  hint: {each.remedy}", 4)
    by_command = lacks(answers)
    ready = [name for name, missing in by_command.items() if not missing]
    for name, missing in by_command.items():
        if missing:
            print_block(console, f"{name} lacks {', '.join(missing)}", 2)
    if ready:
        print_block(console, f"lack nothing: {', '.join(ready)}", 2)


def _state(answer: Answer) -> str:
    # A part of a command's work is no reason for capitals.
    return _SHOWN[answer.status] if answer.needed_by else answer.status


def _commands(answer: Answer) -> str:
    used = f"({', '.join(answer.used_by)})" if answer.used_by else ""
    return " ".join(part for part in (", ".join(answer.needed_by), used) if part)
