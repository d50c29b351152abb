"""Run the tests of libraries that .venv lacks, Orbax with JAX, Megatron-core and TensorFlow, by .venv's own Python.

They lie in a directory outside the checkout, made once for each list (tests/frameworks.txt), and are on the path of
these tests alone: no other test may come to need them. torch and all that they share with it is .venv's.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import container

ROOT = Path(__file__).resolve().parents[2]
VENV = ROOT / ".venv/bin/python"
LIST = ROOT / "tests/frameworks.txt"
TESTS = (
    "tests/checkpoint/test_engines.py",
    "tests/checkpoint/test_frameworks.py",
    "tests/measurement/test_bench_dataset.py",
)
NEEDING_THEM = "orbax or megatron or tensorflow"
"""Names of tests: those of an engine have the engine's name."""
PRESENT = "TUNETOOL_TESTS_FRAMEWORKS"
"""Set for these tests: that a library is missing excuses no skip then (tests/skips.py)."""


def kept(cache: Path, made_from: bytes) -> Path:
    """The directory for what it is made from, whether or not it is there; older ones are removed."""
    path = cache / hashlib.sha256(made_from).hexdigest()[:12]
    for old in cache.glob("????????????"):
        if old != path:
            shutil.rmtree(old, ignore_errors=True)
    return path


def directory_of(cache: Path) -> Path:
    """The libraries' directory for this list and Python."""
    version = subprocess.run([VENV, "--version"], capture_output=True, check=True).stdout
    return kept(cache / "frameworks", LIST.read_bytes() + version)


def install(directory: Path) -> None:
    """pip's ``--target``, whole or not at all."""
    new = directory.with_suffix(".new")
    shutil.rmtree(new, ignore_errors=True)
    pip = [str(VENV), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run(
        [*pip, "--no-deps", "--only-binary", ":all:", "--target", str(new), "--requirement", str(LIST)], check=True
    )
    new.rename(directory)


def test(directory: Path, arguments: Sequence[str]) -> int:
    """pytest's exit status."""
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    # JAX looks for accelerators of every kind, and warns where a library of one is missing.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), PRESENT: "1", "JAX_PLATFORMS": "cpu"}
    # Their warnings are about themselves.
    command = [str(VENV), "-m", "pytest", "-q", "--durations=5", *TESTS, "-k", NEEDING_THEM, "-W", "ignore", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    # Another checkout may have another list: it would remove this one's directory in the middle of a run.
    with container.only_builder(container.cache_directory() / "frameworks"):
        directory = directory_of(container.cache_directory())
        if not directory.exists():
            install(directory)
        return test(directory, sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
