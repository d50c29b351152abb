"""Batches as a rank gets them: its share of the samples, in an order that the seed fixes, each with what it cost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tunetool.errors import TunetoolError, UsageProblem
from tunetool.node.units import format_size
from tunetool.training.rank.recorder import Read, reads

PREFETCH = 2
"""Batches that each loading process keeps ready, torch's default."""
_SHM = "/dev/shm"

Batch = dict[str, Any]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]


class Samples(Protocol):
    """What `tunetool.training.data.dataset` reads."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Cost:
    """Of making one batch, wherever that was done."""

    seconds: float
    read: Read


class Metered:
    """A dataset for torch's DataLoader whose items are whole batches with their cost."""

    def __init__(self, samples: Samples, collate: Collate) -> None:
        self._samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Batch, Cost] | TunetoolError:
        """An error is an item too: one that is raised in a loading process arrives as its traceback's text."""
        began, before = time.monotonic(), reads()
        try:
            batch = self._collate([self._samples[index] for index in indices])
        except TunetoolError as error:
            return error
        return batch, Cost(time.monotonic() - began, reads().since(before))


def as_it_is(fetched: Any) -> Any:
    """For the DataLoader: a batch is one already."""
    return fetched


def steps_per_epoch(samples: int, batch_size: int, world: int) -> int:
    """Whole batches for every rank; what is left over is not seen. Raises ``UsageProblem`` for none."""
    steps = samples // (batch_size * world)
    if steps == 0:
        raise UsageProblem(
            f"{samples} samples are too few for {world} ranks with {batch_size} each",
            "give more images, or fewer samples for each rank with `--micro-batch`",
        )
    return steps


def order(samples: int, epoch: int, rank: int, world: int, batch_size: int, seed: int) -> list[list[int]]:
    """The batches of one rank in one epoch: torch's DistributedSampler, cut into whole batches.

    Together the ranks see each sample at most once; another ``world`` deals the same order out differently.
    """
    import torch

    generator = torch.Generator().manual_seed(seed + epoch)
    shuffled: list[int] = torch.randperm(samples, generator=generator).tolist()
    mine = shuffled[rank::world]
    count = steps_per_epoch(samples, batch_size, world)
    return [mine[number * batch_size : (number + 1) * batch_size] for number in range(count)]


def enough_memory(workers: int, batch_bytes: int, ranks: int, free: int | None = None) -> str | None:
    """Why loading processes cannot hand over batches here, None when they can: they do it through /dev/shm.

    Without room there they die of SIGBUS, which names nothing.
    """
    if workers == 0:
        return None
    free = shutil.disk_usage(_SHM).free if free is None else free
    # Those kept ready, one in the making for each process, and one that the rank holds.
    needed = ranks * (workers * (PREFETCH + 1) + 1) * batch_bytes
    if needed <= free:
        return None
    return (
        f"`{_SHM}` has {format_size(free)} free, and {workers} loading processes for each of {ranks} ranks need "
        f"{format_size(needed)} there: each rank reads its images by itself"
    )


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """What the tensors of a batch hold."""
    return sum(int(tensor.numel() * tensor.element_size()) for tensor in batch.values() if hasattr(tensor, "numel"))


def batches(
    samples: Samples,
    collate: Collate,
    plan: Sequence[Sequence[int]],
    workers: int,
    pin: bool,
    ranks: int,
    tell: Callable[[str], None],
) -> Generator[tuple[Batch, Cost], None, None]:
    """The batches of ``plan`` in its order, made ahead by ``workers`` processes for each of the node's ``ranks``.

    The first is made here, while those start: its size says whether /dev/shm has room for what they hand over, and
    ``tell`` hears when it has not.
    """
    from torch.utils.data import DataLoader

    metered = Metered(samples, collate)
    first, cost = _opened(metered.__getitems__(plan[0]))
    why_not = enough_memory(workers, batch_bytes(first), ranks)
    if why_not is not None:
        tell(why_not)
        workers = 0
    loader: Any = DataLoader(
        cast(Any, metered),  # torch asks for no base class, only for its methods
        batch_sampler=cast(Any, plan[1:]),
        collate_fn=as_it_is,
        num_workers=min(workers, len(plan) - 1),
        pin_memory=pin,
        prefetch_factor=PREFETCH if min(workers, len(plan) - 1) else None,
        # Processes that start anew would import torch and the tokenizer again.
        multiprocessing_context="fork" if min(workers, len(plan) - 1) else None,
    )
    rest = iter(loader)
    yield first, cost
    for fetched in rest:
        yield _opened(fetched)


def _opened(fetched: Any) -> tuple[Batch, Cost]:
    if isinstance(fetched, TunetoolError):
        raise fetched
    batch, cost = fetched
    return batch, cost
