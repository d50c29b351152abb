"""The raw rungs: each drive alone, several together, and the array; read-only, over this run's own data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tunetool.measure.ladder import calls
from tunetool.measure.ladder.budget import RAW_BLOCK, SAMPLES
from tunetool.measure.ladder.rung import Context, Label, Result, Rung, figure
from tunetool.measure.ladder.sampler import Call, Part, of_one_part
from tunetool.measure.ladder.source import RawData
from tunetool.measure.sequential import Plan
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive
from tunetool.record import Scalar

ALONE = "drive.read"
TOGETHER = "drives.{direction}.{drives}"
ARRAY = "array.read"
_START = 1.0


def sub_stack(stack: BlockStack, names: Sequence[str]) -> BlockStack:
    """The part of a stack whose drives count."""
    return replace(stack, leaves=tuple(leaf for leaf in stack.leaves if leaf.name in names), redundant=False)


def counts(drives: int) -> list[int]:
    """How many drives are read together: 1, 2, 4, 8 ... and all."""
    powers = [1 << power for power in range(drives.bit_length()) if 1 << power < drives]
    return [*powers, drives]


def in_slots(context: Context) -> list[str]:
    """Kernel names of the members by PCI address: drives behind one switch follow each other."""
    return by_slot(context.raw_data(), context.drives)


def by_slot(raw: RawData, drives: Sequence[Drive]) -> list[str]:
    """Kernel names of the members in the order of ``drives``, those that are not among them last."""
    ordered = [drive.name for drive in drives if drive.name in raw.members]
    return [*ordered, *(name for name in raw.members if name not in ordered)]


def serial_of(context: Context, name: str) -> str:
    """The serial of a drive, or its kernel name."""
    return next((leaf.label for leaf in context.stack.leaves if leaf.name == name), name)


@dataclass(frozen=True)
class Alone(Rung):
    """Each drive by itself, one after the other."""

    alone: dict[str, float]
    """By kernel name, filled while it runs."""
    name: str = "drives alone"

    def covers(self) -> Sequence[str]:
        """The one name that all drives share."""
        return [ALONE]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return SAMPLES * (drives * shape.duration + _START)

    def run(self, context: Context) -> Result:
        """A figure for each drive."""
        raw, seconds, result = context.raw_data(), context.shape.duration, Result()
        parts = [Part(name, sub_stack(context.stack, [name])) for name in in_slots(context)]
        groups = [(part.name, raw.members[part.name]) for part in parts]
        argv = calls.raw_reads(context.sampler.fio, groups, seconds)
        kept, repeats = context.sampler.rounds(
            lambda label: Call(label, argv, "read", seconds * len(parts), parts), "drives-alone"
        )
        for part in parts:
            parameters: dict[str, Scalar] = {
                **_parameters(context, repeats),
                "device": part.name,
                "serial": serial_of(context, part.name),
                "range_bytes": raw.bytes_of(part.name),
            }
            drive = {"drive": str(parameters["serial"])}
            label = Label("drive.{direction}", "drive", context.engine, "read", "nvme disk", labels=drive)
            result.add(figure(label, part.stack, kept[part.name], parameters))
            self.alone[part.name] = result.measurements[-1].value
        return result


@dataclass(frozen=True)
class Together(Rung):
    """1, 2, 4 ... drives at once: where the sum bends, drives share something."""

    alone: dict[str, float]
    """By kernel name, filled by the rung below."""
    name: str = "drives together"

    def covers(self) -> Sequence[str]:
        """Under one name where the number of drives is not even known."""
        return [TOGETHER.format(direction="read", drives="N")]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return SAMPLES * (shape.duration + _START) * len(counts(drives)[1:])

    def run(self, context: Context) -> Result:
        """A figure for each number of drives; one drive is what was measured alone."""
        raw, names, seconds, result = context.raw_data(), in_slots(context), context.shape.duration, Result()
        for count in counts(len(names))[1:]:
            chosen = names[:count]
            title = f"{count}-drives"
            spans = [span for name in chosen for span in raw.members[name]]
            argv = calls.raw_reads(context.sampler.fio, [(title, spans)], seconds)
            part = Part(title, sub_stack(context.stack, chosen))
            kept, repeats = context.sampler.rounds(of_one_part(argv, "read", seconds, part), f"drives-together-{count}")
            parameters: dict[str, Scalar] = {
                **_parameters(context, repeats),
                "drives": count,
                "devices": ", ".join(chosen),
                "serials": ", ".join(serial_of(context, name) for name in chosen),
            }
            if all(name in self.alone for name in chosen):
                parameters["sum_alone"] = sum(self.alone[name] for name in chosen)
            label = Label(TOGETHER, "drive", context.engine, "read", f"{count} x nvme", labels={"drives": str(count)})
            result.add(figure(label, part.stack, kept[title], parameters))
        return result


@dataclass(frozen=True)
class Array(Rung):
    """The array's device, below the file system."""

    name: str = "array"

    def covers(self) -> Sequence[str]:
        """Its one figure."""
        return [ARRAY]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return SAMPLES * (shape.duration + _START)

    def run(self, context: Context) -> Result:
        """The figure of the array."""
        raw, seconds = context.raw_data(), context.shape.duration
        argv = calls.raw_reads(context.sampler.fio, [("array", raw.array)], seconds, len(raw.members))
        part = Part("array", context.stack)
        kept, repeats = context.sampler.rounds(of_one_part(argv, "read", seconds, part), "array")
        parameters: dict[str, Scalar] = {
            **_parameters(context, repeats),
            "device": raw.array[0].device,
            "range_bytes": sum(span.length for span in raw.array),
        }
        label = Label("array.{direction}", "md", context.engine, "read", context.stack.medium)
        return figure(label, context.stack, kept["array"], parameters)


def _parameters(context: Context, repeats: int) -> dict[str, Scalar]:
    return {
        "block_bytes": RAW_BLOCK,
        "io_engine": "libaio",
        "direct": True,
        "sample_seconds": context.shape.duration,
        "repeated_samples": repeats,
    }
