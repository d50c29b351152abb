"""Runs programs, mostly tunetool, until they end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from waiting import PATIENCE

ROOT = Path(__file__).parents[1]
TUNETOOL = [sys.executable, "-m", "tunetool"]
_IMPORTS = """
import sys
from tunetool.cli.main import main
sys.argv[0] = "tunetool"
try:
    main()
finally:
    print("imported", *sys.modules, file=sys.stderr)
"""


def call(
    *command: object, stdout: int = subprocess.PIPE, timeout: float = PATIENCE, check: bool = False, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``command`` until it ends. ``more``: further arguments of ``subprocess.run``."""
    argv = [*map(str, command)]
    settings: dict[str, Any] = {"stdout": stdout, "stderr": subprocess.PIPE, **more}
    done: subprocess.CompletedProcess[str] = subprocess.run(argv, text=True, timeout=timeout, check=check, **settings)
    return done


def imported_by(*arguments: str) -> tuple[subprocess.CompletedProcess[str], set[str]]:
    """A command of tunetool, and the modules that it imported."""
    done = call(sys.executable, "-c", _IMPORTS, *arguments, cwd=ROOT)
    return done, set(done.stderr.splitlines()[-1].split()[1:])


def benchmark(name: str) -> click.Command:
    """The command ``tunetool bench NAME``."""
    from tunetool.cli.bench import command as benchmarks

    made = benchmarks.get_command(click.Context(benchmarks), name)
    assert made is not None
    return made
