"""Counters of a job's saves, as a file for the textfile collector of Prometheus' node exporter."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tunetool.node.common.files import printable, replace_file

_HELP = {
    "saves_total": "counter Saves that succeeded",
    "failed_saves_total": "counter Saves that failed, by place and reason",
    "save_seconds_total": "counter Seconds of all saves, of asynchronous ones too",
    "last_step": "gauge Step that was saved last",
    "last_save_timestamp_seconds": "gauge When it was saved; alert on its age",
}


class Counters:
    """Replaces ``path`` by one rename after each change; None: counts nothing. A file that cannot be written stops no
    save."""

    def __init__(self, path: Path | None) -> None:
        self._path = path and path.absolute()
        self._values: Counter[tuple[str, str]] = Counter()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._values["save_seconds_total", ""] += time.monotonic() - began  # type: ignore[assignment]

    def saved(self, place: Path, step: int) -> None:
        self._values["saves_total", f'{{place="{_escaped(place)}"}}'] += 1
        self._values["last_step", ""] = step
        self._values["last_save_timestamp_seconds", ""] = int(time.time())
        self._write()

    def failed(self, place: Path, reason: str) -> None:
        self._values["failed_saves_total", f'{{place="{_escaped(place)}",reason="{reason}"}}'] += 1
        self._write()

    def _write(self) -> None:
        if self._path is None:
            return
        lines = []
        for name, about in _HELP.items():
            kind, _, text = about.partition(" ")
            full = f"tunetool_checkpoint_{name}"
            values = [f"{full}{labels} {value}" for (its, labels), value in self._values.items() if its == name]
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}", *values] if values else []
        if self._path.exists() and not self._path.is_file():
            return  # the rename would replace a device
        with contextlib.suppress(OSError):
            replace_file(str(self._path), "".join(f"{line}\n" for line in lines), sync=False, follow=False)


def _escaped(path: Path) -> str:
    return str(printable(str(path))).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
