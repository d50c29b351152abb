"""Writes token files as Megatron-LM's ``IndexedDataset`` reads them: NAME.bin with the tokens, NAME.idx with the index.

The index is, without gaps and with the low byte first: ``MMIDIDX`` and two zero bytes, version (u64), code of the
tokens' type (u8), number of sequences (u64), number of entries in the list of documents (u64); then of each sequence
its number of tokens (i32), of each its first byte in the .bin (i64), and the list of documents (i64): 0, and after each
document the number of sequences until then. The list has one entry more than there are documents.
"""

from __future__ import annotations

import itertools
import os
import struct
import sys
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
UINT16_CODE = 8
"""Megatron takes this type for fewer than 65,500 different tokens."""
TOKEN_BYTES = 2
END_OF_DOCUMENT = 256
"""The token after each document; the others are the bytes themselves."""
HEADER = struct.Struct("<9sQBQQ")
_BUFFER = 4 << 20
_INDEX_OF_A_DOCUMENT = 4 + 8 + 8


@dataclass(frozen=True)
class TokenFiles:
    """The two files and what they hold."""

    tokens_file: Path
    index_file: Path
    documents: int
    tokens: int


def tokenize(text: bytes) -> bytearray:
    """The tokens of a document as they lie in the file: a token for each byte, and the one that ends the document."""
    tokens = bytearray(TOKEN_BYTES * (len(text) + 1))
    tokens[:-TOKEN_BYTES:TOKEN_BYTES] = text
    tokens[-TOKEN_BYTES:] = END_OF_DOCUMENT.to_bytes(TOKEN_BYTES, "little")
    return tokens


def bytes_of_tokens(documents: int, text_bytes: int) -> int:
    """Size of the .bin."""
    return TOKEN_BYTES * (text_bytes + documents)


def bytes_of_index(documents: int) -> int:
    """Size of the .idx."""
    return HEADER.size + _INDEX_OF_A_DOCUMENT * documents + 8


def write_token_files(
    prefix: Path, documents: Iterable[bytes], tick: Callable[[int], None] = lambda _: None
) -> TokenFiles:
    """Write ``prefix``.bin and .idx; each document is one sequence. ``tick`` gets the bytes of tokens so far."""
    tokens_file, index_file = (prefix.with_name(prefix.name + ending) for ending in (".bin", ".idx"))
    lengths = array("i")
    done = 0
    with tokens_file.open("wb", buffering=_BUFFER) as stream:
        for text in documents:
            tokens = tokenize(text)
            stream.write(tokens)
            lengths.append(len(tokens) // TOKEN_BYTES)
            done += len(tokens)
            tick(done)
        stream.flush()
        os.fsync(stream.fileno())
    with index_file.open("wb", buffering=_BUFFER) as stream:
        _write_index(stream.write, lengths)
        stream.flush()
        os.fsync(stream.fileno())
    return TokenFiles(tokens_file, index_file, len(lengths), done // TOKEN_BYTES)


def _write_index(write: Callable[[bytes], object], lengths: array[int]) -> None:
    ends = itertools.accumulate((length * TOKEN_BYTES for length in lengths), initial=0)
    pointers = array("q", itertools.islice(ends, len(lengths)))
    documents = array("q", range(len(lengths) + 1))
    write(HEADER.pack(MAGIC, VERSION, UINT16_CODE, len(lengths), len(documents)))
    for column in (lengths, pointers, documents):
        if sys.byteorder == "big":
            column.byteswap()
        write(column.tobytes())
