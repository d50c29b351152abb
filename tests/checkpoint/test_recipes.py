"""The recipes of docs/guides/checkpoint-recipes.md, with the real trainers: killed, they go on bit for bit."""

from __future__ import annotations

import json
import shutil
import signal
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rank_programs import run_ranks

from tunetool.checkpoint import verify_drained
from waiting import until

GUIDE = Path(__file__).parents[2] / "docs/guides/checkpoint-recipes.md"


def finished(program: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    ranks = run_ranks(Path(__file__).with_name(program), str(GUIDE), str(folder), "0", variables=variables)
    assert [rank.code for rank in ranks] == [0, 0], ranks[0].stderr[-3000:]
    return [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]


@pytest.mark.slow  # the imports of transformers, six times
@pytest.mark.skipif(not find_spec("accelerate"), reason="accelerate is not installed")
def test_hugging_face_s_trainer_under_fsdp2(tmp_path: Path) -> None:
    program, variables = "recipe_trainer.py", {"ACCELERATE_USE_FSDP": "true", "HF_HUB_OFFLINE": "1"}
    whole = finished(program, tmp_path / "whole", **variables)
    assert len(whole[0]["losses"]) == 7
    cut = tmp_path / "cut"
    ranks = run_ranks(Path(__file__).with_name(program), str(GUIDE), str(cut), "5", variables=variables)
    assert [rank.code for rank in ranks] == [-signal.SIGKILL] * 2, ranks[0].stderr[-3000:]
    until((cut / "bulk/step_4").exists)
    verify_drained(cut / "bulk/step_4")
    for tier in ("scratch", "bulk"):
        again = tmp_path / tier
        shutil.copytree(cut, again)
        if tier == "bulk":
            shutil.rmtree(again / "scratch")  # lost with its node
        for rank in finished(program, again, **variables):
            assert rank.pop("from") == f"{tier}/step_4"
            assert rank == {name: whole[0][name] for name in rank}
