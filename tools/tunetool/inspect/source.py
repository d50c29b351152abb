"""The source of an inspection: this machine, a recorded directory tree, or a recording in one file."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from tunetool.errors import UsageProblem
from tunetool.node.array.drive_selection import occupied
from tunetool.node.common import documents
from tunetool.node.gds.facts import GdsFacts, read_gds_facts
from tunetool.node.job_scratch.program import jobs_of_node
from tunetool.node.machine.drive_contents import read_contents
from tunetool.node.machine.drive_health import Health, read_health
from tunetool.node.machine.drives import Drive
from tunetool.node.machine.nvme_admin import NotOffered, Refused
from tunetool.node.machine.recording import BESIDE, SCHEMA_NAME, lay_out

_HINT = "`--root` needs a directory or file that `--capture` wrote"


class Beside(BaseModel):
    """What a recording has beside its files, as ``--capture`` wrote it; a person may have edited it since."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", allow_inf_nan=False)

    health: dict[str, Health] | None = None
    gds_facts: GdsFacts | None = None
    space: dict[str, tuple[int, int]] = {}
    occupied: dict[str, str] | None = None
    note: str | None = None


@dataclass(frozen=True)
class Source:
    """The root directory that readers use, and a recording's data that is not part of its tree."""

    root: str
    live: bool = False
    beside: Beside = field(default_factory=Beside)
    """What a recording has that is in none of its files."""

    def health(self, controller: str) -> Health:
        """The health log of a drive, read or recorded. Raises what ``read_health`` raises."""
        if self.live:
            return read_health(controller)
        recorded = self.beside.health
        if recorded is None:
            raise Refused("not recorded")
        if controller not in recorded:
            raise NotOffered("none in the recording")
        return recorded[controller]

    def occupied(self, drives: Sequence[Drive]) -> dict[str, str] | None:
        """Why a drive is not free, by kernel name, as provisioning judges it; None where nobody looked into the drives,
        which takes root and their device nodes.
        """
        if not self.live:
            return self.beside.occupied
        if os.geteuid() != 0 or not all(Path(drive.path).exists() for drive in drives):
            return None
        contents, unreadable = read_contents([drive for drive in drives if drive.size_bytes], deep=True)
        reasons = {
            drive.name: occupied(drive, contents.get(drive.name, ()), unreadable.get(drive.name)) for drive in drives
        }
        return {name: reason for name, reason in reasons.items() if reason}

    def space(self, mount_point: str) -> tuple[int, int] | None:
        """Bytes of a file system, all and free, read or recorded; None where they are not known."""
        if self.live:
            try:
                status = os.statvfs(mount_point)
            except OSError:  # an XFS that was shut down answers with EIO
                return None
            return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
        return self.beside.space.get(mount_point)

    def jobs(self) -> list[Mapping[str, Any]]:
        """The directories of jobs, which only root reads. Whose jobs ran is not recorded."""
        return jobs_of_node() if self.live and os.geteuid() == 0 else []

    def gds_facts(self, mount_point: str | None) -> GdsFacts:
        """The facts about GPUDirect Storage, read or recorded; some of them are not in a recorded tree."""
        recorded = self.beside.gds_facts
        return read_gds_facts(self.root, mount_point) if self.live or recorded is None else recorded


@contextmanager
def opened(path: Path | None) -> Iterator[Source]:
    """This machine where ``path`` is None, or the recording at ``path``. Raises ``UsageProblem`` for anything else."""
    if path is None:
        yield Source("/", live=True)
    elif path.is_dir():
        if not any((path / name).is_dir() for name in ("proc", "sys")):
            raise UsageProblem(f"`{path}` is not a recording: it has neither `proc` nor `sys`", _HINT)
        beside = path / BESIDE
        yield Source(str(path), beside=_beside(beside, _document(beside)) if beside.is_file() else Beside())
    elif path.is_file():
        document = _document(path)
        with tempfile.TemporaryDirectory(prefix="tunetool-") as folder:
            try:
                lay_out(document, folder)
            except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
                raise UsageProblem(f"`{path}` is not a recording: {error}", _HINT) from None
            yield Source(folder, beside=_beside(path, document))
    else:
        raise UsageProblem(f"`{path}` does not exist", _HINT)


def _beside(path: Path, document: dict[str, Any]) -> Beside:
    try:
        # By way of JSON: there a list may be a tuple, and nothing else is converted.
        return Beside.model_validate_json(json.dumps(document))
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise UsageProblem(f"`{path}` is not a recording: {place}: {first['msg']}", _HINT) from None


def _document(path: Path) -> dict[str, Any]:
    try:
        document = documents.read(path)
    except (OSError, ValueError) as error:
        raise UsageProblem(f"`{path}` is not a recording: {error}", _HINT) from None
    # The oldest recordings have no schema.
    if not isinstance(document, dict) or document.get("schema", SCHEMA_NAME) != SCHEMA_NAME:
        raise UsageProblem(f"`{path}` is not a recording of `{SCHEMA_NAME}`", "record it again with `--capture`")
    return document
