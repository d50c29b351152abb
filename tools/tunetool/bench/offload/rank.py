"""One rank of the benchmark: builds the model and DeepSpeed's engine once, then makes steps by orders.

One of ``tunetool.launch.asked_ranks``. The parent reads the drives' counters
and looks at the swap files between the orders. Times are of the monotonic clock, which all processes of a node share.
"""

from __future__ import annotations

import ctypes
import functools
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.nn.functional import cross_entropy

from tunetool.bench.offload.architecture import architecture
from tunetool.bench.offload.network import build
from tunetool.bench.offload.swap_handles import Ledger, SwapHandles
from tunetool.measure.aio import child

OFFLOADS = ("offload_optimizer", "offload_param")


@dataclass
class Rank:
    """What a rank keeps between orders."""

    rank: int
    ops: Mapping[str, Any] | None = None
    engine: Any = None
    handles: SwapHandles | None = None
    tokens: Any = None
    mover: Any = None
    """The handle of the ladder's rung."""

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Execute one order. Returns the answer."""
        act = {"hello": lambda _: {}, "start": self.start, "step": self.step, "rung": self.rung, "end": self.close}
        return act[order["do"]](order)

    def start(self, order: dict[str, Any]) -> dict[str, Any]:
        """The engine of the order's ``config``, with the model's states where that says."""
        self.ops = _load(order["ops"])
        # Where there is no GPU, DeepSpeed compiles collectives of its own at the first start; gloo has them.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        accelerator = get_accelerator()
        accelerator.set_device(int(os.environ["LOCAL_RANK"]))
        deepspeed.init_distributed()
        device, shape = accelerator.current_device_name(), architecture(order["model"])
        config = order["config"]
        stage, trains = config["zero_optimization"]["stage"], "optimizer" in config
        torch.manual_seed(order["seed"])
        with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
            network = build(shape)
        if stage != 3:
            network = network.to(device)
        if trains and "offload_optimizer" not in config["zero_optimization"] and device == "cpu":
            # DeepSpeed's own Adam for states on the device is not compiled for a processor.
            config["optimizer"]["params"]["torch_adam"] = True
        parameters = list(network.parameters()) if trains else None
        self.engine, *_ = deepspeed.initialize(model=network, config=config, model_parameters=parameters)
        blocks: Mapping[str, Mapping[str, Any]] = order["blocks"]
        self.handles = SwapHandles(self.engine, blocks, self.ops["async_io"].aio_handle) if blocks else None
        torch.manual_seed(order["seed"] + 1 + self.rank)
        batch = self.engine.train_micro_batch_size_per_gpu()
        self.tokens = torch.randint(shape.decoder.vocabulary, (batch, order["tokens"] + 1), device=device)
        return {
            "device": accelerator.device_name(),
            "gpu": torch.cuda.get_device_name() if accelerator.device_name() == "cuda" else "",
            "torch": torch.__version__,
            "deepspeed": deepspeed.__version__,
        }

    def step(self, order: dict[str, Any]) -> dict[str, Any]:
        """One step of the optimizer, by handles of the order's ``block``; without an optimizer a forward pass."""
        if self.handles is not None:
            self.handles.use(order["block"])
        torch.distributed.barrier()
        began = time.monotonic()
        loss = self._train() if self.engine.optimizer is not None else self._infer()
        get_accelerator().synchronize()
        torch.distributed.barrier()
        ended = time.monotonic()
        ledger = self.handles.ledger if self.handles is not None else Ledger()
        return {"began": began, "ended": ended, "loss": loss, **ledger.answer()}

    def close(self, order: dict[str, Any]) -> dict[str, Any]:
        """End in order."""
        if self.mover is not None:
            self.mover.close()
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        return {}

    def _train(self) -> float:
        total, passes = 0.0, self.engine.gradient_accumulation_steps()
        for _ in range(passes):
            loss = self._loss()
            self.engine.backward(loss)
            self.engine.step()
            total += float(loss.detach()) / passes
        return total

    def _infer(self) -> float:
        self.engine.eval()
        with torch.no_grad():
            return float(self._loss())

    def _loss(self) -> Any:
        return cross_entropy(self.engine(self.tokens[:, :-1]).float().flatten(0, 1), self.tokens[:, 1:].flatten())

    def rung(self, order: dict[str, Any]) -> dict[str, Any]:
        """What the handle moves while nothing else is to be done: a write of a file of this rank, and a read."""
        if self.mover is None:
            self.mover = child.Mover({**order, "file": order["file"] % self.rank})
            self.mover.move({"direction": "write", "loops": 1, "stamp": 0})
        self.mover.use(order)
        torch.distributed.barrier()
        moved: dict[str, Any] = self.mover.move({"direction": order["direction"], "loops": 1, "stamp": order["stamp"]})
        return moved


def _load(ops: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Give DeepSpeed the compiled ops, so that nothing compiles in the middle of training."""
    loaded = {name: child.load_all(list(files)) for name, files in ops.items()}
    for path, module in child.LOADED.items():
        # An op finds the one manager of locked memory by its symbol.
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        OpBuilder._loaded_ops[_name(path)] = module
    return loaded


def _name(path: str) -> str:
    """The op's name: files that were compiled when DeepSpeed was installed are called ``NAME_op.*``."""
    return Path(path).name.split(".", 1)[0].removesuffix("_op")


@functools.cache
def _this_rank() -> Rank:
    return Rank(int(os.environ["RANK"]))


def answer(order: dict[str, Any]) -> dict[str, Any]:
    """Called by ``tunetool.measure.child_server``."""
    return _this_rank().answer(order)
