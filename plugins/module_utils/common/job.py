"""The parts that the jobs of all modules have in common."""

from __future__ import annotations

import os

from .drift import Ledger


class Job:
    """Work on the machine under ``root``; what it finds and changes goes into ``ledger``."""

    def __init__(self, ledger: Ledger, root: str = "/") -> None:
        self.ledger = ledger
        self.root = root

    def _path(self, path: str) -> str:
        return os.path.join(self.root, path.lstrip("/"))
