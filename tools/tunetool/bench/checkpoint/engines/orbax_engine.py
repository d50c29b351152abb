"""Orbax, JAX's checkpoint library, over numpy arrays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State, Waiting
from tunetool.bench.checkpoint.engines.files import fsync_below, fsync_names
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
from tunetool.errors import CannotJudge

# numpy has no bf16: its bits travel as integers, which changes neither bytes nor speed.
_AS = {torch.bfloat16: torch.int16}
EVERY = 6
"""Steps between two saves of a manager, as of the benchmark's training loop: it refuses steps between them."""
KEPT = 1
"""Checkpoints that a manager keeps: a save into a directory replaces the one there."""


def _orbax() -> Any:
    """Orbax. It gets arrays of the host alone: without this JAX would take three quarters of a GPU's memory."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import orbax.checkpoint

    return orbax.checkpoint


class _Orbax(Plain):
    """One checkpoint per rank. tunetool adds the fsync, which Orbax lacks."""

    remark = "compresses with zstd unless told otherwise; fsync added"

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        import numpy as np

        path = file_of(like, directory, ".orbax").resolve()
        wanted = {name: _orbax().RestoreArgs(restore_type=np.ndarray) for name in like}
        arrays = self._restored(path, _orbax().args.PyTreeRestore(restore_args=wanted))
        loaded = {name: torch.from_numpy(array).view(like[name].dtype) for name, array in arrays.items()}
        return fill(like, loaded, directory)

    def _restored(self, path: Path, arguments: Any) -> dict[str, Any]:
        raise NotImplementedError


class Orbax(_Orbax):
    """``PyTreeCheckpointHandler`` with its defaults, one checkpoint per rank."""

    name = "orbax"

    def unavailable(self, context: Context) -> str | None:
        """If a GPU's state does not fit into the host's memory."""
        return lacks_memory(host_bytes(context)) if context.device == "cuda" else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        if owner(state) == rank_and_world()[0]:
            path = file_of(state, directory, ".orbax").resolve()
            with _orbax().Checkpointer(_orbax().PyTreeCheckpointHandler()) as checkpointer:
                checkpointer.save(path, args=_orbax().args.PyTreeSave(_arrays(state)), force=True)
            fsync_below(path)
            fsync_names(directory)
        barrier()
        return Done()

    def _restored(self, path: Path, arguments: Any) -> dict[str, Any]:
        with _orbax().Checkpointer(_orbax().PyTreeCheckpointHandler()) as checkpointer:
            return dict(checkpointer.restore(path, args=arguments))


class OrbaxAsync(_Orbax):
    """``CheckpointManager`` with a thread of its own that writes: the newest checkpoint kept, and an interval."""

    name = "orbax-async"

    def __init__(self) -> None:
        self._manager: Any = None

    def unavailable(self, context: Context) -> str | None:
        """If its copy does not fit into the host's memory."""
        return lacks_memory(host_bytes(context))

    def save(self, state: State, directory: Path) -> Waiting:
        """See ``Engine``. The interval is between steps of a manager, which it counts from what it keeps."""
        if owner(state) != rank_and_world()[0]:
            return Waiting(barrier)
        path = file_of(state, directory, ".orbax").resolve()
        if self._manager is None or Path(self._manager.directory) != path:
            self.close()
            self._manager = manager(path)
        held = self._manager
        step = (held.latest_step() or 0) + EVERY
        if not held.save(step, args=_orbax().args.PyTreeSave(_arrays(state))):
            raise CannotJudge(f"Orbax saved no step {step} into `{path}`", "look for what else writes there")

        def durable() -> None:
            held.wait_until_finished()
            fsync_below(path)
            fsync_names(directory)
            barrier()

        return Waiting(durable)

    def _restored(self, path: Path, arguments: Any) -> dict[str, Any]:
        with manager(path) as kept:
            return dict(kept.restore(kept.latest_step(), args=arguments))

    def close(self) -> None:
        """End the manager and its threads."""
        if self._manager is not None:
            self._manager.close()
            self._manager = None


def manager(path: Path, keep: int = KEPT, every: int = EVERY) -> Any:
    """Orbax's manager of the checkpoints below ``path``: asynchronous, ``keep`` of them, one each ``every`` steps."""
    settings = {"max_to_keep": keep, "save_interval_steps": every, "enable_async_checkpointing": True}
    return _orbax().CheckpointManager(path, options=_orbax().CheckpointManagerOptions(**settings))


def _arrays(state: State) -> dict[str, Any]:
    return {name: _array(part) for name, part in local_parts(state).items()}


def _array(tensor: torch.Tensor) -> Any:
    return tensor.view(_AS.get(tensor.dtype, tensor.dtype)).cpu().numpy()
