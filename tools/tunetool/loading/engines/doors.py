"""The entry points that engines call in each of their processes: the load format ``tunetool`` is made known to them."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

LOAD_FORMAT = "tunetool"
_VLLM_LOADERS = "vllm.model_executor.model_loader"
_SGLANG_CONFIG = "sglang.srt.configs.load_config.LoadConfig._verify_load_format"


def vllm() -> None:
    """Register the loader with vLLM (0.11 or newer) once this process imports vLLM's loaders.

    The process that answers requests never does: to import them here would cost it, and every user of vLLM who has
    tunetool installed, seconds.
    """
    if _VLLM_LOADERS in sys.modules:
        _register_with_vllm(sys.modules[_VLLM_LOADERS])
    elif not any(isinstance(finder, _Afterwards) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Afterwards(_VLLM_LOADERS, _register_with_vllm))


def sglang() -> None:
    """Have SGLang take the load format: as a choice of its command line, and then as a class of a loader."""
    try:
        from sglang.srt.arg_groups.choices import (  # noqa: PLC0415
            add_load_format_choices,
        )
        from sglang.srt.plugins.hook_registry import (  # noqa: PLC0415
            HookRegistry,
            HookType,
        )
    except ImportError as error:
        logging.getLogger("sglang.tunetool").warning("no load format `%s`: %s", LOAD_FORMAT, _too_old("SGLang", error))
        return
    add_load_format_choices([LOAD_FORMAT])
    # The formats are an enumeration, but a class of a loader is taken as it is.
    HookRegistry.register(_SGLANG_CONFIG, _verify_load_format, HookType.AROUND)


def _verify_load_format(verify: Callable[..., None], config: Any) -> None:
    if config.load_format != LOAD_FORMAT:
        verify(config)
        return
    from tunetool.loading.engines.sglang_loader import (  # noqa: PLC0415
        TunetoolModelLoader,
    )

    config.load_format = TunetoolModelLoader


def _register_with_vllm(loaders: ModuleType) -> None:
    try:
        register = loaders.register_model_loader
        from tunetool.loading.engines.vllm_loader import (  # noqa: PLC0415
            TunetoolModelLoader,
        )
    except (AttributeError, ImportError) as error:
        logging.getLogger("vllm.tunetool").warning("no load format `%s`: %s", LOAD_FORMAT, _too_old("vLLM", error))
        return
    register(LOAD_FORMAT)(TunetoolModelLoader)


def _too_old(engine: str, error: Exception) -> str:
    return f"this {engine} is too old or too new for this tunetool ({error})"


class _Afterwards(MetaPathFinder):
    """Calls ``then`` with the module ``name`` as soon as it was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """See ``importlib``: what the finders after this one find."""
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
