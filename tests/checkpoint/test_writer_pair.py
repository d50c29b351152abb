"""Two ranks that save together; one of them fails once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from calls import call
from waiting import PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def test_a_rank_that_fails_fails_this_save_and_not_the_next(tmp_path: Path) -> None:
    directory, meet = tmp_path / "step", tmp_path / "meet"
    program = str(Path(__file__).with_name("writer_pair.py"))
    ranks = [
        subprocess.Popen(
            [sys.executable, program, str(rank), str(directory), str(meet)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = []
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=PATIENCE)
            assert rank.returncode == 0, error
            outputs.append(out.splitlines())
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    # 6 x 1.02 MB and 8 MB on both ranks, 1.6 MB in two shards: shared out, each writes half of 15.7 MB.
    sizes = [int(lines[0].removeprefix("saved ")) for lines in outputs]
    assert all(7.8e6 < size < 9.5e6 for size in sizes), sizes
    for lines in outputs:
        assert lines[1].startswith("failed on [1]: `"), lines[1]
        assert "File too large" in lines[1]
    # The rank that failed removed its files; those of the checkpoint are there: its own, and what both hold.
    assert outputs[1][2].count(".distcp") == 2
    assert all(8e6 < int(lines[4].split()[1]) < 40e6 for lines in outputs)
    # The first save and the failed one left nothing.
    assert outputs[0][5].count(".distcp") == 4
    assert outputs[0][5].count("'") == 2 * 5

    loaded = {"big": torch.zeros(2_000_000), "sharded": torch.zeros(400_001, 1), "step": 0}
    replicated = {f"w{number}": torch.zeros(1000, 256) for number in range(6)}
    dcp.load({**loaded, "replicated": replicated}, storage_reader=dcp.FileSystemReader(directory))
    assert torch.equal(loaded["big"], torch.arange(2_000_000.0) + 300)
    assert torch.equal(loaded["sharded"], torch.arange(400_001.0).reshape(-1, 1) + 300)
    assert all(torch.equal(tensor, torch.full((1000, 256), 300.0 + n)) for n, tensor in enumerate(replicated.values()))


@pytest.mark.slow
def test_a_process_saves_what_torch_staged_and_not_our_stager(tmp_path: Path) -> None:
    program = str(Path(__file__).with_name("writer_process.py"))
    done = call(sys.executable, program, str(tmp_path), check=True)
    assert done.stdout.splitlines() == [
        "saved",
        "UsageProblem the stager of DirectWriter supports `AsyncCheckpointerType.THREAD` only",
    ]
    like = {"x": torch.zeros(300_000), "n": {"y": torch.zeros(5, 3)}}
    dcp.load(like, storage_reader=dcp.FileSystemReader(tmp_path / "step"))
    assert torch.equal(like["x"], torch.arange(300_000.0))
    assert torch.equal(like["n"]["y"], torch.ones(5, 3))
