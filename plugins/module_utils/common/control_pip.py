"""The control machine's own pip: wheels of the package, and options for nodes of another kind."""

from __future__ import annotations

import os
import sys
from typing import Sequence

from .commands import run
from .node_wheel import from_installed, installed_files, is_carried, without_collection


def own_pip() -> list[str]:
    """The command: the pip of the Python that runs this."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def has_sources(source: str) -> bool:
    """Whether pip can build the package from this copy of the collection: not from the one in tunetool's own wheel."""
    return os.path.isdir(os.path.join(source, "tools")) or not is_carried(source)


def package_files(source: str) -> list[str]:
    """Every file of the package, wherever this copy of the collection has it."""
    if not has_sources(source):
        return list(installed_files(source).values())
    files = [os.path.join(source, name) for name in ("LICENSE", "README.md")]
    # The package's `node` and `templates` are links to directories beside it, whose files go into the wheel as well.
    for directory, names, entries in os.walk(os.path.join(source, "tools/tunetool"), followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        files += [os.path.join(directory, entry) for entry in entries if not entry.endswith(".pyc")]
    return files


def package_wheel(source: str, directory: str) -> str:
    """Make tunetool's wheel for nodes, which leaves the collection out, in ``directory``; its path.

    From the package's sources, or, without a package index, from the installed package that ``source`` came with.
    """
    if not has_sources(source):
        return from_installed(source, directory)
    run([*own_pip(), "wheel", "--no-deps", "--wheel-dir", directory, source], timeout=600)
    name = next(name for name in sorted(os.listdir(directory)) if name.startswith("tunetool-"))
    path = os.path.join(directory, name)
    without_collection(path)
    return path


def platform_options(machine: str, platforms: Sequence[str]) -> list[str]:
    """Options for a machine type, from platform tags with a ``%s`` for it."""
    return [argument for form in platforms for argument in ("--platform", form % machine)]
