"""The exception by which a module refuses."""

from __future__ import annotations


class Refusal(Exception):
    """Why a step cannot be done, in one line with its hint. The step has changed nothing."""
