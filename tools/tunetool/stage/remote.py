"""Remote sources, which rclone lists and fetches."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.worker import start_talking
from tunetool.node.common.commands import captured, last_line
from tunetool.stage.tree import Entry
from tunetool.system_packages import install_line

TRANSFERS = 8
HUB, WEB = "the Hugging Face Hub", "a web server"
WAYS = {
    HUB: "`hf download NAME --local-dir DIR` fetches it; then stage DIR",
    WEB: "fetch it into a directory and stage that; for a directory that the server lists, "
    "`:http,url='ADDRESS':` is a remote of rclone",
}
"""What to do about addresses that are no remotes."""
_REMOTE = re.compile(r"^(:?[A-Za-z0-9_][A-Za-z0-9_.+@ -]*(,[^:]*)?):")
_FRACTION = re.compile(r"\.(\d+)")


def is_remote(source: str) -> bool:
    """Whether ``source`` is an rclone remote: ``name:path`` or ``:backend:path``, and no local file of that name."""
    return bool(_REMOTE.match(source)) and not os.path.lexists(source)


def web_address(source: str) -> str | None:
    """Whose address ``source`` is, where rclone has no backend of that name: ``hf://`` is no remote `hf`."""
    scheme, there, _ = source.partition("://")
    return {"hf": HUB, "huggingface": HUB, "http": WEB, "https": WEB}.get(scheme.lower()) if there else None


def need_rclone() -> str:
    """The path of rclone. Raises ``CannotJudge`` if it is not installed."""
    program = shutil.which("rclone")
    if program is None:
        raise CannotJudge(
            "`rclone` is not installed: it fetches remote sources", f"{install_line('rclone')}, or stage a directory"
        )
    return program


def scan_remote(source: str) -> list[Entry]:
    """The directories and files of a remote source. Raises ``UsageProblem`` if rclone cannot list them."""
    command = [need_rclone(), "lsjson", "-R", "--no-mimetype", source]
    done = captured(command, None, own_locale=True, errors="surrogateescape")
    if done.returncode != 0:
        raise UsageProblem(f"`{source}` cannot be listed: {last_line(done.stderr)}", "try `rclone lsd` on it")
    entries = [Entry(".", "directory", mode=0o755), *(_entry(row, source) for row in json.loads(done.stdout))]
    return sorted(entries, key=lambda entry: entry.path.split("/") if entry.path != "." else [])


def _entry(row: dict[str, Any], source: str) -> Entry:
    if row["IsDir"]:
        return Entry(row["Path"], "directory", mode=0o755)
    if row["Size"] < 0:
        raise UsageProblem(f"`{source}`: the size of `{row['Path']}` is unknown", "a document has to be exported first")
    return Entry(row["Path"], "file", row["Size"], nanoseconds(row["ModTime"]), 0o644)


def nanoseconds(text: str) -> int:
    """Nanoseconds since 1970 from a time in Go's format, with up to nine fractional digits."""
    digits = _FRACTION.search(text)
    whole = datetime.fromisoformat(_FRACTION.sub("", text).replace("Z", "+00:00"))
    return int(whole.timestamp()) * 10**9 + (int(digits[1].ljust(9, "0")) if digits else 0)


def fetch(source: str, destination: Path, tick: Callable[[int], None]) -> None:
    """Copy all of ``source`` into ``destination``. Raises ``CannotJudge`` when rclone fails."""
    command = [need_rclone(), "copy", "--transfers", str(TRANSFERS), "--stats", "1s", "--use-json-log", "-v"]
    with _running([*command, "--stats-log-level", "NOTICE", source, str(destination)]) as process:
        assert process.stderr is not None  # noqa: S101  (a pipe)
        errors = []
        for line in process.stderr:
            row = _row(line)
            if row.get("level") == "error":
                errors.append(str(row.get("msg")))
            moved = row.get("stats", {}).get("bytes")
            if isinstance(moved, int):
                tick(moved)
        if process.wait() != 0:
            raise CannotJudge(
                f"`rclone copy {source}` failed: {last_line(errors[-1] if errors else '')}",
                "what was copied is removed; try again",
            )


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        return {"level": "error", "msg": line.strip()}
    return row if isinstance(row, dict) else {}


@contextlib.contextmanager
def _running(command: list[str]) -> Iterator[subprocess.Popen[str]]:
    with start_talking(command) as process:
        try:
            yield process
        except BaseException:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            raise
