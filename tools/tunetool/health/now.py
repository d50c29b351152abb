"""The node's health at this moment, from the files of the last runs."""

from __future__ import annotations

import time

from tunetool.health import results
from tunetool.node.health.settings import SettingsError, load


def current(files: results.Files = results.NODE) -> results.Health:
    """The health. Reads three small files."""
    try:
        period = load(str(files.settings))["period_seconds"]
        checked, measured = results.read(files.checked), results.read(files.measured)
    except SettingsError as error:
        return results.Health("unknown", [str(error)])
    except OSError as error:
        # A failure that cannot be read must not look like a pass.
        return results.Health("unknown", [f"`{error.filename}` cannot be read: {error.strerror}"])
    return results.health(checked, measured, time.time(), period)
