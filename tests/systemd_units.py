"""Unit files that tunetool writes: put under a root of the test, and read by systemd itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from calls import call
from tunetool.node.volume.unit_dropins import Change, ForeignDropIn, apply


def complaints(units: Path, names: Sequence[str], *words: str) -> str:
    """What ``systemd-analyze verify`` prints of the units ``names`` in ``units``, of lines with one of ``words`` or of
    a cycle: other units of this machine may have other faults."""
    done = call("systemd-analyze", "verify", *names, env={**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"})
    return "\n".join(line for line in done.stderr.splitlines() if any(word in line for word in (*words, "cycle")))


def applied(changes: Sequence[Change], root: Path) -> list[str]:
    """Apply ``changes`` under ``root``. Their paths on the node, in order."""
    for change in changes:
        apply(change)
    return sorted("/" + os.path.relpath(change.path, root) for change in changes)


def left(root: Path) -> set[str]:
    """The files and links under ``root``, as paths on the node."""
    return {"/" + str(path.relative_to(root)) for path in root.rglob("*") if path.is_file() or path.is_symlink()}


def refuses_another(
    changes: Callable[[dict[str, str], str], Sequence[Change]], wanted: dict[str, str], root: Path
) -> None:
    """Assert that a unit of our name under ``root`` that is not ours stays, and is not replaced by ``wanted``."""
    assert changes({}, str(root)) == []
    with pytest.raises(ForeignDropIn):
        changes(wanted, str(root))
