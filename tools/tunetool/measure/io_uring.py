"""Whether programs here may use io_uring."""

from __future__ import annotations

import ctypes
import errno
import os

_IO_URING_SETUP = 425
"""The same number on every architecture: it is younger than the common table (Linux 5.1)."""
_PARAMETERS_BYTES = 120


def no_io_uring() -> str | None:
    """Why io_uring cannot be used here; None where it can."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.syscall(_IO_URING_SETUP, 1, ctypes.create_string_buffer(_PARAMETERS_BYTES))
    if handle >= 0:
        os.close(handle)
        return None
    number = ctypes.get_errno()
    if number == errno.ENOSYS:
        return "this kernel has no io_uring"
    if number == errno.EPERM:
        return "io_uring is forbidden here: by `kernel.io_uring_disabled`, or by a container's seccomp filter"
    return f"io_uring does not work here: {os.strerror(number)}"
