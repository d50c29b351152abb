"""The speed of checkpoints that a record measured. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tunetool.errors import UsageProblem
from tunetool.node.units import format_bandwidth
from tunetool.record import Measurement, Record

_DURABLE = re.compile(r"checkpoint\.(?P<engine>.+)\.durable")
_PAIRS = (("checkpoint.save", "checkpoint.load"), ("sequential.write", "sequential.read"))
"""What `verify` measures: torch.save and torch.load at level full, fio's figures at every level that measures."""


@dataclass(frozen=True)
class Measured:
    """Bytes per second, and where they come from."""

    write: float
    read: float | None
    source: str


def measured(record: Record, engine: str | None = None) -> Measured:
    """Speed of writing a checkpoint durably, and of reading it back where that was measured too.

    Of ``bench.checkpoint`` that of ``engine``, by default the fastest; of ``verify`` torch.save's, else fio's.
    Raises ``UsageProblem`` for a record that does not hold, and for one without such a figure.
    """
    found = _choose(record, engine)
    # A record says "pass" or nothing speaks for its figures.
    if record.verdict is not None and record.verdict.status != "pass":
        reason = f": {record.verdict.reasons[0]}" if record.verdict.reasons else ""
        raise UsageProblem(
            f"the record of `{record.node.host}` does not hold, its verdict is {record.verdict.status}{reason}",
            f"measure again; or take its figure on your own account: `--bandwidth {found[0].value / 1e9:.4g}GBps`",
        )
    write, read = found
    source = f"`{write.name}` ({write.engine}) on {write.medium} of `{write.host or record.node.host}`"
    return Measured(write.value, read.value if read else None, source)


def _choose(record: Record, engine: str | None) -> tuple[Measurement, Measurement | None]:
    by_name = {each.name: each for each in record.measurements if _counts(each)}
    durable = {match["engine"]: each for name, each in by_name.items() if (match := _DURABLE.fullmatch(name))}
    if engine is not None:
        if engine not in durable:
            known = (
                f"it has {', '.join(sorted(durable))}" if durable else "only those of `bench checkpoint` have engines"
            )
            raise UsageProblem(f"the record measured no checkpoint engine `{engine}`", known)
        return durable[engine], by_name.get(f"checkpoint.{engine}.restore")
    if durable:
        fastest = max(durable, key=lambda name: durable[name].value)
        return durable[fastest], by_name.get(f"checkpoint.{fastest}.restore")
    for write, read in _PAIRS:
        if write in by_name:
            return by_name[write], by_name.get(read)
    raise UsageProblem(
        f"the record of `{record.node.host}` (kind `{record.kind}`) has no speed of writing",
        "give one of `tunetool bench checkpoint` or `tunetool verify`, or a figure with `--bandwidth`",
    )


def _counts(figure: Measurement) -> bool:
    """A speed, and not that of a file system in memory: a checkpoint there is gone with its node."""
    in_memory = figure.evidence is not None and figure.evidence.kind == "memory"
    return figure.quantity == "bandwidth" and figure.value > 0 and not in_memory and "stand_in" not in figure.parameters


def told(found: Measured, asked: float | None) -> str:
    """Where the bandwidth comes from; what was asked beside what was measured."""
    beside = f"; measured is {found.write / asked:.0%} of `--bandwidth`" if asked is not None else ""
    return f"{format_bandwidth(found.write)}, measured: {found.source}{beside}"
