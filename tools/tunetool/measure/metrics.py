"""The table of fio's figures that a verdict can judge: what each is called, how fio is asked for it, what it must keep.

A new figure is one row of ``METRICS``: its measurement, its rung of the ladder, its word of ``--expect``, the help text
and what is shown of it are made from that row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from tunetool.measure import Direction

Unit = Literal["B/s", "1/s"]
MIB = 2**20


@dataclass(frozen=True)
class Share:
    """The share of the rung below that a rung must keep, and the reason."""

    least: float
    reason: str


@dataclass(frozen=True)
class Metric:
    """One figure. Its direction, with its block where that is random, names it in records."""

    direction: Direction
    word: str
    """Of ``--expect``; empty: nothing can be expected of it."""
    title: str
    """Of its rung."""
    kind: str
    """Of its rung: what may be lost there."""
    below: tuple[str, ...] = ()
    """Its rung is compared with the first of these measurements that there is."""
    example: str = ""
    """What the help text of ``--expect`` gives as its value."""
    block: str = ""
    """Name of the block size; empty: sequential blocks of 1 MiB."""
    block_bytes: int = MIB
    queue_depth: int = 32
    """Of each job. A drive needs 32 MiB in flight for large blocks, and for small ones enough to hide its latency."""
    share: Share | None = None
    """None: as its kind has it, if that has any."""

    @property
    def name(self) -> str:
        """Of the measurement."""
        return self.form.format(direction=self.direction, block=self.block)

    @property
    def form(self) -> str:
        """Of that name."""
        return "random.{direction}.{block}" if self.block else "sequential.{direction}"

    @property
    def unit(self) -> Unit:
        """Requests count where they are random, bytes where they are sequential."""
        return "1/s" if self.block else "B/s"

    @property
    def level(self) -> str:
        """The lowest level of ``verify`` that measures it."""
        return "full" if self.block else "quick"


METRICS = (
    Metric("read", "read", "fs libaio read", "filesystem", ("array.read",), "50GBps"),
    Metric("write", "write", "fs libaio write", "none", example="25GBps"),
    Metric(
        "read",
        "randread-4k",
        "random read 4 KiB",
        "random-4k",
        ("random.read.64k",),
        "5MIOPS",
        block="4k",
        block_bytes=4 * 2**10,
        queue_depth=64,
        # No share: cores bound these reads long before drives do, so what is enough is the caller's to say.
    ),
    Metric(
        "read",
        "randread-64k",
        "random read 64 KiB",
        "random-64k",
        ("random.read.1m",),
        block="64k",
        block_bytes=64 * 2**10,
        share=Share(0.5, "sixteen times the requests for the same bytes"),
    ),
    Metric(
        "read",
        "randread-1m",
        "random read 1 MiB",
        "random-1m",
        ("sequential.read",),
        block="1m",
        queue_depth=8,
        share=Share(0.8, "a request of a chunk keeps one drive busy wherever it lies; some drives get more of them"),
    ),
    # An expert of a mixture-of-experts model in whole pages (`bench experts`): many chunks, so one request is enough.
    Metric(
        "read",
        "",
        "random read 19 MB",
        "random-19m",
        ("sequential.read",),
        block="19m",
        block_bytes=4639 * 4096,
        queue_depth=1,
        share=Share(
            0.8, "a request of many chunks is a sequential read wherever it begins; some drives get more of it"
        ),
    ),
)
"""In the order of the words of ``--expect``."""

SEQUENTIAL = tuple(each for each in METRICS if not each.block)
RANDOM = tuple(sorted((each for each in METRICS if each.block), key=lambda each: (each.direction, -each.block_bytes)))
"""In the order in which the ladder measures them: reads before writes, the largest first."""
EXPECTABLE: Mapping[str, Metric] = {each.word: each for each in METRICS if each.word}
"""By word of ``--expect``."""


def expect_help() -> str:
    """The help text of ``--expect``."""
    first = SEQUENTIAL[0]
    both = ",".join(f"{each.word}={each.example}" for each in SEQUENTIAL)
    full = [each.word + f"={each.example}" * bool(each.example) for each in EXPECTABLE.values() if each.block]
    return (
        f"Expected speed: `{first.example}` (sequential {first.direction}) or `{both}`; with --level full also "
        f"{', '.join(f'`{each}`' for each in full)}. Default: the manifest's."
    )
