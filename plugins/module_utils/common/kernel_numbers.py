"""Numbers as the kernel reads them, on its command line and in /proc/sys. Pure."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"0[xX]([0-9a-fA-F]+)|(0[0-7]*)|([0-9]+)", re.ASCII)
_SUFFIXES = "KMGTPE"
_WRAP = 2**64
_DECIDING = 64


def whole(text: str) -> int | None:
    """The number at the start of ``text``, as ``simple_strtoull`` with base 0 takes it: 0x is hexadecimal, 0 octal.

    None without a digit. What follows does not count.
    """
    return _leading(text)[0]


def memory_size(text: str) -> int | None:
    """Bytes, as ``memparse`` (lib/cmdline.c) reads ``text``: one letter of K, M, G, T, P, E may follow, in either case.

    None without a digit. What follows does not count: `1GB` is `1G`.
    """
    number, rest = _leading(text)
    if number is None:
        return None
    power = _SUFFIXES.find(rest[:1].upper()) + 1 if rest else 0
    return (number << 10 * power) % _WRAP


def _leading(text: str) -> tuple[int | None, str]:
    match = _NUMBER.match(text)
    if match is None:
        return None, text
    digits, base = next((part, base) for part, base in zip(match.groups(), (16, 8, 10)) if part is not None)
    # The last 64 digits decide: that power of 8, 10 and 16 is a multiple of 2^64. Python converts no 5,000 digits.
    return int(digits[-_DECIDING:], base) % _WRAP, text[match.end() :]
