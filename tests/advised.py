"""Calls of `tunetool advise` within this process."""

from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from tunetool.cli.main import cli


def run(*arguments: str) -> str:
    """What `tunetool advise ARGUMENTS` prints. Raises what it raises."""
    done = CliRunner().invoke(cli, ["advise", *arguments], standalone_mode=False)
    if done.exception is not None:
        raise done.exception
    assert done.return_value == 0
    return done.stdout


def answered(*arguments: str) -> dict[str, Any]:
    """The result as JSON."""
    document: dict[str, Any] = json.loads(run(*arguments, "--json", "-"))
    return document


def printed(*arguments: str) -> str:
    """The text without its line breaks."""
    return " ".join(run(*arguments).split())
