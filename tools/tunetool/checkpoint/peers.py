"""Which node keeps the replica of which: another one, in another failure domain wherever that is possible. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from tunetool.errors import UsageProblem

Domains = Mapping[str, str] | Callable[[str], str]
"""The failure domain of a node, such as its rack or switch."""


def peer_of(nodes: Iterable[str], node: str, domain: Domains | None = None) -> str | None:
    """The node that keeps the replica of ``node``; None for a job on one node.

    ``nodes``: the host names of the job, in any order, each as often as it comes: such as one for each rank. Every node
    keeps the replica of exactly one other. As many as possible are in another ``domain`` than their peer: all of them,
    unless one domain has more than half of the nodes. Ranks that give the same names and domains get the same answer.

    Raises ``UsageProblem`` if ``node`` is not among the nodes, or a node has no domain.
    """
    known = set(nodes)
    if node not in known:
        raise UsageProblem(f"`{node}` is not among the {len(known)} nodes of the job", "name the hosts of all ranks")
    domains = {each: _domain_of(each, domain) for each in known}
    sizes = Counter(domains.values())
    # A domain's nodes stand side by side, those of the largest first: a step of its size leads out of each domain.
    order = sorted(known, key=lambda each: (-sizes[domains[each]], domains[each], each))
    if len(order) == 1:
        return None
    largest = max(sizes.values())
    step = largest if largest < len(order) else 1
    return order[(order.index(node) + step) % len(order)]


def _domain_of(node: str, domain: Domains | None) -> str:
    if domain is None:
        return ""
    found = domain(node) if callable(domain) else domain.get(node)
    if found is None:
        raise UsageProblem(f"`{node}` has no failure domain", "give the rack or the switch of every node, or of none")
    return found


def switch_of(environment: Mapping[str, str]) -> str:
    """The switches above this node, as Slurm names them in `SLURM_TOPOLOGY_ADDR`; empty where it names none.

    It is of this node alone: gather it from all ranks, together with their host names, for ``peer_of``.
    """
    address, pattern = environment.get("SLURM_TOPOLOGY_ADDR", ""), environment.get("SLURM_TOPOLOGY_ADDR_PATTERN", "")
    parts = list(zip(address.split("."), pattern.split("."), strict=False))
    return ".".join(name for name, kind in parts if kind != "node")
