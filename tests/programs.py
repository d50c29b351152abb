"""Programs that tests need: tests/programs.txt, the same list that tools/dev/setup.sh installs from."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

LIST = Path(__file__).with_name("programs.txt")
_PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/sbin", "/usr/sbin", "/sbin"))
"""Debian keeps the administrator's programs out of an ordinary user's PATH."""


@dataclass(frozen=True)
class Program:
    """A line of the list."""

    name: str
    package: str
    needed_by: tuple[str, ...]


def read(path: Path = LIST) -> list[Program]:
    """The whole list, in order."""
    lines = (line.split() for line in path.read_text().splitlines() if line.strip() and not line.startswith("#"))
    return [Program(name, package, tuple(groups.split(","))) for name, package, groups in lines]


def packages(group: str) -> tuple[str, ...]:
    """The Debian packages that a group needs, each once."""
    return tuple(dict.fromkeys(program.package for program in read() if group in program.needed_by))


def need_program(*names: str) -> None:
    """Fail the test if a program is missing: `make check` and `make test` install it, so it is no reason for a skip."""
    known = {program.name: program for program in read()}
    missing = [known[name] for name in names if shutil.which(name, path=_PATH) is None]
    if missing:
        named = ", ".join(f"`{program.name}` (package {program.package})" for program in missing)
        pytest.fail(
            f"{named} is missing\nhint: tools/dev/setup.sh --for {missing[0].needed_by[0]} installs it", pytrace=False
        )
