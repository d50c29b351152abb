"""Brings the files of the health check, and what runs of it, to what is asked for."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Iterator, Mapping

from ..common.commands import CommandError
from ..common.drift import diff_entry
from . import health_units


def converge(
    program: str,
    files: Mapping[str, str],
    directory: str,
    socket: bool,
    measures: bool,
    acting: bool,
    begins: Callable[[], None] = lambda: None,
) -> list[dict[str, str]]:
    """Compare, then write or remove. Returns the diff. Without ``files`` all of it goes.

    ``begins`` is called before the first change.
    ``directory``: of the metrics, empty for none. The caller lets systemd read its files again: ``take_effect``.
    Raises ``CommandError``, ``ForeignDropIn`` and ``OSError``.
    """
    changed = health_units.changes(files, program)
    diff = [diff_entry(each.path, each.before, each.after) for each in changed]
    if directory and not os.path.isdir(directory):
        diff.append(diff_entry(directory, "", "a directory\n"))
    if files and not diff and not health_units.running(socket):
        diff.append(diff_entry(health_units.TIMER, "", "active\n"))
    metrics = health_units.stale_metrics(directory) if changed else []
    results = health_units.stale_results(bool(files), measures)
    diff += [diff_entry(path, "metrics\n", "") for path in metrics]
    diff += [diff_entry(path, "a result\n", "") for path in results]
    if not acting:
        return diff
    if diff:
        begins()
    if changed:
        health_units.stop(bool(files), socket)
        # Again: a check or measurement that ran until now may have written more.
        metrics = health_units.stale_metrics(directory)
    for path in [*metrics, *health_units.stale_results(bool(files), measures)]:
        os.unlink(path)
    if directory:
        os.makedirs(directory, exist_ok=True)
    for each in changed:
        health_units.put(each)
    return diff


@contextlib.contextmanager
def halted(acting: bool) -> Iterator[list[dict[str, str]]]:
    """Stop what runs of it, and give the diff; ``remove`` then takes the files. What ran runs again if the block fails.

    Raises ``CommandError``.
    """
    running = health_units.active()
    diff = [diff_entry(unit, "active\n", "") for unit in running]
    if not acting or not health_units.installed():
        yield diff
        return
    health_units.stop(False, False)
    try:
        yield diff
    except BaseException:
        # Its own error would hide the first one.
        with contextlib.suppress(CommandError):
            health_units.start(running)
        raise


def remove(program: str, acting: bool) -> list[dict[str, str]]:
    """Remove all of it, also from what systemd knows. Returns the diff. Raises as ``converge`` does."""
    diff = converge(program, {}, "", socket=False, measures=False, acting=acting)
    if diff and acting:
        health_units.take_effect(False, False)
    return diff
