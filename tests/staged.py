"""Trees to stage, and a program's view of a tree."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from tunetool.errors import ExitCode
from tunetool.measure.session import Result
from tunetool.stage.run import Request, run


class Quiet:
    """Progress that keeps its lines; ``on_copy`` is called when the copy begins."""

    def __init__(self, on_copy: Callable[[], None] = lambda: None) -> None:
        self.lines: list[str] = []
        self.done: list[int] = []
        """Bytes that the copy reported."""
        self.on_copy = on_copy

    def say(self, line: str) -> None:
        self.lines.append(line)

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        yield lambda: None

    @contextlib.contextmanager
    def moving(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self.on_copy()
        yield self.done.append


def stage(source: object, destination: Path, runs: Path, progress: Quiet | None = None, **more: object) -> Result:
    request = Request("stage", str(destination), str(source), runs_dir=runs, **more)  # type: ignore[arg-type]
    return run(request, progress or Quiet())


def verify(destination: Path, runs: Path) -> Result:
    return run(Request("verify", str(destination), runs_dir=runs), Quiet())


def evict(destination: Path, runs: Path) -> Result:
    return run(Request("evict", str(destination), runs_dir=runs), Quiet())


def failed(result: Result) -> str:
    """The reason of the failure in the record."""
    assert result.code == ExitCode.NOT_JUDGED
    assert result.record is not None
    assert result.record.verdict is not None
    assert result.record.verdict.status == "error"
    assert result.record.measurements == []
    return result.record.verdict.reasons[0]


def view(root: Path, depth: int = 6) -> dict[str, object]:
    """Everything that a program finds under ``root`` if it follows links, to a limited depth since links may loop."""
    entries: dict[str, object] = {}
    waiting = [("", depth)]
    while waiting:
        folder, left = waiting.pop()
        for name in sorted(each.name for each in (root / folder).iterdir()):
            path = f"{folder}/{name}" if folder else name
            full = root / path
            if full.is_dir():
                entries[path] = "directory"
                if left:
                    waiting.append((path, left - 1))
            else:
                entries[path] = full.read_bytes() if full.exists() else "leads nowhere"
    return entries


def beside(destination: Path) -> list[str]:
    """The hidden siblings of a staged tree."""
    return sorted(path.name for path in destination.parent.iterdir() if path.name.startswith(f".{destination.name}."))
