"""Writes a value into a file when whoever started it is gone: ``huge_pool_keeper.py FILE VALUE``, its stdin a pipe.

Self-contained. It must not die with its parent.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(path: str, value: str) -> None:
    """Wait for the end of stdin, then write."""
    while os.read(0, 65536):
        pass
    if Path(path).read_text().strip() != value:
        Path(path).write_text(f"{value}\n")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
