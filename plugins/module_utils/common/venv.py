"""A venv without a pip of its own, filled by the pip of a wheel, and a link that is switched in one rename."""

from __future__ import annotations

import os
import shutil

from .commands import run


def make_venv(python: str, venv: str) -> None:
    """An empty venv; what was there before is removed."""
    shutil.rmtree(venv, ignore_errors=True)
    run([python, "-m", "venv", "--without-pip", venv])


def pip_of(venv: str, pip_wheel: str) -> list[str]:
    """The command that installs into ``venv``: pip runs from its wheel, which offline nodes get with the others."""
    return [os.path.join(venv, "bin/python"), os.path.join(pip_wheel, "pip"), "--disable-pip-version-check"]


def point(link: str, target: str) -> bool:
    """Make ``link`` a symbolic link to ``target`` in one rename; true when it was something else."""
    if os.path.islink(link) and os.readlink(link) == target:
        return False
    os.makedirs(os.path.dirname(link), exist_ok=True)
    temporary = link + ".new"
    if os.path.lexists(temporary):
        os.unlink(temporary)
    os.symlink(target, temporary)
    os.replace(temporary, link)
    return True
