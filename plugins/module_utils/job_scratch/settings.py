"""The settings of the jobs' directories, which the role writes and the program reads."""

from __future__ import annotations

import json
import re
from typing import Any, Mapping

from ..common import settings_file
from ..machine.mounts import plain_path
from ..units import UnitError, parse_size

CONFIG_PATH = "/etc/tunetool/job-scratch.json"
SCHEMA_NAME = "tunetool.job_scratch/1"
_TEXT = {"type": "string"}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "schema": {"const": SCHEMA_NAME, "type": "string"},
        "mount_point": _TEXT,
        "directory": _TEXT,
        "limit": _TEXT,
        "by_request": {"type": "boolean"},
        "textfile_directory": _TEXT,
    },
    "required": ["schema", "mount_point", "directory", "limit", "by_request", "textfile_directory"],
    "additionalProperties": False,
}
_SHARE = re.compile(r"([1-9][0-9]?|100)%")
_PATH = re.compile(r"/[A-Za-z0-9/._+@-]*")
"""Also plain in a shell and in a job's environment."""


def load(path: str = CONFIG_PATH) -> dict[str, Any]:
    """The settings, checked. Raises ``SettingsError``."""
    return settings_file.load(path, SCHEMA, "jobs get no directories here", "job_scratch_enabled")


def dump(given: Mapping[str, Any], mount_point: str) -> str:
    """The settings as text. ``given``: the role's variables by their names without the role's."""
    document = {
        "schema": SCHEMA_NAME,
        "mount_point": plain_path(mount_point),
        "directory": plain_path(given["directory"]),
        "limit": given["limit"],
        "by_request": given["by_request"],
        "textfile_directory": given["textfile_directory"],
    }
    return json.dumps(document, indent=2) + "\n"


def limit_bytes(text: str, volume: int) -> int:
    """A limit such as ``25%`` or ``500GiB`` in bytes, at most the volume's; 0 for none. Raises ``UnitError``."""
    if not text:
        return 0
    if _SHARE.fullmatch(text):
        return volume * int(text[:-1]) // 100
    try:
        size = parse_size(text)
    except UnitError as error:
        raise UnitError(error.message, "a share such as `25%`, or a size such as `500GiB`") from None
    if size < 1 << 20:
        raise UnitError("`%s` is below 1 MiB" % text, "a share such as `25%`, or a size such as `500GiB`")
    return min(size, volume)


def problems_of(given: Mapping[str, Any], mount_point: str) -> list[str]:
    """The problems of the role's values, a line each. A value that is missing is not judged."""
    problems = []
    directory = given.get("directory")
    if directory is not None:
        inside = plain_path(directory).startswith(plain_path(mount_point).rstrip("/") + "/")
        if not inside or not _PATH.fullmatch(directory):
            problems.append(
                "`job_scratch_directory` is `%s`. hint: a directory under `%s`, of letters, digits and `/._+@-`"
                % (directory, mount_point)
            )
    try:
        limit_bytes(given.get("limit") or "", 1 << 62)
    except UnitError as error:
        problems.append("`job_scratch_limit`: %s. hint: %s" % (error.message, error.hint))
    if given.get("by_request") and not given.get("limit", "25%"):
        problems.append("`job_scratch_by_request` needs a limit for other jobs. hint: `job_scratch_limit: 25%`")
    path = given.get("textfile_directory") or ""
    if path and (not path.startswith("/") or "\n" in path):
        problems.append("`job_scratch_textfile_directory` is `%s`. hint: an absolute path, or '' for none" % path)
    return problems
