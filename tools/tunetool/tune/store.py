"""Stores results as Ansible variables by hash of the hardware, so that `site.yml` uses them on equal nodes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.node.common.files import replace_file
from tunetool.node.tuning.deepspeed_aio import VARIABLE, TunedError, check_variable
from tunetool.record import Record

FILE = "tunetool_tuned.json"
"""Ansible reads JSON beside YAML in group_vars and host_vars."""


def check_store(directory: Path) -> None:
    """Raises ``UsageProblem`` if the result could not be stored; called before anything is measured."""
    if not directory.is_dir():
        raise UsageProblem(
            f"`{directory}` is not a directory", "`--store-vars` takes an existing directory, such as `group_vars/all`"
        )
    _read(directory / FILE)


def store(directory: Path, record: Record, block: Mapping[str, int | bool], mix: str) -> Path:
    """Add the block to those of other hardware. Returns the path of the file."""
    path = directory / FILE
    known = _read(path)
    known[str(record.node.speed_hash)] = {
        "block": dict(block),
        "host": record.node.host,
        "mix": mix,
        "record": record.id,
        "target": record.target,
        "tuned": record.finished.isoformat(),
    }
    replace_file(str(path), json.dumps({VARIABLE: known}, indent=2, sort_keys=True) + "\n")
    return path


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        known = documents.read(path)[VARIABLE]
        check_variable(known)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name another directory") from None
    except (ValueError, KeyError, TypeError, AttributeError, TunedError) as error:
        raise UsageProblem(
            f"`{path}` holds no results of `tunetool tune`: {error}", "move it away, or name another directory"
        ) from None
    return dict(known)
