"""What made a record: the tunetool, by its version, its commit and a hash of its code; and the machine, by the facts
for comparing two records and one hash that says whether they are comparable."""

from __future__ import annotations

import socket
from functools import cache
from pathlib import Path

from tunetool import __version__
from tunetool.node.common.files import read_text
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.hardware_hash import hardware, hardware_hash
from tunetool.node.machine.pci_tree import read_gpus, read_pci
from tunetool.origin import origin, source_sha256
from tunetool.record import DriveFacts, Link, Node, Tool


@cache
def made_by(whole: bool = True) -> Tool:
    """This one. ``whole``: with commit and hash, which take the time of reading the package."""
    if not whole:
        return Tool(version=__version__)
    try:
        source = source_sha256(Path(__file__).resolve().parents[1])
    except OSError:
        # Somebody replaces it at this moment.
        source = None
    return Tool(version=__version__, commit=origin().commit, source_sha256=source)


def node_facts(drives: list[Drive], stack: BlockStack | None, root: str = "/") -> Node:
    """Facts of this node. ``stack``: the measured storage, or None."""
    hardware_facts = hardware(drives, stack, root)
    return Node(
        host=socket.gethostname(),
        machine=_machine(root),
        **{name: hardware_facts[name] for name in ("kernel", "cpu", "cpu_count", "memory_bytes", "driver")},
        gpus=[gpu.model for gpu in read_gpus(read_pci(root), root)] or None,
        drives=[_drive(drive) for drive in drives] or None,
        speed_hash=hardware_hash(hardware_facts),
    )


def _machine(root: str) -> str | None:
    parts = [read_text(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


def _drive(drive: Drive) -> DriveFacts:
    return DriveFacts.from_fields_of(drive, firmware=drive.firmware or None, link=Link.from_fields_of(drive.link))
