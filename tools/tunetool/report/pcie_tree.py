"""The PCIe tree as lines: places with what their links carry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tunetool.inspect.ceilings import spoken, words
from tunetool.inspect.model import Inspection, Link, PciNode

_LINK_AT, _RATE_AT = 66, 84
"""Where the link and the rate of a line of the tree stand."""


def pcie(shown: Inspection) -> Iterator[str]:
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
    """A root complex beside what hangs on it, if that is one line."""
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
    """What to write of neighbours: alike ones share a line. Names, one of them, what lies beneath."""
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
    # Too many for a line: the first and the last say which.
    return joined if len(joined) <= 54 else f"{names[0]} ... {names[-1]} ({len(names)})"


def _row(left: str, node: PciNode, names: str) -> str:
    each = "each " if node.kind != "switch" and ("," in names or "(" in names or "NICs" in names) else ""
    rate = f"{node.bandwidth / 1e9:6.1f}" if node.bandwidth is not None else f"{'-':>6}"
    link = f"{each}{link_words(node.link) if node.link else '-'}"
    return f"{left:{_LINK_AT}}{link:{_RATE_AT - _LINK_AT}}{rate}{_remark(node)}"


def _remark(node: PciNode) -> str:
    if node.kind == "switch":
        below = sum(child.bandwidth for child in node.children if child.bandwidth is not None)
        return f"  shared: {below / 1e9:.1f} beneath" if below else ""
    own = node.link.bandwidth if node.link else None
    if own is not None and node.bandwidth is not None and node.bandwidth < own:
        return "  a port above is narrower"
    return ""


def link_words(link: Link) -> str:
    """Its speed and width, and what it could be where that is more."""
    if link.downgraded:
        return f"{words(link)} of {spoken(link.possible_speed_gts, link.possible_width)}"
    return words(link)
