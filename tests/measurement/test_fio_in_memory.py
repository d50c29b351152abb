"""fio's writes to a tmpfs, with which checkpoints are compared: they get the pages that checkpoints get."""

from __future__ import annotations

import os
from pathlib import Path

from huge_pages import huge_bytes, whole_huge_pages
from programs import need_program
from tunetool.bench.checkpoint.fio_best import FioBest
from tunetool.measure.fio import DATA_FILE, find_fio, run
from tunetool.node.machine.block_stack import read_stack
from waiting import PATIENCE

pytest_plugins = ["huge_tmpfs"]

MIB = 2**20


def test_fio_writes_to_huge_pages_as_the_engines_do(huge_tmpfs: Path) -> None:
    need_program("fio")
    best = FioBest(find_fio(os.environ), huge_tmpfs, read_stack(str(huge_tmpfs)), 32 * MIB, False, os.environ)
    run(best.fio, best.job("write", 2), huge_tmpfs, os.environ, PATIENCE)
    files = [huge_tmpfs / DATA_FILE.format(number=number) for number in range(2)]
    assert [huge_bytes(path) for path in files] == [whole_huge_pages(path) for path in files] == [16 * MIB] * 2
