"""Writes an inventory to start from: an example of the collection's, in a directory of the user's."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.fleet.collection import find_collection

LAB = "lab"
"""The example for virtual nodes: `tunetool lab` writes its hosts.yml."""
GOALS = "goals.toml"
IGNORED = """\
# What runs leave, and what nobody else may read.
*plan*.json
*.retry
vault-password*
.vault*
"""


def write_inventory(directory: Path, profile: str, goals: str | None = None) -> list[Path]:
    """Make ``directory`` from the collection's inventory/PROFILE in one step, and return its files.

    ``goals``: text of a goals file, which ansible.cfg of the collection lets Ansible pass over.

    Raises ``UsageProblem`` if it exists. Directories above it that do not exist are made first.
    """
    if os.path.lexists(directory):
        raise _exists(directory)
    collection = find_collection().root
    example = collection / "inventory" / profile if collection else None
    if example is None or not example.is_dir():
        raise CannotJudge(
            f"this tunetool came without the example `inventory/{profile}`",
            "call it where tunetool was installed whole",
        )
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UsageProblem(
            f"`{directory.parent}` is not a directory", "name another place; nothing was written"
        ) from None
    # Beside it, so that a rename is one step.
    with tempfile.TemporaryDirectory(prefix=f".{directory.name}.", dir=directory.parent) as temporary:
        unfinished = Path(temporary) / "new"
        copied = sorted((example / "group_vars" if profile == LAB else example).rglob("*.yml"))
        files = [Path(".gitignore"), *(path.relative_to(example) for path in copied)]
        for name in files:
            (unfinished / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / ".gitignore").write_text(IGNORED)
        for name in files[1:]:
            shutil.copyfile(example / name, unfinished / name)
        if goals is not None:
            files.append(Path(GOALS))
            (unfinished / GOALS).write_text(goals)
        try:
            unfinished.rename(directory)
        except OSError as error:
            if os.path.lexists(directory):
                # Somebody made it meanwhile.
                raise _exists(directory) from error
            raise
    return [directory / name for name in files]


def _exists(directory: Path) -> UsageProblem:
    return UsageProblem(f"`{directory}` exists", "name a directory that does not exist yet; nothing was written")
