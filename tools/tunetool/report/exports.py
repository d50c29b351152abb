"""Exports and imports of checkpoints as text and as JSON values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tunetool.advise.checkpoint import format_duration
from tunetool.node.units import format_bandwidth, format_count, format_size
from tunetool.report.page import line_of

if TYPE_CHECKING:
    from rich.console import Console

    from tunetool.checkpoint.exporting import Export
    from tunetool.loading.importing import Import


def print_export(done: Export, is_plan: bool, console: Console) -> None:
    """Print what was written, or would be: a line for each thing that a reader must know."""
    what = f"{format_count(len(done.tensors), 'tensor')} of {format_size(done.bytes)} in {_files(len(done.files))}"
    lines = _first(what, done.out, is_plan, done.bytes, done.seconds)
    lines += _changes(done.converted, done.left_out, done.overflows)
    if done.small_files:
        lines.append(f"Copied: {', '.join(f'`{name}`' for name in sorted(done.small_files))}")
    if not done.has_sums:
        lines.append("The save made no checksums: only lengths and structure were checked.")
    processes = f" of {format_count(done.processes, 'process')}" if done.processes > 1 else ""
    lines.append(f"Buffers{processes}: {format_size(done.memory)} of memory at most")
    _print(lines, console)


def print_import(done: Import, is_plan: bool, console: Console) -> None:
    """Print what was written, or would be."""
    what = f"{format_count(len(done.names), 'tensor')} of {format_size(done.bytes)}"
    lines = _first(what, done.step, is_plan, done.bytes, done.seconds)
    lines += _changes(done.converted, done.left_out, done.overflows)
    if done.memory:
        lines.append(f"Converted tensors: {format_size(done.memory)} of memory")
    _print(lines, console)


def _files(count: int) -> str:
    return format_count(count, "file")


def _first(what: str, where: str, is_plan: bool, count: int, seconds: float) -> list[str]:
    if is_plan:
        return [f"Would write {what} into `{where}`."]
    rate = f", {format_bandwidth(count / seconds)}" if seconds >= 1 else ""
    return [f"Wrote {what} into `{where}` in {format_duration(seconds)}{rate}."]


def _changes(converted: Mapping[str, int], left_out: Mapping[str, Sequence[str]], overflows: int) -> list[str]:
    lines = [f"{dtypes}: {format_count(count, 'tensor')}" for dtypes, count in converted.items()]
    if overflows:
        to = next(iter(converted)).rpartition(" ")[2]
        lines.append(f"{format_count(overflows, 'number')} too large for {to}: infinite in what was written")
    if left_out:
        lines.append(f"Left out: {', '.join(f'{len(names)} {reason}' for reason, names in left_out.items())}")
    return lines


def _print(lines: Sequence[str], console: Console) -> None:
    for line in lines:
        console.print(line_of(line), soft_wrap=True)


def export_document(done: Export, is_plan: bool) -> dict[str, Any]:
    """The same as JSON values, with every tensor: bytes and seconds."""
    return {
        "step": done.step,
        "out": done.out,
        "written": not is_plan,
        "bytes": done.bytes,
        "files": [
            {
                "name": file.name,
                "bytes": file.length,
                "tensors": [
                    {**tensor._asdict(), "bytes": tensor.bytes, "start": start} for tensor, start in file.tensors
                ],
            }
            for file in done.files
        ],
        "copied": {name: str(path) for name, path in done.small_files.items()},
        "converted": done.converted,
        "overflows": done.overflows,
        "left_out": done.left_out,
        "checksums": done.has_sums,
        "processes": done.processes,
        "memory": done.memory,
        "seconds": done.seconds,
    }


def import_document(done: Import, is_plan: bool) -> dict[str, Any]:
    """The same as JSON values."""
    return {**asdict(done), "written": not is_plan}
