"""torch.save and torch.load, one file per rank."""

from __future__ import annotations

from pathlib import Path

import torch

from tunetool.bench.checkpoint.engines.base import Done, Plain, State
from tunetool.bench.checkpoint.engines.ranks import device_of, file_of, fill, save_parts

SUFFIX = ".pt"


def load_parts(like: State, directory: Path) -> State:
    """Read a whole file of torch.save's and copy it into ``like``: once over the state's size in memory."""
    path = file_of(like, directory, SUFFIX)
    return fill(like, torch.load(path, map_location=device_of(like), weights_only=True, mmap=False), directory)


class TorchSave(Plain):
    """What most training scripts do, made durable: torch.save to a new name, fsync, rename, fsync of the directory."""

    def __init__(self, zipped: bool) -> None:
        self.name = "torch-save-zip" if zipped else "torch-save-legacy"
        self._zipped = zipped

    def save(self, state: State, directory: Path) -> Done:
        """See ``Engine``."""
        save_parts(state, directory, SUFFIX, self._write)
        return Done()

    def _write(self, parts: State, path: Path) -> None:
        torch.save(parts, path, _use_new_zipfile_serialization=self._zipped)

    def load(self, like: State, directory: Path) -> State:
        """See ``Engine``."""
        return load_parts(like, directory)
