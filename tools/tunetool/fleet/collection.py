"""The collection that every command uses: of the clone, in tunetool's own wheel, or installed by ansible-galaxy."""

from __future__ import annotations

import configparser
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tunetool
from tunetool.errors import UsageProblem
from tunetool.node.common.node_wheel import COLLECTION

_LINK = f".ansible/collections/{COLLECTION}/galaxy.yml"
"""Where `make setup` lets Ansible find the collection of a clone."""
_SEARCHED = "~/.ansible/collections:/usr/share/ansible/collections"
"""Where Ansible looks for collections without any setting."""


@dataclass(frozen=True)
class Collection:
    """One copy of the collection."""

    root: Path | None
    """None: none was found, and Ansible says what it searched."""
    clone: bool = False
    carried: bool = False
    """It came in the wheel of the tunetool that runs."""

    def playbook(self, name: str) -> str:
        """What ansible-playbook takes for playbooks/NAME.yml."""
        return str(self.root / f"playbooks/{name}.yml") if self.root and self.clone else f"tunetool.node.{name}"

    def environment(self) -> dict[str, str]:
        """The variables with which Ansible finds this copy, and takes our settings unless the user names others."""
        if self.root is None or not (self.clone or self.carried):
            return {}
        if self.clone and not (self.root / _LINK).exists():
            raise UsageProblem(
                f"`{self.root}` is a clone whose collection Ansible cannot find", "run `make setup` there"
            )
        variables = {"ANSIBLE_CONFIG": os.environ.get("ANSIBLE_CONFIG") or str(self.root / "ansible.cfg")}
        if self.carried:
            # First, so that no other version of the collection on this machine runs instead.
            site = str(self.root).removesuffix(f"/{COLLECTION}")
            variables["ANSIBLE_COLLECTIONS_PATH"] = os.pathsep.join([site, _searched_else()])
        return variables


def find_collection() -> Collection:
    """The clone of this package, the copy in its wheel, the clone that the caller is in, or an installed collection."""
    package = Path(tunetool.__file__).resolve().parent
    carried = package.parent / COLLECTION
    if _is_clone(package.parents[1]):
        return Collection(package.parents[1], clone=True)
    if (carried / "playbooks").is_dir():
        return Collection(carried, carried=True)
    if _is_clone(Path.cwd()):
        return Collection(Path.cwd(), clone=True)
    # The package may also be used from within an installed collection, whose sources it is then part of.
    for root in (package.parents[1], *_installed()):
        if (root / "playbooks").is_dir():
            return Collection(root)
    return Collection(None)


def _is_clone(root: Path) -> bool:
    return (root / "galaxy.yml").is_file() and (root / "playbooks").is_dir()


def _installed() -> Iterator[Path]:
    for path in os.environ.get("ANSIBLE_COLLECTIONS_PATH", _SEARCHED).split(os.pathsep):
        yield Path(path).expanduser() / COLLECTION


def _searched_else() -> str:
    """Where Ansible would look by the user's own settings."""
    if os.environ.get("ANSIBLE_COLLECTIONS_PATH"):
        return os.environ["ANSIBLE_COLLECTIONS_PATH"]
    chosen = os.environ.get("ANSIBLE_CONFIG")
    settings = configparser.ConfigParser(interpolation=None, strict=False)
    try:
        settings.read(chosen or (), encoding="utf-8")
        paths = settings.get("defaults", "collections_path", fallback=_SEARCHED)
    except (configparser.Error, UnicodeDecodeError):
        # Ansible names what is wrong in it.
        paths = _SEARCHED
    base = Path(chosen).parent if chosen else Path()
    return os.pathsep.join(str((base / Path(path).expanduser()).absolute()) for path in paths.split(os.pathsep))
