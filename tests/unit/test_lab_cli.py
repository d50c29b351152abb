"""`tunetool lab` from its command line: refusals before any work, and messages without a lab."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from tunetool.cli.lab import MIN_DRIVE, command, size_not_below
from tunetool.errors import TunetoolError


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TUNETOOL_LAB_DIR", str(tmp_path / "lab"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tunetool.lab.state.tempfile.gettempdir", lambda: str(tmp_path))

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(command, list(arguments))

    return run


def exit_code(result: Result) -> int:
    return int(result.exception.exit_code) if isinstance(result.exception, TunetoolError) else result.exit_code


def test_an_empty_lab_has_a_status_and_can_be_ended(call, tmp_path: Path):
    for arguments in (("status",), ("down",)):
        result = call(*arguments)
        assert result.exit_code == 0
        assert result.stdout == "no nodes\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("text", "size"),
    [("4G", 2**32), ("4GiB", 2**32), ("512M", 2**29), ("0.5G", 2**29), ("1T", 2**40), ("4194304000B", 4000 * 2**20)],
)
def test_sizes_are_read_as_qemu_and_as_tunetool_write_them(text: str, size: int):
    assert size_not_below(MIN_DRIVE).convert(text, None, None) == size


def test_a_size_that_is_none_says_what_to_write():
    with pytest.raises(click.BadParameter, match="`4G` or `4GiB`"):
        size_not_below(MIN_DRIVE).convert("4g", None, None)


def test_every_command_of_the_issue_is_there():
    assert set(command.commands) == {
        "up",
        "status",
        "ssh",
        "fault",
        "save",
        "reset",
        "reboot",
        "down",
        "inventory",
    }
