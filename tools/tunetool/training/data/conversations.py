"""The conversations of a dataset in LLaMA-Factory's format. Needs no torch.

``dataset_info.json`` lists datasets by name, each with its file, its form (alpaca unless it says sharegpt or openai)
and the names of its columns; ``<image>`` in a message marks the next of the sample's pictures, whose paths are relative
to the dataset's directory. What would be dropped or misread is refused: a run trains what the data says, or none.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool import regular_files
from tunetool.errors import UsageProblem

INFO = "dataset_info.json"
_HINT = "a dataset has `dataset_info.json` and conversations in a form of LLaMA-Factory: alpaca, sharegpt or openai"
_ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
_CHOSEN = {
    "ranking": "is for learning preferences (`ranking`)",
    "num_samples": "draws its samples at random (`num_samples`)",
}
_MEDIA = {"videos": "<video>", "audios": "<audio>"}
_LARGEST = 8 << 30
"""Largest file of samples in bytes; it is read into memory whole."""
_NAMES = 8
"""Names that a message lists."""
_ALPACA = {"prompt": "instruction", "query": "input", "response": "output"}


@dataclass(frozen=True)
class Conversation:
    """One sample of the dataset."""

    messages: tuple[Message, ...]
    images: tuple[Path, ...]


@dataclass(frozen=True)
class Message:
    """One message of a conversation; ``role`` is system, user or assistant."""

    role: str
    content: str


def split_name(text: str) -> tuple[str, str | None]:
    """``DIR:NAME`` as the directory and the name of an entry; a directory that exists is no such pair."""
    directory, colon, name = text.rpartition(":")
    if not colon or not name or "/" in name or Path(text).is_dir():
        return text, None
    return directory or ".", name


def choose(directory: Path, name: str | None = None) -> tuple[str, Mapping[str, Any]]:
    """The entry called ``name`` in ``dataset_info.json``, or the only one that can be read here, and its name.

    Raises ``UsageProblem`` where there is none, or where a person must choose.
    """
    info = _json(directory / INFO)
    entries = {key: value for key, value in info.items() if isinstance(value, dict)} if isinstance(info, dict) else {}
    if name is not None:
        if name not in entries:
            raise UsageProblem(f"`{directory / INFO}` has no dataset `{name}`", f"it has {_listed(entries)}")
        return name, entries[name]
    readable = [key for key, entry in entries.items() if _obstacle(entry, directory) is None]
    if len(readable) > 1:
        raise UsageProblem(
            f"`{directory / INFO}` has {len(readable)} datasets: {_listed(readable)}",
            f"choose one: `--dataset {directory}:{readable[0]}`",
        )
    if readable or len(entries) == 1:
        key = readable[0] if readable else next(iter(entries))
        return key, entries[key]
    raise UsageProblem(f"`{directory / INFO}` names no dataset whose file is here", f"it has {_listed(entries)}")


def read_conversations(directory: Path, name: str | None = None) -> list[Conversation]:
    """All samples of the dataset that ``choose`` chooses.

    Raises ``UsageProblem`` that names the file and the invalid sample, or the picture that is missing.
    """
    name, entry = choose(directory, name)
    obstacle = _obstacle(entry, directory)
    if obstacle is not None:
        raise UsageProblem(f"`{directory / INFO}`: the dataset `{name}` {obstacle}", _HINT)
    form = entry.get("formatting", "alpaca")
    if form not in ("alpaca", "sharegpt", "openai"):
        raise UsageProblem(f"`{directory / INFO}`: the dataset `{name}` has the form `{form}`", _HINT)
    path = directory / entry["file_name"]
    documents = _json(path)
    if not isinstance(documents, list) or not documents:
        raise UsageProblem(f"`{path}` holds no samples", _HINT)
    reader = _Reader(entry, form, directory)
    return [reader.conversation(document, f"`{path}`: sample {n}") for n, document in enumerate(documents)]


def _obstacle(entry: Mapping[str, Any], directory: Path) -> str | None:
    """Why the entry's samples cannot be read, as a predicate."""
    named = next((key for key in _ELSEWHERE if key in entry), None)
    if named is not None:
        return f"lies elsewhere (`{named}`): download it, and name its file"
    file = entry.get("file_name")
    if not isinstance(file, str) or not file:
        return "names no file"
    if Path(file).suffix not in (".json", ".jsonl"):
        return f"lies in `{file}`, which is no .json and no .jsonl"
    if not (directory / file).is_file():
        return f"names `{file}`, which is no file here"
    return next((why for key, why in _CHOSEN.items() if entry.get(key)), None)


def _listed(names: Mapping[str, Any] | list[str]) -> str:
    shown = [f"`{name}`" for name in list(names)[:_NAMES]]
    more = len(names) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "") if shown else "none"


def _json(path: Path) -> Any:
    try:
        text = regular_files.read_bytes(path, _LARGEST).decode("utf-8")
        if path.suffix == ".jsonl":
            # A text may hold other ends of lines, such as U+2028.
            return [json.loads(line) for line in text.split("\n") if line.strip()]
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise UsageProblem(f"`{path}` cannot be read: {error}", _HINT) from None


class _Reader:
    """Reads the samples of one entry."""

    def __init__(self, entry: Mapping[str, Any], form: str, directory: Path) -> None:
        columns, tags = entry.get("columns"), entry.get("tags") or {}
        # The defaults are LLaMA-Factory's: where columns are named, only these count.
        self._columns: Mapping[str, Any] = columns if isinstance(columns, dict) else _ALPACA
        self._alpaca = form == "alpaca"
        self._directory = directory
        self._roles = {
            tags.get("user_tag", "human"): "user",
            tags.get("assistant_tag", "gpt"): "assistant",
            tags.get("system_tag", "system"): "system",
        }
        self._role_tag, self._content_tag = tags.get("role_tag", "from"), tags.get("content_tag", "value")

    def conversation(self, document: Any, where: str) -> Conversation:
        """One sample. Raises ``UsageProblem``."""
        if not isinstance(document, dict):
            raise UsageProblem(f"{where} is no JSON object", _HINT)
        messages = tuple(self._messages(document, where))
        images = tuple(self._images(document, where))
        marks = sum(message.content.count("<image>") for message in messages)
        if marks != len(images):
            raise UsageProblem(f"{where} has {len(images)} pictures and {marks} times `<image>`", _HINT)
        if not any(message.role == "assistant" for message in messages):
            raise UsageProblem(f"{where} has no answer to learn", _HINT)
        self._refuse_media(document, messages, where)
        missing = next((image for image in images if not image.is_file()), None)
        if missing is not None:
            raise UsageProblem(f"`{missing}` is missing ({where})", "copy the dataset again")
        return Conversation(messages, images)

    def _messages(self, document: Mapping[str, Any], where: str) -> Iterator[Message]:
        system = document.get(self._columns.get("system", "")) if "system" in self._columns else None
        listed = self._of_alpaca(document, where) if self._alpaca else self._of_sharegpt(document, where)
        for number, (role, content) in enumerate(listed):
            if number == 0 and role != "system" and system:
                yield Message("system", _text(system, f"{where}: the system's message"))
            yield Message(role, _text(content, f"{where}: message {number}"))

    def _of_sharegpt(self, document: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        column = self._columns.get("messages", "conversations")
        messages = document.get(column)
        if not isinstance(messages, list):
            raise UsageProblem(f"{where} has no list `{column}`", _HINT)
        for number, message in enumerate(messages):
            role = message.get(self._role_tag) if isinstance(message, dict) else None
            if not isinstance(role, str) or role not in self._roles:
                raise UsageProblem(
                    f"{where}: message {number} has the role `{role}`, which is none of {_listed(list(self._roles))}",
                    _HINT,
                )
            if message.get("tool_calls"):
                raise UsageProblem(f"{where}: message {number} calls tools, which is not supported", _HINT)
            yield self._roles[role], message.get(self._content_tag)

    def _of_alpaca(self, document: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
        history = document.get(self._columns["history"]) if "history" in self._columns else None
        for pair in history or ():
            if not isinstance(pair, list) or len(pair) != 2:
                raise UsageProblem(f"{where}: its history is no list of pairs", _HINT)
            yield from zip(("user", "assistant"), pair, strict=True)
        named = [self._columns[key] for key in ("prompt", "query") if key in self._columns]
        answer = self._columns.get("response")
        absent = next((each for each in (*named[:1], answer) if each is not None and each not in document), None)
        if absent is not None or answer is None:
            raise UsageProblem(
                f"{where} has no `{absent or 'response'}`, a column of the form alpaca",
                f"name its columns in `{INFO}`; other forms are `formatting`: `sharegpt`, `openai`",
            )
        parts = [document[column] for column in named if document.get(column)]
        yield "user", "\n".join(_text(part, f"{where}: its question") for part in parts)
        yield "assistant", document[answer]

    def _images(self, document: Mapping[str, Any], where: str) -> Iterator[Path]:
        column = self._columns.get("images", "images")
        images = document.get(column) or ()
        for image in [images] if isinstance(images, str) else images:
            if not isinstance(image, str):
                raise UsageProblem(f"{where}: `{column}` is no list of paths", _HINT)
            yield self._directory / image

    def _refuse_media(self, document: Mapping[str, Any], messages: tuple[Message, ...], where: str) -> None:
        named = [*_MEDIA, "tools", "kto_tag"]
        column = next((each for each in named if document.get(self._columns.get(each, each))), None)
        if column is not None:
            raise UsageProblem(
                f"{where} has `{column}`, which this fine-tune cannot learn from", "take samples without them"
            )
        mark = next((each for each in _MEDIA.values() if any(each in message.content for message in messages)), None)
        if mark is not None:
            raise UsageProblem(f"{where} has `{mark}` and no pictures for it", "take samples with pictures alone")


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    kind = "a list of parts" if isinstance(content, list) else type(content).__name__
    raise UsageProblem(
        f"{where} is {'missing' if content is None else kind}, not text",
        "write its text, with a mark `<image>` for each picture, and list the pictures beside it",
    )
