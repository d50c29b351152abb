"""The device of a rank that measures before the cells run."""

from __future__ import annotations

import torch

from tunetool.errors import CannotJudge


class MeasuringRank:
    """A rank and its device."""

    def __init__(self, device: str, local_rank: int) -> None:
        self.cuda = device != "cpu" and torch.cuda.is_available()
        if device == "cuda" and not self.cuda:
            raise CannotJudge("torch sees no GPU", "measure on `--device cpu`")
        self.device = f"cuda:{local_rank}" if self.cuda else "cpu"
        if self.cuda:
            torch.cuda.set_device(local_rank)

    def synchronize(self) -> None:
        """Wait until the device has done all work."""
        if self.cuda:
            torch.cuda.synchronize()
