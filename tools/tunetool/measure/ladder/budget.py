"""Time and bytes that the ladder may use, and the share that each rung must keep."""

from __future__ import annotations

from collections.abc import Mapping

from tunetool.measure.metrics import METRICS, MIB, Share

SAMPLES = 3
"""Samples of a figure that nothing is expected of. What is judged takes as many as level quick does."""

SUSTAINED_SAMPLES = 15
"""Length of the sustained write in samples: a minute by default."""
SUSTAINED_BYTES_A_DRIVE = 64 * 10**9
"""Where the sustained write ends earlier: no cache of a drive in use holds more. It wears the drive by as much."""

CHECKPOINT_BYTES = 2 * 2**30
CHECKPOINT_SHARE = 0.05
"""Of the free space, beside the tenth that the files take."""

RAW_BLOCK = MIB
RAW_DEPTH = 32
"""For each drive, shared out over the ranges that are read there."""
RAW_RANGES = 4
"""The largest on each drive; one thread reads each."""
LEAST_RAW_BYTES = 8 * MIB
"""On each drive. Less says more about the first request than about the drive."""


EXPECTED: Mapping[str, Share] = {
    "alone": Share(0.8, "drives of one model differ by less than a tenth in their data sheets; a fifth is a fault"),
    "together": Share(0.9, "drives have queues and links of their own: only a shared link or the cores take more"),
    "array": Share(0.9, "md RAID0 passes requests on without copying; it splits those that cross a chunk"),
    "filesystem": Share(0.9, "XFS maps extents and copies nothing under direct I/O"),
    "engine": Share(0.9, "io_uring and libaio hand the kernel the same requests"),
    "sustained": Share(0.8, "data sheets state sustained writes; what exceeds them is a cache"),
    **{each.kind: each.share for each in METRICS if each.share is not None},
    "aio": Share(0.8, "DeepSpeed's aio_handle sends the same requests from fewer threads"),
    "hbm-bounce": Share(
        0.7, "one copy more, over the GPU's link, which is faster than the drives' below eight of them"
    ),
    "hbm-direct": Share(0.8, "no copy, but the path through the GPU's own link"),
    "checkpoint": Share(0.5, "torch.save and torch.load copy through one thread and one file"),
}
"""By kind of rung. These are lines to look behind, stated before any measurement. Only ``--expect`` judges."""
