"""What an interrupted acceptance has measured, so that the next call goes on from there.

A hidden file in the runs directory names the records, which lie beside it as those of any run. It is gone once the
acceptance has its own record.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tunetool import record as records
from tunetool.errors import UsageProblem
from tunetool.node.common.files import replace_file
from tunetool.record import Record
from tunetool.regular_files import below, read_json


@dataclass(frozen=True)
class Kept:
    """A record of a run, and the name of its directory."""

    record: Record
    run: str


@dataclass
class Measured:
    """The records by command line, kept in ``path``. ``identity``: what must be the same to go on."""

    path: Path
    identity: dict[str, str]
    runs: dict[tuple[str, ...], list[Kept]] = field(default_factory=dict)

    def add(self, line: Sequence[str], kept: Kept) -> None:
        """Keep a record that was just made."""
        self.runs.setdefault(tuple(line), []).append(kept)
        done = [
            [list(words), each.run, records.to_document(each.record)["sha256"]]
            for words, all_ in self.runs.items()
            for each in all_
        ]
        replace_file(str(self.path), json.dumps({"identity": self.identity, "done": done}) + "\n")

    def finish(self) -> None:
        """The acceptance has its record."""
        self.path.unlink(missing_ok=True)


def measured_before(runs_dir: Path, name: str, identity: dict[str, str], afresh: bool) -> Measured:
    """What is there of an acceptance by the goals file ``name``.

    Raises ``UsageProblem`` where it was begun under another ``identity``, unless all is to be measured ``afresh``.
    """
    path = runs_dir / f".accept-{re.sub(r'[^A-Za-z0-9._-]', '_', name)}.json"
    measured = Measured(path, identity)
    if afresh or not path.exists():
        measured.finish()
        return measured
    try:
        document = read_json(path)
        begun, done = (
            dict(document["identity"]),
            [(tuple(map(str, words)), str(run), str(sha256)) for words, run, sha256 in document["done"]],
        )
    except (OSError, ValueError, KeyError, TypeError, UsageProblem):
        raise UsageProblem(f"`{path}` is damaged", "`--afresh` measures all again") from None
    differs = [key for key in identity if identity[key] != begun.get(key)]
    if differs:
        raise UsageProblem(
            f"an interrupted acceptance by `{name}` was begun with another {differs[0]}",
            f"`--afresh` measures all again; what was measured stays in `{runs_dir}`",
        )
    for words, run, sha256 in done:
        # A record that is gone, damaged or another than was measured is measured again.
        with contextlib.suppress(UsageProblem, OSError):
            record = records.read(below(runs_dir, f"{run}/{records.FILE}"))
            if record.sha256 == sha256:
                measured.runs.setdefault(words, []).append(Kept(record, run))
    return measured
