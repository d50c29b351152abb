"""The checksum of `.metadata` itself: a line after the pickle, where Python's unpickler and torch do not look."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tunetool.checkpoint.checksums import hasher
from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.checkpoint.metadata_pickle import Content

_LINE = re.compile(rb"tunetool xxh3_64 ([0-9a-f]{16})\n")
_BYTES = len(b"tunetool xxh3_64 \n") + 16


class Damaged(ValueError):
    """The content is not what was written; the message says why."""


def with_sum(content: Sequence[bytes | memoryview]) -> Content:
    """The content in parts, and its checksum as the last part; without one where xxhash is not installed."""
    try:
        hashed = hasher()
    except UsageProblem:
        return [*content]
    for part in content:
        hashed.update(part)
    return [*content, b"tunetool xxh3_64 %b\n" % hashed.hexdigest().encode()]


def without_sum(content: bytes) -> bytes:
    """The content without the line of its checksum, which is not checked here."""
    return content[:-_BYTES] if _LINE.fullmatch(content, max(0, len(content) - _BYTES)) else content


def checked(content: bytes) -> bytes:
    """The content without its checksum. Raises ``Damaged`` if the two differ.

    Files of torch's writer, and of earlier versions, have none. Neither is it checked where xxhash is not installed.
    """
    pickled = without_sum(content)
    if len(pickled) == len(content):
        return content
    try:
        hashed = hasher()
    except UsageProblem:
        return pickled
    hashed.update(pickled)
    now, saved = hashed.hexdigest(), content[-17:-1].decode()
    if now != saved:
        raise Damaged(f"its {len(pickled)} bytes have checksum {now}, and were saved with {saved}")
    return pickled
