"""The types of a ds_config plan: its values, their reasons, and the memory and space that they cost. Pure data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tunetool.advise import zero
from tunetool.advise.precision import BF16, Precision
from tunetool.advise.shapes import Model


@dataclass(frozen=True)
class Explanation:
    """Why one key has its value; ``unit`` and ``formula`` are empty where they do not apply."""

    unit: str
    formula: str
    why: str


@dataclass(frozen=True)
class Node:
    """The resources that all ranks of one node share."""

    memory_bytes: int
    memlock: int | None = None
    """RLIMIT_MEMLOCK in bytes; None: unlimited."""
    free_bytes: int | None = None
    """Free space of the file system that receives the swap files; None: unknown."""
    address_bytes: int = zero.SECTOR
    """Alignment in bytes that direct I/O to that file system needs of a memory address."""
    address_why: str = "a sector is assumed"
    """Whose alignment that is, and how it is known."""
    gpu: bool = True
    precision: Precision = BF16


@dataclass(frozen=True)
class Job:
    """The model to train, the kind of ds_config, and the ranks."""

    kind: str
    model: Model
    aio: Mapping[str, int | bool]
    nvme_path: str = ""
    world: int = 8
    nodes: int = 1
    micro_batch: int = 1
    batch: int | None = None
    """Samples of all ranks per optimizer step; None: one micro batch of each rank."""

    @property
    def ranks_per_node(self) -> int:
        """Ranks that share a node's memory and drives."""
        return self.world // self.nodes


@dataclass(frozen=True)
class Item:
    """Memory or storage that one rank needs for one purpose."""

    name: str
    rank_bytes: int
    where: str
    """``locked`` (host memory that DeepSpeed locks, limited by memlock), ``host``, ``gpu`` or ``nvme``."""


@dataclass
class Plan:
    """Values for the template, their reasons by key path, and what they cost."""

    job: Job
    node: Node
    values: dict[str, Any] = field(default_factory=dict)
    reasons: dict[str, Explanation] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def rank_bytes(self, *where: str) -> int:
        """Bytes that one rank needs in these places (see ``Item.where``)."""
        return sum(item.rank_bytes for item in self.items if item.where in where)
