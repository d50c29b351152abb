"""Sizes in bytes and bandwidths in bytes per second, as people write them.

Units are case-sensitive and decimal or binary as written: ``50GB`` is 50e9 bytes, ``46.6GiB`` is
46.6 * 2**30. Bits (``Gbps``, ``Gb/s``, ``gbps``) are refused, because a factor of eight hides in one letter.
"""

from __future__ import annotations

import math
import re

_FACTORS = {
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "PB": 10**15,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "PiB": 2**50,
}
_NUMBER = r"(?P<number>[0-9]+(?:\.[0-9]+)?)"
_QUANTITY = re.compile(r"^" + _NUMBER + r"\s*(?P<unit>[A-Za-z/]*)$")
_BITS = re.compile(r"^(?P<prefix>[kKmMgGtT]i?)?(?:b|bit|bits)(?:ps|/s)$|^[kmgt]bps$")


class UnitError(ValueError):
    """A quantity that cannot be read. ``hint`` says what to write instead."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def parse_size(text: str) -> int:
    """Bytes from ``3.84TB``, ``4GiB``, ``256MiB`` or ``512B``.

    A bare ``0`` is zero; any other number without a unit raises ``UnitError``, as does a negative one.
    """
    number, unit = _split(text, example="`3.84TB` or `4GiB`")
    if unit == "" and number == 0:
        return 0
    if unit not in _FACTORS:
        raise UnitError("`%s` is not a size" % text, "write a size with its unit, such as `3.84TB` or `4GiB`")
    return round(number * _FACTORS[unit])


def parse_bandwidth(text: str) -> float:
    """Bytes per second from ``50GBps``, ``50GB/s`` or ``46.6GiB/s``. Zero and negative values are refused."""
    number, unit = _split(text, example="`50GBps`")
    if unit == "":
        raise UnitError("`%s` has no unit" % text, "write a bandwidth with its unit, such as `%gGBps`" % (number or 50))
    if _BITS.match(unit):
        raise UnitError(
            "`%s` is in bits" % text,
            "bits; did you mean `%s` or `%s`?" % (_bits_as_bytes(number, unit), "%gGBps" % number),
        )
    for suffix in ("/s", "ps"):
        if unit.endswith(suffix) and unit[: -len(suffix)] in _FACTORS:
            if number <= 0:
                raise UnitError("`%s` is not above zero" % text, "expect a positive bandwidth, such as `50GBps`")
            return number * _FACTORS[unit[: -len(suffix)]]
    raise UnitError("`%s` is not a bandwidth" % text, "use `50GBps`, `50GB/s` or `46.6GiB/s`")


_LINK_BITS = {"kb/s": 10**3, "Mb/s": 10**6, "Gb/s": 10**9, "Tb/s": 10**12}


def parse_link_bandwidth(text: str) -> float:
    """Bytes per second of a network link, from ``1000Mb/s`` or ``400Gb/s``, as networks are sold, or from ``50GB/s``.

    The one place where bits are read: ``b`` is a bit and ``B`` a byte, and every other spelling of bits is refused.
    """
    number, unit = _split(text, example="`1000Mb/s`")
    if unit in _LINK_BITS:
        if number <= 0:
            raise UnitError("`%s` is not above zero" % text, "expect a positive bandwidth, such as `1000Mb/s`")
        return number * _LINK_BITS[unit] / 8
    if _BITS.match(unit):
        prefix = unit[0].upper() if unit[0] in "mMgGtT" else "k"
        raise UnitError(
            "`%s` may be bits or bytes" % text,
            "write `%g%sb/s` for bits or `%g%sB/s` for bytes" % (number, prefix, number, prefix),
        )
    return parse_bandwidth(text)


_RATES = {"IOPS": 1, "kIOPS": 10**3, "KIOPS": 10**3, "MIOPS": 10**6}


def parse_rate(text: str) -> float:
    """Requests per second from ``5MIOPS``, ``800kIOPS`` or ``250000IOPS``. Zero is refused."""
    number, unit = _split(text, example="`5MIOPS`")
    if unit not in _RATES:
        raise UnitError("`%s` is not a rate of requests" % text, "use `5MIOPS`, `800kIOPS` or `250000IOPS`")
    if number <= 0:
        raise UnitError("`%s` is not above zero" % text, "expect a positive rate, such as `5MIOPS`")
    return number * _RATES[unit]


def _split(text: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.match(text.strip())
    if not match:
        raise UnitError("`%s` is not a quantity" % text, "write a number and a unit, such as %s" % example)
    return float(match.group("number")), match.group("unit")


def _bits_as_bytes(number: float, unit: str) -> str:
    return "%g%sBps" % (number / 8, unit[0].upper() if unit[0] in "kKmMgGtT" else "")


def format_size(count: float) -> str:
    """``3.84 TB``: decimal, as drives are sold."""
    return _scaled(count, 1000, ("B", "kB", "MB", "GB", "TB", "PB"))


def format_size_binary(count: float) -> str:
    """``1 MiB``: binary, as chunks and memory are counted."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def format_bandwidth(rate: float) -> str:
    """``50.0 GB/s (46.6 GiB/s)``: both, because published figures use either."""
    return "%.4g GB/s (%.4g GiB/s)" % (rate / 1e9, rate / 2**30)


def format_rate(rate: float) -> str:
    """``1.25 MIOPS``: requests per second."""
    return _scaled(rate, 1000, ("IOPS", "kIOPS", "MIOPS"))


def format_figure(value: float, unit: str) -> str:
    """A figure of a record in its unit: ``B/s``, ``1/s``, or ``1`` for a ratio."""
    if unit == "1":
        return "%.3g" % value
    return format_rate(value) if unit == "1/s" else format_bandwidth(value)


def _scaled(count: float, step: int, units: tuple[str, ...]) -> str:
    try:
        value = float(count)
    except OverflowError:  # digits that a broken file holds are an int of any size
        value = math.inf if count > 0 else -math.inf
    for unit in units[:-1]:
        if abs(value) < step:
            return "%.4g %s" % (value, unit)
        value /= step
    return "%.4g %s" % (value, units[-1])


def format_count(number: int, noun: str) -> str:
    """``1 host``, ``2 hosts``, ``2 processes``."""
    plural = "es" if noun.endswith("s") else "s"
    return "%d %s%s" % (number, noun, "" if number == 1 else plural)
