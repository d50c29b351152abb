"""vLLM and SGLang as far as tunetool's loaders touch them, made of what was recorded of the real packages
(tests/data/engines.json, tests/record_engines.py): each function takes the parameters that the real one takes, each class
has its fields. What they do is the least that lets a directory be loaded; test_vllm.py runs the real one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

RECORDED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data/engines.json").read_text(encoding="utf-8")
)

FILES = """
        import glob
        names = []
        for pattern in allow_patterns_overrides or ["*.safetensors", "*.bin", "*.pt"]:
            names = names or sorted(glob.glob(f"{model_name_or_path}/{pattern}"))
        if not names:
            raise RuntimeError(f"Cannot find any model weights with `{model_name_or_path}`")
"""
VLLM = {
    "__init__": "",
    "config/__init__": """
from types import SimpleNamespace
from vllm.config.load import LoadConfig
current = None
def get_current_vllm_config():
    if current is None:
        raise AssertionError("Current vLLM config is not set.")
    return SimpleNamespace(parallel_config=SimpleNamespace(**current))
""",
    "config/load": """
from dataclasses import dataclass, field
from typing import Any
@dataclass
class LoadConfig:
{LoadConfig}
""",
    "logger": "import logging\ninit_logger = logging.getLogger\n",
    "platforms": "from types import SimpleNamespace\ncurrent_platform = SimpleNamespace(device_type='cpu')\n",
    "model_executor/__init__": "",
    "model_executor/model_loader/__init__": """
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
LOADERS = {}
def register_model_loader({register_model_loader}):
    def register(loader):
        assert load_format not in LOADERS
        LOADERS[load_format] = loader
        return loader
    return register
def get_model_loader({get_model_loader}):
    return LOADERS[load_config.load_format](load_config)
""",
    "model_executor/model_loader/weight_utils": """
def filter_safetensors_files_by_weight_name(files, is_unused):
    from safetensors import safe_open
    return [file for file in files if not all(map(is_unused, safe_open(file, "pt").keys()))]
""",
    "model_executor/model_loader/default_loader": """
from dataclasses import dataclass
from typing import Any
class DefaultModelLoader:
    counter_before_loading_weights = 0.0
    @dataclass
    class Source:
{DefaultModelLoader.Source}
    def __init__({DefaultModelLoader.__init__}):
        assert set(load_config.model_loader_extra_config) <= {"enable_weights_track"}
        assert load_config.load_format == "auto"
        self.load_config = load_config
    def _prepare_weights({DefaultModelLoader._prepare_weights}):
        {FILES}
        return model_name_or_path, names, names[0].endswith(".safetensors")
    def _get_weights_iterator({DefaultModelLoader._get_weights_iterator}):
        return iter([("by vLLM", source.model_or_path)])
    def get_all_weights({DefaultModelLoader.get_all_weights}):
        sources = [DefaultModelLoader.Source(model_config.model, None), *getattr(model, "secondary_weights", ())]
        for source in sources:
            yield from self._get_weights_iterator(source)
""",
}
SGLANG = {
    "__init__": "",
    "srt/__init__": "",
    "srt/arg_groups/__init__": "",
    "srt/arg_groups/choices": "LOAD_FORMAT_CHOICES = ['auto']\nadd_load_format_choices = {add_load_format_choices}\n",
    "srt/plugins/__init__": "",
    "srt/plugins/hook_registry": """
import enum
HookType = enum.Enum("HookType", {HookType})
class HookRegistry:
    hooks = {}
    @classmethod
    def register({HookRegistry.register}):
        cls.hooks[target] = hook, hook_type
    @classmethod
    def apply_hooks(cls):
        import pkgutil
        for target, (hook, hook_type) in cls.hooks.items():
            assert hook_type is HookType.AROUND
            place, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(place)
            original = getattr(owner, name)
            setattr(owner, name, lambda self, hook=hook, original=original: hook(original, self))
""",
    "srt/configs/__init__": "",
    "srt/configs/load_config": """
import enum
from dataclasses import dataclass
from typing import Any
class LoadFormat(str, enum.Enum):
{LoadFormat}
@dataclass
class LoadConfig:
{LoadConfig}
    def __post_init__(self):
        self._verify_load_format()
    def _verify_load_format({LoadConfig._verify_load_format}):
        self.load_format = LoadFormat(self.load_format)
""",
    "srt/model_loader/__init__": "",
    "srt/model_loader/weight_utils": """
def maybe_add_mtp_safetensors({maybe_add_mtp_safetensors}):
    return [*hf_weights_files, *hf_config]
""",
    "srt/model_loader/loader": """
from dataclasses import dataclass
from typing import Any
class DefaultModelLoader:
    @dataclass
    class Source:
{DefaultModelLoader.Source}
    def __init__({DefaultModelLoader.__init__}):
        assert load_config.model_loader_extra_config == {}
        self.load_config = load_config
    def _prepare_weights({DefaultModelLoader._prepare_weights}):
        {FILES}
        return model_name_or_path, names, names[0].endswith(".safetensors")
    def _get_weights_iterator({DefaultModelLoader._get_weights_iterator}):
        return iter([("by SGLang", source.model_or_path)])
    @classmethod
    def _filter_mtp_weights({DefaultModelLoader._filter_mtp_weights}):
        return ((prefix + str(draft_model_idx) + "." + name, tensor) for name, tensor in weights_iterator)
def get_model_loader({get_model_loader}):
    if isinstance(load_config.load_format, type):
        return load_config.load_format(load_config)
    return DefaultModelLoader(load_config)
""",
}
DEFAULTS = {"load_format": "'auto'", "model_loader_extra_config": "field(default_factory=dict)", "prefix": "''"}


def make(directory: Path, engine: str, version: str) -> None:
    """Write the package of the engine's recorded version into ``directory``."""
    recorded = RECORDED[engine][version]
    parts = {place: _class_body(place, what) if isinstance(what, list) else what for place, what in recorded.items()}
    parts["FILES"] = FILES.strip()
    for name, template in {"vllm": VLLM, "sglang": SGLANG}[engine].items():
        path = directory / engine / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(re.sub(r"\{([A-Za-z_.]+)\}", lambda found: parts[found[1]], template))


def _class_body(place: str, fields: list[str]) -> str:
    if place == "HookType":
        return repr(fields)
    if place == "LoadFormat":
        return "\n".join(f"    {each} = '{each.lower()}'" for each in fields)
    indent = " " * (8 if place.endswith("Source") else 4)
    defaults = {**DEFAULTS, **({"model_loader_extra_config": "None"} if "tp_rank" in fields else {})}
    return "\n".join(
        f"{indent}{each}: Any" + ("" if each == "model_or_path" else f" = {defaults.get(each, 'None')}")
        for each in fields
    )
