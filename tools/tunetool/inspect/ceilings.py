"""The most that hardware allows, computed from its links: drives, what they share, GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tunetool.inspect.model import Ceiling, Drive, Gpu, Link, PciNode
from tunetool.inspect.pci import carried, narrow

_GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}


def words(link: Link | None) -> str:
    """``Gen5 x4``; a dash where the link is not visible."""
    if link is None or link.speed_gts is None or link.width is None:
        return "-"
    return spoken(link.speed_gts, link.width)


def spoken(speed_gts: float | None, width: int | None) -> str:
    """``Gen5 x4`` of a speed in GT/s."""
    generation = _GENERATIONS.get(speed_gts or 0.0)
    return f"Gen{generation} x{width}" if generation else f"{speed_gts:g} GT/s x{width}"


def ceilings(drives: Sequence[Drive], gpus: Sequence[Gpu], nodes: Sequence[PciNode]) -> list[Ceiling]:
    """Drives, shared links, one GPU, all GPUs; the lowest of those between drives and all GPUs binds."""
    data = [drive for drive in drives if drive.data]
    found = []
    if data:
        found += _drives(data, nodes)
    if gpus:
        found += _gpus(gpus, nodes)
    known = [one.value for one in found if one.value is not None and one.id != "gpu"]
    # A ceiling nobody knows may be the lowest: then nothing is said to bind.
    if not data or any(one.value is None for one in found):
        return found
    # Sums of the same links in another order differ in their last digits.
    first = next(one.id for one in found if one.id != "gpu" and (one.value or 0.0) <= min(known) * 1.001)
    return [one.model_copy(update={"binds": one.id == first}) for one in found]


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
            f"{number} drives ask {asked / 1e9:.1f} GB/s of `{node.address}` ({words(node.link)})"
            for node, number, asked in tight
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
        Ceiling(id="gpu", of=f"into one GPU: {words(slowest.link)}", value=slowest.link.bandwidth),
        Ceiling(
            id="gpus",
            of=_listed("GPU", [gpu.link for gpu in gpus]),
            value=carried(nodes, rates) if nodes else sum(rates.values()),
        ),
    ]


def _listed(noun: str, links: Sequence[Link]) -> str:
    counts = Counter(words(link) for link in links)
    return ", ".join(f"{count} {noun}{'s' if count > 1 else ''} of {text}" for text, count in counts.items())
