"""The processes that ``offload_steps.py`` starts: they train, and rank 0 writes the result."""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.op_builder.builder import OpBuilder
from torch.nn.functional import cross_entropy

from offload_model import build
from tunetool.advise.read_model import load_decoder
from tunetool.measure.aio.child import load
from tunetool.measure.worker import die_with_parent
from tunetool.tune.settings import DEFAULTS


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", required=True, type=int)
    parser.add_argument("--warm-ups", required=True, type=int)
    parser.add_argument("--tokens", required=True, type=int)
    parser.add_argument("--against")
    parser.add_argument("--json", required=True, type=Path)
    options = parser.parse_args()
    die_with_parent()
    ops = preload_ops(json.loads(os.environ["TUNETOOL_OPS"]))
    get_accelerator().set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed()
    answer = train(options, json.loads(options.config.read_text()), ops)
    if torch.distributed.get_rank() == 0:
        options.json.write_text(json.dumps(answer))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def preload_ops(files: dict[str, list[str]]) -> dict[str, Any]:
    """Give DeepSpeed the compiled ops, so that nothing compiles in the middle of training."""
    ops: dict[str, Any] = {}
    for paths in files.values():
        for path in paths:
            name = Path(path).stem
            if name not in ops:
                ops[name] = load(path)
                # An op finds the one manager of locked memory by its symbol.
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    OpBuilder._loaded_ops.update(ops)
    # Where there is no GPU, DeepSpeed compiles collectives of its own at the first start of each clone; gloo has them.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return ops


def train(options: argparse.Namespace, config: dict[str, Any], ops: dict[str, Any]) -> dict[str, Any]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    device = get_accelerator().current_device_name()
    sizes = load_decoder(options.model)
    torch.manual_seed(7)
    stage = config["zero_optimization"]["stage"]
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = build(sizes)
    if stage != 3:
        model = model.to(device)
    trains = "optimizer" in config
    if trains and "offload_optimizer" not in config["zero_optimization"] and device == "cpu":
        # DeepSpeed's own Adam for what lies on the GPU would be compiled for the processor.
        config["optimizer"]["params"]["torch_adam"] = True
    parameters = list(model.parameters()) if trains else None
    engine, *_ = deepspeed.initialize(model=model, config=config, model_parameters=parameters)
    torch.manual_seed(100 + rank)
    batch = engine.train_micro_batch_size_per_gpu()
    tokens = torch.randint(sizes.vocabulary, (batch, options.tokens + 1), device=device)

    blocks = {"config": config.get("aio") or DEFAULTS.block()}
    handles: dict[str, Handles] = {}
    if options.against:
        blocks["default" if options.against == "default" else Path(options.against).stem] = read_block(options.against)
        handles = {name: Handles(engine, block, ops["async_io"].aio_handle) for name, block in blocks.items()}
    kinds = list(blocks)
    losses: list[float] = []
    seconds: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(options.warm_ups + options.steps * len(kinds)):
        turn, position = divmod(max(0, number - options.warm_ups), len(kinds))
        name = kinds[position if turn % 2 == 0 else -1 - position]
        if handles:
            handles[name].use()
        took, loss = step(engine, tokens) if trains else infer(engine, tokens)
        mean = torch.tensor(loss, device=device)
        torch.distributed.all_reduce(mean)
        losses.append(float(mean) / world)
        if number >= options.warm_ups:
            seconds[name].append(took)
        if rank == 0:
            print(f"step {number + 1} ({name}): {took:.2f} s, loss {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return {
        "model": options.model,
        "trains": trains,
        "parameters": sum(tensor.numel for tensor in sizes.tensors()),
        "world": world,
        "device": device,
        "losses": losses,
        "blocks": blocks,
        "seconds": seconds,
        "swap_files": swap_files(config),
    }


def step(engine: Any, tokens: Any) -> tuple[float, float]:
    """One optimizer step: seconds, and the mean loss of its passes."""
    torch.distributed.barrier()
    began, total = time.perf_counter(), 0.0
    passes = engine.gradient_accumulation_steps()
    for _ in range(passes):
        loss = cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        total += float(loss.detach()) / passes
    get_accelerator().synchronize()
    torch.distributed.barrier()
    return time.perf_counter() - began, total


def infer(engine: Any, tokens: Any) -> tuple[float, float]:
    """One forward pass: seconds, and its loss."""
    engine.eval()
    torch.distributed.barrier()
    began = time.perf_counter()
    with torch.no_grad():
        loss = cross_entropy(engine(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    get_accelerator().synchronize()
    torch.distributed.barrier()
    return time.perf_counter() - began, float(loss)


def read_block(against: str) -> dict[str, Any]:
    if against == "default":
        return dict(DEFAULTS.block())
    document = json.loads(Path(against).read_text())
    return dict(document.get("aio", document))


def swap_files(config: dict[str, Any]) -> dict[str, int]:
    """Bytes of the swap files by folder, while they are there."""
    zero = config["zero_optimization"]
    roots = {zero.get(part, {}).get("nvme_path") for part in ("offload_optimizer", "offload_param")} - {None}
    sizes: dict[str, int] = {}
    for root in roots:
        for path in Path(root).glob("zero_stage_3/**/*.swp"):
            sizes[str(path.parent)] = sizes.get(str(path.parent), 0) + path.stat().st_size
    return sizes


class Handles:
    """Handles with one block's settings, to be put in the place of those that DeepSpeed's swappers hold."""

    def __init__(self, engine: Any, block: dict[str, Any], maker: Any) -> None:
        if block.get("use_gds"):
            raise SystemExit(
                "error: `use_gds`: memory that a GDS handle registered belongs to it, it cannot be changed"
            )
        parameters = next((getattr(each, "nvme_swapper", None) for each in engine.module.parameters()), None)
        self.swappers = [each for each in (getattr(engine.optimizer, "optimizer_swapper", None), parameters) if each]
        if not self.swappers:
            raise SystemExit("error: nothing is offloaded to NVMe, so there is nothing to compare")
        unit = 512 * block["intra_op_parallelism"]
        if any(each.aligned_bytes % unit for each in self.swappers):
            raise SystemExit(f"error: the sizes that the config's block makes are no multiples of {unit} bytes")
        shape = [block[name] for name in ("block_size", "queue_depth", "single_submit", "overlap_events")]
        threads = block["intra_op_parallelism"]
        # Each swapper has its own: it counts what its handle completes.
        self.pairs = [(each, maker(*shape, threads), maker(*shape, threads)) for each in self.swappers]

    def use(self) -> None:
        for swapper, read, write in self.pairs:
            for name, handle in (
                *((name, read) for name in ("read_aio_handle", "aio_read_handle")),
                *((name, write) for name in ("write_aio_handle", "aio_write_handle")),
            ):
                if hasattr(swapper, name):
                    setattr(swapper, name, handle)
            if hasattr(swapper, "gradient_swapper"):
                swapper.aio_handle = write
                swapper.gradient_swapper.aio_handle = write
                swapper.swap_buffer_manager.aio_handle = write
                for info in swapper.swap_params_info.values():
                    info.aio_handle = write


if __name__ == "__main__":
    sys.exit(main())
