"""Calls of `tunetool advise` within this process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from click.testing import CliRunner

from tunetool.cli.main import cli
from tunetool.errors import UsageProblem


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


@contextmanager
def refused(words: str) -> Iterator[None]:
    """What runs within is refused with these words, in one line and with a hint."""
    with pytest.raises(UsageProblem) as caught:
        yield
    assert words in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.message
