"""Which rules of MLPerf Storage a record meets, and which it cannot. Pure.

Source: Rules.md of mlcommons/storage, commit 0366ccf, whose numbers the ids are; `guidelines`: section 6 of
Submission_guidelines.md at its branch v2.0-branch, for what Rules.md leaves to them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.bench.dataset.megatron import TOKEN_BYTES
from tunetool.measure.evidence import LOWEST
from tunetool.node.units import format_size, format_size_binary
from tunetool.record import Measurement, Record

Status = Literal["met", "not met", "not known"]
GIB = 2**30

WORKLOADS = {"llama3-8b": (105, 8), "llama3-70b": (912, 64), "llama3-405b": (5417, 512), "llama3-1t": (18432, 1024)}
"""Of each workload for checkpoints the size in GiB (5.29 and 18 TiB for the last two) and the processes, by table 2."""
NEAR = 0.01
"""By how much a state may differ from a workload's size, which the table rounds, as a fraction of it."""
CHECKPOINTS = 10
LEAST_RANKS = 5
"""Processes on a host; the rule says more than 4."""
MEMORIES = 5
"""A training set is so many times as large as the hosts' memory."""
RUNS = 6
"""One to warm up and five that count."""


@dataclass(frozen=True)
class Rule:
    """A rule, and how the record stands to it."""

    id: str
    asks: str
    status: Status
    found: str


def of_checkpoint(record: Record, durable: Measurement, restore: Measurement | None) -> list[Rule]:
    """The rules for checkpoints, for the figures ``durable`` and ``restore`` of one engine."""
    state, ranks = int(durable.parameters["state_bytes"]), int(durable.parameters["ranks"])
    reads = len(restore.samples or []) if restore is not None else 0
    return [
        *_shared(record, [durable, *([restore] if restore is not None else [])]),
        *_workload(state, ranks),
        Rule("4.6.2", f"at least {LEAST_RANKS} processes on a host", _status(ranks >= LEAST_RANKS), f"{ranks} on one"),
        _count("writes", len(durable.samples or [])),
        _count("reads", reads),
        Rule("4.7.1", "all writes, then all reads", "not met", "each round writes, then reads what it wrote"),
        Rule("4.3.1", "data of 3 times the memory, or a cleared cache", *_cold(restore)),
        Rule("4.3.2", "a sync at the end of each write", "met", "a save counts once all is on the drives"),
        Rule("4.3.4", "a named accelerator, whose memory holds the state", "not known", "tunetool emulates none"),
    ]


def of_dataset(record: Record) -> list[Rule]:
    """The rules for training, for a record of training data."""
    reads = [each for each in record.measurements if each.figure == "read" and each.labels.get("state") == "cold"]
    rounds = max((len(each.samples or []) for each in reads), default=0)
    return [
        *_shared(record, reads),
        Rule("2.1.11", "the workload unet3d or retinanet", "not met", "tokens and images of tunetool's own"),
        Rule("3.3.2", "a share of time that emulated accelerators work", "not met", "no accelerator is emulated"),
        Rule("3.1.2", f"data of {MEMORIES} times the memory", *_times_memory(record, reads)),
        Rule("3.1.2", "500 steps in an epoch", "not met", "a pass ends after its time, not after an epoch"),
        Rule("2.1.17", f"{RUNS} runs, the first to warm up", "not met", f"{rounds} cold passes of one run"),
        Rule("3.3.4", "one host, if the result is of one", "met", "one host"),
        Rule("guidelines 6.6", "another random order in each run", *_order(reads)),
    ]


def _shared(record: Record, figures: Sequence[Measurement]) -> Iterator[Rule]:
    maker = f"tunetool {record.tool.version}" if record.tool is not None else "tunetool"
    yield Rule("1", "mlpstorage itself ran the benchmark", "not met", f"{maker} did")
    yield Rule("2.1.7", "a description of the system as YAML and PDF", "not met", "the record has facts of the host")
    yield Rule("2.1.25", "DLIO's logs and configuration", "not met", "no DLIO ran")
    yield Rule("4.4.2, 3.4.2", "results on another file system than the data", "not known", "no record says so")
    proven = bool(figures) and all(map(_counted, figures))
    found = "the drives counted the bytes" if proven else "no drive's counters prove it"
    yield Rule("guidelines 6.5", "stable storage", _status(proven), found)


def _workload(state: int, ranks: int) -> Iterator[Rule]:
    name = min(WORKLOADS, key=lambda each: abs(WORKLOADS[each][0] * GIB - state))
    size, processes = WORKLOADS[name]
    is_near = abs(state - size * GIB) <= NEAR * size * GIB
    found = f"{format_size_binary(state)}; {name} has {size} GiB"
    # Of equal bytes it may still be another model: the record has no shapes.
    yield Rule("4.3.3", "one of the four workloads", "not known" if is_near else "not met", found)
    found = f"{ranks}; {name} has {processes}"
    yield Rule("4.6.1", "the workload's number of processes", _status(is_near and ranks == processes), found)


def _count(what: str, count: int) -> Rule:
    return Rule("4.6.4", f"{CHECKPOINTS} {what}", _status(count == CHECKPOINTS), f"{count}")


def _cold(restore: Measurement | None) -> tuple[Status, str]:
    how = restore.parameters.get("cold") if restore is not None else None
    if restore is None or not how:
        return "not known", "the record does not say how it was cleared"
    if not _counted(restore):
        return "not known", "no drive's counters prove that it was cleared"
    return "met", f"before each read: {how}"


def _order(reads: Sequence[Measurement]) -> tuple[Status, str]:
    if reads and all("shuffled" in each.labels.get("engine", "") for each in reads):
        return "met", "each round draws its own"
    return "not known", "some engines may read in the files' order" if reads else "the record has no read"


def _counted(figure: Measurement) -> bool:
    """Whether drives counted at least what the figure claims, in each sample."""
    proof = figure.evidence
    if proof is None or proof.kind != "block" or proof.ratio is None:
        return False
    return min(proof.ratio, proof.ratio if proof.worst_ratio is None else proof.worst_ratio) >= LOWEST


def _times_memory(record: Record, reads: Sequence[Measurement]) -> tuple[Status, str]:
    memory = record.node.memory_bytes
    tokens = [count for each in reads if isinstance(count := each.parameters.get("tokens"), int)]
    if memory is None or memory < 1 or not tokens:
        return "not known", "the record has not both sizes"
    size = max(tokens) * TOKEN_BYTES
    found = f"tokens of {format_size(size)}, {size / memory:.3g} times the host's memory"
    return _status(size >= MEMORIES * memory), found


def _status(is_met: bool) -> Status:
    return "met" if is_met else "not met"
