"""Ranks that load the same files together: each reads a share, and sends it to the others over their process group."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunetool.checkpoint.fetch import Want
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.fill import Filling, Ranks

T = TypeVar("T")

PIECE_BYTES = 64 << 20
"""What one rank reads and sends at a time."""
_PIECES_A_TURN = 4
"""Pieces of each rank between two agreements that all have read theirs; the turn before is sent meanwhile."""


class Group(Ranks):
    """The ranks of a process group of torch.distributed."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_first = self._rank == 0
        if self._rank < 0:
            raise UsageProblem(
                "`group`: this process is none of its ranks", "call `load` on the ranks of the group only"
            )

    def all_or_none(self, work: Callable[[], T]) -> T:
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # raised again below, when the other ranks know
            failure = error
        failed = self._largest(0 if failure is None else 1)[0]
        if failure is not None:
            raise failure
        if failed:
            raise CannotJudge("another rank of `group` could not load", "see the error of that rank")
        return result

    def fill(self, filling: Filling, wants: Sequence[Want], device: torch.device) -> None:
        self._check_same(wants)
        whole = [want for want in wants if want.as_bytes is not None]
        pieces = list(_pieces(whole))
        sent: list[Any] = []
        for first in range(0, len(pieces), _PIECES_A_TURN * self.size):
            turn = pieces[first : first + _PIECES_A_TURN * self.size]
            mine = list(itertools.chain.from_iterable(turn[self._rank :: self.size]))
            self.all_or_none(functools.partial(filling.read, mine, device, 1 / self.size))
            others = 0
            for number, piece in enumerate(turn):
                owner = number % self.size
                for part in piece:
                    sent.append(self._send(part.as_bytes, owner))
                    others += len(part.as_bytes) if owner != self._rank else 0
            filling.received(others)
        # Converted or reordered tensors have no bytes that could be sent as they are.
        rest = [want for want in wants if want.as_bytes is None]
        self.all_or_none(functools.partial(filling.read, rest, device))
        for work in sent:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def _send(self, memory: torch.Tensor, owner: int) -> Any:
        return dist.broadcast(memory, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)

    def _largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return [int(value) for value in tensor.tolist()]

    def _check_same(self, wants: Sequence[Want]) -> None:
        """Raises ``UsageProblem`` unless all ranks read the same tensors, since they would wait for each other for
        ever."""
        described = [(want.name, want.file, want.start, want.plain, want.as_bytes is None) for want in wants]
        digest = zlib.crc32(repr(described).encode())
        largest, smallest = self._largest(digest, -digest)
        if largest != -smallest:
            raise UsageProblem(
                "`group`: its ranks were given different files or different modules", "give all of them the same model"
            )


def _pieces(wants: Sequence[Want]) -> Iterator[list[Want]]:
    """The bytes of ``wants`` in pieces of ``PIECE_BYTES``, each of one or more runs of bytes."""
    piece: list[Want] = []
    room = PIECE_BYTES
    for want in wants:
        size = len(want.as_bytes)
        at = 0
        while at < size:
            count = min(room, size - at)
            piece.append(_bytes_of(want, at, count))
            at, room = at + count, room - count
            if not room:
                yield piece
                piece, room = [], PIECE_BYTES
    if piece:
        yield piece


def _bytes_of(want: Want, at: int, count: int) -> Want:
    """The reading of ``count`` bytes of a tensor's memory from ``at`` on."""
    plain = Plain(0, count, "uint8", (count,))
    return Want(
        want.name, want.file, want.start + want.bytes[0] + at, plain, (0,), (count,), want.as_bytes[at : at + count]
    )
