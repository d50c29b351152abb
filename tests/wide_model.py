"""A Qwen2.5-VL whose step takes a CPU a fraction of a second, as does a gather over 1 Gbit/s."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.training.model import reference_model

HIDDEN, LAYERS = 512, 6
_SHARD = 64 << 20


def write(directory: Path) -> Path:
    """Write a model of 24 million parameters, 94 MB in fp32, completely or not at all."""
    tiny = CONFIGURATIONS["tiny"]
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": 16, "num_key_value_heads": 4}
    vision = {**tiny["vision_config"], "out_hidden_size": HIDDEN}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        made, small = Path(scratch) / "made", Path(scratch) / "small"
        for each in (made, small):
            each.mkdir()
        reference_model.write("tiny", small, 0)
        reference_model.write_configured(
            {**tiny, **sizes, "intermediate_size": 2048, "vision_config": vision}, made, 0, _SHARD, lambda _: None
        )
        shutil.copy(small / "preprocessor_config.json", made)
        made.rename(directory)
    return directory
