"""The engines of `bench loading` give the same tensors, and its checksum notices every other byte."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tunetool.bench.loading.child import answer, checksum, digests


@pytest.mark.parametrize("engine", ["direct", "safetensors"])
def test_a_loader_gives_the_bytes_of_the_files(engine: str, tmp_path: Path) -> None:
    state = {"a": torch.randn(1000, 33).bfloat16(), "b": torch.randn(3), "c": torch.arange(5)}
    save_file(state, tmp_path / "model.safetensors")
    order = {"do": "load", "directory": str(tmp_path)}
    plain = answer({**order, "engine": "plain"})
    loads = [answer({**order, "engine": engine}) for _ in range(2)]
    for digest in ("named", "nameless"):
        assert [load[digest] for load in loads] == [plain[digest]] * 2
    assert loads[0]["bytes"] == sum(tensor.nbytes for tensor in state.values())
    state["b"][1] += 1
    save_file(state, tmp_path / "model.safetensors")
    changed = answer({**order, "engine": engine})
    assert changed["named"] != plain["named"]
    assert changed["nameless"] != plain["nameless"]


def test_a_sum_with_names_tells_which_tensor_has_which_bytes() -> None:
    first, second = torch.zeros(3, 5), torch.ones(3, 5)
    one, other = digests({"a": first, "b": second}), digests({"a": second, "b": first})
    assert one["nameless"] == other["nameless"]
    assert one["named"] != other["named"]


def test_the_checksum_changes_with_every_byte_and_their_order() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    sums = {checksum(data), checksum(data.flip(0)), checksum(torch.cat([data[8:16], data[:8], data[16:]]))}
    for position in range(100):
        other = data.clone()
        other[position] ^= 128
        sums.add(checksum(other))
    assert len(sums) == 103
    assert checksum(data[3:40]) == checksum(data[3:40].clone())
    assert checksum(torch.empty(0)) == 0
