"""DeepSpeed's own checkpoint engine, to which ``engine.save_checkpoint`` hands its dictionaries."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tunetool.bench.checkpoint.engines.base import Context, Done, Plain, State
from tunetool.bench.checkpoint.engines.ranks import save_parts
from tunetool.bench.checkpoint.engines.torch_save import SUFFIX, load_parts


class DeepSpeedTorch(Plain):
    """``TorchCheckpointEngine`` as the default configuration makes it, one file per rank as ZeRO writes its parts.

    fsync and rename are ours: DeepSpeed has neither. Its ``load`` unpickles anything (``weights_only=False``); ours is
    torch.load without that.
    """

    name = "deepspeed-torch"
    remark = "torch.save inside; fsync and rename added"

    def __init__(self) -> None:
        self._engine: Any = None

    def unavailable(self, context: Context) -> str | None:
        """If DeepSpeed cannot be imported."""
        del context
        try:
            self._made()
        except ImportError as error:
            return f"deepspeed cannot be imported: {error}"
        return None

    def _made(self) -> Any:
        if self._engine is None:
            from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
            from deepspeed.runtime.model_checkpointing.config import get_checkpoint_config

            self._engine = TorchCheckpointEngine(SimpleNamespace(checkpoint_config=get_checkpoint_config({})))
        return self._engine

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        engine = self._made()
        save_parts(state, directory, SUFFIX, lambda parts, path: engine.save(parts, str(path)))
        return Done()

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_parts(like, directory)
