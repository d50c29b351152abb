"""HPACK (RFC 7541) for reading: the headers of a request over HTTP/2."""

from __future__ import annotations

import re
from collections.abc import Iterator

_TABLE_BYTES = 4096
"""The size of the dynamic table until both sides agree on another; we never ask for one."""
_LONGEST = 1 << 16
_ENTRY = 32
"""Bytes that an entry counts beside its name and value (RFC 7541, 4.1)."""

# RFC 7541, appendix A: the values that are not empty, and the names.
_VALUES = {
    2: "GET", 3: "POST", 4: "/", 5: "/index.html", 6: "http", 7: "https", 8: "200", 9: "204", 10: "206", 11: "304",
    12: "400", 13: "404", 14: "500", 16: "gzip, deflate",
}  # fmt: skip
_NAMES = re.findall(
    r"\S+",
    """
    :authority :method :method :path :path :scheme :scheme :status :status :status :status :status :status :status
    accept-charset accept-encoding accept-language accept-ranges accept access-control-allow-origin age allow
    authorization cache-control content-disposition content-encoding content-language content-length
    content-location content-range content-type cookie date etag expect expires from host if-match
    if-modified-since if-none-match if-range if-unmodified-since last-modified link location max-forwards
    proxy-authenticate proxy-authorization range referer refresh retry-after server set-cookie
    strict-transport-security transfer-encoding user-agent vary via www-authenticate
    """,
)
_STATIC = [(name, _VALUES.get(index, "")) for index, name in enumerate(_NAMES, start=1)]

# RFC 7541, appendix B. The code is canonical: the lengths give the codes, those of one length in the order of their
# symbols. All other symbols (controls, and bytes above 126) have longer codes, which no header of ours needs.
_SYMBOLS = {
    5: "012aceiost",
    6: " %-./3456789=A_bdfghlmnpru",
    7: ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz",
    8: "&*,;XZ",
    10: '!"()?',
    11: "'+|",
    12: "#>",
    13: "\0$@[]~",
    14: "^}",
    15: "<`{",
}


class Malformed(Exception):
    """Bytes that are no headers, or headers that no caller of ours sends."""


def _codes() -> Iterator[tuple[tuple[int, int], str]]:
    code, before = 0, 0
    for length, symbols in _SYMBOLS.items():
        code <<= length - before
        before = length
        for symbol in symbols:
            yield (length, code), symbol
            code += 1


_DECODED = dict(_codes())


def unpacked(data: bytes) -> str:
    """Text in Huffman's code. Raises ``Malformed``."""
    text, length, code = [], 0, 0
    for byte in data:
        for shift in range(7, -1, -1):
            length, code = length + 1, code << 1 | byte >> shift & 1
            symbol = _DECODED.get((length, code))
            if symbol is not None:
                text.append(symbol)
                length, code = 0, 0
            elif length > 15:
                raise Malformed("a symbol that no header of a call has")
    # The rest is the beginning of the longest code, which is all ones.
    if length > 7 or code != (1 << length) - 1:
        raise Malformed("a text that ends within a symbol")
    return "".join(text)


class Decoder:
    """Decodes the header blocks of one connection, in their order."""

    def __init__(self) -> None:
        self._dynamic: list[tuple[str, str]] = []
        self._limit = _TABLE_BYTES

    def decode(self, block: bytes) -> list[tuple[str, str]]:
        """Names and values. Raises ``Malformed``."""
        headers = []
        at = 0
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                headers.append(self._entry(index))
            elif first & 0xE0 == 0x20:
                self._limit, at = _integer(block, at, 5)
                if self._limit > _TABLE_BYTES:
                    raise Malformed("a table that is larger than agreed")
                self._evict()
            else:
                kept = bool(first & 0x40)
                index, at = _integer(block, at, 6 if kept else 4)
                if index:
                    name = self._entry(index)[0]
                else:
                    name, at = _string(block, at)
                value, at = _string(block, at)
                headers.append((name, value))
                if kept:
                    self._dynamic.insert(0, (name, value))
                    self._evict()
        return headers

    def _entry(self, index: int) -> tuple[str, str]:
        if 1 <= index <= len(_STATIC):
            return _STATIC[index - 1]
        if not len(_STATIC) < index <= len(_STATIC) + len(self._dynamic):
            raise Malformed(f"there is no entry {index}")
        return self._dynamic[index - len(_STATIC) - 1]

    def _evict(self) -> None:
        while sum(len(name) + len(value) + _ENTRY for name, value in self._dynamic) > self._limit:
            self._dynamic.pop()


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """A number with a prefix of ``bits`` (RFC 7541, 5.1), and where it ends."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    for shift in range(0, 28, 7):
        if at >= len(block):
            break
        value += (block[at] & 0x7F) << shift
        at += 1
        if not block[at - 1] & 0x80:
            return value, at
    raise Malformed("a number without an end")


def _string(block: bytes, at: int) -> tuple[str, int]:
    """A text (RFC 7541, 5.2), and where it ends."""
    if at >= len(block):
        raise Malformed("a text is missing")
    packed = bool(block[at] & 0x80)
    length, at = _integer(block, at, 7)
    if at + length > len(block) or length > _LONGEST:
        raise Malformed("a text is longer than its block")
    data = block[at : at + length]
    return unpacked(data) if packed else data.decode("latin-1"), at + length
