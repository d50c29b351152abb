"""The layers of a node's storage that a record measured, and the one that binds. Pure.

Layers are the rungs of `verify`'s ladder: drives together, array, file system, and above them what one process reads
and writes by a library. A record of level quick has the file system alone. Without a record the figures are published.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tunetool.advise.expect import is_counted, nodes_of
from tunetool.errors import UsageProblem
from tunetool.measure import Direction
from tunetool.measure.ladder.plan import bandwidth, steps, together_counts
from tunetool.measure.ladder.raw import ALONE, ARRAY
from tunetool.measure.metrics import EXPECTABLE
from tunetool.record import Record


@dataclass(frozen=True)
class Layer:
    """A layer and its speed in bytes per second."""

    name: str
    value: float


PUBLISHED: Mapping[Direction, Layer] = {
    "read": Layer("eight Gen5 drives, published", 48e9),
    "write": Layer("eight Gen5 drives, published", 26e9),
}
"""Eight Gen5 drives as one RAID0, 1 GB to and from HBM (DeepSpeed, `DeepNVMe: Affordable I/O scaling`, 2025)."""
_RANDOM = EXPECTABLE["randread-1m"]
_STORAGE = ("sequential.read", "sequential.write", "sustained.write", ARRAY)


@dataclass(frozen=True)
class Layers:
    """What a node's storage does. All lists begin with the lowest layer."""

    source: str
    measured: bool
    """False: published figures of another node."""
    storage: Mapping[Direction, Sequence[Layer]]
    processes: Mapping[Direction, Sequence[Layer]]
    """What one process of a library reaches."""
    random: Layer | None = None
    """Random reads of 1 MiB."""
    loss: str | None = None
    """What the ladder says of its first loss, with the remedy."""

    def binds(self, direction: Direction) -> Layer:
        """The slowest layer of the storage itself: nothing above it is faster for long."""
        return min(self.storage[direction], key=lambda layer: layer.value)


def published() -> Layers:
    """Figures for a node of which nothing is known."""
    storage = {way: [layer] for way, layer in PUBLISHED.items()}
    return Layers("published for eight Gen5 drives (DeepNVMe, 2025), not measured here", False, storage, {})


def of_record(record: Record) -> Layers:
    """The layers of a record of ``verify``. Raises ``UsageProblem`` for one without proven figures, or of a fleet."""
    if record.hosts is not None:
        raise UsageProblem("this is the record of a fleet", "give the record of one of its nodes")
    (node,) = nodes_of(record)
    if node.problem is not None:
        raise UsageProblem(
            f"no figure of `{node.host}` counts: {node.problem}", "mend that, then `tunetool verify` again"
        )
    counted = [each for each in record.measurements if is_counted(each)]
    by_name = {each.name: each for each in counted}
    storage: dict[Direction, list[Layer]] = {"read": [], "write": []}
    processes: dict[Direction, list[Layer]] = {"read": [], "write": []}
    for step in steps(together_counts(counted)):
        figure = by_name.get(step.name)
        if figure is None or step.name == ALONE or step.kind == "engine" or figure.quantity == "rate":
            continue
        direction: Direction = "write" if figure.parameters.get("direction") == "write" else "read"
        in_storage = step.name in _STORAGE or step.kind == "together"
        (storage if in_storage else processes)[direction].append(Layer(step.title, bandwidth(figure)))
    for direction, layers in storage.items():
        if not layers:
            raise UsageProblem(
                f"the record of `{node.host}` has no proven sequential {direction}",
                "give a record of `tunetool verify`",
            )
    # Fewer drives than all of them together are no layer of their own.
    top = [each for each in storage["read"] if each.name.endswith("drives together")][:-1]
    storage["read"] = [each for each in storage["read"] if each not in top]
    random = by_name.get(_RANDOM.name)
    loss = record.ladder.loss if record.ladder is not None else None
    return Layers(
        source=f"measured on `{node.host}` by `verify`",
        measured=True,
        storage=storage,
        processes=processes,
        random=Layer("random reads of 1 MiB", bandwidth(random)) if random is not None else None,
        loss=f"first loss, {loss.cause}: {loss.found}; {loss.remedy}" if loss is not None else None,
    )
