"""The I/O scheduler of a block device."""

from __future__ import annotations

import os
import re

from ..common.files import read_text


def active_scheduler(name: str, root: str = "/") -> str | None:
    """``none`` or ``mq-deadline``, the one in brackets; None if unknown."""
    text = read_text(os.path.join(root, "sys/block", name, "queue/scheduler"))
    match = re.search(r"\[([^\]]+)\]", text or "")
    return match.group(1) if match else None
