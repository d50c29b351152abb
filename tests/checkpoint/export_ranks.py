"""One of the ranks that hold small models of transformers under FSDP2 and save them. With RANK and WORLD_SIZE.

``export_ranks.py DIRECTORY``: each family's config.json, its logits before it was sharded, and its steps.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers as hf
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tunetool.checkpoint import DirectSavePlanner, DirectWriter

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,  # no number of ranks divides it
}
FAMILIES = {
    "llama": lambda: hf.LlamaConfig(**_SIZES),
    "qwen2": lambda: hf.Qwen2Config(**_SIZES, tie_word_embeddings=True),
    "mixtral": lambda: hf.MixtralConfig(**_SIZES, num_local_experts=4),
}


def logits_of(model: Any) -> torch.Tensor:
    """Of the same words for every model, summed in one order: by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(torch.arange(2 * 17).view(2, 17) % 101).logits
    torch.set_num_threads(threads)
    return logits


def main() -> None:
    """Save each family by both writers."""
    rank, world, root = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(sys.argv[1])
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    for number, (family, config) in enumerate(FAMILIES.items()):
        torch.manual_seed(number)
        model = hf.AutoModelForCausalLM.from_config(config())
        if rank == 0:
            model.config.save_pretrained(root / family)
            torch.save(logits_of(model), root / family / "logits.pt")
        for layer in model.model.layers:
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        dist.barrier()
        state = {"model": model.state_dict(), "optim": {"exp_avg": torch.ones(3)}}
        direct = DirectWriter(root / family / "direct")
        dcp.save(state, storage_writer=direct, planner=DirectSavePlanner())
        dcp.save(state, storage_writer=dcp.FileSystemWriter(root / family / "torch", sync_files=False))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
