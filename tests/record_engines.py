"""Records what tunetool's loaders use of vLLM and SGLang, from unpacked wheels, without importing them.

record_engines.py DIRECTORY ... > tests/data/engines.json

Each DIRECTORY holds a package `vllm` or `sglang` and its .dist-info. tests/checkpoint/test_inference_engines.py makes
stand-ins of it, so that each loader is called as each version would call it.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

USED = {
    "vllm": {
        "vllm/model_executor/model_loader/__init__.py": ["register_model_loader", "get_model_loader"],
        "vllm/model_executor/model_loader/default_loader.py": [
            "DefaultModelLoader.__init__",
            "DefaultModelLoader._prepare_weights",
            "DefaultModelLoader._get_weights_iterator",
            "DefaultModelLoader.get_all_weights",
            "DefaultModelLoader.Source",
        ],
        "vllm/config/load.py": ["LoadConfig"],
    },
    "sglang": {
        "sglang/srt/plugins/hook_registry.py": ["HookRegistry.register", "HookType"],
        "sglang/srt/configs/load_config.py": ["LoadFormat", "LoadConfig", "LoadConfig._verify_load_format"],
        "sglang/srt/model_loader/loader.py": [
            "get_model_loader",
            "DefaultModelLoader.__init__",
            "DefaultModelLoader._prepare_weights",
            "DefaultModelLoader._get_weights_iterator",
            "DefaultModelLoader._filter_mtp_weights",
            "DefaultModelLoader.Source",
        ],
        "sglang/srt/model_loader/weight_utils.py": ["maybe_add_mtp_safetensors"],
        "sglang/srt/arg_groups/choices.py": ["add_load_format_choices"],
    },
}


def described(node: ast.AST) -> object:
    """The parameters of a function, with their defaults; the fields of a class; of an assignment, its value."""
    if isinstance(node, ast.FunctionDef):
        for each in ast.walk(node.args):
            if isinstance(each, ast.arg):
                each.annotation = None
        return ast.unparse(node.args)
    if isinstance(node, ast.ClassDef):
        fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
        fields += [each.targets[0] for each in node.body if isinstance(each, ast.Assign)]
        return [ast.unparse(each) for each in fields if not ast.unparse(each).startswith("_")]
    assert isinstance(node, ast.Assign)
    return ast.unparse(node.value)


def find(tree: ast.AST, dotted: str) -> ast.AST:
    for name in dotted.split("."):
        body: list[ast.stmt] = tree.body  # type: ignore[attr-defined]
        (tree,) = [
            each
            for each in body
            if (isinstance(each, ast.FunctionDef | ast.ClassDef) and each.name == name)
            or (isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name)
        ][-1:]
    return tree


def main() -> None:
    recorded: dict[str, dict[str, object]] = {engine: {} for engine in USED}
    for directory in map(Path, sys.argv[1:]):
        (engine,) = [each for each in USED if (directory / each).is_dir()]
        (info,) = directory.glob(f"{engine}*.dist-info")
        recorded[engine][info.name.removesuffix(".dist-info").rpartition("-")[2]] = {
            dotted: described(find(ast.parse((directory / file).read_text()), dotted))
            for file, names in USED[engine].items()
            for dotted in names
        }
    json.dump(recorded, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
