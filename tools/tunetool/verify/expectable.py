"""What ``--expect`` can name: the measurement, and the unit of what is expected of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Unit = Literal["B/s", "1/s"]

EXPECTABLE: Mapping[str, tuple[str, Unit]] = {
    "read": ("sequential.read", "B/s"),
    "write": ("sequential.write", "B/s"),
    "randread-4k": ("random.read.4k", "1/s"),
    "randread-64k": ("random.read.64k", "1/s"),
    "randread-1m": ("random.read.1m", "1/s"),
}
"""Requests per second are measured by level full alone."""
