"""The control machine's own pip: wheels of the package, and options for nodes of another kind."""

from __future__ import annotations

import os
import sys
from typing import Sequence

from .commands import run


def own_pip() -> list[str]:
    """The command: the pip of the Python that runs this."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def package_wheel(source: str, directory: str) -> str:
    """Build tunetool's wheel from the collection's sources into ``directory``; its path."""
    run([*own_pip(), "wheel", "--no-deps", "--wheel-dir", directory, source], timeout=600)
    name = next(name for name in sorted(os.listdir(directory)) if name.startswith("tunetool-"))
    return os.path.join(directory, name)


def platform_options(machine: str, platforms: Sequence[str]) -> list[str]:
    """Options for a machine type, from platform tags with a ``%s`` for it."""
    return [argument for form in platforms for argument in ("--platform", form % machine)]
