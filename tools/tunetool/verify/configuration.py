"""What ``verify --level config`` asks. Light: the health check asks the same every few minutes, and imports no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tunetool.measure.gds.config import default_mode, static_check
from tunetool.measure.gds.spec import Mode
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.check_result import SKIP, Check
from tunetool.node.common.manifest import MANIFEST_PATH, unsigned
from tunetool.node.memory.memory_checks import Locker
from tunetool.node.volume.volume_answers import ALLOWED, Writing
from tunetool.node.volume.write_read_probe import Asker


def manifest_checks(
    path: Path | None,
    manifest: Mapping[str, Any],
    locker: Locker | None = None,
    asker: Asker | None = None,
    writing: Writing = ALLOWED,
) -> list[Check]:
    """The node against its manifest, which was read from ``path``; None: the node's own path.

    ``writing``: what may be written to the volume, to see that it takes data.
    """
    return [*run_checks(manifest, locker=locker, asker=asker, writing=writing), *_unsigned(path)]


def static_checks(
    manifest: Mapping[str, Any] | None, environment: Mapping[str, str], gds: Mode | None = None
) -> list[Check]:
    """What a level that moves nothing asks beside the manifest's checks. ``gds``: None for what the manifest says."""
    return static_check(gds or default_mode(manifest), environment)


def _unsigned(path: Path | None) -> list[Check]:
    """A skipped check where it is not known whether the manifest was edited."""
    if not unsigned(str(path or MANIFEST_PATH)):
        return []
    return [
        Check(
            "manifest.checksum",
            SKIP,
            "the manifest as it was written",
            f"`{path or MANIFEST_PATH}` is unsigned: an earlier version wrote it, or the checksum was removed",
            "run `tunetool provision` for this node, which writes it again",
        )
    ]
