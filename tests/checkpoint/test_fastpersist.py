"""What `checkpoint.writer` of the installed DeepSpeed (FastPersist's modes) really does, with two ranks on the CPU.

docs/concepts/checkpoints.md says it. When a test here fails, a new DeepSpeed behaves otherwise: correct the page, and
give `bench checkpoint` an engine for what works now.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("deepspeed"):
    pytest.skip("deepspeed is not installed", allow_module_level=True)

from rank_programs import run_ranks

from tunetool.measure.aio import Probe

pytest_plugins = ["disks"]

RANK = Path(__file__).with_name("fastpersist_rank.py")
MODEL = "one/mp_rank_00_model_states.pt"


MACHINES = {"CROSS_SIZE": "1", "CROSS_RANK": "0"}
"""As DeepSpeed's own launcher sets them; torchrun does not."""


def train(
    directory: Path,
    writer: dict[str, Any],
    stage: int = 0,
    ranks: int = 2,
    files: Sequence[str] = (),
    machines: Mapping[str, str] = MACHINES,
) -> list[dict[str, Any]]:
    """The result of every rank."""
    arguments = (str(directory), json.dumps(writer), str(stage), *files)
    results = []
    for rank in run_ranks(RANK, *arguments, world=ranks, variables=machines):
        lines = [line for line in rank.stdout.splitlines() if line.startswith('{"failed"')]
        assert lines, rank.stderr[-3000:]
        results.append(json.loads(lines[-1]))
    return results


@pytest.fixture
def files(ready: Probe) -> list[str]:
    """The op of the writer FAST."""
    return [str(ready.find(part)) for part in ready.parts("async_io")]


def test_the_decoupled_mode_is_loaded_without_zero(tmp_path: Path) -> None:
    writer = {"type": "python", "data_parallel": "machine", "decoupled": True}
    for result in train(tmp_path, writer):
        assert result["failed"] == "", result
        assert list(result["files"]) == [MODEL]
        # The step after the save waited for it: what the loop changed is not in the checkpoint.
        assert (result["changed"], result["loaded"], result["equal"]) == (True, True, True)


def test_the_decoupled_mode_says_that_its_process_was_killed(tmp_path: Path) -> None:
    writer = {"type": "python", "data_parallel": "machine", "decoupled": True, "kills": True}
    (result,) = train(tmp_path, writer, ranks=1)
    assert result["failed"] == "step", "the save itself says nothing"
    assert "checkpoint process is not running" in result["error"]
    assert not (tmp_path / "latest").exists()
    assert not (tmp_path / MODEL).exists()


def test_the_decoupled_mode_cannot_hand_over_the_state_of_zero(tmp_path: Path) -> None:
    writer = {"type": "python", "data_parallel": "machine", "decoupled": True}
    for result in train(tmp_path, writer, stage=1, ranks=1):
        assert result["failed"] == "save"
        assert "serialize non-leaf tensor which requires_grad" in result["error"]


def test_data_parallel_writers_use_names_that_are_not_loaded(tmp_path: Path, files: list[str]) -> None:
    for result in train(tmp_path, {"type": "fast", "data_parallel": "replica"}, files=files):
        assert (result["failed"], result["error"]) == ("load", "AssertionError: "), result
        stored = result["files"]
        assert sorted(stored) == [f"{MODEL}-0.2", f"{MODEL}-1.2"], result
        # No half each: the model has 263,168 bytes.
        assert min(stored.values()) > 263_168


@pytest.mark.slow
def test_a_checkpoint_of_zero_by_any_writer_is_not_loaded(tmp_path: Path) -> None:
    for result in train(tmp_path, {"type": "python", "data_parallel": "machine"}, stage=1, ranks=1):
        assert result["failed"] == "load"
        assert "Weights only load failed" in result["error"]


@pytest.mark.slow
def test_without_data_parallel_there_is_no_training(tmp_path: Path) -> None:
    for result in train(tmp_path, {"type": "python"}, ranks=1):
        assert result["failed"] == "initialize"
        assert "no attribute 'dp_rank'" in result["error"]


@pytest.mark.slow
def test_torchrun_does_not_set_what_the_writers_need(tmp_path: Path) -> None:
    for result in train(tmp_path, {"type": "python", "data_parallel": "machine"}, ranks=1, machines={}):
        assert result["failed"] == "initialize"
        assert "KeyError: 'CROSS_SIZE'" in result["error"]


@pytest.mark.slow
def test_the_fast_writer_needs_a_gpu(tmp_path: Path) -> None:
    for result in train(tmp_path, {"type": "fast", "data_parallel": "machine"}, ranks=1):
        assert result["failed"] == "initialize"
        assert "Cannot access accelerator device when none is available" in result["error"]
