"""Whether the installed version of a library suits our call of it. Imports nothing of tunetool: what a process has
before its first load is not in that load's time."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True)
class Versions:
    """The versions of a package that take our call."""

    package: str
    """As the index calls it."""
    least: str
    below: str = ""
    """The first that is too new; none by default."""

    def unsuitable(self) -> str | None:
        """What is needed, and what was found instead; None where that suits, or nobody says which version it is."""
        try:
            found = version(self.package)
        except PackageNotFoundError:
            return None
        numbers = version_of(found)
        if numbers >= version_of(self.least) and not (self.below and numbers >= version_of(self.below)):
            return None
        return f"needs {self.package} >= {self.least}{f' and < {self.below}' if self.below else ''}, found {found}"


def version_of(text: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version such as ``0.17.1+abc``; empty where there are none."""
    numbers: list[int] = []
    for part in text.partition("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)
