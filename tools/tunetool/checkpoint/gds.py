"""GPUDirect Storage: writes from GPU memory to the drives without a copy in host memory, by cuFile (``cuda-bindings``).

cuFile's compatibility mode, which silently copies through host memory, is disabled: where a direct transfer is not
possible, cuFile refuses the file (NVIDIA's cuFile API reference, cuFileHandleRegister).
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

from tunetool.checkpoint.os_errors import WriteFailed
from tunetool.errors import CannotJudge, UsageProblem

_HINT = "run `tunetool verify --gds require` to see what is missing, or save with gds=False"


def bindings() -> Any:
    """The module ``cuda.bindings.cufile``. Raises ``UsageProblem`` if it is not installed or cannot load libcufile."""
    try:
        from cuda.bindings import cufile  # noqa: PLC0415  GPU nodes alone have it

        cufile.get_version()
    except (ImportError, RuntimeError, OSError) as error:
        from tunetool.origin import install_hint  # noqa: PLC0415  few need the hint

        reason = " ".join(str(error).split())
        raise UsageProblem(
            f"`gds=True`, but cuFile does not load: {reason}",
            f"run {install_hint('gds')}, or save with gds=False",
        ) from None
    return cufile


@functools.cache
def library() -> Any:
    """``bindings()`` with the driver open and compatibility mode off, once per process. Raises ``CannotJudge``."""
    cufile = bindings()
    try:
        cufile.set_parameter_bool(cufile.BoolConfigParameter.PROPERTIES_ALLOW_COMPAT_MODE, False)
        cufile.driver_open()
    except Exception as error:  # a ValueError too: the bindings know no negative status, which old releases give
        raise CannotJudge(f"`cuFileDriverOpen` failed: {_one_line(error)}", _HINT) from None
    return cufile


class Registered:
    """An open file that cuFile writes to. The caller keeps ownership of ``handle``."""

    def __init__(self, handle: int, path: Path) -> None:
        self.path = path
        self._cufile = library()
        description = self._cufile.Descr()
        description.type = self._cufile.FileHandleType.OPAQUE_FD
        description.handle.fd = handle
        # The bindings do not clear this pointer, and libcufile follows it.
        description.fs_ops = 0
        try:
            self._registered = self._cufile.handle_register(description.ptr)
        except Exception as error:
            raise WriteFailed(f"`{path}`: cuFile does not take a file there: {_one_line(error)}", _HINT) from None

    def write(self, address: int, count: int, offset: int) -> None:
        """Write ``count`` bytes from ``address`` in GPU memory to ``offset`` in the file. Raises ``WriteFailed``.

        The calling thread must have that GPU as its current device. Any alignment works; cuFile copies partial pages
        of 4096 bytes through its own buffer on the GPU.
        """
        doing = f"`{self.path}`: cuFileWrite of {count} bytes at {offset}"
        try:
            done = self._cufile.write(self._registered, address, count, offset, 0)
        except Exception as error:
            raise WriteFailed(f"{doing} failed: {_one_line(error)}", "see cufile.log and `dmesg | tail`") from None
        if done != count:
            # A negative count is an errno, or a status of cuFile's own (above 5000).
            reason = os.strerror(-done) if -5000 < done < 0 else f"it returned {done}"
            raise WriteFailed(f"{doing} failed: {reason}", "see `df`, cufile.log and `dmesg | tail`")

    def close(self) -> None:
        """Deregister the file. Call this before the file is closed."""
        self._cufile.handle_deregister(self._registered)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
