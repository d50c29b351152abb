"""The node's lock: one change at a time, also where a module was killed and what it had started goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tunetool.node.common.commands import captured, run
from tunetool.node.common.file_lock import Locked, only_one
from waiting import PATIENCE, until

KILLED = """
import os, sys
sys.path.insert(0, {tools!r})
from tunetool.node.common.file_lock import only_one
from {module} import {call}
with only_one(sys.argv[1]):
    {line}
"""
CHILDREN = {
    "run": ("tunetool.node.common.commands", "run", "run(['sh', '-c', {script!r}])"),
    "training": (
        "tunetool.node.training.children",
        "call_all",
        "call_all([(['sh', '-c', {script!r}], os.environ)], 900, 'x')",
    ),
}


@pytest.mark.parametrize("way", CHILDREN)
def test_what_a_killed_module_left_running_holds_the_lock(tmp_path: Path, way: str) -> None:
    path, gate, up = str(tmp_path / "lock"), tmp_path / "gate", tmp_path / "up"
    os.mkfifo(gate)
    module, call, line = CHILDREN[way]
    # A grandchild, as what update-initramfs starts.
    line = line.format(script=f"sh -c 'echo > {up}; read x < {gate}'; true")
    program = KILLED.format(tools=str(Path(__file__).parents[2] / "tools"), module=module, call=call, line=line)
    parent = subprocess.Popen([sys.executable, "-c", program, path])
    until(up.exists, "the child runs")
    parent.kill()
    parent.wait()
    with pytest.raises(Locked, match=rf"process {parent.pid}\).*`fuser -v {path}`"), only_one(path, patience=0):
        pass
    gate.write_text("go\n")
    with only_one(path, patience=PATIENCE):
        pass


def test_a_service_that_a_module_started_does_not_hold_the_lock(tmp_path: Path) -> None:
    path = str(tmp_path / "lock")
    with only_one(path):
        pid = int(run(["sh", "-c", "sleep 900 >/dev/null 2>&1 & echo $!"]).stdout)
    try:
        with only_one(path, patience=0):
            pass
    finally:
        os.kill(pid, signal.SIGKILL)


def test_without_the_lock_a_child_inherits_nothing() -> None:
    assert run(["ls", "/proc/self/fd"]).stdout.split()[:4] == ["0", "1", "2", "3"]


def test_a_program_keeps_the_lock_beside_a_file_of_its_caller(tmp_path: Path) -> None:
    lock, given = tmp_path / "lock", tmp_path / "given"
    with only_one(str(lock)), given.open("w") as stream:
        done = captured(["ls", "-l", "/proc/self/fd"], PATIENCE, pass_fds=(stream.fileno(),))
    opened = {line.rpartition(" -> ")[2] for line in done.stdout.splitlines()}
    assert {str(lock), str(given)} <= opened, done.stdout + done.stderr
