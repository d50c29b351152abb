"""The exceptions by which a module ends without a traceback, and what every message keeps to: one line."""

from __future__ import annotations


def on_one_line(text: str) -> str:
    """The text without line breaks and a terminal's commands, which a name or a value of somebody's file may bring."""
    return text if text.isprintable() else "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


class Expected(Exception):
    """What may happen on a node. A module ends with its words; ``hint``, if it has one, says what to do."""


class Refusal(Expected):
    """Why a step cannot be done, in one line with its hint. The step has changed nothing.

    ``more``: lines below it, such as a table that people read before they consent.
    """

    def __init__(self, message: str, *more: str) -> None:
        super().__init__("\n".join(map(on_one_line, (message, *more))))
