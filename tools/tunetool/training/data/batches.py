"""The batches of a rank: its share of the samples, in an order that the seed determines, each with its cost."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from tunetool.errors import TunetoolError, UsageProblem
from tunetool.measure.process_reads import Read, reads
from tunetool.node.units import format_size

PREFETCH = 2
"""Batches that each loading process keeps ready; torch's default."""
_SHM = "/dev/shm"

Batch = dict[str, Any]
Collate = Callable[[Sequence[Mapping[str, Any]]], Batch]


class Samples(Protocol):
    """The interface of a dataset, such as that of `tunetool.training.data.dataset`."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Mapping[str, Any]: ...


@dataclass(frozen=True)
class Cost:
    """The cost of preparing one batch, in whichever process: seconds, and bytes read."""

    seconds: float
    read: Read


class Metered:
    """A dataset for torch's DataLoader whose items are whole batches with their costs."""

    def __init__(self, samples: Samples, collate: Collate) -> None:
        self._samples, self._collate = samples, collate

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: Sequence[int]) -> tuple[Batch, Cost] | TunetoolError:
        """A batch, or the error as an item: an exception in a loading process would arrive as text of a traceback."""
        began, before = time.monotonic(), reads()
        try:
            batch = self._collate([self._samples[index] for index in indices])
        except TunetoolError as error:
            return error
        return batch, Cost(time.monotonic() - began, reads().since(before))


def keep_batch(fetched: Any) -> Any:
    """The DataLoader's ``collate_fn``: the items are batches already, so that it returns them unchanged."""
    return fetched


def steps_per_epoch(samples: int, batch_size: int, world: int) -> int:
    """Steps of an epoch in which every rank has a whole batch; remaining samples are skipped.

    Raises ``UsageProblem`` where there is not one step.
    """
    steps = samples // (batch_size * world)
    if steps == 0:
        raise UsageProblem(
            f"{samples} samples are too few for {world} ranks with {batch_size} each",
            "use more images, or fewer samples per rank with `--micro-batch`",
        )
    return steps


def order(samples: int, epoch: int, rank: int, world: int, batch_size: int, seed: int) -> list[list[int]]:
    """Sample numbers of each batch of one rank in one epoch, as torch's DistributedSampler assigns them.

    Together the ranks see each sample at most once. The seed and the epoch determine the order of samples; ``world``
    determines how it is distributed.
    """
    import torch

    generator = torch.Generator().manual_seed(seed + epoch)
    shuffled: list[int] = torch.randperm(samples, generator=generator).tolist()
    mine = shuffled[rank::world]
    count = steps_per_epoch(samples, batch_size, world)
    return [mine[number * batch_size : (number + 1) * batch_size] for number in range(count)]


def enough_memory(workers: int, batch_bytes: int, ranks: int, free: int | None = None) -> str | None:
    """The reason why /dev/shm is too small for the loading processes to pass batches through; None if it is not.

    Without room there they would die of SIGBUS without a message. ``free``: free bytes of /dev/shm; None: read them.
    """
    if workers == 0:
        return None
    free = shutil.disk_usage(_SHM).free if free is None else free
    # The prefetched batches and one in preparation per process, and one that the rank uses.
    needed = ranks * (workers * (PREFETCH + 1) + 1) * batch_bytes
    if needed <= free:
        return None
    return (
        f"`{_SHM}` has {format_size(free)} free, and {workers} loading processes for each of {ranks} ranks need "
        f"{format_size(needed)}: each rank reads its images itself instead"
    )


def batch_bytes(batch: Mapping[str, Any]) -> int:
    """Bytes of the tensors of a batch."""
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
    """The batches of ``plan`` in order, prepared ahead by ``workers`` processes for each of the node's ``ranks``.

    The first is prepared in this process: its size shows whether /dev/shm has room for those of the processes. Where it
    has not, ``tell`` gets the reason and all batches are prepared in this process.
    """
    from torch.utils.data import DataLoader

    metered = Metered(samples, collate)
    first, cost = _opened(metered.__getitems__(plan[0]))
    why_not = enough_memory(workers, batch_bytes(first), ranks)
    if why_not is not None:
        tell(why_not)
        workers = 0
    loader: Any = DataLoader(
        cast(Any, metered),  # torch needs only the methods, no base class
        batch_sampler=cast(Any, plan[1:]),
        collate_fn=keep_batch,
        num_workers=min(workers, len(plan) - 1),
        pin_memory=pin,
        prefetch_factor=PREFETCH if min(workers, len(plan) - 1) else None,
        # Spawned processes would import torch and the tokenizer again.
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
