"""Reads images by a torch DataLoader, for the benchmark; in a process that is fresh for each pass.

The orders are those of ``token_child.py``. An image is decoded by Pillow into a tensor; each comes with its number and
a sum over its file's bytes, which are compared with plain reads.
"""

from __future__ import annotations

import io
import tarfile
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from tunetool.bench.dataset.token_child import counted

BATCH = 32
_CEILING_SECONDS, _CEILING_IMAGES = 0.5, 1 << 20
_READ_AHEAD = 2
"""Batches that each worker of a DataLoader reads ahead (torch's default for ``prefetch_factor``)."""
_KEPT_IN_MEMORY = 64

Item = tuple[torch.Tensor, int, int]
"""The pixels, the number of the image, and the sum over its bytes."""


def decoded(encoded: bytes, number: int) -> Item:
    with Image.open(io.BytesIO(encoded)) as image:
        shape = (image.height, image.width, 3)
        pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8).reshape(shape)
    return pixels, number, zlib.crc32(encoded)


class Separate:
    """Each image in a file of its own, taken in a shuffled order."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> Item:
        return decoded(self._paths[number].read_bytes(), number)


class InMemory:
    """Images, all of them a few that are in memory: what the same DataLoader reaches without storage."""

    def __init__(self, encoded: Sequence[bytes], length: int) -> None:
        self._encoded, self._length = encoded, length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> Item:
        return decoded(self._encoded[number % len(self._encoded)], number)


class Shards(IterableDataset):  # type: ignore[misc]  # mypy does not follow torch
    """Tar files, each read from its beginning to its end; every worker takes some of them."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        for path in self._paths[first::step]:
            with tarfile.open(path, "r|") as archive:
                for member in archive:
                    stream = archive.extractfile(member)
                    if stream is not None:
                        yield decoded(stream.read(), int(Path(member.name).stem))


class _Here:
    """The order of this process."""

    dataset: Any = None
    workers = 0
    seed = 0
    sums: Sequence[int] = ()
    lengths: Sequence[int] = ()
    handed_out: Sequence[tuple[int, int]] = ()


def loader(dataset: Any) -> Any:
    """The DataLoader that is measured. Workers are forked: that is torch's own default on Linux."""
    shuffled = not isinstance(dataset, IterableDataset)
    return DataLoader(
        dataset,
        batch_size=BATCH,
        shuffle=shuffled,
        num_workers=_Here.workers,
        generator=torch.Generator().manual_seed(_Here.seed),
        multiprocessing_context="fork" if _Here.workers else None,
    )


def read_batches(dataset: Any, seconds: float) -> list[tuple[int, int]]:
    """Number and sum of each image that was handed out until the time is over. The workers have ended then."""
    deadline = time.perf_counter() + seconds
    taken: list[tuple[int, int]] = []
    for _, numbers, sums in loader(dataset):
        taken += zip(numbers.tolist(), sums.tolist(), strict=True)
        if time.perf_counter() > deadline:
            break
    return taken


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    images = sorted(Path(order["images"]).iterdir())
    _Here.workers, _Here.seed = order["workers"], order["seed"]
    _Here.dataset = Separate(images) if order["files"] == "files" else Shards(sorted(Path(order["shards"]).iterdir()))
    sums, lengths = [], []
    for path in images:
        encoded = path.read_bytes()
        sums.append(zlib.crc32(encoded))
        lengths.append(len(encoded))
    _Here.sums, _Here.lengths = sums, lengths
    few = [path.read_bytes() for path in images[:_KEPT_IN_MEMORY]]
    return {"ceiling": images_without_storage(few), "torch": torch.__version__}


def images_without_storage(encoded: Sequence[bytes]) -> float:
    """Images per second of the same DataLoader where memory answers, from when every worker hands images out: neither
    the start of the workers nor their end counts."""
    batches = iter(loader(InMemory(encoded, _CEILING_IMAGES)))
    for _ in range(_READ_AHEAD * max(1, _Here.workers)):
        next(batches)
    started, done, seconds = time.perf_counter(), 0, 0.0
    while seconds < _CEILING_SECONDS:
        _, numbers, _ = next(batches)
        done += len(numbers)
        seconds = time.perf_counter() - started
    return done / seconds


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module."""

    def work() -> int:
        _Here.handed_out = read_batches(_Here.dataset, seconds)
        return len(_Here.handed_out)

    answered = counted(work)
    return {**answered, "bytes": sum(_Here.lengths[number] for number, _ in _Here.handed_out)}


def check() -> dict[str, Any]:
    """Whether each image that was handed out has the bytes of its file, and none came twice."""
    once = len({number for number, _ in _Here.handed_out}) == len(_Here.handed_out)
    return {"equal": once and all(_Here.sums[number] == crc for number, crc in _Here.handed_out)}


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return start(order)
    return take_pass(order["seconds"]) if order["do"] == "pass" else check()
