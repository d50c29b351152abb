"""fio on a tmpfs, with which checkpoints are compared: the pages and the memory that checkpoints have."""

from __future__ import annotations

import json
import os
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from huge_pages import huge_bytes, whole_huge_pages
from programs import need_program
from tunetool.bench.checkpoint.fio_best import COUNTS, LARGEST_REQUEST, FioBest
from tunetool.measure.fio import DATA_FILE, Fio, Job, find_fio, run
from tunetool.node.machine.block_stack import BlockStack, read_stack
from waiting import PATIENCE

pytest_plugins = ["huge_tmpfs"]

MIB = 2**20


def test_fio_writes_to_huge_pages_as_the_engines_do(huge_tmpfs: Path) -> None:
    need_program("fio")
    best = FioBest(find_fio(os.environ), huge_tmpfs, read_stack(str(huge_tmpfs)), 32 * MIB, False, os.environ)
    run(best.fio, best.job("write", 2), huge_tmpfs, os.environ, PATIENCE)
    files = [huge_tmpfs / DATA_FILE.format(number=number) for number in range(2)]
    assert [huge_bytes(path) for path in files] == [whole_huge_pages(path) for path in files] == [16 * MIB] * 2


def test_fio_reads_into_memory_of_the_state(huge_tmpfs: Path) -> None:
    need_program("fio")
    best = FioBest(find_fio(os.environ), huge_tmpfs, read_stack(str(huge_tmpfs)), 32 * MIB, False, os.environ)
    run(best.fio, best.job("write", 2), huge_tmpfs, os.environ, PATIENCE)
    files = [huge_tmpfs / DATA_FILE.format(number=number) for number in range(2)]
    written = [path.read_bytes() for path in files]
    read = run(best.fio, best.job("read", 2), huge_tmpfs, os.environ, PATIENCE)
    assert (read.claimed_bytes, read.requests) == (32 * MIB, 2)
    # No page of its memory is made while the time runs.
    assert sum(job["minf"] for job in json.loads(read.raw)["jobs"]) < 32 * MIB // 4096 // 8
    assert [path.read_bytes() for path in files] == written


def test_fio_tells_apart_the_places_of_one_process(tmp_path: Path) -> None:
    need_program("fio")
    # Not the jobs' names: fio takes a directory of that name in its own for the file.
    places = [("numa0", tmp_path / "a"), ("numa1", tmp_path / "b:c")]
    for _, directory in places:
        directory.mkdir()
    job = Job("write", 2, MIB, direct=False, places=places)
    outcome = run(find_fio(os.environ), job, tmp_path, os.environ, PATIENCE)
    assert outcome.claimed_bytes == 4 * MIB
    assert {name: each.claimed_bytes for name, each in outcome.places.items()} == {"numa0": 2 * MIB, "numa1": 2 * MIB}
    assert all(each.percentiles for each in outcome.places.values())
    assert [sorted(path.name for path in directory.iterdir()) for _, directory in places] == [["data.0", "data.1"]] * 2


@given(total=st.integers(16 * MIB, 2**42), files=st.sampled_from(COUNTS))
def test_a_read_from_memory_covers_the_state(total: int, files: int) -> None:
    stack = BlockStack("/x", None, "tmpfs", None, None, "tmpfs", (), redundant=False, in_memory=True)
    job = FioBest(Fio("fio", "3.33"), Path("/dev/shm"), stack, total, False, {}).job("read", files)
    assert job.block_bytes <= LARGEST_REQUEST
    assert job.file_bytes % job.block_bytes == 0
    requests = job.file_bytes // job.block_bytes
    assert 0 <= total - files * job.file_bytes < files * (requests + 1) * MIB
