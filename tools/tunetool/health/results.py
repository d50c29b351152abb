"""The last results of the health check, kept in files, and the node's health by them, at this moment too."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tunetool.node.common import documents
from tunetool.node.common.check_result import FAIL, PASS, UNKNOWN, Check
from tunetool.node.common.files import make_run_directory, replace_file
from tunetool.node.common.manifest import MANIFEST_PATH
from tunetool.node.common.settings_file import SettingsError
from tunetool.node.health.settings import (
    ANSWER_PATH,
    CHECKED_PATH,
    CONFIG_PATH,
    KEPT_PATH,
    LINE_PATH,
    MEASURED_PATH,
    WEAR_PATH,
    load,
)

PERIODS = 3
"""After so many periods a result says nothing any more."""
LINE_PERIODS = 2
"""The same for the line: who reads it asks every minute, and need not wait for a check that is late."""
NAME_A_DRIVE = ("drives.", "array.members: ", "kernel.drives: ")
"""Reasons that come first: a drive is the cause of what fails above it, and a person can replace it."""
LINE_LONGEST = 80
"""Characters of its words: node-problem-detector shows no more by default."""


@dataclass(frozen=True)
class Files:
    """The files of the health check, under the node's root directory."""

    root: Path = Path("/")

    @property
    def settings(self) -> Path:
        """What the role wrote."""
        return self.root / CONFIG_PATH.lstrip("/")

    @property
    def manifest(self) -> Path:
        """What was built."""
        return self.root / MANIFEST_PATH.lstrip("/")

    @property
    def checked(self) -> Path:
        """The result of the checks. It goes with a boot: what was true before says nothing."""
        return self.root / CHECKED_PATH.lstrip("/")

    @property
    def answer(self) -> Path:
        """What a process without rights needs for the node's health."""
        return self.root / ANSWER_PATH.lstrip("/")

    @property
    def line(self) -> Path:
        """The node's health in a line that a shell can read: status, from when and until when it counts, and words."""
        return self.root / LINE_PATH.lstrip("/")

    @property
    def measured(self) -> Path:
        """The result of the last measurement."""
        return self.root / MEASURED_PATH.lstrip("/")

    @property
    def kept(self) -> Path:
        """What one check leaves for the next: where it has read the kernel's log, and what it wrote to the volume."""
        return self.root / KEPT_PATH.lstrip("/")

    @property
    def wear(self) -> Path:
        """What the drives counted, a sample a day."""
        return self.root / WEAR_PATH.lstrip("/")

    @property
    def drained(self) -> Path:
        """The reason with which we drained the node in Slurm."""
        return self.root / "var/lib/tunetool/health/drained.json"


NODE = Files()


@dataclass(frozen=True)
class Result:
    """A run: when it ended (seconds since 1970), its verdict, and what fails, as ``id: words``."""

    at: float
    status: str
    failed: Sequence[str] = ()
    doubts: Sequence[str] = ()
    """What could not be judged."""
    warnings: Sequence[str] = ()
    """What passes, and gives somebody something to do."""


@dataclass(frozen=True)
class Health:
    """The node's health: ``pass``, ``fail`` or ``unknown``, with the reasons; of a pass, what it warns of."""

    status: str
    reasons: Sequence[str] = field(default_factory=tuple)


def of_checks(checks: Sequence[Check], ignored: Sequence[str], at: float) -> Result:
    """The verdict over the checks, as ``verify --level config`` gives it, without those that the owner ignores."""
    judged = [check for check in checks if not is_ignored(check.id, ignored)]
    failed = [f"{check.id}: {check.found}" for check in judged if check.status == FAIL]
    doubts = [f"{check.id}: {check.found}" for check in judged if check.status == UNKNOWN]
    if not failed and not doubts and not any(check.status == PASS for check in judged):
        doubts = ["no check could be made"]
    warnings = [str(check) for check in judged if check.warns]
    return Result(at, "fail" if failed else "unproven" if doubts else "pass", failed, doubts, warnings)


def is_ignored(check_id: str, ignored: Sequence[str]) -> bool:
    """Whether one of the globs ``ignored`` is that of the check."""
    return any(fnmatchcase(check_id, glob) for glob in ignored)


def health(checked: Result | None, measured: Result | None, now: float, period: float) -> Health:
    """What is known of the node now. A failure counts until a later run passes; an old result of the checks is none."""
    # A clock that was set back makes a result look as if it came from the future: it says nothing either.
    fresh = checked if checked is not None and 0 <= now - checked.at <= PERIODS * period else None
    failed = list(fresh.failed) if fresh is not None else []
    if measured is not None and measured.status == "fail":
        failed += measured.failed or ["verify: it falls short"]
    if failed:
        return Health("fail", failed)
    if fresh is None:
        return Health("unknown", ["there is no result that is recent" if checked else "there is no result yet"])
    if fresh.status == "pass":
        return Health("pass", fresh.warnings)
    return Health("unknown", fresh.doubts)


def read(path: Path) -> Result | None:
    """The result in a file; None where there is none. Raises ``OSError`` for a file that cannot be read."""
    return result_in(read_document(path))


def result_in(document: Any) -> Result | None:
    """The result in what a file holds; None where there is none."""
    try:
        return Result(
            float(document["at"]),
            str(document["status"]),
            _lines(document["failed"]),
            _lines(document["doubts"]),
            _lines(document.get("warnings", [])),
        )
    except (KeyError, TypeError, ValueError):
        return None


def _lines(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise TypeError
    return tuple(str(line) for line in value)


def read_document(path: Path) -> Mapping[str, Any]:
    """The object in a file; empty where there is none. Raises ``OSError`` for a file that cannot be read."""
    try:
        document = documents.read(path)
    except (FileNotFoundError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def keep(path: Path, result: Result, **more: Any) -> None:
    """Write the result, by one rename; not through to the disk, since the next one comes soon."""
    write_document(path, {**asdict(result), **more})


def write_document(path: Path, document: Mapping[str, Any], sync: bool = False) -> None:
    """Write an object, by one rename. ``sync``: it survives a crash."""
    replace_file(str(path), json.dumps(document) + "\n", sync=sync)


def current(files: Files = NODE) -> Health:
    """The health. Reads three small files, and the time of the manifest."""
    return _judged(_known(files))


def publish(files: Files = NODE) -> None:
    """Write down for every user what is known: the answering process has no rights.

    The directories of the other files may be closed to it, where they were made under root's umask.
    """
    known = _known(files)
    make_run_directory(str(files.answer.parent))
    replace_file(str(files.answer), json.dumps(known) + "\n", sync=False, follow=False)
    replace_file(str(files.line), _line(known) + "\n", sync=False, follow=False)


def _line(known: Mapping[str, Any]) -> str:
    judged, checked = _judged(known), result_in(known.get("checked"))
    at = int(checked.at) if checked is not None else 0
    until = at + LINE_PERIODS * int(known.get("period", 0))
    return f"{judged.status} {at} {until} {in_a_line(judged.reasons, LINE_LONGEST) or 'nothing was found'}"


def in_a_line(reasons: Sequence[str], longest: int) -> str:
    """A reason, one that names a drive if there is one, in plain characters, without those that Slurm's files and
    shells read otherwise; and how many more there are."""
    named = sorted(reasons, key=lambda reason: not reason.startswith(NAME_A_DRIVE))
    words = re.sub(r"[^\x20-\x7e]|[\"\\]", "?", next(iter(named), ""))
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return words[: longest - len(more)].strip() + more


def answered(files: Files = NODE) -> Health:
    """The health by what was published, and by nothing else."""
    try:
        return _judged(read_document(files.answer))
    except OSError as error:
        return Health("unknown", [_unread(error)])


def _known(files: Files) -> dict[str, Any]:
    try:
        settings = load(str(files.settings))
        checked, measured = read(files.checked), _measured(files, settings)
    except SettingsError as error:
        return {"doubt": str(error)}
    except OSError as error:
        # A failure that cannot be read must not look like a pass.
        return {"doubt": _unread(error)}
    return {
        "period": settings["period_seconds"],
        "checked": asdict(checked) if checked is not None else None,
        "measured": asdict(measured) if measured is not None else None,
    }


def _judged(known: Mapping[str, Any]) -> Health:
    period = known.get("period")
    if not isinstance(period, int):
        return Health("unknown", [str(known.get("doubt", "there is no result yet"))])
    checked, measured = (result_in(known.get(name)) for name in ("checked", "measured"))
    return health(checked, measured, time.time(), period)


def _unread(error: OSError) -> str:
    return f"`{error.filename}` cannot be read: {error.strerror}"


def _measured(files: Files, settings: Mapping[str, Any]) -> Result | None:
    """The last measurement, if it was of what is built now and another one may follow. Raises ``OSError``.

    A failure that no later measurement can clear would count for ever.
    """
    if not settings["measure_seconds"]:
        return None
    try:
        built = files.manifest.stat().st_mtime
    except FileNotFoundError:
        return None
    measured = read(files.measured)
    return measured if measured is not None and measured.at >= built else None
