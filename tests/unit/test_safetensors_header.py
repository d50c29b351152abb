"""Headers of .safetensors files: the same are accepted and refused as by the safetensors library."""

from __future__ import annotations

import json
import random
import struct
import sys
from typing import Any

import pytest

from tunetool import safetensors_header as header
from tunetool.safetensors_header import Entry, Invalid


def verdict(text: bytes, data: int) -> str | None:
    """Why a header with that number of bytes of data is refused; None if it is accepted."""
    content = struct.pack("<Q", len(text)) + text
    try:
        count = header.length(content[:8])
        listed = header.entries(content[8 : 8 + count])
    except Invalid as error:
        return str(error)
    end = listed[-1].end if listed else 0
    return None if end == data else f"{end} bytes are listed, and there are {data}"


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24], **changes}


REFUSED: dict[str, tuple[str, int]] = {
    "a shifted place": (json.dumps({"a": entry(data_offsets=[4, 28])}), 28),
    "a negative place": (json.dumps({"a": entry(data_offsets=[-24, 0])}), 24),
    "backwards": (json.dumps({"a": entry(data_offsets=[24, 0])}), 24),
    "a dtype that does not fit": (json.dumps({"a": entry(dtype="F16")}), 24),
    "an unknown dtype": (json.dumps({"a": entry(dtype="F31")}), 24),
    "overlap": (json.dumps({"a": entry(), "b": entry(data_offsets=[12, 36])}), 36),
    "the same place twice": (json.dumps({"a": entry(), "b": entry()}), 24),
    "a gap": (json.dumps({"a": entry(), "b": entry(data_offsets=[28, 52])}), 52),
    "a fraction": (json.dumps({"a": entry(shape=[2.0, 3])}), 24),
    "a fraction as a place": (json.dumps({"a": entry(data_offsets=[0.0, 24])}), 24),
    "a truth": (json.dumps({"a": entry(shape=[True, 6])}), 24),
    "minus zero": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[-0,4]}}', 4),
    "a text": (json.dumps({"a": entry(shape=["2", 3])}), 24),
    "too large to count": (json.dumps({"a": entry(shape=[2**63, 2, 0], data_offsets=[0, 0])}), 0),
    "a length of 65 bits": (json.dumps({"a": entry(shape=[0, 2**64], data_offsets=[0, 0])}), 0),
    "three offsets": (json.dumps({"a": entry(data_offsets=[0, 24, 24])}), 24),
    "no offsets": (json.dumps({"a": {"dtype": "F32", "shape": [2, 3]}}), 24),
    "a tensor that is null": ('{"a":null}', 0),
    "a field twice": ('{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "a name twice": (
        '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        4,
    ),
    "metadata twice": ('{"__metadata__":{},"__metadata__":{}}', 0),
    "metadata of numbers": ('{"__metadata__":{"a":1}}', 0),
    "NaN": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":NaN}}', 4),
    "a number without end": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":1e999}}', 4),
    "half a character": ('{"\\ud800":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "deep": ("[" * 100_000, 0),
    "deep in a field": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":' + "[" * 126 + "]" * 126 + "}}", 4),
    "deep in a shape": ('{"a":{"dtype":"F32","shape":' + "[" * 50_000 + "]" * 50_000 + ',"data_offsets":[0,4]}}', 4),
    "a list": ("[]", 0),
    "nothing": ("", 0),
    "something behind it": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} x', 4),
    "part of a byte": (json.dumps({"a": entry(dtype="F4", shape=[3], data_offsets=[0, 1])}), 1),
    "more data": (json.dumps({"a": entry()}), 25),
    "less data": (json.dumps({"a": entry()}), 23),
}  # fmt: skip

TAKEN: dict[str, tuple[str, int]] = {
    "one": (json.dumps({"a": entry()}), 24),
    "none": ("{}", 0),
    "out of order": (json.dumps({"b": entry(data_offsets=[24, 48]), "a": entry()}), 48),
    "empty ones": (json.dumps({"a": entry(shape=[0, 9], data_offsets=[0, 0]), "b": entry(), "c": entry(shape=[], data_offsets=[24, 28])}), 28),
    "metadata": ('{"__metadata__":{"format":"pt","format":"np"},"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]}}', 4),
    "no metadata": ('{"__metadata__":null}', 0),
    "white space": (' {"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}} \n\t', 4),
    "another field": (json.dumps({"a": entry(more={"x": [1.5, None, -3, 10**300]})}), 24),
    "as a list": ('{"a":["F32",[1],[0,4]]}', 4),
    "half bytes": (json.dumps({"a": entry(dtype="F4", shape=[3, 2], data_offsets=[0, 3])}), 3),
    "a whole character": ('{"\\ud83d\\ude00":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}', 4),
    "as deep as allowed": ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4],"x":' + "[" * 125 + "]" * 125 + "}}", 4),
}  # fmt: skip


@pytest.mark.parametrize(("text", "data"), REFUSED.values(), ids=REFUSED)
def test_what_the_library_refuses(text: str, data: int) -> None:
    reason = verdict(text.encode(), data)
    assert reason
    assert reason.isprintable()
    assert len(reason) < 400


@pytest.mark.parametrize(("text", "data"), TAKEN.values(), ids=TAKEN)
def test_what_the_library_takes(text: str, data: int) -> None:
    assert verdict(text.encode(), data) is None


def test_entries_come_in_the_order_of_their_bytes() -> None:
    text = json.dumps({"b": entry(data_offsets=[24, 48]), "a": entry()}).encode()
    assert header.entries(text) == (Entry("a", "F32", (2, 3), 0, 24), Entry("b", "F32", (2, 3), 24, 48))


def test_the_length_is_limited() -> None:
    assert header.length(struct.pack("<Q", 100_000_000)) == 100_000_000
    for start in (struct.pack("<Q", 100_000_001), b"\xff" * 8, b"1234567", b""):
        with pytest.raises(Invalid):
            header.length(start)


def of_the_library(text: bytes, data: int) -> str | None:
    import safetensors

    try:
        safetensors.deserialize(struct.pack("<Q", len(text)) + text + bytes(data))
    except safetensors.SafetensorError as error:
        return str(error)
    return None


DTYPES = [*header.BITS, "F31", "f32", "", "C128"]
NUMBERS = ["0", "1", "2", "3", "4", "8", "-0", "-1", "1.0", "1e0", "true", "null", '"4"', "18446744073709551615",
           "18446744073709551616", "9223372036854775808", "1e999", "NaN", "Infinity", "01", "[]", "4294967296"]  # fmt: skip
PIECES = ["{", "}", "[", "]", ",", ":", '"', "\\", " ", "\n", "\0", "\x7f", "é", "\\u0041", "\\ud800", "\\ud83d\\ude00",
          '"dtype"', '"shape"', '"data_offsets"', '"__metadata__"', '"x":1,', "null", "[[[[", *NUMBERS]  # fmt: skip


def made(source: random.Random) -> tuple[bytes, int]:  # noqa: C901  a list of ways to spoil a header
    """A correct or nearly correct header, and the number of bytes after it."""
    at, parts = 0, []
    for number in range(source.choice([0, 1, 1, 2, 2, 3, 5])):
        dtype = source.choice(list(header.BITS))
        shape = [source.choice([0, 1, 2, 3, 8]) for _ in range(source.randrange(4))]
        size = header.BITS[dtype]
        for length in shape:
            size *= length
        if size % 8:
            shape.append(8)
            size *= 8
        offsets = [str(at), str(at + size // 8)]
        sizes = [str(length) for length in shape]
        at += size // 8
        name = source.choice("abcde") if source.random() < 0.1 else f"t{number}"
        for values in (offsets, sizes):
            if values and source.random() < 0.06:
                values[source.randrange(len(values))] = source.choice([*NUMBERS, str(at), str(at - 1)])
            if source.random() < 0.015:
                values.append(source.choice(NUMBERS))
        if source.random() < 0.03:
            dtype = source.choice(DTYPES)
        fields = [f'"dtype":"{dtype}"', f'"shape":[{",".join(sizes)}]', f'"data_offsets":[{",".join(offsets)}]']
        if source.random() < 0.3:
            source.shuffle(fields)
        if source.random() < 0.04:
            fields.append(source.choice(fields))
        if source.random() < 0.03:
            fields.pop(source.randrange(len(fields)))
        if source.random() < 0.06:
            fields.append(
                f'"x":{source.choice([*NUMBERS, "[" * 125 + "]" * 125, "[" * 126 + "]" * 126, "{}", "[[1]]"])}'
            )
        said = "{" + ",".join(fields) + "}"
        if source.random() < 0.03:
            said = f'["{dtype}",[{",".join(sizes)}],[{",".join(offsets)}]]'
        parts.append(f'"{name}":{said}')
    if source.random() < 0.2:
        metadata = source.choice(["{}", "null", '{"a":"b"}', '{"a":"b","a":"c"}', '{"a":1}', "[]", '"x"', '{"a":null}'])
        parts.insert(source.randrange(len(parts) + 1), f'"__metadata__":{metadata}')
    if source.random() < 0.3:
        source.shuffle(parts)
    text = "{" + ",".join(parts) + "}"
    if source.random() < 0.2:
        for _ in range(source.randrange(1, 4)):
            position = source.randrange(len(text) + 1)
            text = (
                text[:position]
                + source.choice([source.choice(PIECES), ""])
                + text[position + source.choice([0, 0, 1, 2]) :]
            )
    if source.random() < 0.1:
        text = source.choice([" ", "\n\t", "", "\ufeff"]) + text + source.choice([" ", "\n", "x", "\0"])
    content = text.encode()
    if source.random() < 0.02:
        position = source.randrange(len(content) + 1)
        content = content[:position] + bytes([source.randrange(256)]) + content[position:]
    if source.random() < 0.05:
        at += source.choice([-1, 1, 4])
    return content, max(at, 0)


def agree(seed: int, count: int) -> tuple[int, int]:
    """The number of ``count`` headers that the library accepted, and of those among them with a duplicate name."""
    source = random.Random(seed)
    taken = stricter = 0
    for _ in range(count):
        content, data = made(source)
        theirs, ours = of_the_library(content, data), verdict(content, data)
        if theirs is None and ours is not None and "twice" in ours and "its header lists" in ours:
            stricter += 1
        else:
            assert (theirs is None) == (ours is None), (content, data, theirs, ours)
        taken += theirs is None
    return taken, stricter


def test_the_library_says_the_same() -> None:
    pytest.importorskip("safetensors")
    taken, stricter = agree(7, 5000)
    assert 1000 < taken < 4000
    assert stricter < taken / 10
    for text, data in (*REFUSED.values(), *TAKEN.values()):
        if text != REFUSED["a name twice"][0]:
            assert (of_the_library(text.encode(), data) is None) == (verdict(text.encode(), data) is None), text[:100]


@pytest.mark.slow
def test_the_library_says_the_same_of_100_000() -> None:
    pytest.importorskip("safetensors")
    taken, stricter = agree(8, 100_000)
    print(f"{taken} taken, {stricter} of them with a name twice", file=sys.stderr)
    assert 20_000 < taken < 80_000
