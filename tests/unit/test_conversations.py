"""Datasets in LLaMA-Factory's format: which one is read, and what is refused instead of dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_finetune_model import Quiet

from tunetool.errors import UsageProblem
from tunetool.training.data.conversations import Message, choose, read_conversations, split_name
from tunetool.training.preparation import prepare
from tunetool.training.workload import Material

TAGS = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
SHAREGPT = {
    "file_name": "data.json",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": TAGS,
}
PICTURE = "pictures/1.jpg"


def sample(question: Any = "<image>Who are they?", answer: Any = "They are.", **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "images": [PICTURE], **more}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Laid out as LLaMA-Factory's own data folder: several datasets, of which some are on a hub and some are gone."""
    (tmp_path / "pictures").mkdir()
    (tmp_path / PICTURE).write_bytes(b"JPEG")
    (tmp_path / "data.json").write_text(json.dumps([sample()]))
    (tmp_path / "identity.json").write_text(json.dumps([{"instruction": "hi", "input": "", "output": "Hello"}]))
    listed(
        tmp_path,
        identity={"file_name": "identity.json"},
        alpaca_en={"hf_hub_url": "llamafactory/alpaca_en"},
        alpaca_en_demo={"file_name": "alpaca_en_demo.json"},
        mllm_demo=SHAREGPT,
    )
    return tmp_path


def listed(folder: Path, **entries: dict[str, Any]) -> None:
    (folder / "dataset_info.json").write_text(json.dumps(entries))


def of(folder: Path, document: Any, **entry: Any) -> None:
    """The folder has one dataset, with this one sample."""
    (folder / "data.json").write_text(json.dumps([document]))
    listed(folder, mine={**SHAREGPT, **entry})


def test_a_name_chooses_among_several_datasets(folder: Path) -> None:
    (found,) = read_conversations(folder, "mllm_demo")
    assert (found.messages[0], found.images) == (Message("user", "<image>Who are they?"), (folder / PICTURE,))
    (found,) = read_conversations(folder, "identity")
    assert found.messages == (Message("user", "hi"), Message("assistant", "Hello"))
    with pytest.raises(UsageProblem, match="has 2 datasets: `identity`, `mllm_demo`") as caught:
        read_conversations(folder)
    assert caught.value.hint == f"choose one: `--dataset {folder}:identity`"
    with pytest.raises(UsageProblem, match="has no dataset `mllm`") as caught:
        choose(folder, "mllm")
    assert "`alpaca_en_demo`, `mllm_demo`" in str(caught.value.hint)


def test_the_only_dataset_whose_file_is_here_needs_no_name(folder: Path) -> None:
    listed(folder, alpaca_en={"hf_hub_url": "llamafactory/alpaca_en"}, gone={"file_name": "g.json"}, mine=SHAREGPT)
    assert choose(folder)[0] == "mine"
    assert len(read_conversations(folder)) == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/data/llava", ("/data/llava", None)),
        ("/data/llava:train", ("/data/llava", "train")),
        ("/data/a:b/llava", ("/data/a:b/llava", None)),
        ("/data/a:b:train", ("/data/a:b", "train")),
        ("data:", ("data:", None)),
        (":train", (".", "train")),
    ],
)
def test_the_name_stands_behind_the_last_colon(text: str, expected: tuple[str, str | None]) -> None:
    assert split_name(text) == expected


def test_a_directory_with_a_colon_is_a_directory(tmp_path: Path) -> None:
    directory = tmp_path / "a:b"
    directory.mkdir()
    assert split_name(str(directory)) == (str(directory), None)
    assert split_name(f"{directory}:c") == (str(directory), "c")


def test_lines_end_at_line_feeds_alone(folder: Path) -> None:
    texts = ("first\u2028second", "a\u0085b\u000b\u000c\u001cc\rd", "e\u2029f")
    lines = [json.dumps(sample(f"<image>{text}"), ensure_ascii=False) for text in texts]
    (folder / "data.jsonl").write_text("\n".join(lines) + "\r\n\n", encoding="utf-8", newline="")
    listed(folder, mine={**SHAREGPT, "file_name": "data.jsonl"})
    assert [found.messages[0].content for found in read_conversations(folder)] == [f"<image>{text}" for text in texts]


def test_a_system_message_and_a_history_are_read(folder: Path) -> None:
    of(folder, sample(system="Be brief."), columns={**SHAREGPT["columns"], "system": "system"})
    assert read_conversations(folder)[0].messages[0] == Message("system", "Be brief.")
    of(
        folder,
        {"ask": "And now?", "more": "Say it.", "reply": "This.", "past": [["Once?", "Yes."]]},
        formatting="alpaca",
        columns={"prompt": "ask", "query": "more", "response": "reply", "history": "past"},
    )
    assert [message.content for message in read_conversations(folder)[0].messages] == [
        "Once?",
        "Yes.",
        "And now?\nSay it.",
        "This.",
    ]


@pytest.mark.parametrize(
    ("document", "entry", "words"),
    [
        (sample([{"type": "text", "text": "x"}], images=[]), {}, "sample 0: message 0 is a list of parts, not text"),
        (sample(answer=None), {}, "sample 0: message 1 is missing, not text"),
        (sample(answer=7), {}, "sample 0: message 1 is int, not text"),
        (sample("<video>what?", images=[], videos=["v.mp4"]), {}, "sample 0 has `videos`"),
        (
            sample("<video>what?", images=[], clips=["v.mp4"]),
            {"columns": {"messages": "messages", "videos": "clips"}},
            "sample 0 has `videos`",
        ),
        (sample("<video>what?", images=[]), {}, "sample 0 has `<video>`"),
        (sample("<audio>what?", images=[], audios=["a.wav"]), {}, "sample 0 has `audios`"),
        (sample(tools="[]{}"), {}, "sample 0 has `tools`"),
        (sample(images=[{"path": PICTURE}]), {}, "sample 0: `images` is no list of paths"),
        ({**sample(), "messages": "x"}, {}, "sample 0 has no list `messages`"),
        ({**sample(), "messages": [{"role": ["user"], "content": "x"}]}, {}, "message 0 has the role `['user']`"),
        ({**sample(), "messages": ["x"]}, {}, "message 0 has the role `None`"),
        ("x", {}, "sample 0 is no JSON object"),
        (sample(), {"formatting": "alpaca"}, "sample 0 has no `response`, a column of the form alpaca"),
        (sample(), {"formatting": "alpaca", "columns": None}, "sample 0 has no `instruction`, a column"),
        (sample(), {"formatting": "other"}, "the dataset `mine` has the form `other`"),
        (sample(), {"ranking": True}, "the dataset `mine` is for learning preferences"),
        (sample(), {"num_samples": 10}, "the dataset `mine` draws its samples"),
        (sample(), {"file_name": "data.parquet"}, "the dataset `mine` lies in `data.parquet`"),
        (sample(), {"file_name": "pictures"}, "the dataset `mine` lies in `pictures`"),
        (sample(), {"hf_hub_url": "a/b"}, "the dataset `mine` lies elsewhere (`hf_hub_url`)"),
    ],
)
def test_what_would_be_dropped_or_misread_is_refused(
    document: Any, entry: dict[str, Any], words: str, folder: Path
) -> None:
    of(folder, document, **entry)
    with pytest.raises(UsageProblem) as caught:
        read_conversations(folder)
    assert words in caught.value.message
    assert caught.value.hint


def test_a_choice_is_asked_for_before_anything_starts(folder: Path, tmp_path: Path) -> None:

    named = Material("tiny", Path(f"{folder}:mllm_demo"), target=tmp_path / "target")
    assert prepare(named, Quiet(), dry_run=True).dataset == folder
    assert named.entry == "mllm_demo"
    with pytest.raises(UsageProblem, match="has 2 datasets"):
        prepare(Material("tiny", folder, target=tmp_path / "target"), Quiet(), dry_run=True)
