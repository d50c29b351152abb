"""Measuring with proof: locks, run directories, samples, statistics, evidence, and the drivers fio, aio, gds and
ladder. It may import ``verdict``, ``node``, ``record`` and ``errors``; it does not know why something is measured."""

from __future__ import annotations

from typing import Literal

Direction = Literal["read", "write"]
"""Of bytes between memory and storage."""
