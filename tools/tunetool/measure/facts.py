"""The machine behind a record: what somebody needs to compare two records, and one hash that says if they may."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket

from tunetool.node.blockstack import BlockStack
from tunetool.node.drives import Drive
from tunetool.node.files import read_text
from tunetool.node.memory import memory_total
from tunetool.record import DriveFacts, Link, Node


def node_facts(drives: list[Drive], stack: BlockStack | None, root: str = "/") -> Node:
    """Facts of this node. ``stack`` is what was measured, None where nothing was."""
    cpu = _first(r"^model name\s*:\s*(.+)$", read_text(f"{root}/proc/cpuinfo"))
    loaded = read_text(f"{root}/proc/driver/nvidia/version")
    # "... Kernel Module  535.104.05 ..." or, the open one, "... Kernel Module for x86_64  550.54.14 ..."
    driver = _first(r"Kernel Module(?: for \S+)?\s+([0-9.]+)", loaded)
    facts = Node(
        host=socket.gethostname(),
        kernel=os.uname().release,
        machine=_machine(root),
        cpu=cpu,
        cpu_count=os.cpu_count(),
        memory_bytes=memory_total(root) or None,
        driver=driver,
        drives=[_drive(drive) for drive in drives] or None,
    )
    return facts.model_copy(update={"speed_hash": speed_hash(facts, stack)})


def speed_hash(facts: Node, stack: BlockStack | None) -> str:
    """Changes when something changes that the speed depends on: not with the host's name or a drive's number."""
    relevant = {
        "kernel": facts.kernel,
        "cpu": facts.cpu,
        "cpu_count": facts.cpu_count,
        "memory_bytes": facts.memory_bytes,
        "driver": facts.driver,
        "drives": sorted(
            json.dumps([drive.model, drive.firmware, drive.link.model_dump() if drive.link else None])
            for drive in facts.drives or []
        ),
        "medium": stack.medium if stack else None,
        "mount": sorted(stack.mount.options) if stack and stack.mount else None,
        "file_system": stack.fs_type if stack else None,
    }
    return hashlib.sha256(json.dumps(relevant, sort_keys=True).encode()).hexdigest()


def _machine(root: str) -> str | None:
    parts = [read_text(f"{root}/sys/class/dmi/id/{name}") for name in ("sys_vendor", "product_name")]
    return " ".join(part for part in parts if part) or None


def _drive(drive: Drive) -> DriveFacts:
    link = drive.link
    return DriveFacts(
        name=drive.name,
        serial=drive.serial,
        model=drive.model,
        firmware=drive.firmware or None,
        size_bytes=drive.size_bytes,
        pci_address=drive.pci_address,
        link=Link(
            current_speed_gts=link.current_speed_gts,
            current_width=link.current_width,
            max_speed_gts=link.max_speed_gts,
            max_width=link.max_width,
        ),
    )


def _first(pattern: str, text: str | None) -> str | None:
    match = re.search(pattern, text or "", re.MULTILINE)
    return match.group(1).strip() if match else None
