"""Calls that are wrong, within this process: how each command refuses, and that it left everything as it was."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tunetool.cli import main as entry
from tunetool.errors import ExitCode


class Refusals:
    """Calls from a directory of their own."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch, output: pytest.CaptureFixture[str]) -> None:
        self.directory, self.patch, self.output = directory, patch, output

    def refused(self, *words: str) -> str:
        """What is said of a call that is wrong: an error and a hint in a line each. Nothing was written or changed."""
        before = self._tree()
        with self.patch.context() as patched:
            patched.setattr(sys, "argv", ["tunetool", *words])
            # To be as it was afterwards.
            patched.setattr(sys, "stdout", sys.stdout)
            with pytest.raises(SystemExit) as left:
                entry.main()
        shown = self.output.readouterr()
        assert (left.value.code, shown.out) == (ExitCode.USAGE, ""), (words, shown)
        assert [line.partition(": ")[0] for line in shown.err.splitlines()] == ["error", "hint"], (words, shown.err)
        assert self._tree() == before, words
        return shown.err

    def _tree(self) -> dict[str, bytes | None]:
        paths = sorted(self.directory.rglob("*"))
        return {str(path): path.read_bytes() if path.is_file() else None for path in paths}
