"""The PCIe tree from root complexes to drives, GPUs and network cards, and the bandwidth of its links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tunetool.inspect.model import Drive, Gpu, Link, PciNode
from tunetool.node.machine import pci_tree
from tunetool.node.machine.drive_health import possible_link
from tunetool.node.machine.drives import Link as NodeLink
from tunetool.node.machine.pci_tree import PciDevice
from tunetool.node.machine.pcie_links import link_bandwidth

VENDORS = {0x1D0F: "Amazon", 0x15B3: "Mellanox", 0x8086: "Intel", 0x14E4: "Broadcom", 0x1AF4: "virtio"}
"""Vendor names from pci.ids (PCI ID Project), for network cards without an interface name."""


def link_of(link: NodeLink) -> Link:
    """The link of a device in the inspection's form."""
    speed, width = possible_link(link)
    return Link(
        speed_gts=link.current_speed_gts,
        width=link.current_width,
        possible_speed_gts=speed,
        possible_width=width,
        bandwidth=link_bandwidth(link),
    )


def tree(devices: Mapping[str, PciDevice], drives: Sequence[Drive], gpus: Sequence[Gpu]) -> list[PciNode]:
    """The PCIe tree: one root for each root complex with a drive or GPU below it."""
    labels = {drive.pci_address: drive.name for drive in drives if drive.pci_address}
    labels |= {gpu.address: f"GPU {gpu.index}" for gpu in gpus}
    wanted = (pci_tree.DRIVE, pci_tree.GPU, pci_tree.NIC)
    leaves = [device for device in devices.values() if device.kind in wanted]
    roots = {leaf.root_complex for leaf in leaves if leaf.kind != pci_tree.NIC}
    root_nodes = []
    for name in sorted(roots):
        below = [leaf for leaf in leaves if leaf.root_complex == name]
        children = _children(below, 0, devices, labels)
        nodes = {leaf.numa_node for leaf in below} - {None}
        numa = nodes.pop() if len(nodes) == 1 else None
        root_nodes.append(PciNode(kind="root", address=name, label=name, numa_node=numa, children=children))
    return root_nodes


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
        beneath = _children([leaf for leaf in group if leaf.address != address], depth + 1, devices, labels)
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
    port_bandwidth = link.bandwidth if link else None
    if len(children) == 1:
        # The only child: the port's link is the child's own, or another one on the way to it.
        child = children[0]
        narrower = port_bandwidth is not None and (child.bandwidth is None or port_bandwidth < child.bandwidth)
        update: dict[str, object] = {"bandwidth": port_bandwidth} if narrower else {}
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
        bandwidth=port_bandwidth,
        children=children,
    )


def carried(nodes: Sequence[PciNode], rates: Mapping[str, float]) -> float:
    """Bytes per second that the leaves in ``rates`` (bytes per second, by address) can send to the roots together."""
    return sum(_carried(node, rates) for node in nodes)


def _carried(node: PciNode, rates: Mapping[str, float]) -> float:
    below = sum(_carried(child, rates) for child in node.children) if node.children else rates.get(node.address, 0.0)
    return below if node.bandwidth is None else min(below, node.bandwidth)


def narrow(nodes: Sequence[PciNode], rates: Mapping[str, float]) -> list[tuple[PciNode, int, float]]:
    """Switches whose link carries less than the leaves below can send.

    Each as the switch, the number of leaves below it, and the bytes per second that these can send.
    """
    switches = []
    for node in nodes:
        needed = sum(_carried(child, rates) for child in node.children)
        if node.kind == "switch" and node.bandwidth is not None and needed > node.bandwidth * 1.001:
            switches.append((node, len(leaves_below(node, rates)), needed))
        switches += narrow(node.children, rates)
    return switches


def leaves_below(node: PciNode, rates: Mapping[str, float]) -> list[str]:
    """Addresses of the leaves in ``rates`` at or below ``node``."""
    addresses = [node.address] if not node.children and node.address in rates else []
    return addresses + [address for child in node.children for address in leaves_below(child, rates)]
