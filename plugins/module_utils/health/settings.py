"""The settings of the node's health check, which the role writes and the program reads."""

from __future__ import annotations

import json
from typing import Any, Mapping

from ..common import settings_file

CONFIG_PATH = "/etc/tunetool/health.json"
CHECKED_PATH = "/run/tunetool/health.json"
ANSWER_PATH = "/run/tunetool/answer.json"
LINE_PATH = "/run/tunetool/health.line"
MEASURED_PATH = "/var/lib/tunetool/health/measured.json"
KEPT_PATH = "/var/lib/tunetool/health/kept.json"
WEAR_PATH = "/var/lib/tunetool/health/wear.json"
SCHEMA_NAME = "tunetool.health/1"
SHORTEST_PERIOD = 60

_SECONDS = {"type": "integer", "minimum": 0}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "schema": {"const": SCHEMA_NAME, "type": "string"},
        "period_seconds": {"type": "integer", "minimum": SHORTEST_PERIOD},
        # 0: never.
        "measure_seconds": _SECONDS,
        "textfile_directory": {"type": "string"},
        "ignored_checks": {"type": "array", "items": {"type": "string"}},
        # An earlier version wrote neither: then both are on.
        "kernel_log": {"type": "boolean"},
        "write": {"type": "boolean"},
    },
    "required": ["schema", "period_seconds", "measure_seconds", "textfile_directory", "ignored_checks"],
    "additionalProperties": False,
}


def load(path: str = CONFIG_PATH) -> dict[str, Any]:
    """The settings, checked. Raises ``SettingsError``."""
    return settings_file.load(path, SCHEMA, "the health check is off", "node_health_enabled")


def dump(
    period: int,
    measure: int,
    textfile_directory: str,
    ignored_checks: list[str],
    kernel_log: bool = True,
    write: bool = True,
) -> str:
    """The settings as text."""
    document: Mapping[str, Any] = {
        "schema": SCHEMA_NAME,
        "period_seconds": period,
        "measure_seconds": measure,
        "textfile_directory": textfile_directory,
        "ignored_checks": ignored_checks,
        "kernel_log": kernel_log,
        "write": write,
    }
    return json.dumps(document, indent=2) + "\n"


def problems_of(given: Mapping[str, Any]) -> list[str]:
    """The problems of the role's values, a line each. A value that is missing is not judged."""
    problems = []
    period, measure = given.get("period"), given.get("measure_every")
    if period is not None and period < SHORTEST_PERIOD:
        problems.append("`node_health_period` is %d. hint: seconds, at least %d" % (period, SHORTEST_PERIOD))
    if measure is not None and measure < 0:
        problems.append("`node_health_measure_every` is %d. hint: hours; 0 for never" % measure)
    for name in ("textfile_directory", "socket"):
        path = given.get(name) or ""
        if path and (not path.startswith("/") or "\n" in path):
            problems.append("`node_health_%s` is `%s`. hint: an absolute path, or '' for none" % (name, path))
    return problems
