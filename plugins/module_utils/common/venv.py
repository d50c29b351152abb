"""A venv: made without a pip of its own, switched by a link in one rename, and looked at for files that it lost."""

from __future__ import annotations

import csv
import glob
import json
import os
import shutil
from typing import Any, Iterator, Sequence

from .commands import run

STAMP = "environment.json"
"""Written into a venv when it is complete: its key, and what is noted of its files."""
REWRITTEN = ("deepspeed/git_version_info_installed.py",)
"""Files of packages that are written again when DeepSpeed's compiled ops are registered."""


def noted(venv: str, others: Sequence[str] = ()) -> dict[str, Any]:
    """For the stamp: the lists that pip left of each package's files, and files of no package with their sizes."""
    records = [os.path.relpath(path, venv) for path in glob.glob(os.path.join(_site(venv), "*.dist-info/RECORD"))]
    files = [os.path.relpath(path, venv) for path in (os.path.join(venv, "pyvenv.cfg"), *others)]
    return {"records": sorted(records), "files": {name: os.path.getsize(os.path.join(venv, name)) for name in files}}


def damage(venv: str) -> str:
    """What of it is gone or has another size, in a few words; empty where all is there."""
    try:
        with open(os.path.join(venv, STAMP), encoding="utf-8") as stream:
            stamp = json.load(stream)
    except (OSError, ValueError):
        return "`%s` is gone or damaged" % os.path.join(venv, STAMP)
    bad = list(_bad(venv, stamp))
    if not bad:
        return ""
    path, state = bad[0]
    return "`%s` %s%s" % (path, state, " (and %d more files)" % (len(bad) - 1) if len(bad) > 1 else "")


def _bad(venv: str, stamp: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, size in stamp.get("files", {}).items():
        state = _state(os.path.join(venv, name), str(size))
        if state:
            yield os.path.join(venv, name), state
    for name in stamp.get("records", ()):
        record = os.path.join(venv, name)
        site = os.path.dirname(os.path.dirname(record))
        try:
            with open(record, encoding="utf-8", newline="") as stream:
                rows = list(csv.reader(stream))
        except (OSError, ValueError):
            yield record, "is gone or damaged"
            continue
        for row in rows:
            # What Python compiled is made again by itself.
            if len(row) < 3 or row[0].endswith(".pyc") or row[0] in REWRITTEN:
                continue
            path = os.path.join(site, row[0])
            state = _state(path, row[2])
            if state:
                yield os.path.normpath(path), state


def _state(path: str, size: str) -> str:
    """What is wrong with a file whose size is known, or empty."""
    try:
        found = os.stat(path).st_size
    except OSError:
        return "is gone"
    return "has another size than when it was installed" if size and found != int(size) else ""


def _site(venv: str) -> str:
    return os.path.join(venv, "lib/python3*/site-packages")


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
