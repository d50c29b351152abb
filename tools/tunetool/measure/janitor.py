"""Removes a directory when whoever started it is gone. Self-contained: ``janitor.py DIR``, its stdin a pipe.

tunetool removes its files itself, whatever happens to it but SIGKILL; this is for that. It must not die with its
parent, and ends without a word when the directory is gone already.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Wait for the end of stdin, then remove."""
    while os.read(0, 65536):
        pass
    # What the parent started dies with it, but a write that the kernel still works on ends only then.
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        if not Path(path).exists():
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
