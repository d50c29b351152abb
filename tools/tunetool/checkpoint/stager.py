"""The stager for ``dcp.async_save``: the training loop waits only until this rank's part has been copied."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from tunetool.checkpoint import ahead
from tunetool.checkpoint.ahead import Ahead
from tunetool.checkpoint.state_shape import PLAIN
from tunetool.checkpoint.torch_call import LentState, TorchCall
from tunetool.errors import CannotJudge, UsageProblem

BEGIN_WITHIN = 120.0
"""Seconds within which the saving thread must begin."""


class Hold:
    """The wait of the training loop for one save, which runs in a thread that torch starts."""

    def __init__(self, after: Sequence[Any] = ()) -> None:
        self.began = time.monotonic()
        self.stall_seconds = 0.0
        self.after = after
        self.ahead: Ahead | None = None
        self._released = threading.Event()
        self._entering = threading.Lock()
        self._call: TorchCall | None = None
        self._gave_up: threading.Thread | None = None
        """The thread of the training loop, once it no longer waits for the save to begin."""
        self._is_over = False

    def entered(self) -> None:
        """The saving thread must call this first. Raises ``CannotJudge`` if the training loop no longer waits for it
        and may change, or free, the tensors. Once the save is over, the caller is a later save without a stager."""
        with self._entering:
            if self._is_over:
                return
            if self._gave_up is None:
                self._call = self._call or TorchCall.current()
            elif self._gave_up is not threading.current_thread():
                raise CannotJudge("the save began too late: the training loop no longer waits for it", "save again")

    def is_mine(self) -> bool:
        """Whether the calling thread is the saving thread of this hold."""
        return self._call is not None and self._call.is_here

    def copied(self) -> None:
        """No tensor is needed any more. Raises ``CannotJudge`` if the training loop was interrupted before that: what
        was copied may be of two states."""
        with self._entering:
            if self._gave_up is not None:
                raise CannotJudge("the training loop was interrupted while it waited for the copy", "save again")
            self.release()

    def release(self) -> None:
        self.drop_ahead()
        if not self._released.is_set():
            self.stall_seconds = time.monotonic() - self.began
            self._released.set()

    def drop_ahead(self) -> None:
        if self.ahead is not None:
            self.ahead.drop()

    def end(self) -> None:
        """The save is over, also one that failed before it began (its future has the error)."""
        with self._entering:
            self._is_over = True
        self.release()

    def wait(self) -> None:
        """Wait until ``release`` is called or the save is over (its future then has the error). Raises
        ``CannotJudge`` if the thread does not begin within ``BEGIN_WITHIN`` seconds."""
        try:
            self._wait()
        except BaseException:
            with self._entering:
                if not self._released.is_set():
                    self._gave_up = threading.current_thread()
            raise

    def _wait(self) -> None:
        while not self._released.wait(0.1):
            if self._call is not None and self._call.is_over:
                return
            with self._entering:
                if self._call is None and time.monotonic() - self.began > BEGIN_WITHIN:
                    self._gave_up = threading.current_thread()
                    self.drop_ahead()
                    raise CannotJudge(
                        f"the save did not begin within {BEGIN_WITHIN:g} s", "see the future of `async_save`"
                    )

    def join(self) -> None:
        if self._call is not None and not self._call.is_here:
            self._call.wait()


def memory_of(value: Any) -> tuple[set[torch.device], dict[int, torch.UntypedStorage]]:
    """The GPUs that hold a tensor of ``value``, and the memory of its plain tensors by the address of the first byte.
    Other GPUs are not used, since that would take memory on them."""
    found: set[torch.device] = set()
    memory: dict[int, torch.UntypedStorage] = {}
    todo, seen = [value], set[int]()
    while todo:
        each = todo.pop()
        if isinstance(each, ShardedTensor):  # refuses `is_cuda`
            todo += [shard.tensor for shard in each.local_shards()]
        elif hasattr(each, "__create_chunk_list__") and not isinstance(each, DTensor):  # its own device is not theirs
            todo += [
                each.__get_tensor_shard__(MetadataIndex("", chunk.offsets)) for chunk in each.__create_chunk_list__()
            ]
        elif isinstance(each, torch.Tensor):
            if each.is_cuda:
                found.add(each.device)
            its = getattr(each, "_local_tensor", each)  # of a DTensor
            if type(its) in PLAIN:
                with contextlib.suppress(RuntimeError):  # it has none
                    storage = its.untyped_storage()
                    memory[storage.data_ptr()] = storage
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))  # a state may contain itself
            todo += each.values() if isinstance(each, dict) else each
    memory.pop(0, None)
    return found, memory


def marks(devices: Iterable[torch.device]) -> list[Any]:
    """CUDA events on the caller's current streams: all results so far must be complete before they are copied."""
    return [torch.cuda.current_stream(device).record_event(torch.cuda.Event(blocking=True)) for device in devices]


class _StateOfLoop(LentState):
    """The state itself, not a copy. Correct only for a thread, because the training loop waits for it."""

    hold: Hold

    def save_is_over(self) -> None:
        self.hold.end()

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.hold.release()
        raise UsageProblem(
            "the stager of DirectWriter supports `AsyncCheckpointerType.THREAD` only",
            "for a separate process, omit `async_stager`, or use torch's DefaultStager",
        )


class DirectStager(AsyncStager):
    """Passes the state to the saving thread without a copy, and makes the training loop wait until that thread has
    copied what this rank writes.

    So a rank copies only its own part, not the tensors of a replicated state that other ranks write.
    """

    def __init__(self, begin: Callable[[Hold], None]) -> None:
        self._begin = begin
        self._hold: Hold | None = None

    @property
    def should_synchronize_after_execute(self) -> bool:
        return True

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        devices, memory = memory_of(state_dict)
        self._hold = Hold(marks(devices))
        self._begin(self._hold)
        self._hold.ahead = ahead.begin(memory, self._hold.after)
        lent = _StateOfLoop(state_dict)
        lent.hold = self._hold
        return lent

    def synchronize_staging(self) -> None:
        if self._hold is not None:
            self._hold.wait()

    def close(self) -> None:
        """Does nothing; ``release_buffers`` returns the memory of the host buffers."""
