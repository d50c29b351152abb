"""The values of options: paths, sizes, durations, rates. An error names the option and its text."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tunetool.errors import UsageProblem
from tunetool.node.units import UnitError, parse_bandwidth, parse_size

_DURATION_HINT = "write seconds or minutes, such as `10s` or `1m`"
_LONGEST = 3600.0
_MOST_TOLERANCE = 50.0
_BITS = {"": 0, "K": 10, "M": 20, "G": 30}
_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    # click before 8.5 has no type argument there.
    _ParamType = click.ParamType


class Value(_ParamType):
    """An option's or argument's value, read by a function of its name and its text."""

    def __init__(self, name: str, read: Callable[[str, str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Raises ``UsageProblem`` where the text cannot be read."""
        if not isinstance(value, str):
            return value
        if isinstance(param, click.Option):
            name = max(param.opts, key=len)
        else:
            name = param.human_readable_name if param is not None else self.name
        return self._read(name, value)


def _text(name: str, text: str) -> str:
    # `--target "$UNSET"` must not measure the directory that the shell happens to be in.
    if not text.strip():
        raise UsageProblem(f"`{name}` is empty", "give a path, or leave the option out")
    return text


def _path(name: str, text: str) -> Path:
    return Path(_text(name, text))


def _json(name: str, text: str) -> str:
    return text if _text(name, text) == "-" else str(_new_file(name, text, ", or `-` for stdout"))


def _new_file(name: str, text: str, other: str = "") -> Path:
    """Refused before any work where it cannot be written."""
    path = _path(name, text)
    if path.is_dir():
        raise UsageProblem(f"`{path}` is a directory", f"`{name}` takes a file{other}")
    if not os.access(path.parent, os.W_OK | os.X_OK) or (path.exists() and not os.access(path, os.W_OK)):
        raise UsageProblem(f"`{path}` cannot be written", f"`{name}` takes a file in a directory that exists")
    # Files are written by rename, which would replace /dev/null by a file.
    if path.exists() and not path.is_file():
        raise UsageProblem(f"`{path}` is not a regular file", f"`{name}` takes a file{other}")
    return path


def _alignment(name: str, text: str) -> int:
    sizes = [2**power for power in range(2, 13)]
    if text not in map(str, sizes):
        raise UsageProblem(f"`{name} {text}` is not an alignment", f"one of {', '.join(map(str, sizes))} bytes")
    return int(text)


def parse_io_size(text: str) -> int:
    """Bytes from ``1G`` (binary, as ds_io has it), ``1GiB`` or ``1GB``. Raises ``UsageProblem``."""
    match = re.fullmatch(r"([0-9]+)([KMG]?)", text.strip())
    if match:
        return int(match[1]) << _BITS[match[2]]
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(error.message, "write `1G` or `1GiB` (2^30 bytes), or `1GB` (10^9)") from None


def _size(name: str, text: str) -> int:
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(f"`{name} {text}`: {error.message}", error.hint) from None


def _bandwidth(name: str, text: str) -> float:
    try:
        return parse_bandwidth(text)
    except UnitError as error:
        raise UsageProblem(f"`{name} {text}`: {error.message}", error.hint) from None


def _time(least: float) -> Callable[[str, str], float]:
    def read(name: str, text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)\s*(s|m|min|h|d)", text.strip())
        seconds = float(match[1]) * _SECONDS[match[2]] if match else -1.0
        if seconds < least:
            raise UsageProblem(f"`{name} {text}` is not a time", "such as `30min`, `0.5h` or `50000h`")
        return seconds

    return read


def parse_duration(text: str) -> float:
    """Seconds from ``10s`` or ``1m``; at least one second, at most one hour. Raises ``UsageProblem``."""
    match = re.fullmatch(r"([0-9]{1,5}(?:\.[0-9]{1,3})?)(s|m)", text.strip())
    if not match:
        raise UsageProblem(f"`{text}` is not a duration", _DURATION_HINT)
    seconds = float(match.group(1)) * (60 if match.group(2) == "m" else 1)
    if not 1 <= seconds <= _LONGEST:
        raise UsageProblem(f"`{text}` is not a duration between 1 s and {_LONGEST:.0f} s", _DURATION_HINT)
    return seconds


def parse_tolerance(text: str) -> float:
    """A fraction from ``2%``; below one half. Raises ``UsageProblem``."""
    match = re.fullmatch(r"([0-9]{1,2}(?:\.[0-9]{1,3})?)%", text.strip())
    if not match or float(match.group(1)) >= _MOST_TOLERANCE:
        raise UsageProblem(f"`{text}` is not a tolerance", f"write per cent below {_MOST_TOLERANCE:g}, such as `2%`")
    return float(match.group(1)) / 100


def _counts(least: int) -> Callable[[str, str], tuple[int, ...]]:
    """Different whole numbers from ``least`` on, the smallest first."""

    def read(name: str, text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"0|[1-9][0-9]{0,3}", part) and int(part) >= least for part in parts):
            raise UsageProblem(f"`{name} {text}` is not a list of numbers", f"such as `{least}`, or `{least},2,4`")
        return tuple(sorted({int(part) for part in parts}))

    return read


TEXT = Value("text", _text)
"""A name or a path, not empty."""
PATH = Value("path", _path)
DIRECTORY = Value("dir", _path)
DATASET = Value("dir[:name]", _path)
FILE = Value("file", _path)
NEW_FILE = Value("file", _new_file)
"""A file that will be written."""
JSON_FILE = Value("file", _json)
SIZE = Value("size", _size)
IO_SIZE = Value("size", lambda name, text: parse_io_size(text))
"""A size with `ds_io`'s meaning: `1G` is 2^30 bytes."""
ALIGNMENT = Value("bytes", _alignment)
BANDWIDTH = Value("rate", _bandwidth)
DURATION = Value("time", lambda name, text: parse_duration(text))
"""A duration of a measurement: seconds or minutes."""
TIME = Value("time", _time(0.0))
"""A time in the life of a job: seconds to days."""
TIME_ABOVE_ZERO = Value("time", _time(1.0))
TOLERANCE = Value("percent", lambda name, text: parse_tolerance(text))
NAMES = Value("names", lambda name, text: tuple(each.strip() for each in text.split(",") if each.strip()))
COUNTS = Value("counts", _counts(1))
NUMBERS = Value("numbers", _counts(0))
"""As ``COUNTS``, from 0 on."""
