"""The PCIe tree as lines of text, with the link and bandwidth of each node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunetool.inspect.ceilings import format_link, format_link_speed
from tunetool.inspect.model import Inspection, Link, PciNode

_LINK_AT, _RATE_AT = 66, 84
"""Columns where the link and the bandwidth begin."""


def pcie(shown: Inspection) -> Iterator[str]:
    """The lines of the tree, grouped by NUMA node; none where no PCIe device is visible."""
    if not shown.pcie:
        return
    yield ""
    yield f"{'pcie':{_LINK_AT}}{'link':{_RATE_AT - _LINK_AT}}{'GB/s':>6}"
    numas = list(dict.fromkeys(root.numa_node for root in shown.pcie))
    for numa in sorted(numas, key=lambda node: -1 if node is None else node):
        yield "no NUMA node named" if numa is None else f"NUMA {numa}"
        roots = [root for root in shown.pcie if root.numa_node == numa]
        for index, root in enumerate(roots):
            last = index == len(roots) - 1
            yield from _root(root, "└─ " if last else "├─ ", "   " if last else "│  ")


def _root(root: PciNode, head: str, tail: str) -> Iterator[str]:
    """A root complex and its children, on one line where the children take only one."""
    lines = list(_lines(root.children))
    if len(lines) == 1:
        names, node, below = lines[0]
        yield _row(f"{head}{root.label}  {names}", node, names)
        yield from _branch(below, tail)
        return
    yield f"{head}{root.label}"
    yield from _branch(root.children, tail)


def _branch(nodes: Sequence[PciNode], prefix: str) -> Iterator[str]:
    lines = list(_lines(nodes))
    for index, (names, node, below) in enumerate(lines):
        last = index == len(lines) - 1
        yield _row(f"{prefix}{'└─ ' if last else '├─ '}{names}", node, names)
        yield from _branch(below, prefix + ("   " if last else "│  "))


def _lines(nodes: Sequence[PciNode]) -> Iterator[tuple[str, PciNode, Sequence[PciNode]]]:
    """The lines for sibling nodes, where nodes with equal links share one line.

    Each as the names, one of the nodes, and the children below it.
    """
    alike: dict[tuple[Link | None, float | None], list[PciNode]] = {}
    for node in nodes:
        if node.kind == "switch":
            yield f"switch {node.address}", node, node.children
        else:
            alike.setdefault((node.link, node.bandwidth), []).append(node)
    for group in alike.values():
        yield _names(group), group[0], ()


def _names(group: Sequence[PciNode]) -> str:
    cards = [node.label for node in group if node.kind == "nic"]
    names = [node.label for node in group if node.kind != "nic"]
    if len(cards) > 2:
        names.append(f"{len(cards)} NICs")
    else:
        names += cards
    joined = ", ".join(names)
    # Too many for a line: the first and the last name the range.
    return joined if len(joined) <= 54 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _row(text: str, node: PciNode, names: str) -> str:
    each = "each " if node.kind != "switch" and ("," in names or "(" in names or "NICs" in names) else ""
    rate = f"{node.bandwidth / 1e9:6.1f}" if node.bandwidth is not None else f"{'-':>6}"
    link = f"{each}{link_words(node.link) if node.link else '-'}"
    return f"{text:{_LINK_AT}}{link:{_RATE_AT - _LINK_AT}}{rate}{_remark(node)}"


def _remark(node: PciNode) -> str:
    if node.kind == "switch":
        below = sum(child.bandwidth for child in node.children if child.bandwidth is not None)
        return f"  shared: {below / 1e9:.1f} below" if below else ""
    link_bandwidth = node.link.bandwidth if node.link else None
    if link_bandwidth is not None and node.bandwidth is not None and node.bandwidth < link_bandwidth:
        return "  a port above is narrower"
    return ""


def link_words(link: Link) -> str:
    """The link as it runs, with what is possible where that is more, such as ``Gen3 x4 of Gen5 x4``."""
    if link.downgraded:
        return f"{format_link(link)} of {format_link_speed(link.possible_speed_gts, link.possible_width)}"
    return format_link(link)
