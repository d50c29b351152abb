"""Orbax, JAX's checkpoint library, over numpy arrays."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State
from tunetool.bench.checkpoint.engines.files import fsync_names
from tunetool.bench.checkpoint.engines.ranks import (
    barrier,
    file_of,
    fill,
    host_bytes,
    lacks_memory,
    owner,
    rank_and_world,
)
from tunetool.bench.checkpoint.engines.tensors import local_parts
from tunetool.checkpoint.steps import fsync, fsync_directory

# numpy has no bf16: its bits travel as integers, which changes neither bytes nor speed.
_AS = {torch.bfloat16: torch.int16}


class Orbax(Plain):
    """``PyTreeCheckpointHandler`` with its defaults, one checkpoint per rank. tunetool adds the fsync, which Orbax
    lacks."""

    name = "orbax"
    family = "orbax"
    remark = "compresses with zstd unless told otherwise; fsync added"

    def unavailable(self, context: Context) -> str | None:
        """If it is not installed, or a GPU's state does not fit into the host's memory."""
        if not find_spec("orbax") or not find_spec("jax"):
            return "Orbax is not installed: pip install orbax-checkpoint"
        return lacks_memory(host_bytes(context)) if context.device == "cuda" else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        import orbax.checkpoint as ocp

        if owner(state) == rank_and_world()[0]:
            arrays = {name: _array(part) for name, part in local_parts(state).items()}
            path = file_of(state, directory, ".orbax").resolve()
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(path, args=ocp.args.PyTreeSave(arrays), force=True)
            _fsync_below(path)
            fsync_names(directory)
        barrier()
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        import numpy as np
        import orbax.checkpoint as ocp

        path = file_of(like, directory, ".orbax").resolve()
        wanted = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in like}
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
            arrays = checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=wanted))
        loaded = {name: torch.from_numpy(array).view(like[name].dtype) for name, array in arrays.items()}
        return fill(like, loaded, directory)


def _array(tensor: torch.Tensor) -> Any:
    return tensor.view(_AS.get(tensor.dtype, tensor.dtype)).cpu().numpy()


def _fsync_below(root: Path) -> None:
    for folder, _, files in os.walk(root):
        for name in files:
            fsync(Path(folder, name))
        fsync_directory(Path(folder))
