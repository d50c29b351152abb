"""Reads the samples from TFRecord shards by tf.data, for the benchmark; in a process that is fresh for each pass.

The orders are those of ``token_child.py``, and ``make``, which writes the shards. A record is a sample after its number
in eight bytes. The same pipeline over shards in memory is its ceiling.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tunetool.bench.dataset.engines import NUMBER_BYTES, TF_DATA
from tunetool.bench.dataset.token_child import counted

# Both before the first import: its log is not the benchmark's, and this process needs no GPU.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
import tensorflow as tf

BATCH = 32
CYCLE, PARALLEL_READS, BUFFER_BYTES = 16, 4, 256 << 20
"""Files read in turn, readers of each, and the buffer of each: of ``create_optimized_dataset`` in the guide
"Framework-Specific Storage Patterns"."""
_KEPT = 64
_CEILING_SECONDS, _CEILING_BYTES, _CEILING_SHARDS = 0.5, 4 << 20, 16


class _Here:
    """The order of this process."""

    order: Mapping[str, Any] = {}
    kept: Sequence[Any] = ()


def pipeline(engine: str, shards: Sequence[str], seed: int) -> Any:
    """Batches of records: by tf.data's defaults, or with the guide's options."""
    if engine == TF_DATA:
        return tf.data.TFRecordDataset(list(shards)).batch(BATCH)
    files = tf.data.Dataset.list_files(list(shards), shuffle=True, seed=seed)
    records = files.interleave(
        lambda path: tf.data.TFRecordDataset(path, buffer_size=BUFFER_BYTES, num_parallel_reads=PARALLEL_READS),
        cycle_length=CYCLE,
        num_parallel_calls=tf.data.AUTOTUNE,
    )
    return records.batch(BATCH).prefetch(tf.data.AUTOTUNE)


def hand_out(batches: Any, deadline: float) -> tuple[int, float, list[Any]]:
    """How many records came until the clock said so, when the last one came, and some of them."""
    done, kept, step = 0, [], 1
    for number, batch in enumerate(batches):
        done += int(batch.shape[0])
        if number % step == 0:
            kept.append(batch[0])
            if len(kept) > _KEPT:
                kept, step = kept[::2], 2 * step
        if time.perf_counter() > deadline:
            break
    return done, time.perf_counter(), kept


def make(order: Mapping[str, Any]) -> dict[str, Any]:
    """Write all samples into shards of nearly equal size."""
    size, count, shards = order["sample_bytes"], order["count"], order["shards"]
    with Path(order["file"]).open("rb") as stream:
        for number in range(shards):
            first, end = count * number // shards, count * (number + 1) // shards
            with tf.io.TFRecordWriter(f"{order['directory']}/{number:05d}.tfrecord") as writer:
                for sample in range(first, end):
                    writer.write(sample.to_bytes(NUMBER_BYTES, "little") + stream.read(size))
    return {}


def samples_without_storage(order: Mapping[str, Any]) -> float:
    """Records per second of the same pipeline over shards in memory."""
    record = bytes(NUMBER_BYTES + order["sample_bytes"])
    with ExitStack() as held:
        paths = []
        for _ in range(_CEILING_SHARDS):
            handle = os.memfd_create("tunetool-ceiling")
            held.callback(os.close, handle)
            paths.append(f"/proc/self/fd/{handle}")
            with tf.io.TFRecordWriter(paths[-1]) as writer:
                for _ in range(max(1, _CEILING_BYTES // len(record))):
                    writer.write(record)
        batches = iter(pipeline(order["engine"], paths, 0).repeat())
        # Threads are started and buffers filled by then, as soon in the pass.
        next(batches)
        started = time.perf_counter()
        done, ended, _ = hand_out(batches, started + _CEILING_SECONDS)
        return done / (ended - started)


def start(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    _Here.order = order
    facts = {"tensorflow": tf.__version__, "cpus": len(os.sched_getaffinity(0))}
    return {"ceiling": samples_without_storage(order), "facts": facts}


def take_pass(seconds: float) -> dict[str, Any]:
    """See the module. What the pipeline still reads at its end counts as fetched, and takes no part of the time."""
    order = _Here.order
    batches = pipeline(order["engine"], sorted(map(str, Path(order["directory"]).iterdir())), order["seed"])
    spent: list[float] = []

    def work() -> int:
        started = time.perf_counter()
        handed_out = iter(batches)
        done, ended, _Here.kept = hand_out(handed_out, started + seconds)
        spent.append(ended - started)
        del handed_out
        return done

    answered = counted(work)
    return {**answered, "seconds": spent[0], "bytes": answered["samples"] * order["sample_bytes"]}


def check() -> dict[str, Any]:
    """A sum over the bytes of some of the samples that the pass handed out."""
    records = [each.numpy() for each in _Here.kept]
    whole = hashlib.sha256(b"".join(record[NUMBER_BYTES:] for record in records))
    return {"numbers": [int.from_bytes(each[:NUMBER_BYTES], "little") for each in records], "sha256": whole.hexdigest()}


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "make":
        return make(order)
    if order["do"] == "start":
        return start(order)
    return take_pass(order["seconds"]) if order["do"] == "pass" else check()
