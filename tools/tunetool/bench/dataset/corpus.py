"""A corpus of documents: a JSON object in each line, as Megatron's ``preprocess_data.py`` takes it."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunetool.errors import UsageProblem
from tunetool.regular_files import open_regular

LONGEST_LINE = 256 << 20
"""Bytes. A file without line feeds would not fit into memory."""
MEAN_DOCUMENT = 3000
"""Bytes of text of a made document, on average."""
_POOL_WORDS, _WORD = 8_000, (2, 11)


@dataclass(frozen=True)
class Extent:
    """The size of a corpus."""

    documents: int
    text_bytes: int
    """Of all texts, as UTF-8."""


def read_documents(path: Path, key: str) -> Iterator[bytes]:
    """The text of each line, as UTF-8. Raises ``UsageProblem``, which names the first line that has none."""
    try:
        handle = open_regular(path)
    except OSError as error:
        raise UsageProblem(
            f"`{path}` cannot be read: {error.strerror or error}",
            "`--jsonl` takes a file with a JSON object in each line",
        ) from None
    number = 0
    with os.fdopen(handle, "rb") as stream:
        while line := stream.readline(LONGEST_LINE + 1):
            number += 1
            try:
                yield _text(line, key)
            except _BrokenError as error:
                raise UsageProblem(
                    f"`{path}` line {number}: {error}",
                    f"each line is a JSON object with a text at `{key}`: mend this line or remove it",
                ) from None
    if not number:
        raise UsageProblem(f"`{path}` is empty", "`--jsonl` takes a file with a JSON object in each line")


def measure_corpus(path: Path, key: str) -> Extent:
    """Read the whole corpus. Raises ``UsageProblem`` as ``read_documents`` does."""
    documents = text_bytes = 0
    for text in read_documents(path, key):
        documents += 1
        text_bytes += len(text)
    return Extent(documents, text_bytes)


class _BrokenError(Exception):
    """A line without a text. As text: why."""


def _text(line: bytes, key: str) -> bytes:
    if len(line) > LONGEST_LINE:
        raise _BrokenError(f"it is longer than {LONGEST_LINE >> 20} MiB")
    try:
        entry = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BrokenError(f"it is not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _BrokenError("it is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise _BrokenError(f"it is not JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # a number of thousands of digits
        raise _BrokenError(f"it is not JSON: {str(error)[:100]}") from None
    if not isinstance(entry, dict):
        raise _BrokenError("it is not a JSON object")
    if key not in entry:
        raise _BrokenError(f"it has no key `{key}`")
    if not isinstance(entry[key], str):
        raise _BrokenError(f"the value of `{key}` is not a text")
    try:
        text: bytes = entry[key].encode("utf-8")
    except UnicodeEncodeError:
        raise _BrokenError(f"the value of `{key}` holds half a surrogate pair, which UTF-8 has no bytes for") from None
    return text


def write_made_corpus(path: Path, text_bytes: int, seed: int, tick: Callable[[int], None] = lambda _: None) -> Extent:
    """Write documents of made words with ``text_bytes`` of text in all. ``tick`` gets the bytes of text so far."""
    drawn = random.Random(f"corpus-{seed}")  # noqa: S311  (made text, no secret)
    letters = "abcdefghijklmnopqrstuvwxyz"
    pool = " ".join("".join(drawn.choices(letters, k=drawn.randint(*_WORD))) for _ in range(_POOL_WORDS))
    documents = done = 0
    with path.open("w", encoding="ascii") as stream:
        while done < text_bytes:
            length = min(text_bytes - done, 1 + int(drawn.expovariate(1 / MEAN_DOCUMENT)), len(pool))
            start = drawn.randrange(len(pool) - length + 1)
            stream.write(json.dumps({"text": pool[start : start + length]}) + "\n")
            documents += 1
            done += length
            tick(done)
    return Extent(documents, done)
