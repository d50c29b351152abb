"""`--load-format tunetool` of vLLM and SGLang, with stand-ins made of what was recorded of their versions."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import stand_in_engines
import torch
from safetensors.torch import save_file
from test_loading import made, same, write_index

import tunetool.loading.fill
from tunetool.loading.engines import doors
from tunetool.loading.engines.reading import options_of, tensors

ROOT = Path(__file__).parents[2]
RECORDED = stand_in_engines.RECORDED


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Makes a version of an engine importable for this test."""
    before = set(sys.modules)
    finders = list(sys.meta_path)

    def make(name: str, version: str) -> None:
        stand_in_engines.make(tmp_path / "packages", name, version)
        monkeypatch.syspath_prepend(str(tmp_path / "packages"))

    yield make
    sys.meta_path[:] = finders
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in RECORDED or name.startswith("tunetool.loading.engines."):
            del sys.modules[name]


@pytest.fixture
def model(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """Three files with an index, and what they hold."""
    directory = tmp_path / "model"
    directory.mkdir()
    files = {
        f"model-{file}.safetensors": {
            f"layer.{file}.{each}": made((file * 100 + each, 7), torch.bfloat16, 10 * file + each) for each in range(3)
        }
        for file in (1, 2, 3)
    }
    for name, held in files.items():
        save_file(held, directory / name)
    write_index(directory, files)
    return directory, {name: each for held in files.values() for name, each in held.items()}


def vllms_loader(extra: Mapping[str, object]) -> Any:
    """As vLLM makes it, in a process that called the entry point."""
    doors.vllm()
    doors.vllm()
    loaders: Any = importlib.import_module("vllm.model_executor.model_loader")
    config = importlib.import_module("vllm.config.load").LoadConfig(
        load_format="tunetool", model_loader_extra_config=dict(extra)
    )
    return loaders.get_model_loader(config)


@pytest.mark.parametrize("version", RECORDED["vllm"])
def test_vllm_gets_every_tensor(
    engine: Callable[[str, str], None],
    model: tuple[Path, dict[str, torch.Tensor]],
    version: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine("vllm", version)
    directory, expected = model
    loader = vllms_loader({"threads": 2, "ahead_bytes": 5000, "enable_weights_track": True})
    (directory / "layer.pt").touch()
    second = type(loader).Source(str(directory), None, prefix="second.")
    pt = type(loader).Source(str(directory), None, allow_patterns_overrides=["*.pt"])
    asked = SimpleNamespace(secondary_weights=[second, pt])
    with caplog.at_level(logging.INFO):
        found = dict(loader.get_all_weights(SimpleNamespace(model=str(directory)), asked))
    assert found.pop("by vLLM") == str(directory), "a file of another kind that the model names"
    same(found, {**expected, **{f"second.{name}": each for name, each in expected.items()}})
    assert f"`{directory}`: " in caplog.messages[0]
    assert "GB/s" in caplog.messages[0]
    assert len(caplog.messages) == 2
    assert loader.counter_before_loading_weights > 0


def test_vllm_reads_no_file_of_which_a_draft_uses_nothing(
    engine: Callable[[str, str], None], model: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    engine("vllm", list(RECORDED["vllm"])[-1])
    directory, expected = model
    loader = vllms_loader({})
    source = type(loader).Source(str(directory), None, is_unused_weight=lambda name: not name.startswith("layer.2."))
    found = dict(loader._get_weights_iterator(source))
    same(found, {name: each for name, each in expected.items() if name.startswith("layer.2.")})


@pytest.mark.parametrize(
    ("current", "given", "seen"),
    [
        (None, None, 1),
        ({"world_size": 1, "data_parallel_size": 1}, None, 1),
        ({"world_size": 4, "data_parallel_size": 2}, None, 8),
        ({"world_size": 4, "data_parallel_size": 2}, "3", 3),
    ],
)
def test_ranks_know_of_each_other(  # else each would read the drives by itself, past the page cache
    engine: Callable[[str, str], None],
    model: tuple[Path, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
    current: dict[str, int] | None,
    given: str | None,
    seen: int,
) -> None:
    engine("vllm", list(RECORDED["vllm"])[-1])
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if given:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", given)
    loader = vllms_loader({})
    monkeypatch.setattr("vllm.config.current", current)
    ranks = []
    real = tunetool.loading.fill.local_ranks
    monkeypatch.setattr(tunetool.loading.fill, "local_ranks", lambda: ranks.append(real()) or ranks[-1])
    reading = loader.get_all_weights(SimpleNamespace(model=str(model[0])), None)
    next(reading)
    assert os.environ.get("LOCAL_WORLD_SIZE") == given, "while the engine has the tensors"
    assert len(list(reading)) == 8
    assert set(ranks) == {seen}


def sglangs_loader(extra: Mapping[str, object], **others: object) -> Any:
    doors.sglang()
    importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
    assert importlib.import_module("sglang.srt.arg_groups.choices").LOAD_FORMAT_CHOICES == ["auto", "tunetool"]
    config = importlib.import_module("sglang.srt.configs.load_config").LoadConfig
    assert config(load_format="gguf").load_format == "gguf"
    with pytest.raises(ValueError, match="tunetol"):
        config(load_format="tunetol")
    made = config(load_format="tunetool", model_loader_extra_config=dict(extra), **others)
    return importlib.import_module("sglang.srt.model_loader.loader").get_model_loader(made)


@pytest.mark.parametrize("draft", [None, 4])
@pytest.mark.parametrize("version", RECORDED["sglang"])
def test_sglang_gets_every_tensor(
    engine: Callable[[str, str], None],
    model: tuple[Path, dict[str, torch.Tensor]],
    version: str,
    draft: int | None,
    tmp_path: Path,
) -> None:
    engine("sglang", version)
    directory, expected = model
    more = {"mtp.weight": made((5, 5), torch.float32, 99)}
    save_file(more, tmp_path / "mtp.safetensors")
    loader = sglangs_loader({"threads": 2}, draft_model_idx=draft)
    hf_config = SimpleNamespace(hf_config=[str(tmp_path / "mtp.safetensors")])
    source = type(loader).Source(str(directory), None, prefix="first.", model_config=hf_config)
    prefix = "first." if draft is None else "first.4."
    same(
        dict(loader._get_weights_iterator(source)),
        {f"{prefix}{name}": each for name, each in {**expected, **more}.items()},
    )
    (directory / "layer.pt").touch()
    pt = type(loader).Source(str(directory), None, allow_patterns_overrides=["*.pt"])
    assert dict(loader._get_weights_iterator(pt, startup_prefetch_started=True)) == {"by SGLang": str(directory)}


@pytest.mark.parametrize("which", ["vllm", "sglang"])
@pytest.mark.parametrize("file", [None, "model.bin", "layers.pt", "model.gguf"])
def test_weights_of_another_kind_are_refused(
    engine: Callable[[str, str], None], tmp_path: Path, which: str, file: str | None
) -> None:
    engine(which, list(RECORDED[which])[-1])
    loader = {"vllm": vllms_loader, "sglang": sglangs_loader}[which]({})
    directory = tmp_path / "model"
    directory.mkdir()
    if file:
        (directory / file).touch()
    with pytest.raises(ValueError, match="the load format tunetool reads no others; leave `--load-format` out for"):
        list(loader._get_weights_iterator(type(loader).Source(str(directory), None)))


@pytest.mark.parametrize(
    ("extra", "line"),
    [
        ({"thread": 4}, "`thread` is no option of the load format tunetool; did you mean `threads`?"),
        (
            {"enable_multithread_load": True},
            "tunetool; there are `ahead_bytes`, `buffer_bytes`, `device`",
        ),
        ({"threads": "4"}, "`threads` is a whole number above 0, not `'4'`"),
        ({"threads": True}, "`threads` is a whole number above 0, not `True`"),
        ({"ahead_bytes": 0}, "`ahead_bytes` is a whole number above 0, not `0`"),
        ({"device": 1}, '`device` is a name such as "cpu", not `1`'),
        ([], "is no JSON object but `[]`"),
    ],
)
def test_a_wrong_option_is_refused_by_name(extra: Any, line: str) -> None:
    with pytest.raises(ValueError, match="--model-loader-extra-config") as refused:
        options_of(extra)
    assert line in str(refused.value)


def test_hints_are_in_the_one_line_that_an_engine_shows(model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    file = model[0] / "model-2.safetensors"
    options, _ = options_of({"buffer_bytes": 5})
    with pytest.raises(ValueError, match="a multiple of 4096 bytes from 65536 on; leave both out"):
        list(tensors([str(file)], "cpu", options))
    options, theirs = options_of({"device": "cpu", "of_engine": 1}, ["of_engine"])
    assert theirs == {"of_engine": 1}
    # Not all that the index lists: each file by itself.
    assert len(list(tensors([str(file)], "no such device", options))) == 3
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 2)
    with pytest.raises(ValueError, match=r"is cut short: .*; copy or download the model again"):
        list(tensors(sorted(map(str, model[0].glob("*.safetensors"))), "cpu", options))


def test_a_file_that_changes_meanwhile_is_a_runtime_error(model: tuple[Path, dict[str, torch.Tensor]]) -> None:
    files = sorted(map(str, model[0].glob("*.safetensors")))
    reading = tensors(files, "cpu", options_of({})[0])
    next(reading)
    os.utime(files[1], (1, 1))
    with pytest.raises(RuntimeError, match="changed while it was loaded; load again when nobody writes to it"):
        list(tensors_left(reading, files))


def tensors_left(reading: Iterator[Any], files: list[str]) -> Iterator[Any]:
    """The rest; where all had been read already, the change is seen by the next load of what is being written."""
    yield from reading
    again = tensors(files, "cpu", options_of({"ahead_bytes": 1})[0])
    next(again)
    os.utime(files[2], (2, 2))
    yield from again


def test_other_versions_of_the_engines_start_as_ever(
    engine: Callable[[str, str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    engine("vllm", "0.11.0")
    loaders = tmp_path / "packages/vllm/model_executor/model_loader/__init__.py"
    loaders.write_text("")
    doors.vllm()
    assert importlib.import_module("vllm.model_executor.model_loader").__file__ == str(loaders)
    doors.vllm()  # where the loaders are imported already
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    doors.sglang()
    assert [record.name for record in caplog.records] == ["vllm.tunetool"] * 2 + ["sglang.tunetool"]
    assert "no load format `tunetool`: this SGLang is too old or too new for this tunetool" in caplog.messages[-1]


def test_the_doors_import_no_torch_and_are_what_engines_find() -> None:
    script = "import sys, tunetool.loading.engines.doors as doors; doors.vllm(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
    tomllib = pytest.importorskip("tomllib", reason="tools/dev needs Python 3.11")
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    assert set(points) == {"vllm.general_plugins", "sglang.srt.plugins"}
    for group in points.values():
        module, _, name = group["tunetool"].partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_the_record_is_as_its_program_writes_it() -> None:
    text = (ROOT / "tests/data/engines.json").read_text()
    assert json.dumps(json.loads(text), indent=1) + "\n" == text
