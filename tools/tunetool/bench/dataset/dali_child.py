"""Reads images by NVIDIA DALI, for the benchmark; in a process that is fresh for each pass.

The orders are those of ``loader_child.py``, and ``device``: ``cpu``, or ``cuda``, where the GPU decodes. The same
pipeline over images in memory is its ceiling.
"""

from __future__ import annotations

import math
import os
import time
import zlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import nvidia.dali
from nvidia.dali import fn, pipeline_def, types

from tunetool.bench.dataset.token_child import counted

BATCH = 32
_CEILING_SECONDS, _CEILING_IMAGES, _KEPT_IN_MEMORY = 0.5, 1 << 14, 64
_READER = "images"


class _Here:
    """The order of this process."""

    order: Mapping[str, Any] = {}
    paths: Sequence[str] = ()
    sums: Sequence[int] = ()
    lengths: Sequence[int] = ()
    handed_out: Sequence[tuple[int, int]] = ()


def pipeline(paths: Sequence[str], seed: int) -> Any:
    """Pixels, encoded bytes and number of each image, shuffled: DALI's defaults, and a thread for each CPU."""
    on_gpu = _Here.order["device"] == "cuda"

    @pipeline_def  # type: ignore[untyped-decorator]  # mypy does not follow DALI
    def images() -> Any:
        numbers = list(range(len(paths)))
        encoded, number = fn.readers.file(
            files=list(paths), labels=numbers, random_shuffle=True, pad_last_batch=True, name=_READER
        )
        pixels = fn.decoders.image(encoded, device="mixed" if on_gpu else "cpu", output_type=types.RGB)
        return pixels, encoded, number

    threads = len(os.sched_getaffinity(0))
    made = images(batch_size=BATCH, num_threads=threads, device_id=0 if on_gpu else None, seed=seed)
    made.build()
    return made


def read_batches(made: Any, count: int, seconds: float) -> list[tuple[int, int]]:
    """Number and sum of each image that was handed out until the time is over or all of them were."""
    deadline = time.perf_counter() + seconds
    taken: list[tuple[int, int]] = []
    for _ in range(math.ceil(count / BATCH)):
        _, encoded, numbers = made.run()
        # The last batch is filled up with its last image.
        for place in range(min(BATCH, count - len(taken))):
            taken.append((int(numbers.at(place)[0]), zlib.crc32(encoded.at(place))))
        if time.perf_counter() > deadline:
            break
    return taken


def images_without_storage(encoded: Sequence[bytes]) -> float:
    """Images per second of the same pipeline over files in memory, from its second batch on."""
    with ExitStack() as held:
        paths = []
        for each in encoded:
            handle = os.memfd_create("tunetool-ceiling")
            held.callback(os.close, handle)
            os.write(handle, each)
            paths.append(f"/proc/self/fd/{handle}")
        many = [paths[number % len(paths)] for number in range(_CEILING_IMAGES)]
        made = pipeline(many, 0)
        read_batches(made, BATCH, 0.0)
        started = time.perf_counter()
        done = len(read_batches(made, len(many) - BATCH, _CEILING_SECONDS))
        seconds = time.perf_counter() - started
        del made
        return done / seconds


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    paths = sorted(Path(order["images"]).iterdir())
    _Here.order, _Here.paths = order, list(map(str, paths))
    encoded = [path.read_bytes() for path in paths]
    _Here.sums, _Here.lengths = list(map(zlib.crc32, encoded)), list(map(len, encoded))
    cpus = len(os.sched_getaffinity(0))
    facts = {"dali": nvidia.dali.__version__, "cpus": cpus, "device": order["device"]}
    return {"ceiling": images_without_storage(encoded[:_KEPT_IN_MEMORY]), "facts": facts}


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module. What the pipeline still reads at its end counts as fetched, and takes no part of the time."""
    spent: list[float] = []

    def work() -> int:
        started = time.perf_counter()
        made = pipeline(_Here.paths, _Here.order["seed"])
        _Here.handed_out = read_batches(made, len(_Here.paths), seconds)
        spent.append(time.perf_counter() - started)
        del made
        return len(_Here.handed_out)

    answered = counted(work)
    size = sum(_Here.lengths[number] for number, _ in _Here.handed_out)
    return {**answered, "seconds": spent[0], "bytes": size}


def check() -> dict[str, Any]:
    """Whether each image that was handed out has the bytes of its file, and none came twice."""
    once = len({number for number, _ in _Here.handed_out}) == len(_Here.handed_out)
    return {"equal": once and all(_Here.sums[number] == crc for number, crc in _Here.handed_out)}


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "start":
        return start(order)
    return take_pass(order["seconds"]) if order["do"] == "pass" else check()
