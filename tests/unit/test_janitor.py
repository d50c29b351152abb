"""The process that undoes what a killed program made."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from calls import call
from tunetool.measure import janitor
from tunetool.measure.janitor import Janitor, last_list, sweep
from waiting import until

KILLED = """
import json, os, signal, sys
from tunetool.measure.janitor import Janitor

with Janitor("a test", sys.argv[1]) as janitor:
    for line in sys.argv[3:]:
        janitor.note(*json.loads(line))
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""
ROWS = "tunetool.measure.marked_processes"


def run(how: str, *noted: list[dict[str, str]], module: str = "") -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", KILLED, module, how, *map(json.dumps, noted)]
    done = call(*argv, env=environment)
    assert done.returncode == (-signal.SIGKILL if how == "kill" else 0)


@pytest.mark.parametrize("how", ["kill", "end"])
@pytest.mark.parametrize("module", ["", ROWS])
def test_each_kind_is_undone(how: str, module: str, tmp_path: Path) -> None:
    folder, setting = tmp_path / "folder", tmp_path / "setting"
    (folder / "deep").mkdir(parents=True)
    setting.write_text("12\n")
    kinds = [{"kind": "directory", "path": str(folder)}, {"kind": "value", "path": str(setting), "value": "0"}]
    run(how, kinds, module=module)
    until(lambda: setting.read_text() == "0\n" and not folder.exists(), "the janitor's end")


def test_it_needs_no_path_but_its_parents(tmp_path: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    tools = Path(janitor.__file__).parents[2]
    program = f"import sys\nsys.path.insert(0, {str(tools)!r})\n{KILLED}"
    # A Python in which tunetool is not installed.
    bare = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    entry = json.dumps([{"kind": "directory", "path": str(made)}])
    call(bare, "-c", program, ROWS, "kill", entry, env=environment, cwd=tmp_path)
    until(lambda: not made.exists(), "the janitor's end")


def test_what_is_noted_no_more_stays(tmp_path: Path) -> None:
    kept, removed = tmp_path / "kept", tmp_path / "removed"
    kept.mkdir()
    removed.mkdir()
    run("end", *([{"kind": "directory", "path": str(path)}] for path in (kept, removed)))
    assert (kept.exists(), removed.exists()) == (True, False)
    run("end", [{"kind": "directory", "path": str(kept)}], [])
    assert kept.exists()
    run("kill")
    assert kept.exists()


def test_the_last_whole_list_counts_and_the_newest_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [b"[]\n", b'[{"kind": "loop"}]\n', b'[{"kind": "loop"}, {"kind": "mount"}]\n', b'[{"kind": "lo']
    assert [entry["kind"] for entry in last_list(lines)] == ["loop", "mount"]
    assert last_list([b""]) == []
    monkeypatch.setattr(janitor, "_PAUSE", 0.0)
    undone = list[str]()

    def undo(entry: Mapping[str, Any]) -> None:
        undone.append(entry["kind"])

    sweep(last_list(lines), {"loop": undo, "mount": undo}, 2)
    assert undone == ["mount", "loop"] * 2, "what was still being made is there at the second look"
    sweep([], {"loop": undo}, 2)
    assert undone == ["mount", "loop"] * 2


def test_what_fails_is_tried_again_and_keeps_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(janitor, "_PAUSE", 0.0)
    undone, problems = list[str](), [OSError(), ValueError()]

    def undo(entry: Mapping[str, Any]) -> None:
        undone.append(entry["kind"])
        if entry["kind"] == "mount" and problems:
            raise problems.pop()

    sweep([{"kind": "loop"}, {"kind": "mount"}], {"loop": undo, "mount": undo})
    assert undone == ["mount", "loop"] * 3


def test_a_dead_janitor_is_noticed_when_something_is_noted() -> None:
    with pytest.raises(OSError, match="does not run"):
        Janitor("a test").note()
    with Janitor("a test") as dead:
        assert dead._process is not None
        dead._process.kill()
        dead._process.wait()
        with pytest.raises(BrokenPipeError):
            dead.note({"kind": "directory", "path": "/nowhere"})
