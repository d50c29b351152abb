"""The node's health at this moment, from the files of the last runs."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tunetool.health import results
from tunetool.node.common.files import replace_file
from tunetool.node.common.run_directory import make_run_directory
from tunetool.node.health.settings import SettingsError, load


def current(files: results.Files = results.NODE) -> results.Health:
    """The health. Reads three small files, and the time of the manifest."""
    return _judged(_known(files))


def publish(files: results.Files = results.NODE) -> None:
    """Write down for every user what is known: the answering process has no rights.

    The directories of the other files may be closed to it, where they were made under root's umask.
    """
    make_run_directory(str(files.answer.parent))
    replace_file(str(files.answer), json.dumps(_known(files)) + "\n", sync=False, follow=False)


def answered(files: results.Files = results.NODE) -> results.Health:
    """The health by what was published, and by nothing else."""
    try:
        return _judged(results.read_document(files.answer))
    except OSError as error:
        return results.Health("unknown", [_unread(error)])


def _known(files: results.Files) -> dict[str, Any]:
    try:
        settings = load(str(files.settings))
        checked, measured = results.read(files.checked), _measured(files, settings)
    except SettingsError as error:
        return {"doubt": str(error)}
    except OSError as error:
        # A failure that cannot be read must not look like a pass.
        return {"doubt": _unread(error)}
    return {
        "period": settings["period_seconds"],
        "checked": asdict(checked) if checked is not None else None,
        "measured": asdict(measured) if measured is not None else None,
    }


def _judged(known: Mapping[str, Any]) -> results.Health:
    period = known.get("period")
    if not isinstance(period, int):
        return results.Health("unknown", [str(known.get("doubt", "there is no result yet"))])
    checked, measured = (results.result_in(known.get(name)) for name in ("checked", "measured"))
    return results.health(checked, measured, time.time(), period)


def _unread(error: OSError) -> str:
    return f"`{error.filename}` cannot be read: {error.strerror}"


def _measured(files: results.Files, settings: Mapping[str, Any]) -> results.Result | None:
    """The last measurement, if it was of what is built now and another one may follow. Raises ``OSError``.

    A failure that no later measurement can clear would count for ever.
    """
    if not settings["measure_seconds"]:
        return None
    try:
        built = files.manifest.stat().st_mtime
    except FileNotFoundError:
        return None
    measured = results.read(files.measured)
    return measured if measured is not None and measured.at >= built else None
