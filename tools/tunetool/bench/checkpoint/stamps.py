"""Stamps in the state, by which a restored checkpoint shows the moment that its bytes are of.

An optimizer changes its tensors in place as soon as ``save`` returns. Each save has a number, which stands at the
beginning of some tensors while ``save`` runs; from then until the save is durable every bit of it is turned over. A
writer that copies late saves the turned bits, one that keeps an older copy an older number.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tunetool.bench.checkpoint.engines import tensors
from tunetool.bench.checkpoint.engines.base import State

MARKED = 32
"""Tensors that carry the stamp, spread over the state: many cost time beside a save that is being timed."""
_WORDS = 4
_HIGH = 0x3F
"""The first byte of each word: as bf16 and as fp32 both a stamp and its opposite are ordinary numbers."""


def mark(state: State, number: int) -> None:
    """Write the number of the save that follows."""
    for part in _heads(state):
        part.copy_(_stamp(number).to(part.device))


def turn_over(state: State) -> None:
    """Turn every bit of the stamps over. A second call restores them."""
    for part in _heads(state):
        part.bitwise_not_()


def moment(restored: State, number: int) -> str | None:
    """Of which moment the stamps of ``restored`` are, if not of save ``number``; None if of none."""
    opposite = _stamp(number).bitwise_not()
    found = [part.cpu() for part in _heads(restored)]
    if any(torch.equal(head, opposite) for head in found):
        return "it holds what the state became after `save` had returned: the engine takes its snapshot too late"
    others = {_number(head) for head in found} - {None, number}
    if others:
        return (
            f"it holds the bytes of save {min(others, key=str)}, and save {number} was restored: its snapshot is stale"
        )
    return None


def _heads(state: State) -> Iterator[torch.Tensor]:
    """The first bytes of the marked tensors, sharing their memory."""
    names = [name for name, tensor in state.items() if tensors.local(tensor).nbytes >= 2 * _WORDS]
    for name in names[:: max(1, len(names) // MARKED)][:MARKED]:
        yield tensors.local(state[name]).detach().reshape(-1).view(torch.uint8)[: 2 * _WORDS]


def _stamp(number: int) -> torch.Tensor:
    low = number.to_bytes(_WORDS, "little")
    return torch.tensor([byte for pair in zip(low, bytes([_HIGH] * _WORDS), strict=True) for byte in pair]).to(
        torch.uint8
    )


def _number(head: torch.Tensor) -> int | None:
    """The number of a stamp; None for what is none."""
    read = bytes(head.tolist())
    return int.from_bytes(read[::2], "little") if set(read[1::2]) == {_HIGH} else None
