"""The reference model and its data with torch and transformers: both loaders, and training on the data."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from at_a_lock import ended
from huge_pages import HUGE, huge_bytes
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS, published_name
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import safetensors_files
from tunetool.measure import page_cache
from tunetool.training.data.dataset import IGNORED, Samples, collate
from tunetool.training.data.pictures import COLOURS
from tunetool.training.data.pictures import make as make_pictures
from tunetool.training.model import reference_model
from tunetool.training.model.reference_model import load
from tunetool.training.model.tokenizer import Tokenizer

pytest_plugins = ["huge_tmpfs"]

IMAGES = 136


@dataclass(frozen=True)
class Made:
    model: Path
    data: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("finetune")
    reference_model.build("tiny", root / "model", 0)
    make_pictures(root / "data", IMAGES, 224, 140)
    return Made(root / "model", root / "data")


@pytest.fixture(scope="module")
def samples(made: Made) -> Samples:
    return Samples(made.data, made.model)


def _same(model: Any, other: Any) -> None:
    for ours, theirs in (
        (model.state_dict(), other.state_dict()),
        (dict(model.named_buffers()), dict(other.named_buffers())),
    ):
        assert ours.keys() == theirs.keys()
        for name, tensor in ours.items():
            assert tensor.dtype == theirs[name].dtype, name
            assert torch.equal(tensor, theirs[name]), name


def _logits(model: Any, samples: Samples) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(**collate([samples[0], samples[1]])).logits)


def test_transformers_takes_a_built_model_without_a_word(made: Made) -> None:
    model, loading = Qwen2_5_VLForConditionalGeneration.from_pretrained(
        made.model, dtype=torch.bfloat16, output_loading_info=True
    )
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert sum(each.numel() for each in model.parameters()) == reference_model.check(made.model).parameters


@pytest.mark.parametrize("size", ["7b", "3b"])
def test_the_true_sizes_are_those_of_transformers(size: str) -> None:
    config = Qwen2_5_VLForConditionalGeneration.config_class(**CONFIGURATIONS[size])
    with torch.device("meta"):
        model = Qwen2_5_VLForConditionalGeneration(config)
    model.tie_weights()
    assert {published_name(name): tuple(each.shape) for name, each in model.named_parameters()} == {
        tensor.name: tensor.shape for tensor in reference_model.tensors(CONFIGURATIONS[size], size)
    }


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_both_loaders_give_the_same_model(made: Made, samples: Samples, dtype: str) -> None:
    plain = load(made.model, "cpu", "transformers", dtype)
    parallel = load(made.model, "cpu", "parallel", dtype)
    _same(parallel.model, plain.model)
    assert not parallel.model.training
    assert plain.bytes == parallel.bytes == reference_model.describe("tiny").bytes
    assert min(plain.seconds, parallel.seconds) > 0
    assert "threads" in parallel.how
    if dtype == "float32":  # bfloat16 on a CPU may be an illegal instruction under emulation
        assert torch.equal(_logits(plain.model, samples), _logits(parallel.model, samples))


def test_the_ranks_of_a_node_share_the_page_cache(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    past_the_cache: list[str] = []
    really_open = os.open

    def watched(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            past_the_cache.append(Path(path).name)
        return really_open(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", watched)
    page_cache.drop(made.model)
    alone = load(made.model, "cpu", "parallel")
    if "from drives" in alone.how:
        assert set(past_the_cache) >= set(safetensors_files.files_of(made.model))
    past_the_cache.clear()
    page_cache.drop(made.model)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    shared = load(made.model, "cpu", "parallel")
    assert past_the_cache == [], "each rank would have the drive asked again"
    _same(shared.model, alone.model)


def test_tied_weights_are_one_tensor(samples: Samples, tmp_path: Path) -> None:
    reference_model.write_configured(
        {**CONFIGURATIONS["tiny"], "tie_word_embeddings": True}, tmp_path, 0, 10**6, lambda _: None
    )
    assert "lm_head.weight" not in safetensors_files.list_tensors(tmp_path).tensors
    plain, parallel = (load(tmp_path, "cpu", loader).model for loader in ("transformers", "parallel"))
    assert parallel.lm_head.weight is parallel.model.language_model.embed_tokens.weight
    _same(parallel, plain)
    assert torch.equal(_logits(plain, samples), _logits(parallel, samples))


def test_a_model_that_transformers_saved_is_loaded_as_well(made: Made, tmp_path: Path) -> None:
    """Save the model as fine-tuned models may be: in one file, in float32, with other names."""
    model = load(made.model, "cpu", "transformers", "float32").model
    model.save_pretrained(tmp_path)
    shutil.copy(made.model / "tokenizer.json", tmp_path)
    facts = reference_model.check(tmp_path)
    assert facts.files == (safetensors_files.SINGLE,)
    assert facts.bytes == 2 * reference_model.describe("tiny").bytes
    for dtype in ("float32", "bfloat16"):
        _same(load(tmp_path, "cpu", "parallel", dtype).model, load(tmp_path, "cpu", "transformers", dtype).model)


def test_a_gpu_that_is_not_there_is_said(made: Made) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(UsageProblem, match="torch sees no GPU"):
        load(made.model, "cuda", "parallel")


def test_text_becomes_what_transformers_makes_of_it(made: Made, samples: Samples) -> None:
    theirs = AutoTokenizer.from_pretrained(made.model)
    sample, conversation = samples[3], samples.conversations[3]
    pad = theirs.convert_tokens_to_ids("<|image_pad|>")
    assert CONFIGURATIONS["tiny"]["image_token_id"] == pad
    marks = int((sample["input_ids"] == pad).sum())
    assert marks == int(sample["image_grid_thw"].prod()) // 4 == int(sample["mm_token_type_ids"].sum())
    text = theirs.decode(sample["input_ids"])
    expected = theirs.apply_chat_template(
        [
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "QUESTION"}]},
            {"role": "assistant", "content": conversation.messages[1].content},
        ],
        tokenize=False,
    )
    question = conversation.messages[0].content.removeprefix("<image>")
    assert text == expected.replace("QUESTION", question).replace("<|image_pad|>", "<|image_pad|>" * marks)
    assert theirs(text)["input_ids"] == sample["input_ids"].tolist()
    learned = sample["labels"][sample["labels"] != IGNORED].tolist()
    assert theirs.decode(learned) == f"{conversation.messages[1].content}<|im_end|>"
    assert Tokenizer(made.model).decode(Tokenizer(made.model).encode("é\n\0 日")) == "é\n\0 日"


def test_the_true_vocabulary_has_the_published_numbers(tmp_path: Path) -> None:
    from tunetool.training.model import tokenizer

    tokenizer.write(tmp_path, CONFIGURATIONS["7b"])
    tokens = Tokenizer(tmp_path)
    assert [tokens.special[name] for name in ("<|im_start|>", "<|im_end|>", "<|image_pad|>")] == [
        151644,
        151645,
        151655,
    ]
    assert max(tokens.encode("any text at all")) < 256


def test_a_batch_is_filled_up_at_the_end(samples: Samples) -> None:
    pair = sorted((samples[n] for n in range(8)), key=lambda each: len(each["input_ids"]))
    short, long = pair[0], pair[-1]
    assert len(short["input_ids"]) < len(long["input_ids"])
    batch = collate([short, long])
    width = len(short["input_ids"])
    assert batch["attention_mask"].sum(1).tolist() == [width, len(long["input_ids"])]
    assert batch["labels"][0, width:].unique().tolist() == [IGNORED]
    assert torch.equal(batch["input_ids"][0, :width], short["input_ids"])
    assert torch.equal(batch["pixel_values"], torch.cat([short["pixel_values"], long["pixel_values"]]))
    assert batch["image_grid_thw"].shape == (2, 3)


def test_pictures_have_their_size_and_depend_on_the_seed(made: Made, tmp_path: Path) -> None:
    make_pictures(tmp_path / "full", 2)
    files = sorted((tmp_path / "full/images").iterdir())
    for file in files:
        with Image.open(file) as picture:
            assert picture.size == (1928, 1208)
    # A batch of 2 is to be about 6 MB.
    assert 5.6e6 < sum(file.stat().st_size for file in files) < 6.6e6
    make_pictures(tmp_path / "again", 3, 224, 140)
    make_pictures(tmp_path / "other", 3, 224, 140, seed=1)
    ours, again, other = (
        [file.read_bytes() for file in sorted((root / "images").iterdir())[:3]]
        for root in (made.data, tmp_path / "again", tmp_path / "other")
    )
    assert ours == again
    assert not set(ours) & set(other)
    big = Samples(tmp_path / "full", made.model)[0]
    assert big["pixel_values"].shape == (int(big["image_grid_thw"].prod()), 1176)
    assert int(big["image_grid_thw"].prod()) * 14 * 14 <= reference_model.MAX_PIXELS["tiny"]
    wide = Samples(tmp_path / "full", made.model, max_pixels=reference_model.PIXELS)[0]
    assert int(wide["mm_token_type_ids"].sum()) == 714


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    directory = tmp_path / "data"
    shutil.copytree(made.data / "images", directory / "images")
    for name in ("data.json", "dataset_info.json"):
        shutil.copy(made.data / name, directory)
    return directory


def _edit(directory: Path, change: Callable[[list[dict[str, Any]]], object]) -> None:
    path = directory / "data.json"
    documents = json.loads(path.read_text())
    change(documents)
    path.write_text(json.dumps(documents))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda d: (d / "images/000002.jpg").unlink(), "images/000002.jpg` is missing"),
        (lambda d: (d / "dataset_info.json").unlink(), "dataset_info.json` cannot be read"),
        (lambda d: (d / "dataset_info.json").write_text("{}"), "dataset_info.json` names no dataset"),
        (lambda d: (d / "data.json").write_text("[]"), "data.json` holds no samples"),
        (lambda d: _edit(d, lambda s: s[1]["images"].clear()), "data.json`: sample 1 has 0 pictures and 1 times"),
        (lambda d: _edit(d, lambda s: s[1]["messages"].pop()), "data.json`: sample 1 has no answer"),
        (
            lambda d: _edit(d, lambda s: s[1]["messages"][0].update(role="x")),
            "data.json`: sample 1: message 0 has the role `x`",
        ),
    ],
)
def test_what_is_wrong_with_a_dataset_is_named(
    made: Made, copy: Path, spoil: Callable[[Path], object], words: str
) -> None:
    spoil(copy)
    with pytest.raises(UsageProblem) as caught:
        Samples(copy, made.model)
    assert words in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("content", [b"", b"no picture", None])
def test_a_picture_that_cannot_be_read_is_named(made: Made, copy: Path, content: bytes | None) -> None:
    path = copy / "images/000001.jpg"
    if content is None:
        os.truncate(path, path.stat().st_size // 2)
    else:
        path.write_bytes(content)
    samples = Samples(copy, made.model)
    samples[0]
    with pytest.raises(CannotJudge, match=r"images/000001.jpg`: the picture cannot be read"):
        samples[1]


def test_a_dataset_by_llamafactorys_defaults_is_read(made: Made, copy: Path) -> None:
    """Another form of sharegpt, line by line, with a system message, two pictures and a sample without any."""
    lines = [
        {
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "<image> or <image>?"},
                {"from": "gpt", "value": "neither"},
            ],
            "images": ["images/000000.jpg", "images/000001.jpg"],
        },
        {"conversations": [{"from": "human", "value": "?"}, {"from": "gpt", "value": "!"}]},
    ]
    (copy / "mine.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    entry = {"file_name": "mine.jsonl", "formatting": "sharegpt"}
    (copy / "dataset_info.json").write_text(json.dumps({"mine": entry}))
    samples = Samples(copy, made.model)
    assert len(samples) == 2
    text = Tokenizer(made.model).decode(samples[0]["input_ids"].tolist())
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert samples[0]["image_grid_thw"].shape == (2, 3)
    assert "pixel_values" not in samples[1]
    assert collate([samples[0], samples[1]])["image_grid_thw"].shape == (2, 3)


# peft asks transformers by a name that transformers gives up.
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.slow
def test_the_answer_is_learned_from_the_picture(made: Made, samples: Samples) -> None:
    """With LoRA on the language model alone: the vision tower stays random, and still tells colours apart."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    model = load(made.model, "cpu", "parallel").model
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model.train(), LoraConfig(r=8, lora_alpha=16, target_modules=targets))
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-3)
    chosen, losses = random.Random(0), []
    for _ in range(60):
        loss = model(**collate([samples[n] for n in chosen.sample(range(IMAGES - 16), 4)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 4 < losses[0] < 8
    assert sum(losses[-10:]) / 10 < 0.2
    model.eval()
    batch = collate([samples[n] for n in range(IMAGES - 16, IMAGES)])
    with torch.no_grad():
        logits = model(**batch).logits
    first = (batch["labels"] != IGNORED).int().argmax(1)
    rows = torch.arange(16)
    right = logits[rows, first - 1].argmax(1) == batch["labels"][rows, first]
    # Guessing the most frequent of them gets 2 or 3.
    assert len(COLOURS) == 8
    assert int(right.sum()) >= 12


def test_made_pictures_lie_on_huge_pages(huge_tmpfs: Path) -> None:
    # Where memory is in pieces at this moment the kernel gives small pages instead, whoever asks.
    for name in map(str, range(5)):
        make_pictures(huge_tmpfs / name, 2, 1928, 1208)
        pictures = sorted((huge_tmpfs / name / "images").iterdir())
        if [huge_bytes(path) for path in pictures] == [HUGE] * 2:
            return
    pytest.fail("the pictures lie on small pages")


_INTERRUPTED = """
from pathlib import Path
from tunetool.training.data import pictures

hold(pictures, "_write_sample")
begin_in(pictures, "write")
try:
    pictures.write(Path(sys.argv[1]), 50, 28, 28, 0)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_as_a_lock_is_taken_ends_the_making(tmp_path: Path) -> None:
    done = ended(_INTERRUPTED, tmp_path)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
