"""FSDP2 (``fully_shard``) with AdamW, saved and loaded through ``get_state_dict`` and ``set_state_dict``.

The state's tensors become the parameters of a module under ``fully_shard`` and the states of an AdamW over its fp32
masters, in the same memory: nothing runs forward, so any model's shapes do. bf16 weights are parameters that no
optimizer has: torch's ``Optimizer.load_state_dict`` casts a parameter's states to its dtype, and would round fp32 ones.
"""

from __future__ import annotations

import abc
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tunetool.bench.checkpoint.engines.base import Context, Done, State
from tunetool.bench.checkpoint.engines.dcp import finish
from tunetool.bench.checkpoint.engines.files import write_durably
from tunetool.bench.checkpoint.engines.ranks import alone, barrier, device_of, lacks_memory, rank_and_world
from tunetool.bench.checkpoint.engines.tensors import local

THREADS = 4
"""Threads of torch's writer, as of ``fsdp-sharded``."""
CONSOLIDATED = "consolidated.pt"
_MASTER, _MOMENTS = ".fp32", ("exp_avg", "exp_avg_sq")


class Training(NamedTuple):
    """What a training loop hands to its checkpoints."""

    model: nn.Module
    """Under ``fully_shard``."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """None for a state without masters."""

    def shards(self) -> dict[str, Any]:
        """This rank's part, sharing the model's memory."""
        model, optimizer = get_state_dict(self.model, self.optimizers)
        return {"model": model, "optimizer": optimizer}

    def whole(self) -> dict[str, Any]:
        """Everything, on rank 0's host; empty on the others. All ranks call it."""
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizers, options=options)
        return {"model": model, "optimizer": optimizer}

    def take(self, shards: dict[str, Any]) -> None:
        """Become what was loaded into ``shards``."""
        model, optimizer = shards["model"], shards["optimizer"]
        set_state_dict(self.model, self.optimizers, model_state_dict=model, optim_state_dict=optimizer)

    def take_whole(self, whole: dict[str, Any]) -> None:
        """Become what rank 0 has in ``whole``, from which each rank gets its part. All ranks call it.

        Not by ``set_state_dict``: it leaves the model out on a rank whose dictionary of it is empty, as it is on every
        rank but 0, and rank 0 waits for them forever (torch 2.13).
        """
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(self.model, whole.get("model", {}), options=options)
        if self.optimizers:
            set_optimizer_state_dict(self.model, self.optimizers, whole.get("optimizer", {}), options=options)


def training_of(state: State) -> Training:
    """A model and its AdamW whose tensors are the state's: plain ones of the only rank, or ``DTensor`` ``Shard(0)``."""
    mesh = init_device_mesh(device_of(state).type, (dist.get_world_size(),))
    sharded = {
        name: tensor if isinstance(tensor, DTensor) else DTensor.from_local(tensor, mesh, [Shard(0)], run_check=False)
        for name, tensor in state.items()
    }
    moments = {name for name in state if _master_of(name) in state}
    model = _fully_sharded({name: tensor for name, tensor in sharded.items() if name not in moments}, mesh)
    named = {name: parameter for name, parameter in model.named_parameters() if _moment(name, _MOMENTS[0]) in moments}
    if not named:
        return Training(model, ())
    optimizer = torch.optim.AdamW(named.values())
    for name, parameter in named.items():
        states = {moment: sharded[_moment(name, moment)] for moment in _MOMENTS if _moment(name, moment) in moments}
        optimizer.state[parameter] = {"step": torch.tensor(1.0), **states}
    return Training(model, (optimizer,))


def _moment(master: str, moment: str) -> str:
    return f"{master.removesuffix(_MASTER)}.{moment}"


def _master_of(name: str) -> str:
    """The name of the master whose state this is; one that no tensor has, for any other tensor."""
    head, _, leaf = name.rpartition(".")
    return head + _MASTER if leaf in _MOMENTS else ""


def _fully_sharded(tensors: State, mesh: Any) -> nn.Module:
    """A module with these parameters, under ``fully_shard`` layer by layer."""
    from torch.distributed.fsdp import fully_shard

    root = nn.Module()
    layers: dict[nn.Module, None] = {}
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        node = root
        for part in path:
            if part not in node._modules:
                node.add_module(part, nn.Module())
            node = node.get_submodule(part)
            if part.isdecimal():
                layers[node] = None
        # Without memory of its own: `assign` below gives it the state's.
        blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        node.register_parameter(leaf, nn.Parameter(blank, requires_grad=tensor.is_floating_point()))
    for module in (*layers, *root.children(), root):
        fully_shard(module, mesh=mesh)
    root.load_state_dict(tensors, assign=True)
    for name, parameter in root.named_parameters():
        _share(parameter, tensors[name])
    return root


def _share(parameter: Any, tensor: DTensor) -> None:
    """Give a parameter the memory of ``tensor``. Where ranks have unequal parts, FSDP2 copies those of the last rank
    into longer memory of its own after every ``load_state_dict``, for its all-gather, which nothing here runs.
    """
    if parameter._local_tensor.data_ptr() != tensor._local_tensor.data_ptr():
        parameter._local_tensor = tensor._local_tensor


class _Fsdp2(abc.ABC):
    """A model under ``fully_shard`` for each state, made at its first save or load and kept, as a job has it."""

    remark = ""

    def __init__(self) -> None:
        self._made: list[tuple[State, State, Training]] = []

    def unavailable(self, context: Context) -> str | None:
        """If torch has no FSDP2, or there is no torch.distributed."""
        del context
        try:
            from torch.distributed.fsdp import fully_shard
        except ImportError:
            return (
                f"torch {torch.__version__} has no `fully_shard` in torch.distributed.fsdp: pip install -U 'torch>=2.6'"
            )
        del fully_shard
        return "FSDP2 needs torch.distributed: start the ranks by torchrun" if alone() else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        self.write(self._training(state), directory)
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        training = self._training(like)
        self.read(training, directory)
        _put_back(training, like)
        return like

    def close(self) -> None:
        """Forget the models, which have no memory of their own."""
        self._made.clear()

    @abc.abstractmethod
    def write(self, training: Training, directory: Path) -> None:
        """Save a model and its optimizer durably."""

    @abc.abstractmethod
    def read(self, training: Training, directory: Path) -> None:
        """Load them."""

    def _training(self, state: State) -> Training:
        for kept, tensors, training in self._made:
            if kept is state and all(state.get(name) is tensor for name, tensor in tensors.items()):
                return training
        training = training_of(state)
        # The state that is saved, and the one that is loaded.
        self._made = [*self._made[-1:], (state, dict(state), training)]
        return training


def _put_back(training: Training, like: State) -> None:
    """Bring what was loaded into the memory of ``like``: parameters (``_share``) and Adam's states may have moved."""
    for name, parameter in training.model.named_parameters():
        _move(parameter, like[name])
    for optimizer in training.optimizers:
        for name, parameter in training.model.named_parameters():
            states = optimizer.state.get(parameter, {})
            for moment in set(states) & set(_MOMENTS):
                _move(states[moment], like[_moment(name, moment)])


def _move(loaded: Any, into: torch.Tensor) -> None:
    """Copy a DTensor's part into a tensor of the state, and let it lie there from now on."""
    memory = local(into)
    if loaded._local_tensor.data_ptr() != memory.data_ptr():
        memory.copy_(loaded._local_tensor)
        loaded._local_tensor = memory


class Fsdp2Dcp(_Fsdp2):
    """Every rank writes its shards by torch's FileSystemWriter."""

    name = "fsdp2-dcp"

    def write(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``."""
        writer = dcp.FileSystemWriter(directory, single_file_per_rank=True, sync_files=True, thread_count=THREADS)
        dcp.save(training.shards(), storage_writer=writer, no_dist=alone())
        finish(directory)

    def read(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``."""
        shards = training.shards()
        dcp.load(shards, storage_reader=dcp.FileSystemReader(directory), no_dist=alone())
        training.take(shards)


class Fsdp2Direct(_Fsdp2):
    """Every rank writes its shards by ``DirectWriter``."""

    name = "fsdp2-direct"

    def write(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``."""
        from tunetool.checkpoint import DirectSavePlanner, DirectWriter

        writer = DirectWriter(directory)
        dcp.save(training.shards(), storage_writer=writer, planner=DirectSavePlanner(), no_dist=alone())
        barrier()

    def read(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``."""
        from tunetool.checkpoint import DirectLoadPlanner, DirectReader

        shards = training.shards()
        dcp.load(shards, storage_reader=DirectReader(directory), planner=DirectLoadPlanner(), no_dist=alone())
        training.take(shards)

    def close(self) -> None:
        """Free the pinned buffers, which the library keeps for the next save."""
        from tunetool.checkpoint import release_buffers

        super().close()
        release_buffers()


class Fsdp2Consolidated(_Fsdp2):
    """Rank 0 gathers the whole model and its optimizer, and writes them by torch.save."""

    name = "fsdp2-consolidated"
    remark = "rank 0 holds the state of all ranks in host memory"

    def unavailable(self, context: Context) -> str | None:
        """Also if the whole state does not fit into the host's memory."""
        return super().unavailable(context) or lacks_memory(context.state_bytes * context.world)

    def write(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``."""
        whole = training.whole()
        if rank_and_world()[0] == 0:
            write_durably(directory / CONSOLIDATED, lambda path: torch.save(whole, path))
        barrier()

    def read(self, training: Training, directory: Path) -> None:
        """See ``_Fsdp2``. Rank 0 reads, and each rank gets its part of every tensor from it."""
        whole: dict[str, Any] = {}
        if rank_and_world()[0] == 0:
            whole = torch.load(directory / CONSOLIDATED, map_location="cpu", weights_only=True, mmap=False)
        training.take_whole(whole)
