"""Record a node to a file or directory, so that ``inspect --root`` shows the same screen on any machine."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tunetool import __version__
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.inspect.collect import brief, filesystems, volume
from tunetool.inspect.source import Source
from tunetool.node.array.md_arrays import read_arrays
from tunetool.node.common.files import replace_file
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.nvme_admin import NotOffered, Refused, Silent
from tunetool.node.machine.recording import anonymous, lay_out, record


def check_destination(path: Path) -> None:
    """Raise ``UsageProblem`` unless ``path`` is a new file ``*.json``, or an empty or new directory."""
    if path.suffix == ".json":
        if path.exists():
            raise UsageProblem(f"`{path}` exists", "`--capture` overwrites no file: name a new one")
    elif path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UsageProblem(f"`{path}` is not empty", "`--capture` takes a new or empty directory, or a file `*.json`")
    if not path.absolute().parent.is_dir():
        raise UsageProblem(f"`{path.parent}` is not a directory", "create it first")


def capture(source: Source, path: Path, hide_names: bool) -> dict[str, Any]:
    """Write a recording of the node to ``path`` and return it as a document.

    On an error nothing remains at ``path``. ``hide_names`` replaces serial numbers and host names. Raises
    ``CannotJudge`` where the node cannot be recorded.
    """
    try:
        document = record(source.root)
    except ValueError as error:
        raise CannotJudge(f"`{source.root}` cannot be recorded: {error}") from None
    document["tool_version"] = __version__
    document["health"] = _health_logs(source)
    # In brief: labels, and names of programs, are their owner's.
    occupied = source.occupied(read_drives(source.root))
    document["occupied"] = occupied and {name: brief(reason) for name, reason in occupied.items()}
    arrays = read_arrays(source.root)
    mounted = filesystems(arrays, source.root)
    document["gds_facts"] = asdict(source.gds_facts(volume(mounted, arrays, source.root)))
    spaces = {each.mount_point: source.space(each.mount_point) for each in mounted}
    document["space"] = {point: space for point, space in spaces.items() if space is not None}
    if source.beside.note:
        document["note"] = source.beside.note
    if hide_names:
        document = anonymous(document)
    if path.suffix == ".json":
        replace_file(str(path), json.dumps(document, indent=1, sort_keys=True) + "\n")
        return document
    existed = path.exists()
    try:
        path.mkdir(exist_ok=True)
        lay_out(document, str(path))
    except BaseException:
        _remove_partial(path, existed)
        raise
    return document


def _health_logs(source: Source) -> dict[str, Any] | None:
    logs = {}
    for controller in {drive.controller: None for drive in read_drives(source.root) if drive.controller}:
        try:
            logs[controller] = asdict(source.health(controller))
        except Refused:
            return None
        except (NotOffered, Silent, ValueError):
            continue
    return logs


def _remove_partial(path: Path, keep: bool) -> None:
    with contextlib.suppress(OSError):
        for entry in path.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink()
        if not keep:
            path.rmdir()
