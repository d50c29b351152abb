"""How an NVMe drive loses its contents for good: what it offers, as it says itself, and the commands.

Layouts: NVM Express Base Specification, Identify Controller (CNS 01h), Format NVM, Sanitize, Sanitize Status (log 81h);
NVM Command Set Specification, Identify Namespace (CNS 00h).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Sequence

from .nvme_admin import GET_LOG_PAGE, IDENTIFY, IDENTIFY_BYTES, NotOffered, Silent, ask, namespace_id, opened, order

_FORMAT, _SANITIZE = 0x80, 0x84
_NAMESPACE, _CONTROLLER, _ACTIVE, _ALLOCATED = 0x00, 0x01, 0x02, 0x10
_STATUS_LOG, _LOG_BYTES, _ALL_NAMESPACES = 0x81, 512, 0xFFFFFFFF
_CRYPTO_FORMAT, _CRYPTO_SANITIZE = 2, 4
"""Secure Erase Setting, and sanitize action: both change the key that the medium is encrypted with."""
_FORMAT_MILLISECONDS = 600_000
_RUNS, _FAILED, _DONE = 2, 3, (1, 4)


FORMAT, SANITIZE = "Format NVM", "Sanitize"
"""The ways to a cryptographic erase."""


@dataclass(frozen=True)
class Controller:
    """What Identify Controller says about a cryptographic erase."""

    serial: str
    format_crypto: bool
    format_reaches_all: bool
    """Format NVM, or its secure erase, is of all namespaces."""
    sanitize_crypto: bool
    manages_namespaces: bool


@dataclass(frozen=True)
class SanitizeStatus:
    """The state of the last sanitize operation."""

    runs: bool
    failed: bool
    done: bool
    """It completed, with or without deallocation."""


def parse_controller(identity: bytes) -> Controller:
    """Of the 4096 bytes of Identify Controller. Raises ``ValueError``."""
    formats = _whole(identity)[524]
    commands, sanitize = struct.unpack_from("<H", identity, 256)[0], struct.unpack_from("<I", identity, 328)[0]
    return Controller(
        # As sysfs shows it.
        serial=identity[4:24].split(b"\0")[0].decode("utf-8", "replace").strip(),
        format_crypto=bool(commands & 1 << 1 and formats & 1 << 2),
        format_reaches_all=bool(formats & 3),
        sanitize_crypto=bool(sanitize & 1),
        manages_namespaces=bool(commands & 1 << 3),
    )


def parse_reads_as(namespace: bytes) -> int | None:
    """What discarded blocks read as, by DLFEAT of Identify Namespace. Raises ``ValueError``."""
    return {1: 0x00, 2: 0xFF}.get(_whole(namespace)[33] & 7)


def parse_namespaces(table: bytes) -> tuple[int, ...]:
    """The ids of a namespace list, which ends with a zero. Raises ``ValueError``."""
    ids = struct.unpack("<1024I", _whole(table))
    return ids[: ids.index(0)] if 0 in ids else ids


def parse_sanitize(log: bytes) -> SanitizeStatus:
    """Of the log. Raises ``ValueError``."""
    if len(log) < 4:
        raise ValueError("a sanitize status has %d bytes" % len(log))
    state = struct.unpack_from("<H", log, 2)[0] & 7
    return SanitizeStatus(state == _RUNS, state == _FAILED, state in _DONE)


def format_dword10(namespace: bytes, secure_erase: int = _CRYPTO_FORMAT) -> int:
    """Format NVM with the format that the namespace has: block size, metadata and protection stay."""
    used, protection = _whole(namespace)[26], namespace[29]
    # Reserved in a drive with up to 16 formats.
    upper = used >> 5 & 3 if namespace[25] + 1 + namespace[43] > 16 else 0
    kept = (used & 0x1F) | (protection & 7) << 5 | (protection >> 3 & 1) << 8
    return kept | secure_erase << 9 | upper << 12


def choose_crypto(controller: Controller, others: Sequence[int]) -> str:
    """The way that erases this namespace by throwing its key away; ``others``: further namespaces of the medium.

    Raises ``NotOffered``.
    """
    offered = [FORMAT] * controller.format_crypto + [SANITIZE] * controller.sanitize_crypto
    if not offered:
        raise NotOffered("its controller offers cryptographic erase neither by Format NVM nor by Sanitize")
    alone = [way for way in offered if not others or (way == FORMAT and not controller.format_reaches_all)]
    if not alone:
        raise NotOffered("its other namespaces would be erased too: %s" % ", ".join(map(str, others)))
    return alone[0]


def ask_crypto(controller: str, name: str) -> str:
    """Ask ``/dev/nvmeX`` for the way for its namespace ``/dev/NAME``. Raises ``Refused``, ``NotOffered``, ``Silent`` or
    ``ValueError``."""
    with opened("/dev/" + name) as handle:
        own = namespace_id(handle)
    with opened("/dev/" + controller) as handle:
        said = parse_controller(ask(handle, IDENTIFY, 0, IDENTIFY_BYTES, _CONTROLLER))
        # Those that are attached to no controller hold data as well.
        listed = _ALLOCATED if said.manages_namespaces else _ACTIVE
        ids = parse_namespaces(ask(handle, IDENTIFY, 0, IDENTIFY_BYTES, listed))
    return choose_crypto(said, [each for each in ids if each != own])


def ask_reads_as(name: str) -> int | None:
    """What discarded blocks of ``/dev/NAME`` read as. Raises as ``ask_crypto`` does."""
    with opened("/dev/" + name) as handle:
        return parse_reads_as(ask(handle, IDENTIFY, namespace_id(handle), IDENTIFY_BYTES, _NAMESPACE))


def format_crypto(name: str) -> None:
    """Give the namespace ``/dev/NAME`` another key; returns when that is done. Raises as ``ask_crypto`` does."""
    with opened("/dev/" + name) as handle:
        own = namespace_id(handle)
        identity = ask(handle, IDENTIFY, own, IDENTIFY_BYTES, _NAMESPACE)
        order(handle, _FORMAT, own, format_dword10(identity), _FORMAT_MILLISECONDS)


def sanitize_crypto(controller: str, serial: str) -> None:
    """Begin to give all of the medium another key, if the controller is that drive's. Raises as ``ask_crypto`` does."""
    with opened("/dev/" + controller) as handle:
        own = parse_controller(ask(handle, IDENTIFY, 0, IDENTIFY_BYTES, _CONTROLLER)).serial
        if not own or not (serial == own or serial.startswith((own + ":", own + "@"))):
            raise Silent("`%s` is the controller of `%s` by now" % (controller, own))
        order(handle, _SANITIZE, 0, _CRYPTO_SANITIZE, 0)


def sanitize_status(controller: str) -> SanitizeStatus:
    """Whether that is done. Raises as ``ask_crypto`` does."""
    with opened("/dev/" + controller) as handle:
        dword10 = (_LOG_BYTES // 4 - 1) << 16 | _STATUS_LOG
        return parse_sanitize(ask(handle, GET_LOG_PAGE, _ALL_NAMESPACES, _LOG_BYTES, dword10))


def _whole(structure: bytes) -> bytes:
    if len(structure) != IDENTIFY_BYTES:
        raise ValueError("an identity has %d bytes, not %d" % (len(structure), IDENTIFY_BYTES))
    return structure
