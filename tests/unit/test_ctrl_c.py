"""Ctrl-C while something is started, ended or removed: that is finished, and then Ctrl-C counts."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from at_a_lock import ended
from tunetool.ctrl_c import Threads
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


def test_a_handler_is_put_back_though_ctrl_c_comes_meanwhile() -> None:
    program = """
from tunetool import ctrl_c
signal.signal(signal.SIGTERM, ctrl_c.as_interrupt)
put = signal.signal
def putting(number, handler):
    put(number, handler)
    if handler is signal.default_int_handler:
        signal.raise_signal(signal.SIGINT)
signal.signal = putting
try:
    ctrl_c.uninterrupted(lambda: None)
except KeyboardInterrupt:
    print("interrupted")
try:
    signal.raise_signal(signal.SIGTERM)
except KeyboardInterrupt:
    print("ended")
"""
    assert said(program) == ["interrupted", "ended"]


def test_all_handlers_are_put_back_though_ctrl_c_comes_then() -> None:
    program = """
from tunetool import ctrl_c
ours = lambda number, frame: None
signal.signal(signal.SIGTERM, ours)
put, pressed = signal.signal, []
def putting(number, handler):
    put(number, handler)
    if handler is signal.default_int_handler and not pressed:
        pressed.append(number)
        signal.raise_signal(signal.SIGINT)
signal.signal = putting
try:
    ctrl_c.uninterrupted(lambda: None)
except KeyboardInterrupt:
    print("interrupted", signal.getsignal(signal.SIGTERM) is ours)
"""
    assert said(program) == ["interrupted True"]


def test_of_timers_only_that_of_a_lost_ctrl_c_waits() -> None:
    program = """
from tunetool import ctrl_c
def limit(number, frame):
    raise TimeoutError
def work():
    signal.raise_signal(signal.SIGALRM)
    print("done")
for handler in (ctrl_c.as_interrupt, limit):
    signal.signal(signal.SIGALRM, handler)
    try:
        ctrl_c.uninterrupted(work)
    except (KeyboardInterrupt, TimeoutError) as error:
        print(type(error).__name__)
"""
    assert said(program) == ["done", "KeyboardInterrupt", "TimeoutError"]


def test_threads_work_in_order_and_little_ahead() -> None:
    begun: list[int] = []

    def work(number: int) -> int:
        begun.append(number)
        return -number

    with Threads(2) as pool:
        assert list(itertools.islice(pool.each(work, itertools.count()), 3)) == [0, -1, -2]
    assert len(begun) < 100


def test_an_error_of_a_thread_ends_the_others() -> None:
    begun: list[int] = []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise OSError("of a thread")

    with pytest.raises(OSError, match="of a thread"), Threads(1) as pool:
        for _ in pool.each(work, itertools.count()):
            pass
    assert len(begun) < 100


def test_one_more_ctrl_c_ends_the_wait_for_a_stuck_thread() -> None:
    program = """
import threading, traceback
from tunetool import ctrl_c
stuck, begun, came = threading.Event(), threading.Event(), []
def work(_):
    begun.set()
    stuck.wait()
def handler(number, frame):
    leaves = any(each.f_code is ctrl_c.Threads.__exit__.__code__ for each, _ in traceback.walk_stack(frame))
    if len(came) == leaves:
        came.append(number)
        raise KeyboardInterrupt
def press():
    begun.wait()
    while not stuck.is_set():
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        time.sleep(0.05)
signal.signal(signal.SIGINT, handler)
threading.Thread(target=press).start()
try:
    with ctrl_c.Threads(1) as pool:
        list(pool.each(work, [0]))
except KeyboardInterrupt:
    stuck.set()
    print(len(came), "it is over")
"""
    assert said(program) == ["2 it is over"]


_IN_THREADS = """
from tunetool import ctrl_c

class Work:
    def do(number):
        return number

def run():
    with ctrl_c.Threads(2) as pool:
        print(list(pool.each(Work.do, range(9))))

hold(Work, "do")
begin_in(sys.modules["__main__"], "run")
try:
    run()
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.parametrize(
    ("entered", "by"),
    [("futures._AcquireFutures", "futures.wait"), ("threading.Condition", "threading.Event.wait")],
    ids=["waits", "starts"],
)
def test_ctrl_c_as_a_pool_takes_a_lock_ends_it(entered: str, by: str) -> None:
    done = ended(f"moments[:] = [({entered}.__enter__.__code__, {by}.__code__)]\n{_IN_THREADS}")
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
