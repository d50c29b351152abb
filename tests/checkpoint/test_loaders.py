"""The loaders that perf/loading.py compares give the same tensors, and its checksum notices every other byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from loading_child import checksum, run


@pytest.mark.parametrize("loader", ["tunetool", "safetensors"])
def test_a_loader_gives_the_bytes_of_the_files(loader: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(1000, 33).bfloat16(), "b": torch.randn(3), "c": torch.arange(5)}
    save_file(state, tmp_path / "model.safetensors")
    order = {"directory": str(tmp_path), "device": "cpu", "loads": 2}
    (plain,) = set(run({**order, "loader": "plain"})["digests"])
    answer = run({**order, "loader": loader})
    assert answer["digests"] == [plain, plain]
    assert answer["bytes"] == sum(tensor.nbytes for tensor in state.values())
    assert len(answer["seconds"]) == len(answer["drives"]) == 2
    state["b"][1] += 1
    save_file(state, tmp_path / "model.safetensors")
    assert plain not in run({**order, "loader": loader})["digests"]


def test_the_checksum_changes_with_every_byte_and_with_their_order() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    sums = {checksum(data), checksum(data.flip(0)), checksum(torch.cat([data[8:16], data[:8], data[16:]]))}
    for position in range(100):
        other = data.clone()
        other[position] ^= 128
        sums.add(checksum(other))
    assert len(sums) == 103
    assert checksum(data[3:40]) == checksum(data[3:40].clone())
    assert checksum(torch.empty(0)) == 0
