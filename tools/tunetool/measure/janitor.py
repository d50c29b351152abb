"""Removes a directory when whoever started it is gone. Self-contained: ``janitor.py DIR``, its stdin a pipe.

The pipe has a word once the directory is made: what is there before is somebody else's.

tunetool removes its files itself, whatever happens to it but SIGKILL; this is for that. It must not die with its
parent, and ends without a word when the directory is gone already, or was never made.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    """Wait for the end of stdin, then remove."""
    made = False
    while os.read(0, 65536):
        made = True
    # What the parent started dies with it, but a write that the kernel still works on ends only then.
    for _ in range(50 if made else 0):
        shutil.rmtree(path, ignore_errors=True)
        if not Path(path).exists():
            return
        time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1])
