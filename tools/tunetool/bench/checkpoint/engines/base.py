"""The interface of every engine of the benchmark: save a state durably, and fill tensors from the files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

State = dict[str, Any]
"""Tensors by name: plain ones, or ``DTensor`` sharded over the ranks. Plain tensors on several ranks are replicas."""


@dataclass(frozen=True)
class Context:
    """The environment of an engine. With several ranks, and for ``dcp-async-process`` always, torch.distributed is
    initialised with a backend for the CPU (``gloo``, or ``cpu:gloo,cuda:nccl``).
    """

    rank: int
    world: int
    device: str
    """``cpu`` or ``cuda``: the device that holds the state."""
    directory: Path
    """Directory below which the engine saves."""
    state_bytes: int = 0
    """Bytes of this rank's part; 0: not known."""


class Pending(Protocol):
    """A save in progress."""

    def wait(self) -> None:
        """Return when files and directories are fsynced, on every rank. All ranks call it. Raises the error of the
        save."""


class Engine(Protocol):
    """One way to save and to restore. Made once for many saves: it keeps its buffers between them."""

    name: str
    remark: str
    """One line to print beside the engine's figures; empty if there is none."""

    def unavailable(self, context: Context) -> str | None:
        """Why the engine cannot run here, in one line; None if it can. Moves no data. Asked where its library is
        there (``Entry.missing``)."""

    def save(self, state: State, directory: Path) -> Pending:
        """Save into ``directory``, which is made where it is missing. All ranks call it.

        Returns as soon as the training loop may change the state; a synchronous engine's ``Pending`` is done by then. A
        checkpoint of the same engine there is replaced. One save at a time: ``wait`` before the next.
        """

    def load(self, like: State, directory: Path) -> State:
        """Fill ``like``, shaped and placed as the state was, from ``directory``, and return it. All ranks call it."""

    def close(self) -> None:
        """Release buffers, threads and processes."""


class Plain:
    """An engine that runs everywhere and keeps nothing between saves."""

    remark = ""

    def unavailable(self, context: Context) -> str | None:
        """Never."""
        del context
        return None

    def close(self) -> None:
        """Nothing is kept."""


class Done:
    """The handle of a save that was durable when ``save`` returned."""

    def wait(self) -> None:
        """Return at once."""


class Waiting:
    """A save that is durable after one call of ``finish``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """See ``Pending``."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
