"""NVMe admin commands by ioctl, without a process. Those that read do no I/O on the media and take a millisecond each.

Also the LBA formats that a drive offers, and the `nvme format` line for the wanted one. Layout: NVM Express NVM Command
Set Specification, Identify Namespace data structure (CNS 00h).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from dataclasses import dataclass, replace
from typing import Iterator, Sequence

from .drives import Drive

IDENTIFY, IDENTIFY_BYTES = 0x06, 4096
GET_LOG_PAGE = 0x02

# include/uapi/linux/nvme_ioctl.h: _IO('N', 0x40), and _IOWR('N', 0x41, struct nvme_admin_cmd)
NVME_IOCTL_ID = ord("N") << 8 | 0x40
_COMMAND = struct.Struct("=BBHIIIQQIIIIIIIIII")
NVME_IOCTL_ADMIN_CMD = 3 << 30 | _COMMAND.size << 16 | ord("N") << 8 | 0x41

# Generic: invalid opcode, invalid field. Command specific: invalid log page.
_NOT_IMPLEMENTED = (0x001, 0x002, 0x109)


class Refused(Exception):
    """This process has no permission for the command."""


class NotOffered(Exception):
    """The drive does not support the command, like some emulated and cloud drives."""


class Silent(Exception):
    """The drive does not answer. The message says how."""


def encode_command(
    opcode: int, namespace: int, address: int, length: int, dword10: int, milliseconds: int = 0
) -> bytes:
    """An admin command that reads ``length`` bytes to ``address``.

    Without ``milliseconds`` it has the kernel's own time-out: after a shorter one the kernel would reset the controller
    while others use it.
    """
    return _COMMAND.pack(opcode, 0, 0, namespace, 0, 0, 0, address, 0, length, dword10, 0, 0, 0, 0, 0, milliseconds, 0)


@contextlib.contextmanager
def opened(path: str) -> Iterator[int]:
    """An open controller or namespace for ``ask``. Turns errors of the kernel into ``Refused`` or ``Silent``."""
    try:
        handle = os.open(path, os.O_RDONLY)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM):
            raise Refused("only root may ask the drives") from None
        raise Silent(os.strerror(error.errno or 0)) from None


def ask(handle: int, opcode: int, namespace: int, length: int, dword10: int) -> bytes:
    """The answer to one command. Raises ``NotOffered``, ``Silent`` or ``OSError``."""
    answer = ctypes.create_string_buffer(length)
    command = bytearray(encode_command(opcode, namespace, ctypes.addressof(answer), length, dword10))
    status = fcntl.ioctl(handle, NVME_IOCTL_ADMIN_CMD, command, True)
    raise_for_status(status)
    return answer.raw


def order(handle: int, opcode: int, namespace: int, dword10: int, milliseconds: int) -> None:
    """Carry out a command without data. Raises as ``ask`` does."""
    command = bytearray(encode_command(opcode, namespace, 0, 0, dword10, milliseconds))
    raise_for_status(fcntl.ioctl(handle, NVME_IOCTL_ADMIN_CMD, command, True))


def namespace_id(handle: int) -> int:
    """The id of an open namespace; its kernel name may carry another number."""
    return fcntl.ioctl(handle, NVME_IOCTL_ID)


def raise_for_status(status: int) -> None:
    """The error for an NVMe status: status code type and code, as the kernel returns them."""
    if status & 0x7FF in _NOT_IMPLEMENTED:
        raise NotOffered("NVMe status %#x" % status)
    if status != 0:
        raise Silent("NVMe status %#x" % status)


_TABLE, _ENTRIES = 128, 64
_NAMESPACE = 0x00
_SMALLEST, _LARGEST = 9, 16
"""Powers of two that a block can have: 512 bytes, as the specification demands, to what no drive exceeds."""


@dataclass(frozen=True)
class LbaFormat:
    """One row of the drive's table."""

    index: int
    data_bytes: int
    metadata_bytes: int
    performance: int = 0
    """Relative performance: 0 best, 3 degraded."""


@dataclass(frozen=True)
class Formats:
    """The formats of a namespace, the present one, and its number of blocks."""

    offered: tuple[LbaFormat, ...]
    current: LbaFormat
    blocks: int

    @property
    def size_bytes(self) -> int:
        """Its capacity in bytes without metadata, even if the kernel shows none because it cannot use the format."""
        return self.blocks * self.current.data_bytes


def parse_formats(identity: bytes) -> Formats:
    """Read the formats from the Identify Namespace data structure. Raises ``ValueError``."""
    if len(identity) != IDENTIFY_BYTES:
        raise ValueError("an identity has %d bytes, not %d" % (IDENTIFY_BYTES, len(identity)))
    # Formats of both lists, the plain one and the one that needs a host to enable it.
    count = min(identity[25] + 1 + identity[43], _ENTRIES)
    offered = []
    for index in range(count):
        metadata, shift, performance = struct.unpack_from("<HBB", identity, _TABLE + 4 * index)
        if _SMALLEST <= shift <= _LARGEST:
            offered.append(LbaFormat(index, 1 << shift, metadata, performance & 3))
    # Bits 6:5 are the upper part of the index where there are more than 16 formats.
    chosen = identity[26] & 0xF | (identity[26] >> 1 & 0x30 if count > 16 else 0)
    current = next((form for form in offered if form.index == chosen), None)
    if current is None:
        raise ValueError("the format in use, %d, is none that it offers" % chosen)
    return Formats(tuple(offered), current, struct.unpack_from("<Q", identity, 0)[0])


def read_formats(name: str) -> Formats:
    """Ask the namespace ``/dev/NAME``. Raises ``Refused``, ``NotOffered``, ``Silent`` or ``ValueError``."""
    with opened("/dev/" + name) as handle:
        return parse_formats(ask(handle, IDENTIFY, namespace_id(handle), IDENTIFY_BYTES, _NAMESPACE))


def try_formats(name: str) -> Formats | None:
    """The same, or None without an answer; the owner must then look up the format."""
    try:
        return read_formats(name)
    except (Refused, NotOffered, Silent, ValueError):
        return None


def with_capacity(drive: Drive, formats: Formats | None) -> Drive:
    """The drive with the capacity of its identity, if sysfs shows none because the kernel cannot use its metadata."""
    if drive.size_bytes or formats is None:
        return drive
    current = formats.current
    return replace(
        drive, size_bytes=formats.size_bytes, lba_bytes=current.data_bytes, metadata_bytes=current.metadata_bytes
    )


def best_format(offered: Sequence[LbaFormat], data_bytes: int) -> LbaFormat | None:
    """The fastest format with blocks of ``data_bytes`` and without metadata; the first of equals."""
    fitting = [form for form in offered if form.data_bytes == data_bytes and not form.metadata_bytes]
    return min(fitting, key=lambda form: (form.performance, form.index), default=None)


def mending(path: str, formats: Formats | None, data_bytes: int) -> str:
    """The hint how to give the drive at ``path`` blocks of ``data_bytes`` without metadata, with the command line.

    Without ``--force``: nvme-cli then shows what it would erase and waits.
    """
    if formats is None:
        return (
            "`nvme id-ns -H %s` lists its formats; `nvme format %s --lbaf=N`, N being the one of %d bytes without "
            "metadata, mends it and erases the drive" % (path, path, data_bytes)
        )
    best = best_format(formats.offered, data_bytes)
    if best is None:
        return "it offers no format of %d bytes without metadata: replace it" % data_bytes
    return "`nvme format %s --lbaf=%d` mends it and erases the drive" % (path, best.index)
