"""vLLM's loader of weights, with files read by ``iterate``. vLLM chooses the files, as for `--load-format auto`, and
hands the tensors to its model, which takes its slices of them."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import Any, cast

import torch
from vllm.config import get_current_vllm_config
from vllm.config.load import LoadConfig
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.platforms import current_platform

from tunetool.loading.engines.reading import Tensors, chosen, options_of, tensors

logger = init_logger("vllm.tunetool")
_OF_VLLM = ("enable_weights_track",)


class TunetoolModelLoader(DefaultModelLoader):
    """All but the reading is the default loader's: what to download, secondary weights, what no file initialised."""

    counter_before_loading_weights: float

    def __init__(self, load_config: LoadConfig) -> None:
        self._options, extra = options_of(load_config.model_loader_extra_config, _OF_VLLM)
        super().__init__(_changed(load_config, load_format="auto", model_loader_extra_config=extra))

    def _get_weights_iterator(self, source: Any) -> Tensors:
        arguments = {
            name: getattr(source, name)
            for name in ("subfolder", "revision", "fall_back_to_pt", "allow_patterns_overrides")
            if hasattr(source, name)  # newer versions have more
        }
        found = chosen(
            lambda: self._prepare_weights(source.model_or_path, **arguments),
            source.model_or_path,
            source.allow_patterns_overrides,
        )
        if found is None:
            return cast("Tensors", super()._get_weights_iterator(source))
        _, files = found
        if (is_unused := getattr(source, "is_unused_weight", None)) is not None:
            # A draft model, say, of whose files most hold the layers of the other.
            from vllm.model_executor.model_loader.weight_utils import (  # noqa: PLC0415  newer versions alone
                filter_safetensors_files_by_weight_name,
            )

            files = filter_safetensors_files_by_weight_name(files, is_unused)
        if not self.counter_before_loading_weights:
            self.counter_before_loading_weights = time.perf_counter()  # the default loader says how long it took
        read = tensors(files, self._device(), self._options, ranks=_ranks(), told=logger.info)
        return ((source.prefix + name, tensor) for name, tensor in read)

    def _device(self) -> torch.device:
        if self.load_config.device is not None:
            return torch.device(self.load_config.device)
        if current_platform.device_type == "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return torch.device("cpu")


def _ranks() -> int:
    """Processes of the engine; more than this machine has, where it has several."""
    try:
        parallel = get_current_vllm_config().parallel_config
    except AssertionError:  # by whom nothing is configured
        return 1
    return int(parallel.world_size * parallel.data_parallel_size)


def _changed(config: LoadConfig, **changes: Any) -> LoadConfig:
    """As ``dataclasses.replace``, which does not take vLLM's fields of pydantic in all versions."""
    return LoadConfig(**{**{each.name: getattr(config, each.name) for each in fields(config) if each.init}, **changes})
