"""The node's health at this moment, from the files of the last runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from tunetool.health import results
from tunetool.node.health.settings import SettingsError, load


def current(files: results.Files = results.NODE) -> results.Health:
    """The health. Reads three small files, and the time of the manifest."""
    try:
        settings = load(str(files.settings))
        checked, measured = results.read(files.checked), _measured(files, settings)
    except SettingsError as error:
        return results.Health("unknown", [str(error)])
    except OSError as error:
        # A failure that cannot be read must not look like a pass.
        return results.Health("unknown", [f"`{error.filename}` cannot be read: {error.strerror}"])
    return results.health(checked, measured, time.time(), settings["period_seconds"])


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
