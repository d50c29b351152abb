"""Detects whether a call of ``dcp.save`` is still running.

torch calls ``StorageWriter.finish`` when every rank's files are written. If another rank failed, torch raises without
calling the writer: the coordinator can only notice that the call has ended.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_MODULE, _FUNCTION = "torch.distributed.checkpoint.state_dict_saver", "_save_state_dict"
"""The function that ``dcp.save`` always runs, also in the thread or process of ``dcp.async_save`` (torch 2.5 to
2.13)."""


class TorchCall:
    """The call of ``dcp.save`` in which the current thread creates this object."""

    def __init__(self) -> None:
        self._thread = threading.current_thread()
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_save(frame):
            frame = frame.f_back
        # Its id and code, not the frame itself, which would keep the whole state in memory.
        self._frame = None if frame is None else (id(frame), frame.f_code)

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the one that made the call."""
        return self._thread is threading.current_thread()

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised.

        If ``dcp.save`` was not among the callers, only the end of the thread counts.
        """
        if not self._thread.is_alive():
            return True
        if self._frame is None:
            return False
        frame = sys._current_frames().get(self._thread.ident or 0)
        while frame is not None:
            if (id(frame), frame.f_code) == self._frame:
                return False
            frame = frame.f_back
        return True


def _is_save(frame: FrameType) -> bool:
    return frame.f_code.co_name == _FUNCTION and frame.f_globals.get("__name__") == _MODULE
