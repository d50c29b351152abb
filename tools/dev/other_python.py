"""Run the unit tests on another Python: a venv outside the checkout, which is made once for each lock file."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import container
from groups import PARALLEL

ROOT = Path(__file__).resolve().parents[2]


def venv_of(cache: Path, version: str) -> Path:
    """The path of that version's venv for the lock file, whether or not it is there; older ones are removed."""
    inputs = (ROOT / "constraints.txt").read_bytes() + (ROOT / "pyproject.toml").read_bytes()
    venv = cache / "pythons" / f"{version}-{hashlib.sha256(inputs).hexdigest()[:12]}"
    # The second pattern is the name that earlier versions of this file gave.
    for old in (*venv.parent.glob(f"{version}-*"), *cache.glob(f"python{version}-*")):
        if old != venv:
            shutil.rmtree(old, ignore_errors=True)
    return venv


def test(python: str, version: str) -> int:
    """pytest's exit status."""
    venv = venv_of(container.cache_directory(), version)
    if not (venv / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin/pip"), "--disable-pip-version-check", "install", "--quiet"]
        constraint = ["--constraint", str(ROOT / "constraints.txt")]
        needs = ["click", "jinja2", "pydantic", "rich", "pytest", "pytest-timeout", "pytest-xdist"]
        needs += ["grpcio", "hypothesis", "jsonschema", "prometheus-client", "pyyaml", "xxhash"]
        subprocess.run([*pip, *constraint, *needs], check=True)
        (venv / "ready").touch()
    # Tests of the checkout's own tools show the same on every Python, so this one leaves them out (`any_python`).
    # Tests that drive Ansible need a control machine's Python (3.11) and skip themselves elsewhere (tests/skips.py).
    command = [str(venv / "bin/python"), "-m", "pytest", "-q", *PARALLEL, "tests/unit"]
    command += ["-m", "not slow and not any_python", "--hypothesis-profile=few"]
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT / "tools"), PYTHONDONTWRITEBYTECODE="1", TUNETOOL_TESTS_BARE_PYTHON="1"
    )
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def main() -> int:
    python, version = sys.argv[1], sys.argv[2]
    # Another checkout may have another lock: it would remove this one's venv in the middle of a run.
    with container.only_builder(container.cache_directory() / "pythons"):
        return test(python, version)


if __name__ == "__main__":
    sys.exit(main())
