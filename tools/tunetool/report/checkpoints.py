"""Checkpoints as text and as JSON values: steps, contents, what a verification found, what differs, what came."""

from __future__ import annotations

import collections
import math
import socket
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.text import Text

from tunetool.advise.checkpoint import format_duration
from tunetool.errors import ExitCode
from tunetool.node.common.refusal import on_one_line
from tunetool.node.units import format_bandwidth, format_count, format_size
from tunetool.report.page import add_number_columns, line_of, new_table, print_block, word
from tunetool.view.text import number

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.checkpoint.catalogue import Catalogue, Entry
    from tunetool.checkpoint.contents import Contents, Stored
    from tunetool.checkpoint.differences import Compared
    from tunetool.checkpoint.step_fetch import Fetched
    from tunetool.checkpoint.verification import Verification

_WORDS = {ExitCode.OK: "PASS", ExitCode.FALLS_SHORT: "FAIL", ExitCode.NOT_JUDGED: "UNPROVEN"}


def print_steps(steps: Catalogue, now_ns: int, console: Console) -> None:
    """Print a row for each copy of a step, why some are not whole, and from which a job would resume."""
    table = new_table(console.width)
    table.add_column("step", overflow="fold")
    table.add_column("where", ratio=1, overflow="fold")
    table.add_column("state")
    add_number_columns(table, "bytes", "age", "ranks")
    table.add_column("drained")
    for each in steps.entries:
        directory, _, name = each.path.rpartition("/")
        age = format_duration(max(0, now_ns - each.saved_ns) / 1e9) if each.saved_ns else "-"
        table.add_row(
            _cell(name if each.step is None else str(each.step)),
            _cell(directory or "/"),
            "not whole" if each.problem else "whole",
            format_size(each.bytes),
            age,
            "-" if each.world is None else str(each.world),
            "yes" if each.drained else "no",
        )
    if steps.entries:
        console.print(table)
    for each in steps.entries:
        if each.problem:
            _print_line(console, f"{_name(each)} is not whole: {each.problem}")
        elif each.step is None:
            _print_line(console, f"{_name(each)}: no job resumes from it, since it is not called `step_<N>`")
    for line in _resumes(steps):
        _print_line(console, line)


def _cell(text: str) -> Text:
    """A name in a table, which may be anybody's: without rich's markup, and on one line."""
    return Text(on_one_line(text))


def _print_line(console: Console, text: str) -> None:
    """Whole, so that a path in it can be copied."""
    console.print(line_of(text), soft_wrap=True)


def _name(entry: Entry) -> str:
    return f"`{entry.path}`"


def _resumes(steps: Catalogue) -> list[str]:
    resumed = next((each for each in steps.entries if each.resumed), None)
    if resumed is not None:
        host = socket.gethostname()
        return [
            f"A job would resume from {_name(resumed)}, by the files that `{host}` sees.",
            "Ranks on other nodes see others: all of a job agree on the last step that each can read.",
        ]
    if any(each.replica_of for each in steps.entries) and steps.obstacle is None:
        return ["There are only replicas of other nodes: `latest(..., replicas=True)` takes them to the ranks."]
    return [steps.obstacle or "There is no step: a job would begin anew."]


def steps_document(steps: Catalogue) -> dict[str, Any]:
    """The same as JSON values: bytes, and times in UTC."""
    rows = []
    for each in steps.entries:
        row = {**asdict(each), "whole": each.problem is None, "saved": _time(each.saved_ns)}
        del row["saved_ns"]
        rows.append(row)
    resumed = next((each.path for each in steps.entries if each.resumed), None)
    return {"host": socket.gethostname(), "steps": rows, "resumed": resumed, "obstacle": steps.obstacle}


def _time(ns: int) -> str | None:
    try:
        return datetime.fromtimestamp(ns // 10**9, timezone.utc).isoformat() if ns else None
    except (OverflowError, ValueError, OSError):  # what a file has is not always a time
        return None


def print_contents(held: Contents, console: Console) -> None:
    """Print a row for each tensor and each object, and the totals."""
    table = new_table(console.width)
    table.add_column("name", ratio=1, overflow="fold")
    table.add_column("dtype")
    table.add_column("shape", overflow="fold")
    add_number_columns(table, "bytes", "pieces", "ranks", "files")
    for each in [*held.tensors, *held.objects]:
        table.add_row(
            _cell(each.name),
            each.dtype or "object",
            "x".join(map(str, each.shape)) if each.dtype and each.shape else "-",
            format_size(each.bytes),
            str(len(each.pieces)),
            str(len(each.ranks)) if each.ranks else "-",
            str(len(each.files)) if each.files else "-",
        )
    console.print(table)
    files = {name for each in held.stored for name in each.files}
    tensors, objects = held.tensors, held.objects
    counted = [
        f"{format_count(len(some), noun)} of {format_size(_sum(some))}"
        for some, noun in ((tensors, "tensor"), (objects, "object"))
    ]
    print_block(console, f"{', '.join(counted)}, in {format_count(len(files), 'file')}", 2)
    for dtype, some in _by_dtype(tensors).items():
        print_block(console, f"{dtype}: {format_count(len(some), 'tensor')} of {format_size(_sum(some))}", 2)
    if not held.has_sums:
        print_block(console, "The save made no checksums.", 2)


def _sum(stored: Sequence[Stored]) -> int:
    return sum(each.bytes for each in stored)


def _by_dtype(tensors: Sequence[Stored]) -> dict[str, list[Stored]]:
    by_dtype: dict[str, list[Stored]] = collections.defaultdict(list)
    for each in tensors:
        by_dtype[str(each.dtype)].append(each)
    return dict(sorted(by_dtype.items()))


def contents_document(held: Contents) -> dict[str, Any]:
    """The same as JSON values, with every piece."""
    tensors, objects = held.tensors, held.objects
    return {
        "checksums": held.has_sums,
        "tensors": [_stored(each) for each in tensors],
        "objects": [_stored(each) for each in objects],
        "totals": {
            "tensors": len(tensors),
            "bytes": _sum(tensors),
            "objects": len(objects),
            "object_bytes": _sum(objects),
            "dtypes": {
                dtype: {"tensors": len(some), "bytes": _sum(some)} for dtype, some in _by_dtype(tensors).items()
            },
        },
    }


def _stored(each: Stored) -> dict[str, Any]:
    pieces = [
        {name: value for name, value in piece._asdict().items() if each.dtype or name not in ("offsets", "sizes")}
        for piece in each.pieces
    ]
    kind = {"dtype": each.dtype, "shape": each.shape} if each.dtype else {}
    return {"name": each.name, **kind, "bytes": each.bytes, "pieces": pieces}


def print_verification(found: Verification, console: Console) -> None:
    """Print every fault, what was compared with what, and the verdict."""
    for fault in found.faults:
        _print_line(console, fault.message)
    files = format_count(found.files, "file")
    marker = "the replica" if found.replica else "the drain"
    of = [name for name, there in (("the save", found.has_sums), (marker, found.drained or found.replica)) if there]
    if found.checked_bytes and of:
        checked = f"{format_size(found.checked_bytes)} in {format_duration(found.seconds)}"
        if found.seconds >= 1:
            checked += f", {format_bandwidth(found.checked_bytes / found.seconds)}"
        print_block(console, f"{files}, compared with checksums of {' and of '.join(of)}: {checked}", 2)
    elif found.files and not found.has_sums and not found.checked_bytes:
        verb = "has" if found.files == 1 else "have"
        print_block(console, f"{files} {verb} no checksums: only lengths and structure were checked", 2)
    console.print(word(_WORDS[found.code]))


def verification_document(found: Verification) -> dict[str, Any]:
    """The same as JSON values: bytes and seconds."""
    return {**asdict(found), "verdict": _WORDS[found.code].lower()}


def print_differences(compared: Sequence[Compared], console: Console) -> None:
    """Print a row for each name that is not equal, and how many are."""
    different = [each for each in compared if each.state != "equal"]
    table = new_table(console.width)
    table.add_column("name", ratio=1, overflow="fold")
    table.add_column("state")
    table.add_column("A / B", overflow="fold")
    add_number_columns(table, "elements", "largest", "relative", "NaN in A", "in B")
    for each in different:
        numbers = [str(each.elements), number(each.largest_change), number(each.largest_relative)]
        numbers += [str(each.nan_a), str(each.nan_b)]
        is_tensor = each.state == "different" and each.a != "object"
        kinds = each.a if each.a == each.b else f"{each.a or '-'} / {each.b or '-'}"
        table.add_row(_cell(each.name), each.state, kinds, *(numbers if is_tensor else ["-"] * len(numbers)))
    if different:
        console.print(table)
    print_block(console, f"{len(compared) - len(different)} equal, {len(different)} not", 2)


def differences_document(compared: Sequence[Compared]) -> dict[str, Any]:
    """The same as JSON values, with what is equal. JSON has no infinity: it is a text there."""
    rows = [
        {name: str(value) if value == math.inf else value for name, value in asdict(each).items()} for each in compared
    ]
    return {"equal": sum(each.state == "equal" for each in compared), "names": rows}


def print_fetched(fetched: Fetched, console: Console) -> None:
    """Print what came and from where, or what would."""
    what = f"{format_count(fetched.files, 'file')} of {format_size(fetched.bytes)} from `{fetched.source}`"
    if fetched.done:
        took = f"{format_duration(fetched.seconds)}, {format_bandwidth(fetched.bytes / fetched.seconds)}"
        _print_line(console, f"`{fetched.step}` is there: {what}, verified, in {took}")
        return
    room = "there is room" if fetched.fits else "it does not fit"
    _print_line(console, f"`{fetched.step}` would be {what}; {room}: {format_size(fetched.free)} are left")


def fetched_document(fetched: Fetched) -> dict[str, Any]:
    """The same as JSON values: bytes and seconds."""
    return {**asdict(fetched), "fits": fetched.fits}
