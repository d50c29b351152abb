"""I/O settings before tunetool changed them, for resetting them: /etc/tunetool/io-tuning.json."""

from __future__ import annotations

import contextlib
import json
import os
import re
from dataclasses import dataclass, field

from ..common import documents
from ..common.files import content, replace_file
from ..common.refusal import Refusal

_SCHEMA = "tunetool.io-tuning/1"


@dataclass(frozen=True)
class Change:
    """One value that we changed."""

    before: str
    set: str


def key_of(setting: str, target: str) -> str:
    """The file's key of a setting on a target."""
    return "%s[%s]" % (setting, target) if target else setting


def split_key(key: str) -> tuple[str, str]:
    """Setting and target of a key."""
    match = re.match(r"^([a-z0-9_]+)(?:\[(.*)\])?$", key)
    return (match.group(1), match.group(2) or "") if match else (key, "")


@dataclass
class State:
    """The file. It is written before a value is changed, so that every change can be reset after an interruption."""

    path: str
    changes: dict[str, Change] = field(default_factory=dict)
    text_before: str = ""
    """Text of the file as it was read."""

    @classmethod
    def load(cls, path: str) -> State:
        """Read the file; empty without one. Raises ``Refusal`` if it cannot be read: its values would be lost."""
        try:
            text = documents.read_bytes(path).decode("utf-8")
            if not text:
                return cls(path)
            document = documents.parse(text)
            if document["schema"] != _SCHEMA:
                raise ValueError("schema `%s`" % document["schema"])
            changes = {
                key: Change(str(change["before"]), str(change["set"])) for key, change in document["changes"].items()
            }
        except FileNotFoundError:
            return cls(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Refusal(
                "`%s` cannot be read (%s): what was set before is not known. hint: move it away; what tunetool set "
                "then stays until the next boot" % (path, error)
            ) from None
        return cls(path, changes, text)

    def remember(self, key: str, before: str, value: str) -> None:
        """Record a place before it is set. A value from an earlier run stays."""
        known = self.changes.get(key)
        self.changes[key] = Change(known.before if known else before, value)

    def forget(self, key: str) -> None:
        """Remove a place that is no longer ours."""
        self.changes.pop(key, None)

    def text(self) -> str:
        """The file's text; empty when nothing is ours."""
        if not self.changes:
            return ""
        changes = {key: {"before": change.before, "set": change.set} for key, change in sorted(self.changes.items())}
        return json.dumps({"schema": _SCHEMA, "changes": changes}, indent=2) + "\n"

    def save(self) -> None:
        """Write it, or remove it when nothing is ours."""
        text = self.text()
        if text and text != content(self.path):
            replace_file(self.path, text)
        elif not text:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
