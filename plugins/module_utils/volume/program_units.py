"""A program with its units: its settings, a starter beside the program, and what systemd runs."""

from __future__ import annotations

import os
import stat
from typing import Iterable, Mapping

from ..common.files import content, replace_file
from .unit_dropins import UNITS_DIRECTORY, Change, ForeignDropIn, apply, exact_changes, link_to

EXECUTABLE, PLAIN = 0o755, 0o644
_SCRIPT = "#!"


def starter_path(program: str, name: str) -> str:
    """The path of a starter, beside the link of the program."""
    return os.path.join(os.path.dirname(program), name)


def unit_path(name: str) -> str:
    """Where systemd reads a unit of ours."""
    return os.path.join(UNITS_DIRECTORY, name)


def changes(
    wanted: Mapping[str, str], known: Iterable[str], starter: str, service: str, header: str, root: str = "/"
) -> list[Change]:
    """Differences of ``known``, all paths that there may be, from exactly the files ``wanted``.

    A starter or a service without the ``header`` is somebody else's. Raises ``ForeignDropIn`` if it is wanted.
    """

    def under(path: str) -> str:
        return os.path.join(root, path.lstrip("/"))

    theirs = content(under(starter)) and header not in content(under(starter))
    if wanted and theirs:
        raise ForeignDropIn("`%s` is not tunetool's. hint: move it to another name" % under(starter))
    present = [under(path) for path in known if os.path.lexists(under(path)) and not (path == starter and theirs)]
    texts = {under(path): text for path, text in wanted.items()}
    changed = exact_changes(under(unit_path(service)), header, texts, present)
    same = set(texts) - {change.path for change in changed}
    return changed + [_other_mode(path, texts[path]) for path in sorted(same) if not _has_mode(path, texts[path])]


def put(change: Change) -> None:
    """Write or remove one of these files. It has its mode from the beginning: a run may be cut at any moment."""
    if change.after and not change.after.startswith(link_to("")):
        replace_file(change.path, change.after, _mode_of(change.after), follow=False)
    else:
        apply(change)


def any_of(paths: Iterable[str], root: str = "/") -> bool:
    """Whether any of these files is there."""
    return any(os.path.lexists(os.path.join(root, path.lstrip("/"))) for path in paths)


def _mode_of(text: str) -> int:
    return EXECUTABLE if text.startswith(_SCRIPT) else PLAIN


def _has_mode(path: str, text: str) -> bool:
    return os.path.islink(path) or not os.path.exists(path) or _mode(path) == _mode_of(text)


def _other_mode(path: str, text: str) -> Change:
    return Change(path, "(mode %04o)\n%s" % (_mode(path), text), text)


def _mode(path: str) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)
