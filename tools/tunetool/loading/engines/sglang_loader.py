"""SGLang's loader of weights, with files read by ``iterate``. SGLang chooses the files, as for `--load-format auto`,
and hands the tensors to its model, which takes its slices of them."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any, cast

import torch
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.weight_utils import maybe_add_mtp_safetensors

from tunetool.loading.engines.reading import Tensors, chosen, options_of, tensors
from tunetool.loading.safetensors_files import INDEX

logger = logging.getLogger("sglang.tunetool")


class TunetoolModelLoader(DefaultModelLoader):
    """All but the reading is the default loader's: what to download, secondary weights, draft layers."""

    def __init__(self, load_config: LoadConfig) -> None:
        self._options, _ = options_of(load_config.model_loader_extra_config or {})
        super().__init__(replace(load_config, load_format=LoadFormat.AUTO, model_loader_extra_config={}))

    def _get_weights_iterator(self, source: Any, *, resolved_source: Any = None, **others: Any) -> Tensors:
        path, own = source.model_or_path, source.allow_patterns_overrides
        found = chosen(
            lambda: self._prepare_weights(path, source.revision, source.fall_back_to_pt, own),
            path,
            own,
        )
        if found is None:
            theirs = super()._get_weights_iterator(source, resolved_source=resolved_source, **others)
            return cast("Tensors", theirs)
        folder, files = found
        if source.model_config is not None:
            files = maybe_add_mtp_safetensors(files, folder, INDEX, source.model_config.hf_config)
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
        read = tensors(files, device, self._options, ranks=_ranks(), told=logger.info)
        draft = self.load_config.draft_model_idx
        if draft is not None:
            return cast("Tensors", self._filter_mtp_weights(read, source.prefix, draft))
        return ((source.prefix + name, tensor) for name, tensor in read)


def _ranks() -> int:
    """Processes that load together; more than this machine has, where it has several."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
