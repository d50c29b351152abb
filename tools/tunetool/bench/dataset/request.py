"""The request of `bench dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool.bench.dataset.engines import Device
from tunetool.bench.defaults import CHECKPOINT_ROUNDS
from tunetool.measure.session import Run

KIND = "bench.dataset"


@dataclass(frozen=True)
class Request:
    """The options of the call. Each default is that of the command."""

    target: Path
    """A directory on drives or in memory; the files are made in it."""
    jsonl: Path | None = None
    """A corpus; None: one is made."""
    key: str = "text"
    """The key of the text in each line of the corpus."""
    size: int = 4 * 10**9
    """About how many bytes the tokens of a made corpus take."""
    sequence_length: int = 4096
    """Number of tokens in a sample."""
    threads: int = 16
    """Number of threads that read past the page cache or into a GPU."""
    device: Device = "auto"
    """Which memory gets the batches of ``gpu-direct``; ``auto`` is a GPU."""
    images: int = 2000
    image_side: int = 256
    """Width and height of an image in pixels."""
    workers: Sequence[int] = (0, 2)
    """Numbers of processes of a DataLoader."""
    states: Sequence[str] = ("cold", "warm")
    """Of the page cache, in which the files are read."""
    seconds: float = 4.0
    """The longest time of one pass over the data."""
    huge_pages: int | None = None
    """Size of the pool of huge pages for one more row; None: no such row."""
    engines: Sequence[str] = ("*",)
    """Glob patterns of engine names."""
    rounds: int = CHECKPOINT_ROUNDS
    seed: int = 0
    run: Run = field(default_factory=Run)
