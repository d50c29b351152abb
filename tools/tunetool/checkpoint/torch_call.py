"""Knows whether a call of ``dcp.save`` is still running.

torch calls ``StorageWriter.finish`` when every rank's files are written. If another rank failed, torch raises without
calling the writer: the coordinator can only notice that the call has ended. So each call records its own end. A call
may also fail before it calls the writer at all; a ``LentState`` then learns that it is over.

Another thread must not look for the call on this thread's stack (``sys._current_frames``, ``f_back``): Python 3.11
makes a frame object on demand, which can start a garbage collection, and whatever Python code runs in that lets the
other thread return from the frame. The object then describes memory that is already in use for something else, and
the process crashes later, anywhere.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint import state_dict_saver

_FUNCTION = "_save_state_dict"
"""The function that ``dcp.save`` always runs, also in the thread or process of ``dcp.async_save`` (torch 2.5 to
2.13)."""
_SAVE = "save"


class TorchCall:
    """A call of ``dcp.save`` by the thread that creates this object.

    ``recorded``: its end is reported by ``end``; otherwise it is over when the thread has ended.
    """

    def __init__(self, *, recorded: bool) -> None:
        self._thread = threading.current_thread()
        self._recorded = recorded
        self._ended = threading.Event()

    @classmethod
    def current(cls) -> TorchCall:
        """The innermost call that the current thread is in. If something else than ``dcp.save`` calls the writer, only
        the end of the thread counts."""
        return _this_thread.call or cls(recorded=False)

    @property
    def is_here(self) -> bool:
        """Whether the current thread is the one that made the call."""
        return self._thread is threading.current_thread()

    @property
    def is_over(self) -> bool:
        """Whether the call has returned or raised."""
        return self._ended.is_set() if self._recorded else not self._thread.is_alive()

    def end(self) -> None:
        self._ended.set()

    def wait(self) -> None:
        """Wait until the call is over."""
        if self._recorded:
            self._ended.wait()
        else:
            self._thread.join()


class _ThisThread(threading.local):
    call: TorchCall | None = None


_this_thread = _ThisThread()


@contextlib.contextmanager
def taking_part(call: TorchCall) -> Iterator[None]:
    """This thread works for the call of another thread meanwhile."""
    outer, _this_thread.call = _this_thread.call, call
    try:
        yield
    finally:
        _this_thread.call = outer


class LentState(dict[str, Any]):
    """A state that learns when the call of ``dcp.save`` that got it, in the thread of ``dcp.async_save``, is over."""

    def save_is_over(self) -> None:
        raise NotImplementedError


def _tell_end(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return save(*args, **kwargs)
        finally:
            state = args[0] if args else kwargs.get("state_dict")
            if isinstance(state, LentState):
                state.save_is_over()

    return telling


def _record_end(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        outer, call = _this_thread.call, TorchCall(recorded=True)
        _this_thread.call = call
        try:
            return save(*args, **kwargs)
        finally:
            call.end()
            _this_thread.call = outer

    return recorded


# torch offers no hook for a save that fails. Its own `save` looks this function up in its module at each call, and the
# thread of `async_save` looks up `save` (torch 2.5 to 2.13).
if hasattr(state_dict_saver, _FUNCTION):
    setattr(state_dict_saver, _FUNCTION, _record_end(getattr(state_dict_saver, _FUNCTION)))
if hasattr(state_dict_saver, _SAVE):
    setattr(state_dict_saver, _SAVE, _tell_end(getattr(state_dict_saver, _SAVE)))
