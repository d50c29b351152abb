"""Builds what a machine without a clone installs: the wheel, which carries the collection, the sdist, the collection.

    dist.py [DIR]     into DIR, by default dist/

The names depend on the version alone. The build backend comes from pip's index for the time of the build, as for any
`pip install` from sources.
"""

from __future__ import annotations

import datetime
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import changelog

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("sdist", "wheel")


def backend() -> list[str]:
    """What pyproject.toml needs to be built."""
    found = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]*)"', found[1])


def build(directory: Path, forms: Sequence[str] = FORMS) -> None:
    """Sdist and wheel of this tree."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="tunetool-dist-") as tools:
        subprocess.run([*pip, "install", "--target", tools, *backend()], check=True)
        targets = [each for form in forms for each in ("--target", form)]
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build", "--directory", str(directory), *targets],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": tools},
            stdout=subprocess.DEVNULL,
            check=True,
        )


def build_collection(directory: Path) -> None:
    """The archive that ansible-galaxy installs; its changelog is made of CHANGELOG.md for the time of the build."""
    import yaml

    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    command = [str(galaxy), "collection", "build", "--force", "--output-path", str(directory)]
    made = ROOT / "changelogs/changelog.yaml"
    document = changelog.changelog((ROOT / "CHANGELOG.md").read_text(), datetime.date.today().isoformat())
    made.parent.mkdir(exist_ok=True)
    made.write_text(yaml.safe_dump(document, width=120))
    try:
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    finally:
        made.unlink()
        made.parent.rmdir()


def main() -> int:
    directory = Path(sys.argv[1] if sys.argv[1:] else ROOT / "dist").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        build(directory)
        build_collection(directory)
    except subprocess.CalledProcessError as error:
        print(f"error: `{Path(error.cmd[0]).name} {' '.join(error.cmd[1:4])}` failed", file=sys.stderr)
        print("hint: what it printed is above; pip needs an index, or `find-links` with hatchling", file=sys.stderr)
        return 1
    for path in sorted(directory.iterdir()):
        print(f"{path.stat().st_size / 1e6:6.2f} MB  {path}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
