"""Who disturbs a measurement is named: two processes that write to one disk with direct I/O, one of them measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import call
from tunetool.measure.evidence import REPEATS
from waiting import until

pytest_plugins = ["disks"]

MIB = 2**20
DISTURBING = """
import mmap, os, sys

with mmap.mmap(-1, 2**20) as block:
    block.write(os.urandom(2**20))
    handle = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600)
    while True:
        for offset in range(64):
            os.pwritev(handle, [block], offset * 2**20)
"""
MEASURING = """
import json, os, subprocess, sys, time
from pathlib import Path
from tunetool.measure.evidence import explain
from tunetool.measure.sampling import Counting, Repeats, again
from tunetool.node.machine.block_stack import read_stack
from tunetool.measure.process_io import look, movers

target, neighbour, said, own = Path(sys.argv[1]), int(sys.argv[2]), [], [os.getpid()]
stack = read_stack(str(target))


def written():
    lines = Path(f"/proc/{neighbour}/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["write_bytes"])


def take(label):
    before, begun = look(), written()
    with Counting(stack, label) as counting:
        argv = ["dd", "if=/dev/urandom", f"of={target}/own", "bs=1M", "count=16", "oflag=direct", "conv=fsync"]
        with subprocess.Popen(argv, stderr=subprocess.DEVNULL) as process:
            own.append(process.pid)
        # The neighbour is on its way in each sample, however slow the disk is.
        while written() < begun + 32 * 2**20:
            time.sleep(0.01)
    found = movers(before, look(), ["write"], os.getpid())
    return counting.count("write", 16 * 2**20), [[mover.pid, mover.bytes] for mover in found]


counted, found = again("write-1", take, lambda sample: [sample[0].judgement], Repeats(), said.append)
print(json.dumps([said, counted.others, explain(stack, "write", counted), found, own]))
"""


@pytest.fixture
def neighbour(disk: Path) -> Iterator[int]:
    """A process that writes to the disk with direct I/O all the time."""
    with subprocess.Popen([sys.executable, "-c", DISTURBING, str(disk / "theirs")]) as process:
        try:
            until(lambda: (disk / "theirs").exists() and (disk / "theirs").stat().st_size > 0, "its file", process)
            yield process.pid
        finally:
            process.kill()


def test_who_writes_beside_a_sample_is_named(disk: Path, neighbour: int) -> None:
    command = [sys.executable, "-c", MEASURING, str(disk), str(neighbour)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = call(*command, env=environment, cwd=disk)
    assert done.returncode == 0, done.stderr
    said, others, line, found, own = json.loads(done.stdout)
    assert said[0] == "write-1: something else used the drives meanwhile: repeated"
    assert len(said) == REPEATS
    assert f"something else uses the drives: {others}; stop it" in line
    moved = dict(found)
    assert moved[neighbour] >= 32 * MIB
    assert not moved.keys() & set(own)
    # Other tests may write more meanwhile: three are named.
    if neighbour in list(moved)[:3]:
        assert f"(pid {neighbour}) wrote " in others
