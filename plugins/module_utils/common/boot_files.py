"""Files of the machine that set values at boot: which ones count, in the order in which they are read."""

from __future__ import annotations

import glob
import os
from typing import Iterator

from .files import lines, read_text

SYSCTL_CONF = "etc/sysctl.conf"


def ordered(kind: str, suffix: str, root: str) -> list[str]:
    """Files of such a directory as systemd reads them: by name over all places, /etc hiding /run hiding /usr."""
    chosen: dict[str, str] = {}
    for top in ("lib", "usr/lib", "usr/local/lib", "run", "etc"):
        for path in glob.glob(os.path.join(root, top, kind, "*" + suffix)):
            chosen[os.path.basename(path)] = path
    return [chosen[name] for name in sorted(chosen)]


def numbered_lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines without comments and blank lines; continued ones are joined."""
    held, first = "", 0
    for number, raw in enumerate(lines(read_text(path) or ""), start=1):
        first = first or number
        held += raw.strip()
        if held.endswith("\\"):
            held = held[:-1]
            continue
        if held and held[0] not in "#;":
            yield first, held
        held, first = "", 0


def location(path: str, number: int, root: str) -> str:
    """A line of a file, for a message."""
    return "`/%s` line %d" % (os.path.relpath(path, root), number)


def sysctl_lines(root: str) -> Iterator[tuple[str, int, str, str]]:
    """Path, number, key and text of every line that sets a value by sysctl, each file once, in the order of reading."""
    # `sysctl --system` reads the plain file last; systemd-sysctl does where a link 99-sysctl.conf leads to it.
    seen = set()
    for path in [*ordered("sysctl.d", ".conf", root), os.path.join(root, SYSCTL_CONF)]:
        if os.path.realpath(path) in seen:
            continue
        seen.add(os.path.realpath(path))
        for number, line in numbered_lines(path):
            yield path, number, line.lstrip("-").partition("=")[0].strip().replace("/", "."), line
