"""safetensors, one file per rank."""

from __future__ import annotations

import inspect
from pathlib import Path

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State
from tunetool.bench.checkpoint.engines.ranks import device_of, file_of, fill, host_bytes, lacks_memory, save_parts

SUFFIX = ".safetensors"


class Safetensors(Plain):
    """``save_file``, which copies all tensors of a GPU to the host first; ``load_file``, by pread where it can."""

    name = "safetensors"

    def unavailable(self, context: Context) -> str | None:
        """If a GPU's state does not fit into the host's memory."""
        return lacks_memory(host_bytes(context)) if context.device == "cuda" else None

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        save_parts(state, directory, SUFFIX, _write)
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        from safetensors.torch import load_file

        # 0.8 and newer read by pread when asked; the older ones only by mmap.
        more = {"backend": "pread"} if "backend" in inspect.signature(load_file).parameters else {}
        return fill(like, load_file(file_of(like, directory, SUFFIX), device=str(device_of(like)), **more), directory)


def _write(parts: State, path: Path) -> None:
    from safetensors.torch import save_file

    save_file(parts, path)
