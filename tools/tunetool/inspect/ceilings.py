"""Upper limits of bandwidth, computed from PCIe links: of the drives, of the links that they share, of the GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tunetool.inspect.model import Ceiling, Drive, Gpu, Link, PciNode
from tunetool.inspect.pci import carried, narrow

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def format_link(link: Link | None) -> str:
    """The link as it runs now, such as ``Gen5 x4``; a dash where it is not visible."""
    if link is None or link.speed_gts is None or link.width is None:
        return "-"
    return format_link_speed(link.speed_gts, link.width)


def format_link_speed(speed_gts: float | None, width: int | None) -> str:
    """``Gen5 x4`` for a speed in GT/s and a width in lanes."""
    generation = _GENERATIONS.get(speed_gts or 0.0)
    return f"Gen{generation} x{width}" if generation else f"{speed_gts:g} GT/s x{width}"


def ceilings(drives: Sequence[Drive], gpus: Sequence[Gpu], nodes: Sequence[PciNode]) -> list[Ceiling]:
    """The ceilings of drives, shared links, one GPU and all GPUs, in bytes per second.

    The lowest of them binds, except that of one GPU; none binds where one of them is unknown.
    """
    data = [drive for drive in drives if drive.data]
    result = []
    if data:
        result += _drives(data, nodes)
    if gpus:
        result += _gpus(gpus, nodes)
    known = [ceiling.value for ceiling in result if ceiling.value is not None and ceiling.id != "gpu"]
    # An unknown ceiling may be the lowest one, so that nothing can be marked as binding.
    if not data or any(ceiling.value is None for ceiling in result):
        return result
    # Sums of the same links in a different order differ in their last digits.
    first = next(
        ceiling.id for ceiling in result if ceiling.id != "gpu" and (ceiling.value or 0.0) <= min(known) * 1.001
    )
    return [ceiling.model_copy(update={"binds": ceiling.id == first}) for ceiling in result]


def _drives(data: Sequence[Drive], nodes: Sequence[PciNode]) -> list[Ceiling]:
    rates = {drive.pci_address: drive.link.bandwidth for drive in data if drive.pci_address and drive.link.bandwidth}
    if len(rates) < len(data):
        of = f"{len(data)} drives, of which {len(data) - len(rates)} show no link"
        return [Ceiling(id="drives", of=of)]
    total = sum(rates.values())
    drives = Ceiling(id="drives", of=_listed("drive", [drive.link for drive in data]), value=total)
    through = carried(nodes, rates) if nodes else total
    tight = narrow(nodes, rates)
    if tight:
        of = "; ".join(
            f"{count} drives need {needed / 1e9:.1f} GB/s of `{node.address}` ({format_link(node.link)})"
            for node, count, needed in tight
        )
    else:
        of = "no shared link is narrower than the drives beneath it"
    return [drives, Ceiling(id="links", of=of, value=through)]


def _gpus(gpus: Sequence[Gpu], nodes: Sequence[PciNode]) -> list[Ceiling]:
    rates = {gpu.address: gpu.link.bandwidth for gpu in gpus if gpu.link.bandwidth}
    if len(rates) < len(gpus):
        return [Ceiling(id="gpus", of=f"{len(gpus)} GPUs, of which {len(gpus) - len(rates)} show no link")]
    slowest = min(gpus, key=lambda gpu: gpu.link.bandwidth or 0.0)
    return [
        Ceiling(id="gpu", of=f"into one GPU: {format_link(slowest.link)}", value=slowest.link.bandwidth),
        Ceiling(
            id="gpus",
            of=_listed("GPU", [gpu.link for gpu in gpus]),
            value=carried(nodes, rates) if nodes else sum(rates.values()),
        ),
    ]


def _listed(noun: str, links: Sequence[Link]) -> str:
    counts = Counter(format_link(link) for link in links)
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''} of {text}" for text, count in counts.items())
