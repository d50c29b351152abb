"""Where a process is in its random numbers."""

from __future__ import annotations

import io
import random
import sys
from importlib.util import find_spec

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

import numpy as np
import torch

from tunetool.checkpoint import random_states, set_random_states


def numbers() -> list[float]:
    return [torch.rand(1).item(), torch.randn(1).item(), random.random(), random.gauss(0, 1), np.random.rand()]


def test_random_numbers_go_on_from_what_was_saved() -> None:
    np.random.randn()  # of a pair, whose other number it keeps
    torch.save(random_states(), file := io.BytesIO())
    expected = [*numbers(), np.random.randn()]
    assert numbers() != expected[:-1]
    set_random_states(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert [*numbers(), np.random.randn()] == expected


def test_random_numbers_of_unused_libraries_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "numpy")
    assert sorted(random_states()) == ["python", "torch"]
    assert not torch.cuda.is_initialized()


def test_a_rank_takes_its_random_numbers_to_another_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    states = {device: torch.tensor([device]) for device in range(4)}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(states))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_rng_state", states.get)
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state, device: states.update({device: state}))
    saved = random_states()
    states = dict.fromkeys(range(2), torch.tensor([-1]))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    set_random_states(saved)
    assert {device: state.item() for device, state in states.items()} == {1: 3, 0: 0}
