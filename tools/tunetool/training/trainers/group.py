"""Small collectives over gloo for ranks that only coordinate, without a GPU."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar

from tunetool.errors import TunetoolError

_T = TypeVar("_T")


class Group:
    """All ranks of the run. The methods are collective: every rank must call them in the same order."""

    def __init__(self, rank: int, world: int) -> None:
        import torch

        self._rank, self._world, self._torch = rank, world, torch
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)

    def share_port(self) -> int:
        """A TCP port that is free on the first rank's node."""
        return self.first(_free_port)

    def total(self, *counts: int | bool) -> list[int]:
        """The sum of each count over all ranks."""
        tensor = self._torch.tensor([int(count) for count in counts], dtype=self._torch.int64)
        self._torch.distributed.all_reduce(tensor)
        return [int(count) for count in tensor.tolist()]

    def first(self, ask: Callable[[], _T]) -> _T:
        """Call ``ask`` on the first rank only, and return its result, or raise its ``TunetoolError``, on all ranks."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box = [ask()]
            except TunetoolError as error:
                box = [error]
        self._torch.distributed.broadcast_object_list(box, src=0)
        if isinstance(box[0], TunetoolError):
            raise box[0]
        result: _T = box[0]
        return result

    def all(self, mine: _T) -> list[_T]:
        """The values ``mine`` of all ranks, by rank."""
        box: list[Any] = [None] * self._world
        self._torch.distributed.all_gather_object(box, mine)
        return box


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
