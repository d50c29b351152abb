"""Runs tunetool's own commands, one after another, each as a process of its own: as a person would call them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tunetool import record as records
from tunetool.accept.progress_file import Kept
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.node.common.commands import captured
from tunetool.node.play import connection

_DRY_SECONDS = 600.0


# Not `-m`: it imports from the working directory first, where somebody else's files may lie beside his goals.
_START = """import sys
sys.path[:] = [each for each in sys.path if each]
import runpy
runpy.run_module("tunetool", run_name="__main__", alter_sys=True)"""


def _argv(line: Sequence[str], *more: str) -> list[str]:
    return [sys.executable, "-c", _START, *line, *more]


def announced(line: Sequence[str]) -> list[str]:
    """What the command says that it would do: how long, and how many bytes.

    Raises ``UsageProblem`` where the call is wrong on this machine, ``CannotJudge`` where it cannot run here.
    """
    try:
        done = captured(_argv(line, "--dry-run"), _DRY_SECONDS, own_locale=True)
    except subprocess.TimeoutExpired:
        raise CannotJudge(f"`{shlex.join(line)}` says nothing for {_DRY_SECONDS:.0f} s") from None
    lines = [each for each in done.stderr.splitlines() if each.strip()]
    if done.returncode == ExitCode.OK:
        return lines
    error = next((each.removeprefix("error: ") for each in lines if each.startswith("error: ")), "no reason was given")
    hint = next((each.removeprefix("hint: ") for each in lines if each.startswith("hint: ")), None)
    kind = UsageProblem if done.returncode == ExitCode.USAGE else CannotJudge
    raise kind(error, hint)


def measure(line: Sequence[str], runs_dir: Path, more: Sequence[str] = ()) -> Kept:
    """Run it and return its record. Raises ``CannotJudge`` where it leaves none.

    A Ctrl-C ends the command, which cleans up, and then is raised.
    """
    with tempfile.TemporaryDirectory(prefix="tunetool-accept-") as temporary:
        document = Path(temporary) / "record.json"
        argv = _argv(line, "--runs-dir", str(runs_dir), "--json", str(document), *more)
        # In a session of its own: a Ctrl-C on the terminal reaches it once, from here.
        with Path(os.devnull).open("wb") as nowhere, os.fdopen(os.dup(2), "wb") as errors:
            process = connection.start(argv, os.environ, nowhere, errors)
        try:
            code = process.wait()
        except BaseException:
            process.terminate()
            process.wait()
            raise
        if code == ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        if not document.is_file():
            raise CannotJudge(f"`tunetool {shlex.join(line)}` left no record and ended with {code}")
        record = records.read(document)
    for name, each in records.newest_beside(runs_dir, record.kind, 50):
        if each.id == record.id:
            return Kept(record, name)
    raise CannotJudge(f"`{runs_dir}` has no record of `tunetool {shlex.join(line)}`")
