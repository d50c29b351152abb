"""Interpreters for the DeepSpeed rung."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from tunetool.measure.aio import Missing, need, probe


def bare_python(folder: Path) -> Path:
    """This Python without its installed packages: the rung is left out, as on machines without DeepSpeed."""
    return python_that(folder, "", "-S", name="bare-python")


def python_that(folder: Path, before: str, *options: str, name: str = "python") -> Path:
    """This Python, after the lines of shell ``before``; ``$$`` is its process."""
    program = folder / name
    program.write_text(f'#!/bin/sh\n{before}\nexec {sys.executable} {" ".join(options)} "$@"\n')
    program.chmod(0o755)
    return program


def has_deepspeed() -> bool:
    """Whether this Python has DeepSpeed with its op built, which `make setup` does if torch comes without CUDA."""
    try:
        need(probe(Path(sys.executable), os.environ), "async_io")
    except Missing:
        return False
    return True
