"""The tunetool that makes a record: its version, its commit, and a hash of its code."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from tunetool import __version__
from tunetool.origin import origin, source_sha256
from tunetool.record import Tool


@cache
def made_by(whole: bool = True) -> Tool:
    """This one. ``whole``: with commit and hash, which take the time of reading the package."""
    if not whole:
        return Tool(version=__version__)
    try:
        source = source_sha256(Path(__file__).resolve().parents[1])
    except OSError:
        # Somebody replaces it at this moment.
        source = None
    return Tool(version=__version__, commit=origin().commit, source_sha256=source)
