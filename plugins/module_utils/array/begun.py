"""The array that was made on this node and has no file system yet: what lies on it is no data of anybody's."""

from __future__ import annotations

import os
import uuid

from ..common.files import read_text, replace_file

BEGUN_PATH = "/etc/tunetool/array.begun"


def begin() -> str:
    """The UUID for a new array, as mdadm writes it, noted before the array exists. Raises ``OSError``."""
    digits = uuid.uuid4().hex
    drawn = ":".join(digits[start : start + 8] for start in range(0, 32, 8))
    replace_file(BEGUN_PATH, drawn + "\n")
    return drawn


def begun(root: str = "/") -> str | None:
    """The UUID noted by ``begin`` that no file system was made on since, or None."""
    return read_text(os.path.join(root, BEGUN_PATH.lstrip("/"))) or None
