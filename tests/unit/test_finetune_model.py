"""The reference model as a directory: its sizes, faults of a broken one, and what `prepare` uses again."""

from __future__ import annotations

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")

from staged import Quiet
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS, published_name
from tunetool.advise.shapes import Tensor
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import random_weights, safetensors_files
from tunetool.stage.room import need_room
from tunetool.training.model import reference_model
from tunetool.training.preparation import MANIFEST, prepare
from tunetool.training.workload import Material


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    reference_model.build("tiny", directory, 7)
    return directory


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("size", "parameters", "tensors", "tied"),
    [
        # `total_size` of the published model.safetensors.index.json is twice these, and it lists so many tensors.
        ("7b", 16_584_333_312 // 2, 729, False),
        ("3b", 7_509_245_952 // 2, 824, True),
    ],
)
def test_a_true_size_has_the_published_number_of_parameters(
    size: str, parameters: int, tensors: int, tied: bool
) -> None:
    facts = reference_model.describe(size)
    assert (facts.parameters, facts.bytes, facts.tied) == (parameters, 2 * parameters, tied)
    assert facts.language_parameters + facts.vision_parameters == parameters
    assert reference_model.room(size) > facts.bytes
    listed = reference_model.tensors(CONFIGURATIONS[size], "config.json")
    assert len({tensor.name for tensor in listed}) == len(listed) == tensors
    assert ("lm_head.weight" in {tensor.name for tensor in listed}) is not tied


def test_a_built_model_is_whole_and_depends_on_the_seed_alone(whole: Path, tmp_path: Path) -> None:
    facts = reference_model.check(whole)
    assert len(facts.files) > 1
    assert facts.bytes == reference_model.describe("tiny").bytes == reference_model.describe(whole).bytes
    assert all((whole / file).stat().st_size <= 2 * 2**20 + 8192 for file in facts.files)

    ticks: list[int] = []
    reference_model.build("tiny", tmp_path / "one-file", 7, shard_bytes=10**9, tick=ticks.append)
    assert reference_model.check(tmp_path / "one-file").files == (safetensors_files.SINGLE,)
    assert ticks[-1] == facts.bytes
    assert _contents(tmp_path / "one-file") == _contents(whole)

    reference_model.build("tiny", tmp_path / "other", 8)
    ours, other = _contents(whole), _contents(tmp_path / "other")
    assert {name for name in ours if ours[name] == other[name]} == {
        tensor.name for tensor in reference_model.tensors(CONFIGURATIONS["tiny"], "") if len(tensor.shape) == 1
    }


def _contents(directory: Path) -> dict[str, bytes]:
    contents = {}
    for tensor in safetensors_files.list_tensors(directory).tensors.values():
        with (directory / tensor.file).open("rb") as file:
            file.seek(tensor.start)
            contents[tensor.name] = file.read(tensor.length)
    return contents


def test_weights_have_the_spread_that_keeps_the_scale(whole: Path) -> None:
    contents = _contents(whole)

    def spread(name: str) -> float:
        halves = struct.unpack(f"<{len(contents[name]) // 2}H", contents[name])
        values = [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in halves]
        return float((sum(value * value for value in values) / len(values)) ** 0.5)

    assert spread("model.layers.0.self_attn.q_proj.weight") == pytest.approx(256**-0.5, rel=0.02)
    assert spread("model.layers.3.mlp.down_proj.weight") == pytest.approx((768 * 2 * 4) ** -0.5, rel=0.02)
    assert spread("visual.blocks.1.attn.proj.weight") == pytest.approx((64 * 2 * 2) ** -0.5, rel=0.04)
    assert spread("model.embed_tokens.weight") == pytest.approx(0.02, rel=0.02)
    assert spread("model.norm.weight") == 1
    assert spread("visual.merger.mlp.0.bias") == 0


def test_files_hold_no_more_than_asked_for() -> None:
    sizes = [10, 20, 100, 5, 5, 5]
    files = random_weights.lay_out([Tensor(f"t{n}", (size,)) for n, size in enumerate(sizes)], 60)
    assert [[tensor.numel for tensor, _ in shard.tensors] for shard in files] == [[10, 20], [100], [5, 5, 5]]
    assert [shard.file for shard in files] == [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert [(at - len(shard.header), len(shard.header) % 8) for shard in files for _, at in shard.tensors[:1]] == [
        (0, 0)
    ] * 3
    assert files[0].size == len(files[0].header) + 60


def _cut(path: Path, count: int) -> None:
    os.truncate(path, path.stat().st_size - count)


def _change(path: Path, change: Callable[[dict], object]) -> None:  # type: ignore[type-arg]
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


def _header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Another header before the same bytes."""
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    listed = json.loads(content[8 : 8 + length])
    change(listed)
    text = json.dumps(listed).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _first(listed: dict[str, Any]) -> dict[str, Any]:
    return next(entry for name, entry in listed.items() if name != "__metadata__")


def _shift(listed: dict[str, Any], by: int) -> None:
    for name, entry in listed.items():
        if name != "__metadata__":
            entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4976698672\n"
SECOND = "model-00002-of-00004.safetensors"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / SECOND).unlink(), f"/{SECOND}` is missing: the index lists 4 files, 1 are not there"),
        (lambda d: _cut(d / SECOND, 1), f"/{SECOND}` is cut short: "),
        (lambda d: os.truncate(d / SECOND, 100), f"/{SECOND}` is cut short: 100 bytes, its list of tensors alone"),
        (lambda d: os.truncate(d / SECOND, 0), f"/{SECOND}` is not a safetensors file"),
        (lambda d: (d / SECOND).write_bytes(b"PK" * 5000), f"/{SECOND}` is not a safetensors file"),
        (lambda d: os.truncate(d / SECOND, 10**7), f"/{SECOND}` is too long: 10000000 bytes, and its header lists "),
        (lambda d: (d / safetensors_files.INDEX).unlink(), "holds no weights"),
        (lambda d: (d / safetensors_files.INDEX).write_text("{}"), f"/{safetensors_files.INDEX}` is not an index"),
        (
            lambda d: _change(d / safetensors_files.INDEX, lambda i: i["weight_map"].update(x="../x.safetensors")),
            f"/{safetensors_files.INDEX}` names no files of this directory",
        ),
        (
            lambda d: _change(
                d / safetensors_files.INDEX,
                lambda i: i.update(weight_map={k: v for k, v in i["weight_map"].items() if v != SECOND}),
            ),
            "no file has the tensor `",
        ),
        (lambda d: (d / "config.json").unlink(), "has no `config.json`"),
        (lambda d: (d / "config.json").write_text("{"), "/config.json` cannot be read"),
        (lambda d: _change(d / "config.json", lambda c: c.update(model_type="llama")), "of type `llama`"),
        (lambda d: _change(d / "config.json", lambda c: c.pop("hidden_size")), "'hidden_size' is missing"),
        (lambda d: _change(d / "config.json", lambda c: c.update(hidden_size=8.5)), "'hidden_size' is missing or not"),
        (
            lambda d: _change(d / "config.json", lambda c: c.update(vocab_size=321)),
            "shape [320, 256], config.json has",
        ),
        (lambda d: (d / "tokenizer.json").unlink(), "/tokenizer.json` is missing"),
        (shutil.rmtree, "is not a directory"),
        (lambda d: _header(d / SECOND, lambda h: _shift(h, 2)), f"/{SECOND}` is not a safetensors file: '"),
        (lambda d: _header(d / SECOND, lambda h: _shift(h, -2)), "data_offsets that are not two whole numbers"),
        (lambda d: _header(d / SECOND, lambda h: _first(h).update(dtype="F32")), "take "),
        (lambda d: _header(d / SECOND, lambda h: _first(h).update(dtype="F4")), "take "),
        (lambda d: _header(d / SECOND, lambda h: h.update(more=_first(h))), "is where it must begin"),
        (lambda d: _header(d / SECOND, lambda h: _first(h)["shape"].append(1.0)), "not a list of whole numbers"),
        (lambda d: (d / SECOND).write_bytes(struct.pack("<Q", 90_000) + b"[" * 90_000), "is nested too deeply"),
        (
            lambda d: (d / safetensors_files.INDEX).write_text("[" * 100_000),
            f"/{safetensors_files.INDEX}` is not an index",
        ),
        (lambda d: _fifo(d / safetensors_files.INDEX), f"/{safetensors_files.INDEX}` is no file but a FIFO"),
        (lambda d: _fifo(d / SECOND), f"/{SECOND}` is no file but a FIFO"),
        *(
            (lambda d, name=name: (d / name).write_text(POINTER), f"/{name}` is a Git LFS pointer")
            for name in (SECOND, "config.json", "tokenizer.json", "tokenizer_config.json")
        ),
        (lambda d: _fifo(d / "config.json"), "/config.json` cannot be read"),
        (lambda d: (d / "config.json").write_text("[" * 100_000), "/config.json` cannot be read"),
    ],
)
def test_what_is_wrong_with_a_model_is_named(copy: Path, spoil: Callable[[Path], object], words: str) -> None:
    reference_model.check(copy)
    spoil(copy)
    with pytest.raises(UsageProblem) as caught:
        reference_model.check(copy)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_directory_as_transformers_5_writes_it_is_understood(copy: Path) -> None:
    """The language model's sizes in a separate block, and tensors with the names that they have in memory."""
    flat = reference_model.describe(copy)

    def nest(config: dict[str, object]) -> None:
        names = [name for name in config if name not in ("vision_config", "model_type", "architectures")]
        config["text_config"] = {name: config.pop(name) for name in names}

    _change(copy / "config.json", nest)
    assert reference_model.describe(copy) == flat
    assert published_name("model.language_model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"
    assert published_name("model.visual.merger.ln_q.weight") == "visual.merger.ln_q.weight"
    assert published_name("model.layers.3.mlp.up_proj.weight") == "model.layers.3.mlp.up_proj.weight"


def test_nothing_is_left_of_a_model_whose_making_was_interrupted(tmp_path: Path) -> None:
    def stop(_: int) -> None:
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reference_model.build("tiny", tmp_path / "model", 0, tick=stop)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_of_a_model_that_could_not_be_held(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        with pytest.raises(CannotJudge, match="/model` could not be made: File too large"):
            reference_model.build("tiny", tmp_path / "model", 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_a_model_is_not_made_over_something_else(copy: Path) -> None:
    with pytest.raises(UsageProblem, match="is there already"):
        reference_model.build("tiny", copy, 0)
    with pytest.raises(UsageProblem, match="`13b` is not a size"):
        reference_model.build("13b", copy.parent / "x", 0)
    reference_model.check(copy)


def test_what_was_prepared_is_used_again_and_only_for_what_it_is(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    target, progress = tmp_path / "not/there/yet", Quiet()
    asked = Material("tiny", data, 0, target, 3)

    planned = prepare(asked, progress, dry_run=True)
    assert not (tmp_path / "not").exists()
    assert "makes the model `tiny`" in progress.lines[0]

    # A killed run leaves an incomplete hidden directory beside it.
    target.mkdir(parents=True)
    shutil.copytree(data, target / f".{planned.model.name}.tunetool-stage-0123456789ab")
    material = prepare(asked, progress)
    assert material == planned
    assert [path.name for path in target.iterdir()] == [material.model.name]
    reference_model.check(material.model)
    assert progress.done[-1] == reference_model.describe("tiny").bytes
    before, lines = (material.model / MANIFEST).stat().st_ino, list(progress.lines)

    assert prepare(asked, progress) == material
    assert (material.model / MANIFEST).stat().st_ino == before
    assert progress.lines == lines

    with pytest.raises(UsageProblem, match="was made with seed 3, needed is 4") as caught:
        prepare(replace(asked, seed=4), progress)
    assert caught.value.hint == f"remove `{material.model}`, or name another `--target`"

    _cut(material.model / SECOND, 5)
    with pytest.raises(UsageProblem, match="cut short") as caught:
        prepare(asked, progress)
    assert f"remove `{material.model}`" in str(caught.value.hint)

    (material.model / MANIFEST).unlink()
    with pytest.raises(UsageProblem, match="was not made by tunetool"):
        prepare(asked, progress)


def test_a_directory_of_the_users_is_checked_and_left_as_it_is(copy: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    asked = Material(str(copy), data, 0, tmp_path / "target")
    with pytest.raises(UsageProblem, match=r"data` has no `dataset_info.json`"):
        prepare(asked, Quiet())
    (data / "dataset_info.json").write_text('{"mine": {"file_name": "mine.json"}}')
    assert prepare(asked, Quiet()).model == copy
    assert not (tmp_path / "target").exists()
    (copy / SECOND).unlink()
    with pytest.raises(UsageProblem, match=f"{SECOND}` is missing"):
        prepare(asked, Quiet())


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    free = shutil.disk_usage(tmp_path).free
    images = free // (3 * 10**6)
    with pytest.raises(CannotJudge, match=r"the model `7b` and .* pictures of 1928x1208 takes") as caught:
        prepare(Material("7b", None, images, tmp_path / "target"), Quiet())
    assert "another `--target`" in str(caught.value.hint)
    assert not list((tmp_path / "target").iterdir())
    need_room(tmp_path, 1, "a byte")
