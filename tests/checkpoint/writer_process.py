"""Saves through dcp's own process, with torch's stager and, wrongly, with ours. Argument: a directory."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from tunetool.checkpoint.writer import DirectWriter

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    dist.init_process_group("gloo", init_method=f"file://{directory}/meet", rank=0, world_size=1)
    process = AsyncCheckpointerType.PROCESS
    state = {"x": torch.arange(300_000.0), "n": {"y": torch.ones(3, 5).t()}}
    saving = dcp.async_save(state, storage_writer=DirectWriter(directory / "step"), async_checkpointer_type=process)
    state["x"].zero_()  # type: ignore[attr-defined]
    saving.result()
    print("saved", flush=True)
    writer = DirectWriter(directory / "other")
    saving = dcp.async_save(
        state, storage_writer=writer, async_checkpointer_type=process, async_stager=writer.stager()
    )  # fmt: skip
    print(type(saving.exception()).__name__, saving.exception(), flush=True)
    dist.destroy_process_group()
