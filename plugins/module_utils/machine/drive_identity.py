"""What an NVMe namespace is known by: its serial number, and more where several namespaces of the machine share one.

Some clouds give all local drives one serial (Google's Local SSD: `nvme_card`), and clones of a drive have one too.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from dataclasses import dataclass

from ..common.files import read_int, read_text

PCI_ADDRESS = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
NAMESPACE = re.compile(r"^nvme\d+n\d+$")
_OWN_ID = re.compile(r"^(?:eui|uuid)\.[0-9a-f-]{16,36}$")
_IDENTITY = re.compile(
    r"^(?P<serial>.*)(?::(?P<id>(?:eui|uuid)\.[0-9a-f-]{16,36})|@(?P<address>[0-9a-f:.]+)-n(?P<number>\d+))$"
)


@dataclass(frozen=True)
class _Namespace:
    name: str
    serial: str
    own_id: str
    """The NGUID, EUI-64 or UUID that the drive gives this namespace; empty for none."""
    subsystem: str
    """NQN of the NVM subsystem: namespaces of two subsystems are never one."""
    address: str
    number: int
    """Namespace id: within a subsystem, of one namespace."""


def identities(root: str = "/") -> dict[str, str]:
    """What each namespace is known by, by kernel name: its serial, if no other has that, or it has none.

    Otherwise the serial with the namespace's own identifier (`SERIAL:eui.0025…`), else with the PCI address and the
    namespace's id (`SERIAL@0000:00:05.0-n3`). Those that may be two paths to one namespace keep one identity.
    """
    try:
        names = sorted(name for name in os.listdir(os.path.join(root, "sys/block")) if NAMESPACE.match(name))
    except OSError:
        return {}
    namespaces = [_read(root, name) for name in names]
    counts = Counter(each.serial for each in namespaces)
    return {
        each.name: each.serial if not each.serial or counts[each.serial] == 1 else _own(each, namespaces)
        for each in namespaces
    }


def _own(namespace: _Namespace, others: list[_Namespace]) -> str:
    if namespace.own_id:
        return "%s:%s" % (namespace.serial, namespace.own_id)
    if not PCI_ADDRESS.match(namespace.address) or any(_may_be_one(namespace, other) for other in others):
        return namespace.serial
    return "%s@%s-n%d" % (namespace.serial, namespace.address, namespace.number)


def _may_be_one(namespace: _Namespace, other: _Namespace) -> bool:
    """Whether two devices may be two paths to one namespace: dual ports without the kernel's own multipath."""
    return (
        namespace.name != other.name
        and namespace.serial == other.serial
        and not other.own_id
        and namespace.number == other.number
        and not (namespace.subsystem and other.subsystem and namespace.subsystem != other.subsystem)
    )


def _read(root: str, name: str) -> _Namespace:
    base = os.path.join(root, "sys/block", name)
    controller = controller_of(base)
    number = read_int(os.path.join(base, "nsid"))
    return _Namespace(
        name=name,
        serial=read_text(os.path.join(controller, "serial")) or "",
        own_id=_own_id(base),
        subsystem=read_text(os.path.join(controller, "subsysnqn")) or "",
        address=read_text(os.path.join(controller, "address")) or "",
        number=int(name.rpartition("n")[2]) if number is None else number,
    )


def _own_id(base: str) -> str:
    # Without one the kernel makes a `nvme.` identifier of vendor, serial, model and id, which others may have too.
    wwid = read_text(os.path.join(base, "wwid")) or ""
    if wwid:
        return wwid if _OWN_ID.match(wwid) else ""
    for file in ("nguid", "eui"):
        digits = re.sub(r"[^0-9a-f]", "", (read_text(os.path.join(base, file)) or "").lower())
        if digits.strip("0"):
            return "eui." + digits
    return ""


def controller_of(base: str) -> str:
    """The controller of a namespace. Under native multipath the namespace hangs off a subsystem instead."""
    device = os.path.join(base, "device")
    if os.path.exists(os.path.join(device, "transport")):
        return device
    paths = sorted(glob.glob(os.path.join(device, "nvme[0-9]*")))
    paths = [path for path in paths if os.path.exists(os.path.join(path, "transport"))]
    return paths[0] if paths else device


@dataclass(frozen=True)
class Parts:
    """An identity taken apart; what is not in it is empty."""

    serial: str
    own_id: str = ""
    address: str = ""
    number: str = ""


def parts(identity: str) -> Parts:
    """The parts of an identity. A serial has at most 20 characters, so none looks like a longer identity."""
    match = _IDENTITY.match(identity)
    if not match or len(identity) <= 20:
        return Parts(identity)
    return Parts(match["serial"], match["id"] or "", match["address"] or "", match["number"] or "")
