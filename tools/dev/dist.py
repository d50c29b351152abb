"""Builds what a machine without a clone installs: the wheel, which carries the collection, the sdist, the collection.

    dist.py [DIR]     into DIR, by default dist/

Where there is a C compiler, also a wheel for machines of this kind, with compiled code (read_loop.c): pip takes
it before the other, and whoever has another machine takes the other.
Wheel and archive have the reference pages that git lacks (reference.py). The names depend on the version alone. The
build backend comes from pip's index for the time of the build, as for any `pip install` from sources.
"""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import reference
from tunetool.checkpoint import build_read_loop

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("sdist", "wheel")
CONTRACTS = ("manifest.schema.json", "record.schema.json")
"""Reference pages that git has; the wheel carries them beside the others."""
KIND = "major_changes"
"""antsibull's section of all entries: the headings of CHANGELOG.md are subjects."""
_RELEASE = re.compile(r"^## (\S+)(?: \((.*)\))?$")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


def backend() -> list[str]:
    """What pyproject.toml needs to be built."""
    found = re.search(r"^requires = \[(.*)\]$", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return re.findall(r'"([^"]*)"', found[1])


def build(directory: Path, forms: Sequence[str] = FORMS, compiled: bool = False) -> None:
    """Sdist and wheel of this tree; ``compiled``: and a second wheel, with compiled code."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="tunetool-dist-") as made:
        tools, pages = f"{made}/tools", Path(made) / "reference"
        pages.mkdir()
        for name, text in made_pages().items():
            (pages / name).write_text(text)
        for name in CONTRACTS:
            shutil.copy(ROOT / reference.FOLDER / name, pages)
        subprocess.run([*pip, "install", "--target", tools, *backend()], check=True)
        # hatch_build.py reads these.
        environment = {**os.environ, "PYTHONPATH": tools, "TUNETOOL_REFERENCE": str(pages), "TUNETOOL_COMPILED": ""}
        hatchling = [sys.executable, "-m", "hatchling", "build", "--directory", str(directory)]
        targets = [each for form in forms for each in ("--target", form)]
        subprocess.run([*hatchling, *targets], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        if compiled:
            environment["TUNETOOL_COMPILED"] = "1"
            subprocess.run(
                [*hatchling, "--target", "wheel"], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True
            )


def made_pages() -> dict[str, str]:
    """The reference pages that git lacks, by their names."""
    return {Path(name).name: reference.page(name) for name in reference.MADE}


@contextmanager
def in_place(files: dict[Path, str]) -> Iterator[None]:
    """Files of the clone that are there only while this goes on; git ignores them."""
    folders = {path.parent for path in files if not path.parent.exists()}
    try:
        for path, text in files.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        yield
    finally:
        for path in files:
            path.unlink(missing_ok=True)
        for folder in folders:
            folder.rmdir()


def build_collection(directory: Path) -> None:
    """The archive that ansible-galaxy installs, with the reference pages and a changelog made of CHANGELOG.md."""
    import yaml

    galaxy = Path(sys.executable).with_name("ansible-galaxy")
    command = [str(galaxy), "collection", "build", "--force", "--output-path", str(directory)]
    made = ROOT / "changelogs/changelog.yaml"
    document = changelog((ROOT / "CHANGELOG.md").read_text(), datetime.date.today().isoformat())
    pages = {ROOT / reference.FOLDER / name: text for name, text in made_pages().items()}
    with in_place({made: yaml.safe_dump(document, width=120), **pages}):
        subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)


def as_rst(text: str) -> str:
    """Markdown of one entry as reStructuredText: code, and links by their text."""
    without_links = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"`([^`]*)`", r"``\1``", without_links)


def changelog(text: str, today: str) -> dict[str, Any]:
    """antsibull's document of a CHANGELOG.md.

    ``today``: the date of a version that has none yet, since antsibull wants one of each.
    """
    releases: dict[str, Any] = {}
    entries: list[str] = []
    for line in text.splitlines():
        if match := _RELEASE.match(line):
            dated = match[2] is not None and _DATE.fullmatch(match[2])
            entries = []
            releases[match[1]] = {"changes": {KIND: entries}, "release_date": match[2] if dated else today}
        elif line.startswith("- "):
            entries.append(line[2:])
        elif line.startswith("  ") and entries:
            entries[-1] += f" {line.strip()}"
    for release in releases.values():
        release["changes"][KIND] = [as_rst(each) for each in release["changes"][KIND]]
    return {"ancestor": None, "releases": releases}


def can_compile() -> bool:
    """Whether this machine makes the compiled code; says why where it has a compiler that does not."""
    if build_read_loop.compiler() is None:
        return False
    with tempfile.TemporaryDirectory(prefix="tunetool-dist-") as made:
        try:
            build_read_loop.build(Path(made) / build_read_loop.MADE.name)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"no wheel with compiled code: {error}", file=sys.stderr)
            return False
    return True


def main() -> int:
    directory = Path(sys.argv[1] if sys.argv[1:] else ROOT / "dist").resolve()
    directory.mkdir(parents=True, exist_ok=True)
    try:
        build(directory, compiled=can_compile())
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
