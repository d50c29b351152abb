"""A ds_config as values, each with its reason, and what they cost. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunetool.advise import zero
from tunetool.advise.shapes import Model


@dataclass(frozen=True)
class Explanation:
    """Of one key."""

    unit: str
    formula: str
    why: str


@dataclass(frozen=True)
class Node:
    """What the ranks of one node have together; ``memlock`` and ``free_bytes`` None: no limit, not known."""

    memory_bytes: int
    memlock: int | None = None
    free_bytes: int | None = None
    """Of the file system that is offloaded to."""
    address_bytes: int = zero.SECTOR
    """Of what an address in memory must be a multiple for direct I/O there."""
    gpu: bool = True
    bf16: bool = True


@dataclass(frozen=True)
class Job:
    """What is to be trained, by how many."""

    kind: str
    model: Model
    aio: Mapping[str, int | bool]
    nvme_path: str = ""
    world: int = 8
    nodes: int = 1
    micro_batch: int = 1
    batch: int | None = None
    """Of all ranks, for one optimizer step; None: one micro batch of each rank."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node's memory and drives."""
        return self.world // self.nodes


@dataclass(frozen=True)
class Item:
    """Memory or space that one rank takes."""

    name: str
    rank_bytes: int
    where: str
    """locked (by DeepSpeed, counts against memlock), host, gpu, nvme."""


@dataclass
class Plan:
    """Values for the template, why they are so, and what they cost."""

    job: Job
    node: Node
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Explanation] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rank_bytes(self, *where: str) -> int:
        """What one rank takes there."""
        return sum(item.rank_bytes for item in self.items if item.where in where)
