"""Is a cufile.json what libcufile will take it for? Pure.

libcufile says nothing about a key that it does not know or that is in the wrong place: it uses the default.
A wrong type makes it refuse the whole file, and a section that is no object ends the process (all tried on libcufile
1.20). Comments are `//` and `/* */`, as the file that NVIDIA ships has them; `#` is none.
"""

from __future__ import annotations

import difflib
import json
import re
from dataclasses import dataclass
from typing import Any, Iterator, Optional

from ..common.documents import refuse_deep
from .cufile_keys import (
    BOOL,
    BY_PATH,
    COUNT,
    COUNTS,
    HEX,
    INTEGER,
    KEYS,
    NEWEST,
    OLDEST,
    PRINTED,
    TABLE,
    TEXT,
    TEXTS,
    Key,
)

REFUSED, IGNORED, ABORTS, TAKEN = "refused", "ignored", "aborts", "taken"
"""What libcufile does: refuses the whole file; ignores the key; ends the process; uses another value."""

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_WALK = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]')
_PLAIN = re.compile(r"[\w-]+\Z")
"""A name that a line can show as it is."""
_MOUNTS = re.compile(r"^fs\.(?:(?P<type>[a-z]+)\.)?mounts$")
_DENIES = re.compile(r"deny|black", re.IGNORECASE)
_DOTTED = re.compile(r'"[^"]*\.[^"]*"')
_SECTIONS = {key.path[: match.start()] for key in KEYS for match in re.finditer(r"\.", key.path)}
_NAMES = {key.name: key.path for key in KEYS}


@dataclass(frozen=True)
class Problem:
    """One problem of the file. ``line``: 0 if unknown."""

    key: str
    line: int
    message: str
    remedy: str
    effect: str

    def __str__(self) -> str:
        where = "line %d: " % self.line if self.line else ""
        return "%s%s; %s" % (where, self.message, self.remedy)


class ConfigError(ValueError):
    """The text is not a JSON object. ``problem`` says where and why."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def read_config(text: str) -> dict[str, Any]:
    """The settings, comments left out. Raises ``ConfigError``."""
    plain = _without_comments(text)
    try:
        config = json.loads(plain, parse_constant=_no_constant)
        refuse_deep(config)
    except json.JSONDecodeError as error:
        raise ConfigError(_malformed(plain, error)) from None
    except RecursionError:
        raise ConfigError(Problem("", 0, "it is nested too deeply", "write no more than sections", REFUSED)) from None
    except ValueError as error:
        raise ConfigError(Problem("", 0, str(error), "write a number", REFUSED)) from None
    if not isinstance(config, dict):
        raise ConfigError(Problem("", 1, "the file holds no JSON object", "begin it with `{`", ABORTS))
    return config


def flatten(config: dict[str, Any]) -> dict[str, Any]:
    """Value by path, ``properties.io_batchsize``. A list, and the table of a file system's mounts, is a value."""
    return dict(_leaves(config, ""))


def check_config(text: str, version: Optional[str] = None) -> list[Problem]:
    """Problems of the text of a cufile.json, in its order. ``version`` is libcufile's, such as ``1.15``."""
    try:
        config = read_config(text)
    except ConfigError as error:
        return [error.problem]
    positions = _positions(_without_comments(text))
    lines = {".".join(path): line for path, line in positions}
    problems = _repeated(positions)
    release = parse_version(version)
    for path, value in _leaves(config, ""):
        key = BY_PATH.get(path)
        if path in _SECTIONS:
            # An empty section has no effect.
            complaint = (
                None
                if value == {}
                else ("`%s` is %s" % (path, _shown(value)), "it is a section: write an object", ABORTS)
            )
        else:
            complaint = _stray(path) if key is None else _misfit(key, value, release)
        if complaint is not None:
            problems.append(Problem(path, lines.get(path, 0), *complaint))
    problems += _pairs(flatten(config), lines)
    return sorted(problems, key=lambda problem: problem.line)


def parse_version(version: Optional[str]) -> Optional[tuple[int, int]]:
    """Major and minor of ``1.15.1.6``; None if unknown."""
    match = re.match(r"\s*v?([0-9]{1,9})\.([0-9]{1,9})", version or "")
    return (int(match.group(1)), int(match.group(2))) if match else None


_Complaint = Optional["tuple[str, str, str]"]


def _misfit(key: Key, value: Any, release: Optional[tuple[int, int]]) -> _Complaint:
    if release is not None and release < key.since:
        message = "`%s` needs libcufile %d.%d, this is %d.%d, which ignores it" % (key.path, *key.since, *release)
        return message, "leave it out, or install that libcufile", IGNORED
    if release is not None and key.until is not None and release > key.until:
        message = "`%s` is read by no libcufile after %d.%d, this is %d.%d" % (key.path, *key.until, *release)
        return message, "leave it out", IGNORED
    if not _fits(key.kind, value):
        taken = key.kind == COUNT and isinstance(value, (bool, float)) and value >= 0
        return "`%s` is %s" % (key.path, _shown(value)), "write %s" % key.kind, TAKEN if taken else REFUSED
    for each in value if isinstance(value, list) else [value]:
        wrong = _out_of_range(key, each)
        if wrong:
            return "`%s` is %s" % (key.path, _shown(value)), wrong, TAKEN if key.lenient else REFUSED
    return None


def _fits(kind: str, value: Any) -> bool:
    if kind == BOOL:
        return isinstance(value, bool)
    if kind in (COUNT, INTEGER):
        return isinstance(value, int) and not isinstance(value, bool)
    if kind in (TEXT, HEX):
        return isinstance(value, str)
    if kind == TABLE:
        return isinstance(value, dict)
    return isinstance(value, list) and all(_fits(TEXT if kind == TEXTS else COUNT, each) for each in value)


def _out_of_range(key: Key, value: Any) -> str:
    if key.choices:
        return "" if value in key.choices else "write one of %s" % ", ".join("`%s`" % each for each in key.choices)
    if key.kind == HEX:
        return "" if re.match(r"^0[xX][0-9a-fA-F]+$", value) else "write %s" % HEX
    if key.kind not in (COUNT, INTEGER, COUNTS):
        return ""
    low = key.low if key.low is not None else (0 if key.kind != INTEGER else value)
    if value < low or (key.high is not None and value > key.high) or value % key.multiple:
        rest = " and at most %d" % key.high if key.high is not None else ""
        rest += ", a multiple of %d" % key.multiple if key.multiple > 1 else ""
        return "write at least %d%s" % (low, rest)
    return ""


def _stray(path: str) -> _Complaint:
    """The problem of a path that no libcufile reads: in the wrong place, misspelt, or unknown."""
    if _DOTTED.search(path):
        return "`%s` has a dot in its name" % path, "libcufile takes sections as nested objects: nest it", IGNORED
    mounts = _MOUNTS.match(path)
    if mounts:
        table = "`fs.%s.mount_table`" % (mounts.group("type") or "nfs")
        remedy = "leave it out: cuFile finds mounts itself; %s takes the RDMA addresses of one mount" % table
        return "`%s` is not a key" % path, remedy, IGNORED
    name = path.rsplit(".", 1)[-1]
    if name in PRINTED:
        return "`%s` is not a key" % path, "libcufile reads `%s`" % PRINTED[name], IGNORED
    paths = right_paths(path)
    if paths:
        shown = " or ".join("`%s`" % each for each in paths)
        return "`%s` is in the wrong place, where libcufile ignores it" % path, "its place is %s" % shown, IGNORED
    near = difflib.get_close_matches(path, BY_PATH, 1, 0.75)
    near = near or difflib.get_close_matches(
        path, [each for each in _SECTIONS if each.count(".") == path.count(".")], 1, 0.75
    )
    if not near:
        near = [_NAMES[each] for each in difflib.get_close_matches(name, _NAMES, 1, 0.75)]
    near = [each for each in near if _DENIES.search(path) or not each.startswith("denylist")]
    versions = "libcufile %d.%d to %d.%d" % (*OLDEST, *NEWEST)
    remedy = "did you mean `%s`?" % near[0] if near else "leave it out"
    return "`%s` is read by no %s" % (path, versions), remedy, IGNORED


def right_paths(path: str) -> list[str]:
    """The paths where the key at ``path`` belongs: those that share the most of its path's end."""
    parts = path.split(".")
    best: list[str] = []
    most = 0
    for known in BY_PATH:
        if known.startswith("denylist.") and not _DENIES.search(path):
            # What is named there is kept out: the opposite of what was meant.
            continue
        shared = _shared_end(parts, known.split("."))
        if shared and shared >= most:
            best = [known] if shared > most else [*best, known]
            most = shared
    general = [known for known in best if known.startswith("properties.")]
    return general or best


def _shared_end(first: list[str], second: list[str]) -> int:
    count = 0
    while count < min(len(first), len(second)) and first[-1 - count] == second[-1 - count]:
        count += 1
    return count


def _pairs(values: dict[str, Any], lines: dict[str, int]) -> Iterator[Problem]:
    slabs = "properties.gpu_bounce_buffer_slab_config"
    for sizes, counts, effect in (
        ("properties.posix_pool_slab_size_kb", "properties.posix_pool_slab_count", REFUSED),
        (slabs + ".slab_size_kb", slabs + ".slab_count", IGNORED),
    ):
        size_list, count_list = values.get(sizes), values.get(counts)
        if isinstance(size_list, list) and isinstance(count_list, list) and len(size_list) != len(count_list):
            message = "`%s` has %d entries, `%s` has %d" % (sizes, len(size_list), counts, len(count_list))
            yield Problem(counts, lines.get(counts, 0), message, "give one count for each size", effect)
    for name in ("max_direct_io_size_kb", "max_device_cache_size_kb", "per_buffer_cache_size_kb"):
        path = "properties." + name
        if path in values and slabs + ".slab_size_kb" in values:
            message = "`%s` has no effect beside `%s`" % (path, slabs)
            yield Problem(path, lines.get(path, 0), message, "keep one of them", IGNORED)


def _repeated(positions: list[tuple[tuple[str, ...], int]]) -> list[Problem]:
    seen: dict[tuple[str, ...], int] = {}
    problems = []
    for path, line in positions:
        if path in seen:
            name = ".".join(path)
            message = "`%s` is given again, after line %d" % (name, seen[path])
            problems.append(Problem(name, line, message, "libcufile uses only the last: keep one of them", TAKEN))
        seen[path] = line
    return problems


def _leaves(value: dict[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, each in value.items():
        below = path + (name if _PLAIN.match(name) else json.dumps(name))
        known = BY_PATH.get(below)
        if isinstance(each, dict) and not (known and known.kind == TABLE) and (below in _SECTIONS or _holds_key(each)):
            yield from _leaves(each, below + ".")
        else:
            yield below, each


def _holds_key(value: dict[str, Any]) -> bool:
    """Whether an unknown section has a key whose right place is known."""
    return any(name in _NAMES or (isinstance(each, dict) and _holds_key(each)) for name, each in value.items())


def _positions(plain: str) -> list[tuple[tuple[str, ...], int]]:
    """Each key's path and line, in the order of the text, which is well-formed JSON."""
    positions: list[tuple[tuple[str, ...], int]] = []
    stack: list[Optional[str]] = []
    waiting = ""
    for match in _WALK.finditer(plain):
        mark = match.group()
        if mark == ":" and None not in stack[1:]:
            inside = [part for part in stack if part is not None]
            positions.append(((*inside, waiting), plain.count("\n", 0, match.start()) + 1))
        elif mark[0] == '"':
            waiting = json.loads(mark, strict=False)
        elif mark in "{[":
            stack.append(waiting if _opens(plain, match.start()) else None)
        elif mark in "}]":
            stack.pop()
    return positions


def _opens(plain: str, position: int) -> bool:
    """Whether the value of a key begins at ``position``."""
    return plain[:position].rstrip().endswith(":")


def _without_comments(text: str) -> str:
    """The text with each comment as blanks, so that lines and columns stay."""
    return _TOKEN.sub(lambda m: m.group() if m.group()[0] == '"' else re.sub(r"[^\n]", " ", m.group()), text)


def _malformed(plain: str, error: json.JSONDecodeError) -> Problem:
    line = plain.split("\n")[error.lineno - 1].strip()
    remedy = "libcufile refuses the whole file: correct line %d" % error.lineno
    if line.startswith("#"):
        remedy = "`#` does not begin a comment here: write `//`"
    elif re.search(r",\s*$", plain[: error.pos]) and plain[error.pos : error.pos + 1] in ("}", "]"):
        remedy = "leave out the comma before `%s`" % plain[error.pos]
    return Problem("", error.lineno, "no JSON: %s" % error.msg, remedy, REFUSED)


def _no_constant(name: str) -> Any:
    raise ValueError("`%s` is not a number" % name)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return "`%s`" % (text if len(text) <= 40 else text[:37] + "...")
