"""A record in the result layout of mlpstorage, the tool of MLPerf Storage: names, files and units.

Layout: ``<system>/checkpointing/<model>/<YYYYMMDD_HHMMSS>/`` with ``summary.json``, ``*_metadata.json`` and
``*_per_epoch_stats.json`` (Rules.md 2.1.8 to 2.1.27; generate_output_location in mlpstorage/rules.py of v2.0-branch).
Keys and units of the summary are those of DLIO (utils/statscounter.py at mlperf_storage_v2.0): what it calls GB is GiB,
rates are arithmetic means over the checkpoints, deviations those of a population.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import TYPE_CHECKING, Any

from tunetool.bench.checkpoint.request import KIND as CHECKPOINT
from tunetool.bench.dataset.request import KIND as DATASET
from tunetool.errors import UsageProblem
from tunetool.node.common.files import replace_file
from tunetool.record import Measurement, Record, chosen
from tunetool.report.mlpstorage_rules import GIB, Rule, of_checkpoint, of_dataset
from tunetool.report.page import line_of, new_table

if TYPE_CHECKING:
    from rich.console import Console

INVALID = "invalid"
"""What mlpstorage's field ``verification`` has for a run that no division takes."""
JUDGED = ("pass", "fail", "unstable")
"""Verdicts of records whose figures are proven; the check of an engine says whether its own restores were equal."""
NEEDED = ("model", "ranks", "state_bytes")
RULES = "rules.json"
_NO_BENCHMARK = "measure again: no benchmark writes that"
_RATES = (1.0, 1e18)
"""Bytes per second between which the rates of all storage lie."""
_LONGEST = 100
"""Characters of a name; a file's name may have 255 bytes, and two of them are one."""


@dataclass(frozen=True)
class Result:
    """A directory of the layout, below the one that the user names."""

    what: str
    directory: str
    files: dict[str, str]
    """Texts by name; the metadata, by which mlpstorage finds a run, last."""
    rules: list[Rule]


def results(record: Record, name: str) -> list[Result]:
    """What can be written of a record: a result for each engine of checkpoints, of training data the rules alone.

    ``name``: the record's, for errors. Raises ``UsageProblem`` for another kind of record, one whose figures prove
    nothing, and one that lacks what a result must say.
    """
    if record.kind not in (CHECKPOINT, DATASET):
        raise UsageProblem(
            f"`{name}` is a record of `{record.kind}`, which MLPerf Storage does not measure",
            f"name a record of `{CHECKPOINT}` or `{DATASET}`",
        )
    status = record.verdict.status if record.verdict is not None else "none"
    if status not in JUDGED:
        raise UsageProblem(
            f"`{name}` has the verdict `{status}`: nothing proves its figures",
            f"measure again; `tunetool report show {name}` says what was in the way",
        )
    # Wrong bytes of one engine weigh more in the verdict than another's figures, of which nothing is proven.
    if record.verdict is not None and "unproven" in (record.verdict.kinds or []):
        raise UsageProblem(
            f"`{name}` has figures that nothing proves, beside its verdict `{status}`",
            f"measure again; `tunetool report show {name}` says what was in the way",
        )
    if record.kind == DATASET:
        return [_dataset(record)]
    durable = chosen(record.measurements, "durable", place=None)
    made = [result for each in durable if (result := _checkpoint(record, each, name)) is not None]
    if not made:
        raise UsageProblem(
            f"`{name}` has no engine on drives whose restores were equal", "measure with `--target` on drives"
        )
    return made


def _dataset(record: Record) -> Result:
    rules = of_dataset(record)
    directory = f"{_plain(record.node.host)}/training/tunetool-dataset/run/{_stamp(record)}"
    return Result(
        "training data: no result, since no accelerator is emulated", directory, {RULES: _text(_judged(rules))}, rules
    )


def _checkpoint(record: Record, durable: Measurement, name: str) -> Result | None:
    engine = durable.labels.get("engine")
    checks = [
        each.status for each in record.checks if each.labels.get("engine") == engine and "place" not in each.labels
    ]
    if engine is None or checks != ["pass"] or not durable.samples:
        return None
    missing = [each for each in NEEDED if each not in durable.parameters]
    if missing:
        raise UsageProblem(
            f"`{name}`: `{durable.name}` does not say its {missing[0]}", "measure again: older records do not have it"
        )
    for figure in ("durable", "restore"):
        if len(same := chosen(record.measurements, figure, engine=engine, place=None)) > 1:
            raise UsageProblem(f"`{name}` has `{same[0].name}` more than once", _NO_BENCHMARK)
    restore = next(iter(chosen(record.measurements, "restore", engine=engine, place=None)), None)
    for each in (durable, *([restore] if restore is not None else [])):
        if odd := _odd(each, durable):
            raise UsageProblem(f"`{name}`: `{each.name}` has {odd}", _NO_BENCHMARK)
    model = f"tunetool-{_plain(str(durable.parameters['model']))}"
    stamp = _stamp(record)
    rules = of_checkpoint(record, durable, restore)
    size = int(durable.parameters["state_bytes"])
    writes, reads = durable.samples, (restore.samples or []) if restore is not None else []
    files = {
        "summary.json": _summary(record, durable, {"save": writes, "load": reads}, size),
        "0_per_epoch_stats.json": {"1": {**_each("save", writes, size), **_each("load", reads, size)}},
        RULES: _judged(rules),
        f"checkpointing_{stamp}_metadata.json": {
            "benchmark_type": "checkpointing",
            "model": model,
            "command": "run",
            "run_datetime": stamp,
            "num_processes": int(durable.parameters["ranks"]),
            # No workload's name: mlpstorage's own check of it then says INVALID too.
            "parameters": {
                "model": {"name": model},
                "checkpoint": {"num_checkpoints_write": len(writes), "num_checkpoints_read": len(reads), "fsync": True},
            },
            **_judged(rules),
            "executed_command": " ".join(record.command),
            "tunetool": {"record": record.id, "engine": durable.engine, "medium": durable.medium},
        },
    }
    directory = f"{_plain(record.node.host)}-{_plain(engine)}/checkpointing/{model}/{stamp}"
    return Result(f"checkpoints by `{engine}`", directory, {key: _text(each) for key, each in files.items()}, rules)


def _odd(figure: Measurement, durable: Measurement) -> str:
    """What no benchmark writes, and nothing can be computed of; empty where all is well."""
    for key in ("ranks", "state_bytes"):
        if type(value := durable.parameters[key]) is not int or value < 1:
            return f"the {key} `{value}`"
    if figure.unit != "B/s":
        return f"the unit `{figure.unit}`"
    least, most = _RATES
    return next((f"the rate `{each:g}` B/s" for each in figure.samples or [] if not least <= each <= most), "")


def _summary(record: Record, durable: Measurement, rates: dict[str, list[float]], size: int) -> dict[str, Any]:
    node, metric = record.node, dict[str, float]()
    for what, each in rates.items():
        if each:
            metric |= _spread(f"{what}_checkpoint_io", "GB_per_second", [rate / GIB for rate in each])
            metric |= _spread(f"{what}_checkpoint_duration", "seconds", [size / rate for rate in each])
    return {
        "start": record.started.isoformat(),
        "end": record.finished.isoformat(),
        "num_accelerators": int(durable.parameters["ranks"]),
        "num_hosts": 1,
        "hostname": node.host,
        **(
            {"host_memory_GB": [node.memory_bytes / GIB]}
            if node.memory_bytes is not None and node.memory_bytes > 0
            else {}
        ),
        **({"host_cpu_count": [node.cpu_count]} if node.cpu_count is not None else {}),
        "metric": {**metric, "checkpoint_size_GB": size / GIB},
    }


def _spread(name: str, unit: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}_mean_{unit}": fmean(values), f"{name}_stdev_{unit}": pstdev(values)}


def _each(what: str, rates: Sequence[float], size: int) -> dict[str, dict[str, float]]:
    return {
        f"{what}_ckpt{number}": {"duration": size / rate, "throughput": rate / GIB}
        for number, rate in enumerate(rates, start=1)
    }


def _judged(rules: Sequence[Rule]) -> dict[str, Any]:
    """The verdict: never valid, since mlpstorage did not run the benchmark."""
    return {
        "verification": INVALID,
        "issues": [f"{each.id}: {each.asks}: {each.found}" for each in rules if each.status != "met"],
        "rules": [asdict(each) for each in rules],
    }


def _plain(name: str) -> str:
    """A part of a directory's name; the whole one of a host must lead nowhere else."""
    plain = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:_LONGEST]
    return plain if plain.strip(".") else f"_{plain}"


def _stamp(record: Record) -> str:
    return record.started.strftime("%Y%m%d_%H%M%S")


def _text(document: dict[str, Any]) -> str:
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def write(made: Sequence[Result], to: Path) -> None:
    """Write all results below ``to``, or none: not where one is there already, nor where one cannot be written.

    Where it fails, the directories that it made are gone again. Raises ``UsageProblem``, ``OSError``.
    """
    directories = [to / result.directory for result in made]
    for number, directory in enumerate(directories):
        if directory in directories[:number]:
            again = "name each record once, or another directory with `--to` for the second"
            raise UsageProblem(f"`{directory}` would hold two results", again)
        if os.path.lexists(directory):
            raise _there(directory)
    ours: list[Path] = []
    above: list[Path] = []
    try:
        for directory in directories:
            _make_above(directory, above)
            try:
                directory.mkdir()
            except FileExistsError:  # another call was quicker
                raise _there(directory) from None
            ours.append(directory)
        for result, directory in zip(made, directories, strict=True):
            for name, text in result.files.items():
                replace_file(str(directory / name), text)
    except BaseException:
        for directory in ours:
            shutil.rmtree(directory, ignore_errors=True)
        for parent in reversed(above):
            with contextlib.suppress(OSError):  # another call may have put something there
                parent.rmdir()
        raise


def _make_above(directory: Path, made: list[Path]) -> None:
    """Make the directories above, and add those that this call made."""
    for parent in reversed(directory.parents):
        if not parent.is_dir():
            with contextlib.suppress(
                FileExistsError
            ):  # another call was quicker; of anything else the next `mkdir` says it
                parent.mkdir()
                made.append(parent)


def _there(directory: Path) -> UsageProblem:
    return UsageProblem(f"`{directory}` is there already", "name another directory with `--to`")


def as_document(made: Sequence[Result]) -> str:
    """The results as JSON: what each is of, its directory, and the rules."""
    results = [{"of": each.what, "directory": each.directory, **_judged(each.rules)} for each in made]
    return _text({"results": results})


def print_results(made: Sequence[Result], to: Path, console: Console) -> None:
    """Print for each result where it is, and each rule with what was found."""
    for result in made:
        console.print(line_of(f"{result.what}: {to / result.directory}"), soft_wrap=True)
        counts = {status: sum(each.status == status for each in result.rules) for status in ("not met", "not known")}
        words = ", ".join(f"{count} {status}" for status, count in counts.items())
        console.print(line_of(f"INVALID as a submission to MLPerf Storage: of {len(result.rules)} rules {words}"))
        table = new_table()
        for title in ("rule", "asks", "is"):
            table.add_column(title, overflow="fold")
        table.add_column("found", ratio=1, overflow="fold")
        for each in result.rules:
            table.add_row(each.id, each.asks, each.status, each.found)
        console.print(table)
