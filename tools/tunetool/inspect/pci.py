"""The PCIe tree between root complexes and drives, GPUs and network cards, and what its links carry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.inspect.model import Drive, Gpu, Link, PciNode
from tunetool.node.machine import pci_tree
from tunetool.node.machine.drive_health import possible_link
from tunetool.node.machine.drives import Link as NodeLink
from tunetool.node.machine.pci_tree import PciDevice
from tunetool.node.machine.pcie_links import link_bandwidth

VENDORS = {0x1D0F: "Amazon", 0x15B3: "Mellanox", 0x8086: "Intel", 0x14E4: "Broadcom", 0x1AF4: "virtio"}
"""pci.ids of the PCI ID Project: of cards that have no interface to be named by."""


def link_of(link: NodeLink) -> Link:
    """As the screen shows it."""
    speed, width = possible_link(link)
    return Link(
        speed_gts=link.current_speed_gts,
        width=link.current_width,
        possible_speed_gts=speed,
        possible_width=width,
        bandwidth=link_bandwidth(link),
    )


def tree(devices: Mapping[str, PciDevice], drives: Sequence[Drive], gpus: Sequence[Gpu]) -> list[PciNode]:
    """One root for each root complex that has a drive or GPU beneath."""
    labels = {drive.pci_address: drive.name for drive in drives if drive.pci_address}
    labels |= {gpu.address: f"GPU {gpu.index}" for gpu in gpus}
    wanted = (pci_tree.DRIVE, pci_tree.GPU, pci_tree.NIC)
    leaves = [device for device in devices.values() if device.kind in wanted]
    roots = {leaf.root_complex for leaf in leaves if leaf.kind != pci_tree.NIC}
    found = []
    for name in sorted(roots):
        below = [leaf for leaf in leaves if leaf.root_complex == name]
        children = _children(below, 0, devices, labels)
        nodes = {leaf.numa_node for leaf in below} - {None}
        numa = nodes.pop() if len(nodes) == 1 else None
        found.append(PciNode(kind="root", address=name, label=name, numa_node=numa, children=children))
    return found


def _children(
    leaves: Sequence[PciDevice], depth: int, devices: Mapping[str, PciDevice], labels: Mapping[str, str]
) -> list[PciNode]:
    groups: dict[str, list[PciDevice]] = {}
    for leaf in leaves:
        groups.setdefault(leaf.ports[depth] if len(leaf.ports) > depth else leaf.address, []).append(leaf)
    nodes = []
    for address, group in sorted(groups.items()):
        if len(group) == 1 and len(group[0].ports) <= depth:
            nodes.append(_leaf(group[0], labels))
            continue
        beneath = _children([one for one in group if one.address != address], depth + 1, devices, labels)
        nodes.append(_port(address, devices.get(address), beneath))
    return nodes


def _leaf(device: PciDevice, labels: Mapping[str, str]) -> PciNode:
    kind = {pci_tree.DRIVE: "drive", pci_tree.GPU: "gpu"}.get(device.kind, "nic")
    plain = {"drive": "NVMe controller without a namespace", "gpu": "GPU"}.get(kind, "")
    named = "NIC " + (device.interfaces[0] if device.interfaces else VENDORS.get(device.vendor or 0, "")).strip()
    link = link_of(device.link)
    return PciNode.model_validate(
        {
            "kind": kind,
            "address": device.address,
            "label": labels.get(device.address) or plain or named.strip(),
            "numa_node": device.numa_node,
            "link": link,
            "bandwidth": link.bandwidth,
        }
    )


def _port(address: str, port: PciDevice | None, children: list[PciNode]) -> PciNode:
    link = link_of(port.link) if port else None
    own = link.bandwidth if link else None
    if len(children) == 1:
        # One thing beneath: the port's link is that thing's, or another on the way to it.
        child = children[0]
        narrower = own is not None and (child.bandwidth is None or own < child.bandwidth)
        update: dict[str, object] = {"bandwidth": own} if narrower else {}
        if child.kind == "switch":
            update["address"] = address
            update |= {"link": link} if narrower else {}
        return child.model_copy(update=update)
    nodes = {child.numa_node for child in children} - {None}
    return PciNode(
        kind="switch",
        address=address,
        label="switch",
        numa_node=nodes.pop() if len(nodes) == 1 else None,
        link=link,
        bandwidth=own,
        children=children,
    )


def carried(nodes: Sequence[PciNode], rates: Mapping[str, float]) -> float:
    """What the leaves named in ``rates`` (bytes per second, by address) can send to the top together."""
    return sum(_carried(node, rates) for node in nodes)


def _carried(node: PciNode, rates: Mapping[str, float]) -> float:
    below = sum(_carried(child, rates) for child in node.children) if node.children else rates.get(node.address, 0.0)
    return below if node.bandwidth is None else min(below, node.bandwidth)


def narrow(nodes: Sequence[PciNode], rates: Mapping[str, float]) -> list[tuple[PciNode, int, float]]:
    """Switches whose link carries less than the leaves beneath ask for: the switch, how many, what they ask for."""
    found = []
    for node in nodes:
        asked = sum(_carried(child, rates) for child in node.children)
        if node.kind == "switch" and node.bandwidth is not None and asked > node.bandwidth * 1.001:
            found.append((node, len(leaves_below(node, rates)), asked))
        found += narrow(node.children, rates)
    return found


def leaves_below(node: PciNode, rates: Mapping[str, float]) -> list[str]:
    """Addresses of the leaves named in ``rates`` under a place."""
    own = [node.address] if not node.children and node.address in rates else []
    return own + [address for child in node.children for address in leaves_below(child, rates)]
