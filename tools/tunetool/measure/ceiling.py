"""What the drives' links can carry at most: the figure that no measurement can exceed and an expectation must not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.node.blockstack import BlockStack
from tunetool.node.drives import Drive, Link


def link_bandwidth(link: Link) -> float | None:
    """Raw bytes per second of a link as negotiated, after line encoding; None when sysfs is silent.

    2.5 and 5 GT/s (Gen1, Gen2) carry 8 bits in 10, 8 to 32 GT/s (Gen3 to Gen5) 128 in 130 (PCIe base
    specification). 64 GT/s (Gen6) has no line code; its flit overhead is not subtracted here.
    """
    if link.current_speed_gts is None or link.current_width is None:
        return None
    if link.current_speed_gts <= 5:
        share = 8 / 10
    elif link.current_speed_gts <= 32:
        share = 128 / 130
    else:
        share = 1.0
    return link.current_speed_gts * 1e9 * share / 8 * link.current_width


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
