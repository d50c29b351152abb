"""Which distribution a machine runs, from os-release(5), and what follows from it."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from typing import Optional

from ..common.files import lines, read_text

DEBIAN = "debian"
REDHAT = "redhat"

_FAMILIES = {
    "debian": DEBIAN,
    "ubuntu": DEBIAN,
    "rhel": REDHAT,
    "centos": REDHAT,
    "fedora": REDHAT,
    "rocky": REDHAT,
    "almalinux": REDHAT,
}


@dataclass(frozen=True)
class Distribution:
    """``family``: None if neither ``id`` nor ``id_like`` is known here."""

    id: str
    version: str
    family: Optional[str]

    @property
    def python_hint(self) -> str:
        """Hint for a system whose own Python is too old for the program."""
        if self.family == REDHAT and self.version.partition(".")[0] == "9":
            return (
                "RHEL 9's own Python is 3.9: set `node_packages_extra: [python3.11]` and "
                "`tunetool_python: /usr/bin/python3.11`"
            )
        return "set `tunetool_python` to a Python of 3.10 or newer, and `tunetool_python_versions` to its version"


def read_distribution(root: str = "/") -> Distribution:
    """The machine's distribution; unknown fields are empty."""
    values = {}
    for release_file in ("etc/os-release", "usr/lib/os-release"):
        text = read_text(os.path.join(root, release_file))
        if text:
            values = parse_os_release(text)
            break
    names = [values.get("ID", ""), *values.get("ID_LIKE", "").split()]
    family = next((_FAMILIES[name] for name in names if name in _FAMILIES), None)
    return Distribution(values.get("ID", ""), values.get("VERSION_ID", ""), family)


def parse_os_release(text: str) -> dict[str, str]:
    """The assignments of the file, without quotes as in a shell."""
    values = {}
    for line in lines(text):
        name, separator, value = line.strip().partition("=")
        if not separator or name.startswith("#"):
            continue
        try:
            values[name] = "".join(shlex.split(value))
        except ValueError:
            continue
    return values
