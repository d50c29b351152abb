"""Ranks that load the same files together: each reads a share, and sends it to the others over their process group
while it reads on."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tunetool.checkpoint.fetch import Fetch, FileRead, Want
from tunetool.checkpoint.host_buffers import within_gpu
from tunetool.checkpoint.raw_bytes import Plain
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading.device_memory import taking
from tunetool.loading.fill import Filling, Ranks, size_of
from tunetool.loading.peers import Gone, Peers

T = TypeVar("T")

PIECE_BYTES = 128 << 20
"""What one rank sends at a time, at most. Small models are sent in more and smaller pieces."""
_LEAST_PIECE = 8 << 20
_PIECES_EACH = 16
"""Of each rank, at least, so that sending begins early and ends soon after the last read."""
PACKED_BYTES = 16 << 20
"""Of a piece, smaller tensors are sent in one memory: each sending takes as long as that of a megabyte."""
_PIECES_A_CHECK = 4
"""Pieces of each rank between two checks whether all ranks can still read."""
_CHECKS_AHEAD = 2
"""Checks that are under way while pieces are sent: nobody waits for one that has just begun."""


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
        self._peers = Peers(group, device)
        self._check_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        """Of the checks, which wait for no piece of this rank there."""

    def __exit__(self, *_: object) -> None:
        self._peers.close()

    def all_or_none(self, work: Callable[[], T]) -> T:
        failure: BaseException | None = None
        try:
            result = work()
        except BaseException as error:  # raised again below, when the other ranks know
            if isinstance(error, Gone):
                raise
            failure = error
        failed = self._largest(0 if failure is None else 1)[0]
        if failure is not None:
            try:
                raise failure
            finally:
                # Its traceback has this frame: together they would keep the tensors of a failed load.
                del failure
        if failed:
            raise CannotJudge("another rank of `group` could not load", "see the error of that rank")
        return result

    def fill(self, filling: Filling, wants: Sequence[Want], device: torch.device) -> None:
        # Copies by address go to the stream of the thread's current GPU.
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._fill(filling, wants, device)

    def _fill(self, filling: Filling, wants: Sequence[Want], device: torch.device) -> None:
        if not self._agree(wants, self._peers.sharing_pays(filling.files.in_memory)):
            self.all_or_none(functools.partial(filling.read, wants, device))
            return
        filling.is_shared_by(self.size)
        pieces = self._pieces(wants)

        def make() -> torch.Tensor:
            count = max((sum(size_of(part) for part in piece if _is_packed(part)) for piece in pieces), default=0)
            with taking(device, count, "what ranks send each other"):
                return torch.empty(count, dtype=torch.uint8, device=device)

        pack = self.all_or_none(make)
        self.all_or_none(functools.partial(self._share, filling, pieces, device, pack))
        # Converted or reordered tensors have no bytes that could be sent as they are.
        rest = [want for want in wants if not want.by_address]
        if rest:
            self.all_or_none(functools.partial(filling.read, rest, device))

    def _share(
        self, filling: Filling, pieces: Sequence[Sequence[Want]], device: torch.device, pack: torch.Tensor
    ) -> None:
        """Read every n-th piece, and send all pieces in their order.

        A rank that fails sends on what its memory holds until all know it: the others would wait for it for ever.
        """
        sent: list[Any] = []
        checks: list[tuple[Any, torch.Tensor]] = []
        failure: BaseException | None = None
        with contextlib.ExitStack() as held:

            def begin() -> tuple[_Mine, Fetch]:
                mine = _Mine(filling, pieces[self._rank :: self.size], device)
                fetch = filling.fetch(device)
                held.enter_context(fetch.running(mine.reads, mine.done))
                return mine, fetch

            mine, fetch = self.all_or_none(begin)
            for number, piece in enumerate(pieces):
                owner, count = number % self.size, sum(map(size_of, piece))
                is_mine = owner == self._rank
                try:
                    if is_mine and not mine.wait(number // self.size, lambda: fetch.is_stopped):
                        fetch.stop()
                    if failure is None:
                        filling.has_come(count, count if is_mine else 0)
                except BaseException as error:  # raised below, when the other ranks know
                    failure = failure or error
                    fetch.stop()
                sent += self._send_all(piece, owner, pack)
                if (number + 1) % (_PIECES_A_CHECK * self.size) == 0:
                    checks.append(self._begin_check(fetch.is_stopped))
                    if len(checks) > _CHECKS_AHEAD and self._one_failed(*checks.pop(0)):
                        fetch.stop()
                        break
            if failure is not None:
                raise failure
        self._peers.finish([*sent, *(work for work, _ in checks)], device)

    def _pieces(self, wants: Sequence[Want]) -> list[list[Want]]:
        whole = [want for want in wants if want.by_address]
        total = sum(map(size_of, whole))
        small = max(min(_LEAST_PIECE, PIECE_BYTES), total // (self.size * _PIECES_EACH))
        return list(_cut(whole, min(PIECE_BYTES, small)))

    def _send_all(self, piece: Sequence[Want], owner: int, pack: torch.Tensor) -> list[Any]:
        """Send the bytes of a piece, small tensors through ``pack``; what is under way."""
        under_way = [self._send(part.as_bytes, owner) for part in piece if not _is_packed(part)]
        packed = [part for part in piece if _is_packed(part)]
        if packed:
            memory = pack[: sum(map(size_of, packed))]
            if owner == self._rank:
                _copy(packed, memory, into=True)
            self._peers.order(self._send(memory, owner))
            if owner != self._rank:
                _copy(packed, memory, into=False)
        return under_way

    def _send(self, memory: torch.Tensor, owner: int) -> Any:
        return dist.broadcast(memory, dist.get_global_rank(self._group, owner), group=self._group, async_op=True)

    def _begin_check(self, failed: bool) -> tuple[Any, torch.Tensor]:
        """Begin to ask all ranks whether one of them failed."""
        with torch.cuda.stream(self._check_stream):
            # Copied, not filled: a kernel that is loaded for its first use waits for those that run, and those wait for
            # the other ranks.
            flag = torch.tensor([int(failed)], dtype=torch.int64, device=self._device)
            return dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True), flag

    def _one_failed(self, work: Any, flag: torch.Tensor) -> bool:
        """The answer of a check."""
        with torch.cuda.stream(self._check_stream):
            self._peers.finish([work])
            return bool(flag.item())

    def _largest(self, *values: int) -> list[int]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._peers.finish([dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)])
        return [int(value) for value in tensor.tolist()]

    def _agree(self, wants: Sequence[Want], pays: bool) -> bool:
        """Whether sharing pays for one of the ranks. Raises ``UsageProblem`` unless all ranks read the same tensors,
        since they would wait for each other for ever."""
        described = [(want.name, want.file, want.start, *want.plain, want.by_address) for want in wants]
        digest = zlib.crc32(json.dumps(described).encode())
        largest, smallest, shared = self._largest(digest, -digest, int(pays))
        if largest != -smallest:
            raise UsageProblem(
                "`group`: its ranks were given different files or different modules", "give all of them the same model"
            )
        return bool(shared)


class _Mine:
    """The pieces that this rank reads, and which of them are complete."""

    def __init__(self, filling: Filling, pieces: Sequence[Sequence[Want]], device: torch.device) -> None:
        self._device = device
        planned = [filling.plan(piece) for piece in pieces]
        self.reads = list(itertools.chain.from_iterable(planned))
        self._of = {id(read): number for number, reads in enumerate(planned) for read in reads}
        self._left = [len(reads) for reads in planned]
        self._copied: dict[int, Any] = {}
        self._changed = threading.Condition()

    def done(self, read: FileRead, stream: Any) -> None:
        """A read was carried out; its copies are queued on ``stream``."""
        number = self._of[id(read)]
        with self._changed:
            self._left[number] -= 1
            if self._left[number]:
                return
            if stream is not None:
                # After the copies of all threads, which share this stream.
                self._copied[number] = stream.record_event()
            self._changed.notify()

    def wait(self, number: int, is_stopped: Callable[[], bool]) -> bool:
        """Wait until a piece is complete, for whatever the current stream does next; False if it never will be."""
        with self._changed:
            while self._left[number]:
                if is_stopped():
                    return False
                self._changed.wait(0.05)
        copied = self._copied.pop(number, None)
        if copied is not None:
            torch.cuda.current_stream(self._device).wait_event(copied)
        return True


def _is_packed(part: Want) -> bool:
    return size_of(part) < PACKED_BYTES


def _copy(parts: Sequence[Want], memory: torch.Tensor, *, into: bool) -> None:
    """Copy the bytes of ``parts``, one after another, into ``memory`` or back from there, on the current stream."""
    stream = torch.cuda.current_stream(memory.device).cuda_stream if memory.device.type == "cuda" else None
    at, address = 0, memory.data_ptr()
    for part in parts:
        count = size_of(part)
        there, here = (address + at, part.address) if into else (part.address, address + at)
        # By address: a copy by torch waits for the interpreter's lock more than once, and makes tensors first.
        if stream is None or not within_gpu(there, here, count, stream):
            packed = memory[at : at + count]
            (packed if into else part.as_bytes).copy_(part.as_bytes if into else packed)
        at += count


def _cut(wants: Sequence[Want], most: int) -> Iterator[list[Want]]:
    """The bytes of ``wants`` in pieces of at most ``most``, each of one or more runs of bytes. A tensor is cut only
    where it is larger: each run is one order to the GPU."""
    piece: list[Want] = []
    room = most
    for want in wants:
        size = size_of(want)
        if size > room and piece:
            yield piece
            piece, room = [], most
        if size < most:
            piece.append(want)
            room -= size
            continue
        for at in range(0, size, most):
            count = min(most, size - at)
            piece.append(_bytes_of(want, at, count))
            room -= count
            if room <= 0:
                yield piece
                piece, room = [], most
    if piece:
        yield piece


def _bytes_of(want: Want, at: int, count: int) -> Want:
    """The reading of ``count`` bytes of a tensor's memory from ``at`` on."""
    plain = Plain(0, count, "uint8", (count,))
    return Want(
        want.name, want.file, want.start + want.bytes[0] + at, plain, (0,), (count,), want.as_bytes[at : at + count]
    )
