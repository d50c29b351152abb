"""What the product has one of, and who else may do the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("call", "files"),
    [
        # The second is the text of a program for Pythons that do not have `FileLock`.
        (r"\b(flock|lockf)\(", {"common/file_lock.py", "training/environment.py"}),
        # The second runs where a wheel is built, before there is a package.
        (r"subprocess\.(run|check_output|check_call|call)\(", {"common/commands.py", "checkpoint/build_read_loop.py"}),
        (r"\bos\.(system|popen)\(", set()),
    ],
    ids=["locks", "programs", "shells"],
)
def test_there_is_one_place_for_it(call: str, files: set[str]) -> None:
    texts = [*ROOT.glob("plugins/**/*.py"), *ROOT.glob("tools/tunetool/**/*.py")]
    callers = {path for path in texts if re.search(call, path.read_text(encoding="utf-8"))}
    assert {"/".join(path.parts[-2:]) for path in callers} == files
