"""NVMe admin commands that read, by ioctl: no process, no I/O on the media, a millisecond each."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
from typing import Iterator

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


def encode_command(opcode: int, namespace: int, address: int, length: int, dword10: int) -> bytes:
    """An admin command that reads ``length`` bytes to ``address``.

    Uses the kernel's own time-out: after a shorter one it would reset the controller while others use it.
    """
    return _COMMAND.pack(opcode, 0, 0, namespace, 0, 0, 0, address, 0, length, dword10, 0, 0, 0, 0, 0, 0, 0)


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


def namespace_id(handle: int) -> int:
    """The id of an open namespace; its kernel name may carry another number."""
    return fcntl.ioctl(handle, NVME_IOCTL_ID)


def raise_for_status(status: int) -> None:
    """The error for an NVMe status: status code type and code, as the kernel returns them."""
    if status & 0x7FF in _NOT_IMPLEMENTED:
        raise NotOffered("NVMe status %#x" % status)
    if status != 0:
        raise Silent("NVMe status %#x" % status)
