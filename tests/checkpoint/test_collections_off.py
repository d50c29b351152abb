"""The garbage collector is off while a thread needs that, and always on again afterwards."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tunetool.checkpoint import collections_off
from tunetool.checkpoint.collections_off import without_collections
from waiting import PATIENCE


@pytest.fixture(autouse=True)
def on_again() -> Iterator[None]:
    assert gc.isenabled()
    yield
    gc.enable()


@pytest.mark.parametrize("first_out", ["the other", "this"])
def test_it_is_on_after_the_last_thread_whichever_that_is(first_out: str) -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with without_collections():
            inside.set()
            assert leave.wait(PATIENCE)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(PATIENCE)
    with without_collections():
        if first_out == "the other":
            leave.set()
            thread.join(PATIENCE)
        else:
            assert not gc.isenabled()
    leave.set()
    thread.join(PATIENCE)
    assert gc.isenabled()


def test_it_stays_off_where_it_was_off_before() -> None:
    gc.disable()
    with without_collections(), without_collections():
        pass
    assert not gc.isenabled()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("on", [True, False], ids=["on before", "off before"])
def test_a_forked_child_has_it_as_it_was_before(on: bool) -> None:
    if not on:
        gc.disable()
    with without_collections():
        pid = os.fork()
        if not pid:
            os._exit(gc.isenabled())
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == on
        assert not gc.isenabled()


def test_a_ctrl_c_anywhere_leaves_it_on() -> None:
    """At every line of the module, one after the other."""
    file = str(Path(collections_off.__file__))
    lines, cut = 0, -1

    def look(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != file:
            return None
        if event == "line":
            lines += 1
            if lines == cut:
                signal.raise_signal(signal.SIGINT)
        return look

    seen = sys.gettrace()
    for cut in range(1, 1000):
        lines, interrupted = 0, False
        sys.settrace(look)
        try:
            with without_collections():
                pass
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(seen)
        assert gc.isenabled(), cut
        if not interrupted:
            break
    assert 8 < cut < 999


def test_nothing_else_of_the_package_turns_it_off() -> None:
    """One that does knows nothing of the others, of forks and of a Ctrl-C."""
    package = Path(collections_off.__file__).parents[1]
    paths = list(package.rglob("*.py"))
    assert len(paths) > 100
    users = {path.name for path in paths if re.search(r"\bgc\.(disable|freeze|set_threshold)\b", path.read_text())}
    assert users == {Path(collections_off.__file__).name}
