"""The ranks of one load: a process alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from tunetool.checkpoint.fetch import Want
from tunetool.loading.fill import Filling

T = TypeVar("T")


class Ranks:
    """This process alone: it reads everything."""

    size = 1
    is_first = True
    """Whether this is the one rank that does what need not be done twice."""

    def all_or_none(self, work: Callable[[], T]) -> T:
        """Do ``work``, on all ranks. Raises on every rank if it raised on one of them."""
        return work()

    def fill(self, filling: Filling, wants: Sequence[Want], device: torch.device) -> None:
        """Fill the targets of ``wants`` on ``device``."""
        filling.read(wants, device)
