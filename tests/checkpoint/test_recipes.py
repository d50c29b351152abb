"""The recipes of docs/guides/checkpoint-recipes.md, with the real trainers: killed, they go on bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rank_programs import Ended, run_ranks

from tunetool.checkpoint import verify_drained
from tunetool.checkpoint.retention import NOTE
from waiting import until

GUIDE = Path(__file__).parents[2] / "docs/guides/checkpoint-recipes.md"


def run(program: str, folder: Path, killed: int, variables: dict[str, str]) -> list[Ended]:
    path = Path(__file__).with_name(program)
    return run_ranks(path, str(GUIDE), str(folder), str(killed), variables=variables)


def finished(program: str, folder: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    ranks = run(program, folder, 0, variables)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


def goes_on(program: str, tmp_path: Path, losses: int, **variables: str) -> None:
    """Killed after step 5 of 7, it ends like a run that was not, from either tier. ``losses``: as many it then has."""
    whole = finished(program, tmp_path / "whole", variables)
    assert len(set(whole[0]["losses"])) == 7
    cut = tmp_path / "cut"
    ranks = run(program, cut, 5, variables)
    assert [rank.code for rank in ranks] == [-signal.SIGKILL] * 2, ranks[0].stderr[-3000:]
    for step in ("step_2", "step_4"):  # the drains, which go on, end with a note beside what they drained
        until((cut / "scratch" / step / NOTE).exists)
    verify_drained(cut / "bulk/step_4")
    for tier in ("scratch", "bulk"):
        again = tmp_path / tier
        shutil.copytree(cut, again)
        if tier == "bulk":
            shutil.rmtree(again / "scratch")  # lost with its node
        for rank, undisturbed in zip(finished(program, again, variables), whole, strict=True):
            assert rank == {**undisturbed, "from": f"{tier}/step_4", "losses": undisturbed["losses"][-losses:]}


@pytest.mark.slow  # the imports of transformers, eight times
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_hugging_face_s_trainer_under_fsdp2(tmp_path: Path) -> None:
    goes_on("recipe_trainer.py", tmp_path, losses=7, ACCELERATE_USE_FSDP="true", HF_HUB_OFFLINE="1")


@pytest.mark.slow  # the imports of Lightning, eight times
@pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed")
def test_lightning_under_fsdp2(tmp_path: Path) -> None:
    goes_on("recipe_lightning.py", tmp_path, losses=3, TORCHELASTIC_RUN_ID="of torchrun")


@pytest.mark.slow  # the imports of DeepSpeed, sixteen times
@pytest.mark.skipif(not find_spec("deepspeed"), reason="DeepSpeed is not installed")
@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed(tmp_path: Path, stage: str) -> None:
    goes_on("recipe_deepspeed.py", tmp_path, losses=3, ZERO_STAGE=stage)


@pytest.mark.slow  # the imports of Megatron-core, sixteen times
@pytest.mark.skipif(not find_spec("megatron"), reason="Megatron-core is not installed")
@pytest.mark.parametrize("tensor_parallel", ["1", "2"])
def test_megatron(tmp_path: Path, tensor_parallel: str) -> None:
    goes_on("recipe_megatron.py", tmp_path, losses=3, TENSOR_PARALLEL=tensor_parallel)


@pytest.mark.slow  # the imports of torchtitan, eight times
@pytest.mark.skipif(not find_spec("torchtitan"), reason="torchtitan is not installed")
def test_torchtitan(tmp_path: Path) -> None:
    goes_on("recipe_torchtitan.py", tmp_path, losses=3)
