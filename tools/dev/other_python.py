"""Run the unit tests on another Python: a venv of its own outside the checkout, made once per lock."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from groups import PARALLEL

ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    python, version = sys.argv[1], sys.argv[2]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tunetool"
    inputs = (ROOT / "constraints.txt").read_bytes() + (ROOT / "pyproject.toml").read_bytes() + str(ROOT).encode()
    venv = cache / f"python{version}-{hashlib.sha256(inputs).hexdigest()[:12]}"
    if not (venv / "ready").exists():
        subprocess.run([python, "-m", "venv", "--clear", str(venv)], check=True)
        pip = [str(venv / "bin/pip"), "--disable-pip-version-check", "install", "--quiet"]
        constraint = ["--constraint", str(ROOT / "constraints.txt")]
        needs = ["click", "jinja2", "pydantic", "rich", "pytest", "pytest-xdist", "hypothesis", "jsonschema", "pyyaml"]
        needs += ["prometheus-client", "xxhash"]
        subprocess.run([*pip, *constraint, *needs], check=True)
        (venv / "ready").touch()
    # Tests that drive Ansible need a control machine's Python (3.11) and skip themselves elsewhere (tests/skips.py).
    command = [str(venv / "bin/python"), "-m", "pytest", "-q", *PARALLEL, "tests/unit", "-m", "not slow"]
    environment = dict(
        os.environ, PYTHONPATH=str(ROOT / "tools"), PYTHONDONTWRITEBYTECODE="1", TUNETOOL_TESTS_BARE_PYTHON="1"
    )
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
