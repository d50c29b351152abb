"""FSDP2: a transformer and its AdamW after a real step come back bit by bit, whatever writes them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest
from rank_programs import run_ranks

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

RANKS = Path(__file__).with_name("fsdp2_ranks.py")
NAMES = ("fsdp2-dcp", "fsdp2-direct", "fsdp2-consolidated")


def test_two_ranks_load_a_model_and_one_reads_the_same(tmp_path: Path) -> None:
    results = []
    for rank in run_ranks(RANKS, str(tmp_path)):
        assert rank.code == 0, rank.stderr[-3000:]
        results.append(json.loads(rank.stdout.splitlines()[-1]))
    for each in results:
        # Two layers of 12 parameters, the embedding and the output; each with AdamW's two moments and its step.
        assert each["parts"] == 26 * 4
        assert each["unlike"] == dict.fromkeys(NAMES, 1)
        assert list(each["differing"].items()) == [(name, []) for name in NAMES]
        # The next step of training has all that it needs.
        assert len(set(each["losses"].values())) == 1
        assert list(each["after"].items()) == [(name, []) for name in NAMES]
    assert results[0]["alone"] == dict.fromkeys(NAMES, results[0]["digest"])
    # Sharded: each rank writes files of its own. Consolidated: rank 0 writes one.
    assert [path.name for path in (tmp_path / "fsdp2-consolidated").iterdir()] == ["consolidated.pt"]
    for name in NAMES[:2]:
        assert len([path for path in (tmp_path / name).iterdir() if path.name != ".metadata"]) >= 2
