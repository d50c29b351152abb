"""One of two ranks: saves and restores with every engine. Its last line has the results as JSON.

``engines_pair.py MODEL DIRECTORY``, with torchrun's environment and a free ``MASTER_PORT``.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path

import torch.distributed as dist

from tunetool.bench.checkpoint.engines import ENGINES
from tunetool.bench.checkpoint.engines.base import Context
from tunetool.bench.checkpoint.engines.tensors import blank, build, equal, local_parts
from tunetool.bench.checkpoint.states import Layout, Shape, rank_bytes, shape


def cycle(name: str, layout: Layout, form: Shape, directory: Path) -> str:
    """``equal``, or a description of the difference."""
    rank, world = dist.get_rank(), dist.get_world_size()
    if missing := ENGINES[name].missing():
        return f"unavailable: {missing}"
    engine = ENGINES[name]()
    held = rank_bytes(form, rank, world, layout)
    reason = engine.unavailable(Context(rank, world, "cpu", directory, held))
    if reason:
        return f"unavailable: {reason}"
    state = build(form, "cpu", rank, world, seed=3, layout=layout)
    if sum(part.nbytes for part in local_parts(state).values()) != held:
        return "not the bytes that were announced"
    engine.save(state, directory).wait()
    files = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    restored = engine.load(blank(state), directory)
    engine.close()
    # The state is written once, by any of the ranks; our engine pads each part to whole blocks.
    packed = ENGINES[name].compression != "none"
    if not packed and not form.bytes <= files < 1.05 * form.bytes + 8192 * world * form.tensors:
        return f"{files} bytes in files for {form.bytes} of state"
    return equal(state, restored) or "equal"


def main() -> None:
    """Shards with every engine; replicas with the engines that distribute the writing themselves."""
    model, directory = sys.argv[1:]
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    results = {}
    for name in ENGINES:
        results[f"sharded {name}"] = cycle(name, "sharded", shape(model), Path(directory, "sharded", name))
    for name in (
        "torch-save-zip",
        "dcp-t1-single",
        "dcp-async-thread",
        "fsdp-consolidated",
        "megatron-dist",
        "orbax",
        "direct",
    ):
        results[f"replicated {name}"] = cycle(name, "replicated", shape(model), Path(directory, "replicated", name))
    dist.barrier()
    print(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
