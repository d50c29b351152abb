"""The checkpoint speed that a record measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from tunetool.errors import UsageProblem
from tunetool.measure.figures import is_sequential
from tunetool.node.units import format_bandwidth
from tunetool.record import Measurement, Record, chosen

_OF_ENGINES = ("durable", "restore")
"""Figures of an engine of `bench checkpoint`."""


@dataclass(frozen=True)
class Measured:
    """Write and read bandwidth in bytes per second; ``source`` names the figure, medium and host."""

    write: float
    read: float | None
    source: str


def measured(record: Record, engine: str | None = None) -> Measured:
    """The speed of writing a checkpoint durably, and of reading it back where that was measured too.

    A record of ``bench.checkpoint`` gives that of ``engine``, by default the fastest; one of ``verify`` gives
    torch.save's, or else fio's. Raises ``UsageProblem`` for a record whose verdict is not pass, and for one without
    such a figure.
    """
    figures = _choose(record, engine)
    # Figures of a record without the verdict "pass" may be wrong.
    if record.verdict is not None and record.verdict.status != "pass":
        reason = f": {record.verdict.reasons[0]}" if record.verdict.reasons else ""
        raise UsageProblem(
            f"the record of `{record.node.host}` cannot be used: its verdict is {record.verdict.status}{reason}",
            f"measure again, or use its figure at your own risk: `--bandwidth {figures[0].value / 1e9:.4g}GBps`",
        )
    write, read = figures
    source = f"`{write.name}` ({write.engine}) on {write.medium} of `{write.host or record.node.host}`"
    return Measured(write.value, read.value if read else None, source)


def _choose(record: Record, engine: str | None) -> tuple[Measurement, Measurement | None]:
    counting = [each for each in record.measurements if _counts(each)]
    durable, restore = ({each.labels["engine"]: each for each in chosen(counting, name)} for name in _OF_ENGINES)
    if engine is not None:
        if engine not in durable:
            known = (
                f"it has {', '.join(sorted(durable))}" if durable else "only records of `bench checkpoint` have engines"
            )
            raise UsageProblem(f"the record has no checkpoint engine `{engine}`", known)
        return durable[engine], restore.get(engine)
    if durable:
        fastest = max(durable, key=lambda name: durable[name].value)
        return durable[fastest], restore.get(fastest)
    # Of `verify`: torch.save and torch.load (level full), fio's (every level that measures).
    for pair in ([*chosen(counting, "save"), *chosen(counting, "load")], list(filter(is_sequential, counting))):
        ways = {each.labels["direction"]: each for each in pair}
        if "write" in ways:
            return ways["write"], ways.get("read")
    raise UsageProblem(
        f"the record of `{record.node.host}` (kind `{record.kind}`) has no write bandwidth",
        "give a record of `tunetool bench checkpoint` or `tunetool verify`, or a figure with `--bandwidth`",
    )


def _counts(figure: Measurement) -> bool:
    """Whether it is a bandwidth of storage, not of a file system in memory, which loses a checkpoint with its node."""
    in_memory = figure.evidence is not None and figure.evidence.kind == "memory"
    return figure.quantity == "bandwidth" and figure.value > 0 and not in_memory and "stand_in" not in figure.parameters


def bandwidth_source(speed: Measured, requested: float | None) -> str:
    """The measured bandwidth with its source, compared with the ``requested`` one where there is one."""
    comparison = f"; this is {speed.write / requested:.0%} of `--bandwidth`" if requested is not None else ""
    return f"{format_bandwidth(speed.write)}, measured: {speed.source}{comparison}"
