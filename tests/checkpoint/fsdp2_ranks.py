"""One of two ranks that train a small transformer under FSDP2, save it and load it. Its last line has the results as JSON.

``fsdp2_ranks.py DIRECTORY``, with RANK and WORLD_SIZE.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.engines.fsdp2 import Training
from tunetool.bench.checkpoint.engines.tensors import local

NAMES = ("fsdp2-dcp", "fsdp2-direct", "fsdp2-consolidated")
VOCABULARY, WIDTH = 501, 64  # 501: no number of ranks divides it


class Transformer(nn.Module):
    """A causal language model: embedding, two layers of attention and MLP, output."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        layer = {"dim_feedforward": 3 * WIDTH, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 4, **layer) for _ in range(2))  # type: ignore[arg-type]
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        logits: torch.Tensor = self.output(hidden)
        return logits


def _made(world: int, seed: int) -> Training:
    torch.manual_seed(seed)
    model, mesh = Transformer(), init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Training(model, (torch.optim.AdamW(model.parameters(), lr=1e-3),))


def _step(training: Training, seed: int) -> float:
    """One step of training. Returns the loss."""
    tokens = torch.randint(VOCABULARY, (2, 17), generator=torch.Generator().manual_seed(seed))
    logits = training.model(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    for optimizer in training.optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def _parts(training: Training) -> dict[str, torch.Tensor]:
    """Copies of this rank's part of every parameter and of every state of the optimizer."""
    named = dict(training.model.named_parameters())
    parts = {name: local(parameter).detach().clone() for name, parameter in named.items()}
    for optimizer in training.optimizers:
        for name, parameter in named.items():
            parts |= {f"{name} {key}": local(value).clone() for key, value in optimizer.state[parameter].items()}
    return parts


def _differing(expected: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]) -> list[str]:
    assert expected.keys() == parts.keys()
    return [name for name, tensor in expected.items() if not torch.equal(tensor, parts[name])]


def _digest(training: Training) -> str:
    """Of the whole model and optimizer, on rank 0."""
    whole, digest = training.whole(), hashlib.sha256()
    for part in (whole["model"], whole["optimizer"].get("state", {})):
        for name in sorted(part):
            values = part[name] if isinstance(part[name], dict) else {"": part[name]}
            for key in sorted(values):
                digest.update(f"{name} {key}".encode() + values[key].detach().numpy().tobytes())
    return digest.hexdigest()


def train_save_and_load(rank: int, world: int, path: str, meet: str) -> dict[str, Any]:
    """After a real step, each engine saves the model and loads it into a new one, which has made no step."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    trained = _made(world, seed=1)
    _step(trained, rank)
    expected, differing, unlike = _parts(trained), {}, {}
    loaded = {}
    for name in NAMES:
        engine: Any = ENGINES[name]()
        engine.write(trained, Path(path, name))
        loaded[name] = _made(world, seed=2)
        unlike[name] = len(
            _differing(
                {key: expected[key] for key in ("output.weight",)},
                {"output.weight": local(loaded[name].model.output.weight)},
            )
        )
        engine.read(loaded[name], Path(path, name))
        differing[name] = _differing(expected, _parts(loaded[name]))
        engine.close()
    digest = _digest(trained)
    losses = {"trained": _step(trained, 7), **{name: _step(each, 7) for name, each in loaded.items()}}
    after = {name: _differing(_parts(trained), _parts(each)) for name, each in loaded.items()}
    dist.destroy_process_group()
    return {
        "differing": differing,
        "unlike": unlike,
        "digest": digest,
        "losses": losses,
        "after": after,
        "parts": len(expected),
    }


def load_on_other_ranks(rank: int, world: int, path: str, meet: str) -> dict[str, str]:
    """Digests of what another number of ranks reads from the same files."""
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=world)
    digests = {}
    for name in NAMES:
        training, engine = _made(world, seed=2), ENGINES[name]()
        engine.read(training, Path(path, name))  # type: ignore[attr-defined]  # of the FSDP2 engines
        digests[name] = _digest(training)
    dist.destroy_process_group()
    return digests


def main() -> None:
    """The two ranks; then the first of them alone, from the same files."""
    rank, path = int(os.environ["RANK"]), sys.argv[1]
    warnings.simplefilter("ignore")
    results = train_save_and_load(rank, int(os.environ["WORLD_SIZE"]), path, f"{path}/meet")
    if rank == 0:
        results["alone"] = load_on_other_ranks(0, 1, path, f"{path}/meet-alone")
    print(json.dumps(results))


if __name__ == "__main__":
    main()
