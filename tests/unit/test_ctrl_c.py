"""Ctrl-C while something is started, ended or removed: that is finished, and then Ctrl-C counts."""

from __future__ import annotations

import os
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


def said(program: str, mark: str = "") -> list[str]:
    """What it prints, in a process of its own, where Ctrl-C and what is registered do no harm."""
    # A shell's background jobs ignore Ctrl-C, and what they start does so too.
    begin = "import os, signal, time\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
    environment = {**os.environ, "TUNETOOL_TEST_MARK": mark}
    command = [sys.executable, "-c", begin + program]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("moment", ["before", "after_in_parent"])
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_ctrl_c_while_a_program_starts_counts_and_ends_it(number: str, moment: str, tmp_path: Path) -> None:
    program = f"""
from tunetool import ctrl_c
from tunetool.measure import marked_processes, worker
signal.signal(signal.SIGTERM, ctrl_c.as_interrupt)
os.register_at_fork({moment}=lambda: (os.kill(os.getpid(), signal.{number}), None)[1])
try:
    worker.start(["sleep", "600"], dict(os.environ))
except KeyboardInterrupt:
    print("it counts", marked_processes.marked("TUNETOOL_TEST_MARK", {str(tmp_path)!r}))
"""
    assert said(program, str(tmp_path)) == ["it counts []"]


def test_ctrl_c_counts_where_the_program_does_not_start_either() -> None:
    program = """
from tunetool.measure import worker
os.register_at_fork(after_in_parent=lambda: (os.kill(os.getpid(), signal.SIGINT), None)[1])
try:
    worker.start(["/nonexistent"], dict(os.environ))
except BaseException as error:
    print(type(error).__name__)
"""
    assert said(program) == ["KeyboardInterrupt"]


def test_ctrl_c_counts_while_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0)\nexcept KeyboardInterrupt:\n    pass\n"
    )
    program = f"""
import sys
from tunetool.cli import bench, checkpoint
sys.path.insert(0, {str(tmp_path)!r})
bench.go_on_under = lambda *_: None
try:
    checkpoint._Options().go_on()
    import torch
    print("it is lost")
except KeyboardInterrupt:
    print("it counts")
"""
    assert said(program) == ["it counts"]


def test_ctrl_c_inside_a_destructor_counts() -> None:
    program = """
from tunetool import ctrl_c
class Interrupted:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
ctrl_c.never_lost()
try:
    Interrupted()
    time.sleep(30)
    print("it is lost")
except KeyboardInterrupt:
    print("it counts")
"""
    assert said(program) == ["it counts"]


def test_other_errors_of_destructors_are_printed_as_ever(capfd: pytest.CaptureFixture[str]) -> None:
    program = """
from tunetool import ctrl_c
class Broken:
    def __del__(self):
        raise OSError("of a destructor")
ctrl_c.never_lost()
Broken()
"""
    assert said(program) == []
    assert "OSError: of a destructor" in capfd.readouterr().err
