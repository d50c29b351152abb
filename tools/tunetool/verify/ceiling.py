"""What the drives' links can carry at most: the figure that no measurement can exceed and an expectation must not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.measure.figures import ceiling_figure
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive, read_drives
from tunetool.node.machine.pcie_links import link_bandwidth
from tunetool.record import Measurement


def ceiling_figures(stack: BlockStack) -> list[Measurement]:
    """The ceiling of this machine's drives below ``stack`` for a record; none where a link is not visible."""
    limit = ceiling(stack, read_drives())
    return [] if limit is None else [ceiling_figure(stack, limit)]


def ceiling(stack: BlockStack, drives: Sequence[Drive]) -> float | None:
    """The sum over the leaves of ``stack``; None unless the link of every one of them is known."""
    by_name: Mapping[str, Drive] = {drive.name: drive for drive in drives}
    total = 0.0
    for leaf in stack.leaves:
        drive = by_name.get(leaf.name)
        bandwidth = link_bandwidth(drive.link) if drive else None
        if bandwidth is None:
            return None
        total += bandwidth
    return total or None
