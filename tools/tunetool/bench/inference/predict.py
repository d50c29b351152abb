"""The speed that the ladder promises for weights on drives, and the batch from which computing takes longer. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """One generation. Every pass of the model reads all weights that lie on drives, whatever the batch is."""

    batch: int
    passes: int
    """As many as new tokens: the pass over the prompts gives the first."""
    read_bytes: int
    """Of one pass."""
    first_floor: float = 0.0
    """Seconds that the pass over the prompts takes with all weights at hand; 0: not known."""
    next_floor: float = 0.0
    """The same of each pass after it."""

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.batch * self.passes

    @property
    def bytes_per_token(self) -> float:
        """Bytes of weights that are read for each token."""
        return self.read_bytes / self.batch

    def rate(self, bandwidth: float) -> float:
        """Tokens per second where reads of ``bandwidth`` bytes per second and computing overlap entirely."""
        reading = self.read_bytes / bandwidth
        return self.tokens / (max(reading, self.first_floor) + (self.passes - 1) * max(reading, self.next_floor))

    def balanced_batch(self, bandwidth: float) -> int | None:
        """The batch with which a pass computes for as long as it reads, if its time to compute grows with the batch;
        None where that time is not known. Below it more sequences cost nothing but memory."""
        if not self.next_floor:
            return None
        return max(self.batch, int(self.batch * self.read_bytes / bandwidth / self.next_floor))
