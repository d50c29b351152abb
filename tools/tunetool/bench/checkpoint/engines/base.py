"""What every engine of the benchmark does: save a state durably, and fill tensors from what it saved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

State = dict[str, Any]
"""Tensors by name: plain ones, or ``DTensor`` sharded over the ranks. Plain tensors on several ranks are replicas."""


@dataclass(frozen=True)
class Context:
    """Where an engine is to work. With several ranks, and for ``dcp-async-process`` always, torch.distributed is
    initialised with a backend for the CPU (``gloo``, or ``cpu:gloo,cuda:nccl``).
    """

    rank: int
    world: int
    device: str
    """``cpu`` or ``cuda``: what holds the state."""
    directory: Path
    """Below which it saves."""
    state_bytes: int = 0
    """Of this rank's part; 0: not known."""


class Pending(Protocol):
    """A save on its way."""

    def wait(self) -> None:
        """Return when files and directories are fsynced, on every rank. All ranks call it. Raises what went wrong."""


class Engine(Protocol):
    """One way to save and to restore. Made once for many saves: it keeps its buffers between them."""

    name: str
    family: str
    """torch.save, safetensors, dcp, dcp-async, consolidated, deepspeed, orbax, direct, direct-async, direct-gds."""
    remark: str
    """One line that belongs beside its figures; empty where there is nothing to say."""

    def unavailable(self, context: Context) -> str | None:
        """Why it cannot run here, in one line; None when it can. Moves no data."""

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


Factory = Callable[[], Engine]


class Done:
    """The handle of a save that was durable when ``save`` returned."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Waiting:
    """Durable once ``finish``, called once, has returned."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """See ``Pending``."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
