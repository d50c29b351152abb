"""Orbax's manager, and the sizes of Orbax's and torch's checkpoints of one model. Run by tools/dev/environments.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)
if not find_spec("orbax"):
    pytest.skip("Orbax is not installed", allow_module_level=True)

import numpy as np
import torch
import torch.distributed as dist

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.engines.orbax_engine import manager
from tunetool.bench.checkpoint.engines.tensors import blank, build, equal
from tunetool.bench.checkpoint.states import shape
from tunetool.measure import page_cache


def saved_by(kept: Any, step: int) -> bool:
    """Whether the manager saved this step."""
    import orbax.checkpoint as ocp

    done = bool(kept.save(step, args=ocp.args.PyTreeSave({"step": np.full(1000, step, dtype=np.float32)})))
    kept.wait_until_finished()
    return done


def test_orbax_saves_at_its_interval_and_keeps_the_newest(tmp_path: Path) -> None:
    with manager(tmp_path / "many", keep=2, every=3) as kept:
        assert [step for step in range(1, 11) if saved_by(kept, step)] == [1, 3, 6, 9]
        assert list(kept.all_steps()) == [6, 9]


def test_orbax_async_replaces_a_checkpoint_and_says_when_durable(tmp_path: Path) -> None:
    engine, state = ENGINES["orbax-async"](), {"a": torch.arange(5000.0), "b": torch.ones(7, dtype=torch.bfloat16)}
    directory = tmp_path / "step"
    for number in range(3):
        state["a"] += number
        engine.save(state, directory).wait()
        (steps,) = [[each for each in path.iterdir() if each.name.isdecimal()] for path in directory.iterdir()]
        assert len(steps) == 1
    assert equal(state, engine.load(blank(state), directory)) is None
    engine.close()


def test_orbax_compresses_one_model_that_torch_writes_as_it_is(model: str, tmp_path: Path) -> None:
    form = shape(model)
    state = build(form, "cpu", seed=1)
    sizes = {}
    made = not dist.is_initialized()
    if made:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for name in ("orbax", "dcp-t4-multi", "megatron-dist"):
        engine = ENGINES[name]()
        engine.save(state, tmp_path / name).wait()
        assert equal(state, engine.load(blank(state), tmp_path / name)) is None
        engine.close()
        sizes[name] = page_cache.size_of(tmp_path / name)
    if made:
        dist.destroy_process_group()
    # Without compression nothing is less than the state; random weights leave zstd their exponents.
    assert sizes["orbax"] < 0.96 * form.bytes < form.bytes <= sizes["dcp-t4-multi"]
    assert form.bytes <= sizes["megatron-dist"] < 1.05 * form.bytes
    uncompressed = _orbax_without_compression(state, tmp_path / "plain")
    assert form.bytes <= uncompressed < 1.02 * form.bytes


def _orbax_without_compression(state: dict[str, torch.Tensor], path: Path) -> int:
    """Bytes of the files of the same arrays where Orbax is asked not to compress."""
    import orbax.checkpoint as ocp

    arrays = {
        name: tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else tensor.dtype).numpy()
        for name, tensor in state.items()
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_compression=False)) as checkpointer:
        checkpointer.save(path, args=ocp.args.PyTreeSave(arrays))
    return page_cache.size_of(path)
