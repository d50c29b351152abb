"""Where this tunetool came from, and so the line that installs one of its extras: it is on no package index."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from tunetool.node.common.node_wheel import SHARED

_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_NAME = re.compile(r"[\w.-]+")
_OLDER_PYTHON = re.compile(r"python_version\s*<\s*['\"]")
_LEAST_PYTHON = re.compile(r"python_version\s*>=\s*['\"](\d+)\.(\d+)")
_SET_UP = {"control": "setup"} | dict.fromkeys(
    ("deepspeed", "checkpoint", "engines", "finetune", "lightning"), "setup-deepspeed"
)
"""The target of `make` that installs an extra in a clone."""


@dataclass(frozen=True)
class Origin:
    """What pip was given, as far as its metadata (PEP 610) say."""

    clone: Path | None = None
    """The clone that the package is used from."""
    given: str | None = None
    """What pip takes again, without extras: a wheel, a directory, an address."""
    requires: Sequence[str] = ()
    """The package's requirements, each with its marker."""
    commit: str | None = None
    """The clone's, or the one that pip installed from a repository."""


def origin() -> Origin:
    """That of this package."""
    from importlib import metadata  # noqa: PLC0415  (a hint is rarely needed, and this takes a while to import)

    package = Path(__file__).resolve().parent
    try:
        distribution = metadata.distribution("tunetool")
        text, requires = distribution.read_text("direct_url.json"), distribution.requires or ()
    except metadata.PackageNotFoundError:
        text, requires = None, ()
    return read_origin(package, text, requires)


def read_origin(package: Path, direct_url: str | None, requires: Sequence[str]) -> Origin:
    """``package``: directory of the package that runs; ``direct_url``: content of direct_url.json, if there is one."""
    clone = package.parents[1]
    if (clone / "pyproject.toml").is_file() and (clone / "tools/tunetool").is_dir():
        return Origin(clone, str(clone), requires, _head(clone))
    commit = None
    try:
        document = json.loads(direct_url or "{}")
        given = _given(document)
        commit = str(document["vcs_info"]["commit_id"]) if "vcs_info" in document else None
    except (ValueError, TypeError, AttributeError, KeyError):
        # Somebody's own installer: as if nothing were known.
        given = None
    return Origin(None, given, requires, commit)


def _head(clone: Path) -> str | None:
    """The commit that is checked out. git itself refuses to answer in a clone of another user."""
    try:
        directory = clone / ".git"
        if directory.is_file():  # a work tree beside its repository
            directory = clone / directory.read_text().removeprefix("gitdir:").strip()
        head = (directory / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        shared = directory / "commondir"
        common = directory / shared.read_text().strip() if shared.is_file() else directory
        for path in (directory / name, common / name):
            if path.is_file():
                return path.read_text().strip()
        packed = [line.split() for line in (common / "packed-refs").read_text().splitlines()]
        return next((line[0] for line in packed if line[1:] == [name]), None)
    except (OSError, ValueError):
        return None


def source_sha256(package: Path) -> str:
    """One hash over the Python files of a package, by their paths."""
    # `node` is a link in a clone, a directory on a node, and on a control machine in the collection.
    files = _python_files(package)
    carried = package.parent / SHARED
    if len([name for name in files if name.startswith("node/")]) == 1 and carried.is_dir():
        files |= {f"node/{name}": path for name, path in _python_files(carried).items()}
    whole = hashlib.sha256()
    for name, path in sorted(files.items()):
        whole.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def _python_files(root: Path) -> dict[str, Path]:
    """By their names below it."""
    return {
        os.path.relpath(f"{directory}/{name}", root): Path(directory, name)
        for directory, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    }


def _given(document: dict[str, Any]) -> str | None:
    url = str(document.get("url") or "")
    parts = urlsplit(url)
    if parts.scheme == "file" and "vcs_info" not in document:
        path = Path(unquote(parts.path))
        return str(path) if path.exists() else None
    if "vcs_info" in document:
        vcs = document["vcs_info"]
        return f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    return url if parts.scheme else None


def lacking(extra: str, source: Origin | None = None) -> list[str] | None:
    """Packages of ``extra`` that the Python which runs this lacks; none of them is imported.

    None where the metadata of tunetool do not list the extra. ``source``: by default where this tunetool came from.
    """
    from importlib import metadata  # noqa: PLC0415  (see ``origin``)

    listed = _of_extra(source or origin(), extra)
    absent = []
    for requirement, marker in listed:
        name = _NAME.match(requirement)
        least = _LEAST_PYTHON.search(marker)
        if least and sys.version_info < (int(least[1]), int(least[2])):
            absent.append(f"{requirement}, which needs Python {least[1]}.{least[2]}")
            continue
        try:
            metadata.distribution(name[0] if name else requirement)
        except metadata.PackageNotFoundError:
            absent.append(requirement)
    return absent if listed else None


def _of_extra(source: Origin, extra: str) -> list[tuple[str, str]]:
    """Requirement and marker of each package of ``extra``."""
    parts = [
        each.partition(";")
        for each in source.requires
        # A line for older Pythons alone is there for pip to refuse them; the line for newer ones says what is needed.
        if extra in _EXTRA.findall(each) and not _OLDER_PYTHON.search(each)
    ]
    return [(requirement.strip(), marker) for requirement, _, marker in parts]


def install_hint(extra: str, python: str | Path | None = None) -> str:
    """The command, in backticks, that installs ``extra`` for ``python``: by default the one that runs this."""
    return hint_for(origin(), extra, Path(python or sys.executable), Path(sys.prefix))


def newer_python_hint(version: str) -> str:
    """The command, in backticks, that installs tunetool for control machines with another Python."""
    source = origin()
    if source.clone is not None:
        return f"`PYTHON=python{version} make setup` in `{source.clone}`"
    return hint_for(source, "control", Path(f"python{version}"), Path(sys.prefix))


def hint_for(source: Origin, extra: str, python: Path, prefix: Path) -> str:
    """As ``install_hint``, for a tunetool of that origin which runs in the environment ``prefix``."""
    own = python.parent.parent.resolve() == prefix.resolve()
    if source.clone is not None and own and extra in _SET_UP and prefix.resolve() == (source.clone / ".venv").resolve():
        return f"`make {_SET_UP[extra]}` in `{source.clone}`"
    if source.given is None:
        what = [requirement for requirement, _ in _of_extra(source, extra)]
    elif "://" in source.given:
        what = [f"tunetool[{extra}] @ {source.given}"]
    else:
        what = [f"{source.given}[{extra}]"]
    # What is used from a clone stays so; another Python gets a copy.
    editable = ["-e"] if source.clone is not None and own else []
    line = shlex.join([str(python), "-m", "pip", "install", *editable, *what])
    return f"`{line}`" if what else f"`{line}` with the packages of tunetool's extra `{extra}`"
