"""Paths below an object's directory, as its attributes."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class _HasDirectory(Protocol):
    @property
    def directory(self) -> Path: ...


class InDirectory:
    """``root = InDirectory("root.img")`` in a class: an object's ``root`` is that path below its ``directory``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, owner: _HasDirectory, _: type | None = None) -> Path:
        """The path below the directory of ``owner``."""
        return owner.directory / self._name
