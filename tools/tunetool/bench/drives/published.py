"""The published scaling of DeepSpeed's handle, in its own words. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

SOURCE = "DeepSpeed blog, `DeepNVMe: Affordable I/O scaling for Deep Learning Applications`"
NOTE = (
    "published, not measured here: transfers of 1 GB between HBM and a RAID0, one VM, by ds_io, whose GB/sec are "
    "probably 2^30 bytes: 48 would be 51.5 GB/s"
)


class Published(NamedTuple):
    """One row: GB/sec as it says."""

    drives: str
    number: int
    read: float
    write: float


ROWS: Sequence[Published] = (
    Published("4 x PCIe Gen4", 4, 10, 5),
    Published("4 x PCIe Gen5", 4, 27, 11),
    Published("8 x PCIe Gen5", 8, 48, 26),
)
