"""tunetool's wheel for nodes: without the collection that the control machine's wheel also carries; and its own pip."""

from __future__ import annotations

import base64
import csv
import glob
import hashlib
import io
import os
import re
import sys
import zipfile
from typing import Mapping, Sequence

from .commands import CommandError, run

COLLECTION = "ansible_collections/tunetool/node"
"""Where the control machine's wheel has the collection, below site-packages."""
SHARED = COLLECTION + "/plugins/module_utils"
"""There, what the package has as ``tunetool.node``, which leads to it; on nodes the package has it itself."""
_NODE = "tunetool/node"
_FILE_TIME = (2020, 2, 2, 0, 0, 0)
"""Equal files make an equal wheel."""
_METADATA = re.compile(r"^[^/]+\.dist-info/(METADATA|WHEEL|entry_points\.txt|licenses/.+)$")
"""What a wheel brings; an installer adds files of its own beside these."""
_Member = tuple[bytes, bool]
"""Content, and whether it is a program."""


def without_collection(path: str) -> None:
    """Write the wheel ``path`` again without the collection."""
    with zipfile.ZipFile(path) as wheel:
        members = {
            name: (wheel.read(entry), bool(entry.external_attr >> 16 & 0o100))
            for entry in wheel.infolist()
            for name in [_on_nodes(entry.filename)]
            if name and not entry.is_dir()
        }
    _write(path, members)


def from_installed(source: str, directory: str) -> str:
    """Make the wheel from the installed package that the collection ``source`` came with; its path."""
    members: dict[str, _Member] = {}
    for name, path in installed_files(source).items():
        with open(path, "rb") as stream:
            members[name] = (stream.read(), os.access(path, os.X_OK))
    described = next(name for name in members if name.endswith(".dist-info/WHEEL"))
    tag = re.search(rb"^Tag: (\S+)", members[described][0], re.MULTILINE)
    stem = described.split("/")[0][: -len(".dist-info")]
    path = os.path.join(directory, "%s-%s.whl" % (stem, tag.group(1).decode() if tag else "py3-none-any"))
    _write(path, members)
    return path


def is_carried(source: str) -> bool:
    """Whether this copy of the collection lies where the wheel has it."""
    return os.path.realpath(source).endswith("/" + COLLECTION)


def installed_files(source: str) -> dict[str, str]:
    """Files of the installed package that the collection ``source`` came with: name in a wheel, and path.

    Raises ``CommandError`` where ``source`` came with none, or where one of its files is gone.
    """
    site = os.path.realpath(os.path.join(source, *[".."] * (COLLECTION.count("/") + 1)))
    records = glob.glob(os.path.join(glob.escape(site), "tunetool-*.dist-info", "RECORD"))
    if len(records) != 1:
        raise CommandError("`%s` has neither the sources of tunetool nor one installed tunetool beside it" % source)
    with open(records[0], encoding="utf-8", newline="") as stream:
        names = [row[0] for row in csv.reader(stream) if row]
    files = {_on_nodes(name): os.path.join(site, name) for name in names}
    files.pop("", None)
    for path in files.values():
        if not os.path.isfile(path):
            raise CommandError("`%s` of the installed tunetool is gone: install it again" % path)
    return files


def _on_nodes(name: str) -> str:
    """The name in the nodes' wheel of a file in the control machine's; empty: that leaves it out."""
    if name.startswith(SHARED + "/") and not name.endswith(".pyc"):
        return _NODE + name[len(SHARED) :]
    # Programs that an installer made lie outside site-packages.
    others = (COLLECTION.split("/", maxsplit=1)[0] + "/", _NODE + "/", "../", "/")
    if name.startswith(others) or name.endswith(".pyc"):
        return ""
    return "" if ".dist-info/" in name and not _METADATA.match(name) else name


def _write(path: str, members: Mapping[str, _Member]) -> None:
    """A wheel with these files and their RECORD, by rename."""
    metadata = next(name for name in members if name.endswith(".dist-info/METADATA"))
    record = metadata[: -len("METADATA")] + "RECORD"
    lines = io.StringIO()
    table = csv.writer(lines, lineterminator="\n")
    temporary = path + ".new"
    with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, (content, program) in sorted(members.items()):
            _add(wheel, name, content, program)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
            table.writerow([name, "sha256=" + digest, len(content)])
        table.writerow([record, "", ""])
        _add(wheel, record, lines.getvalue().encode(), False)
    os.replace(temporary, path)


def _add(wheel: zipfile.ZipFile, name: str, content: bytes, program: bool) -> None:
    entry = zipfile.ZipInfo(name, _FILE_TIME)
    entry.external_attr = (0o100755 if program else 0o100644) << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    wheel.writestr(entry, content)


def own_pip() -> list[str]:
    """The command: the pip of the Python that runs this."""
    return [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def has_sources(source: str) -> bool:
    """Whether pip can build the package from this copy of the collection: not from the one in tunetool's own wheel."""
    return os.path.isdir(os.path.join(source, "tools")) or not is_carried(source)


def package_files(source: str) -> list[str]:
    """Every file of the package, wherever this copy of the collection has it."""
    if not has_sources(source):
        return list(installed_files(source).values())
    files = [os.path.join(source, name) for name in ("LICENSE", "README.md")]
    # The package's `node` and `templates` are links to directories beside it, whose files go into the wheel as well.
    for directory, names, entries in os.walk(os.path.join(source, "tools/tunetool"), followlinks=True):
        names[:] = [name for name in names if name != "__pycache__"]
        files += [os.path.join(directory, entry) for entry in entries if not entry.endswith(".pyc")]
    return files


def package_wheel(source: str, directory: str) -> str:
    """Make tunetool's wheel for nodes, which leaves the collection out, in ``directory``; its path.

    From the package's sources, or, without a package index, from the installed package that ``source`` came with.
    """
    if not has_sources(source):
        return from_installed(source, directory)
    run([*own_pip(), "wheel", "--no-deps", "--wheel-dir", directory, source], timeout=600)
    name = next(name for name in sorted(os.listdir(directory)) if name.startswith("tunetool-"))
    path = os.path.join(directory, name)
    without_collection(path)
    return path


def platform_options(machine: str, platforms: Sequence[str]) -> list[str]:
    """Options for a machine type, from platform tags with a ``%s`` for it."""
    return [argument for form in platforms for argument in ("--platform", form % machine)]
