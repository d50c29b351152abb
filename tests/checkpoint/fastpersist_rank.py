"""One rank of a small DeepSpeed training with `checkpoint.writer`: saves, steps and loads. Its last line is JSON.

``fastpersist_rank.py DIRECTORY WRITER STAGE OP...``, with torchrun's environment. WRITER is the section as JSON, with
``kills`` where its process is to be killed before the save; each OP is a compiled file, in their order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from tunetool.measure.aio.byte_view import byte_view
from tunetool.measure.aio.child import load_all


class Bytes:
    """In place of DeepSpeed's builder of `utils`, which refuses machines without a GPU."""

    def load(self) -> Any:
        return self

    def cast_to_byte_tensor(self, tensors: Any) -> Any:
        return [byte_view(each) for each in tensors] if isinstance(tensors, list) else byte_view(tensors)


def make_fast_run_on_a_cpu(files: list[str]) -> None:
    """The parts of FAST that need a GPU: memory that CUDA pins, and the op `utils`. The writer itself is untouched."""
    from deepspeed.io import fast_file_writer
    from deepspeed.runtime.model_checkpointing import writer_factory

    def set_up(factory: Any, aio: Any) -> None:
        del aio
        factory._dnvme_handle = load_all(files).aio_handle(2**20, 8, False, True, 1)
        example = torch.empty(0, dtype=torch.uint8)
        factory._io_buffer = factory._dnvme_handle.new_cpu_locked_tensor(2**20, example)

    fast_file_writer.UtilsBuilder = Bytes
    writer_factory.CheckpointWriterFactory._setup_for_aio = set_up


def train(directory: Path, writer: dict[str, Any], stage: int, kills: bool) -> dict[str, Any]:
    """What happened: an error's text, or what was stored and loaded. ``kills``: the process of the decoupled mode."""
    torch.manual_seed(0)
    model = torch.nn.Linear(256, 256)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "checkpoint": {"writer": writer},
    }
    done, files = "initialize", {}
    try:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
        step(engine)
        saved = {name: tensor.detach().clone() for name, tensor in engine.module.state_dict().items()}
        done = "save"
        if kills:
            engine.checkpoint_engine.ckpt_process.kill()
            engine.checkpoint_engine.ckpt_process.join()
        engine.save_checkpoint(str(directory), tag="one")
        done = "step"
        step(engine)
        dist.barrier()
        files = {str(path.relative_to(directory)): path.stat().st_size for path in directory.rglob("*.pt*")}
        changed = any(not torch.equal(saved[name], now) for name, now in engine.module.state_dict().items())
        done = "load"
        path, _ = engine.load_checkpoint(str(directory), tag="one")
        equal = all(torch.equal(saved[name], now) for name, now in engine.module.state_dict().items())
        engine.destroy()
    except Exception as error:
        return {"failed": done, "error": f"{type(error).__name__}: {error}", "files": files}
    return {"failed": "", "files": files, "changed": changed, "loaded": path is not None, "equal": equal}


def step(engine: Any) -> None:
    engine.backward(engine(torch.ones(1, 256)).sum())
    engine.step()


def main() -> None:
    directory, writer, stage, *files = sys.argv[1:]
    if files:
        make_fast_run_on_a_cpu(files)
    # DeepSpeed would compile an op of its own for ranks of one machine.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    settings = json.loads(writer)
    kills = settings.pop("kills", False)
    result = train(Path(directory), settings, int(stage), kills)
    print("\n" + json.dumps(result), flush=True)
    if not result["failed"]:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
