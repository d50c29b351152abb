"""Ctrl-C while something is ended or removed: that is finished, and then Ctrl-C counts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tunetool.measure import rundir, worker
from tunetool.stage import destination


def interrupted_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """Does as ``function``, but for the first call, during which Ctrl-C comes."""
    calls: Iterator[int] = iter(range(1000))

    def call(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 0:
            raise KeyboardInterrupt
        return function(*arguments, **more)

    return call


def deaf() -> subprocess.Popen[bytes]:
    """A program that SIGTERM does not end."""
    program = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    process = worker.start([sys.executable, "-c", program], {})
    assert process.stdout is not None
    process.stdout.read(1)
    return process


def test_a_program_is_ended_and_ctrl_c_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    process = deaf()
    monkeypatch.setattr(time, "sleep", interrupted_once(time.sleep))
    with pytest.raises(KeyboardInterrupt):
        worker.end(process, 0.1)
    assert process.returncode == -9
    worker.close_pipes(process)


def test_the_pipes_of_a_program_are_closed_and_ctrl_c_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    process = deaf()
    monkeypatch.setattr(time, "sleep", interrupted_once(time.sleep))
    with pytest.raises(KeyboardInterrupt):
        worker.finish(process, timeout=0)
    assert process.returncode == -9
    assert process.stdout is not None
    assert process.stdout.closed


@pytest.mark.parametrize("remove", [destination.remove_tree, lambda path: rundir.remove_stale([path])])
def test_a_tree_is_removed_and_ctrl_c_counts(
    remove: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    (tree / "directory").mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", interrupted_once(shutil.rmtree))
    with pytest.raises(KeyboardInterrupt):
        remove(tree)
    assert not tree.exists()
