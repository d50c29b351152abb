"""Compiles read_loop.c, `python -m tunetool.checkpoint.build_read_loop` beside itself, for an installed pure wheel.

hatch_build.py runs this file where a wheel is built, so it imports the standard library alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).with_name("read_loop.c")
MADE = SOURCE.with_name("libread_loop.so")  # not read_loop.so, which Python would take for the module


def compiler() -> str | None:
    """The C compiler of this machine, if there is one."""
    return shutil.which(os.environ.get("CC", "cc"))


def build(target: Path = MADE) -> None:
    """Compile to ``target``, which is whole or not there. Raises ``OSError`` or ``CalledProcessError``."""
    new = target.with_name(f"{target.name}.{os.getpid()}.new")
    try:
        subprocess.run([compiler() or "cc", "-O2", "-shared", "-fPIC", "-o", str(new), str(SOURCE)], check=True)
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


if __name__ == "__main__":
    try:
        build()
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"tunetool: `{MADE}` was not made: {error}\nhint: install a C compiler, or set `CC`")
