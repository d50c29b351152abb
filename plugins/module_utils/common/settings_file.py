"""The settings of a program of ours, which a role writes and the program reads."""

from __future__ import annotations

from typing import Any, Mapping

from . import documents
from .manifest import validate
from .refusal import Expected


class SettingsError(Expected):
    """The settings cannot be used. The message is one line with its hint."""


def load(path: str, schema: Mapping[str, Any], without: str, variable: str) -> dict[str, Any]:
    """The settings, checked. Raises ``SettingsError``.

    ``without``: what it means that there are none; ``variable``: what the inventory sets to true to have them.
    """
    again = "hint: run `tunetool provision` for this node"
    try:
        document = documents.read(path)
    except FileNotFoundError:
        hint = "hint: set `%s: true`, then run `tunetool provision`" % variable
        raise SettingsError("`%s` is not there: %s. %s" % (path, without, hint)) from None
    except (OSError, ValueError) as error:
        raise SettingsError("`%s` cannot be read: %s. %s" % (path, error, again)) from None
    problems = validate(document, schema, "settings")
    if problems:
        raise SettingsError("`%s`: %s. %s" % (path, problems[0], again))
    return dict(document)
