"""The one way in which a module says no."""

from __future__ import annotations


class Refusal(Exception):
    """What stands in the way, as one line with its hint. The step that says it has changed nothing."""
