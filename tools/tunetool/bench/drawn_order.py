"""The order within a round, drawn anew for each: nothing always finds the machine as the same other left it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import TypeVar

ItemT = TypeVar("ItemT")


def drawn_order(items: Iterable[ItemT], *key: object) -> list[ItemT]:
    """The same for the same ``key``, such as seed and number of the round."""
    drawn = list(items)
    random.Random("/".join(map(str, key))).shuffle(drawn)  # noqa: S311  (an order, no secret)
    return drawn
