"""What a program says of one transfer. Whether it is true, the drives' counters decide (``evidence``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """The bytes that it moved, and the seconds that this took."""

    claimed_bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.claimed_bytes / self.seconds
