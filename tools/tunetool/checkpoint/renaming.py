"""Which tensors are exported or imported, and under which names. Pure, but for ``read_names``."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tunetool import regular_files
from tunetool.errors import UsageProblem

OPTIMIZER = ("optim", "optimizer", "optimizers", "optimizer_states")
"""First parts of names of an optimizer's tensors, as torch, torchtitan, accelerate and Lightning have them."""
_RESERVED = "__metadata__"


@dataclass(frozen=True)
class Renaming:
    """``names``: old name or pattern to new name, None to leave it out, as ``--names`` has them; the first that matches
    counts, and a whole name counts before every pattern. A ``*`` in the new name stands for what the ``*`` of the same
    place stands for in the old one.

    ``prefix``: what tensors in a step begin with, and files of safetensors do not have.
    """

    prefix: str = ""
    names: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True)
class Renamed:
    """``names``: new name of each tensor that is taken. ``left_out``: the others, by the reason in words."""

    names: dict[str, str]
    left_out: dict[str, list[str]]


def read_names(path: Path) -> dict[str, str | None]:
    """The table in a JSON file. Raises ``UsageProblem``."""
    try:
        table = regular_files.read_json(path)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "`--names` takes a file of JSON") from None
    except ValueError as error:
        raise UsageProblem(f"`{path}` is not JSON: {error}", 'such as {"model.*": "*", "step": null}') from None
    if not isinstance(table, dict) or not all(new is None or isinstance(new, str) for new in table.values()):
        raise UsageProblem(
            f"`{path}` is not a table of names",
            'each old name has a new one, or null to leave it out: {"model.*": "*", "step": null}',
        )
    for old, new in table.items():
        if new is not None and "*" in new and new.count("*") != old.count("*"):
            raise UsageProblem(
                f"`{old}: {new}` in `{path}` has not the same number of `*` on both sides",
                "each `*` of the new name stands for one of the old name",
            )
    return table


def to_export(saved: Sequence[str], asked: Renaming) -> Renamed:
    """The names of a step's tensors in files of safetensors. The prefix comes off first. Without a prefix, what an
    optimizer has is left out.

    Raises ``UsageProblem`` where a name matches nothing, two tensors would have one name, or none is left.
    """
    left_out: dict[str, list[str]] = {}
    stripped: dict[str, str] = {}
    for name in saved:
        if not name.startswith(asked.prefix):
            left_out.setdefault(f"not of `{asked.prefix}`", []).append(name)
        elif not asked.prefix and name.partition(".")[0] in OPTIMIZER:
            left_out.setdefault("of the optimizer", []).append(name)
        else:
            stripped[name] = name[len(asked.prefix) :]
    if asked.prefix and not stripped:
        starts = {f"{name.partition('.')[0]}." for name in saved}
        raise UsageProblem(
            f"no tensor begins with `{asked.prefix}`",
            _near(asked.prefix, sorted(starts)) or "`tunetool checkpoint show` lists the names",
        )
    return _renamed(stripped, asked.names, left_out)


def to_import(stored: Sequence[str], asked: Renaming) -> Renamed:
    """The names in a step of tensors in files of safetensors: the way back, so the prefix comes last. Raises as
    ``to_export`` does."""
    renamed = _renamed({name: name for name in stored}, asked.names, {})
    return Renamed({old: asked.prefix + new for old, new in renamed.names.items()}, renamed.left_out)


def _renamed(current: Mapping[str, str], names: Mapping[str, str | None], left_out: dict[str, list[str]]) -> Renamed:
    """``current``: the name so far of each tensor."""
    there = set(current.values())
    for old in names:
        if not any(_matched(old, name) is not None for name in (there if "*" in old else there & {old})):
            raise UsageProblem(
                f"`{old}` of `--names` is not there",
                _near(old, sorted(there))
                or "`--dry-run` without `--names` lists the names, with `--json -` all of them",
            )
    patterns = [old for old in names if "*" in old]
    renamed: dict[str, str] = {}
    owners: dict[str, str] = {}
    for name, so_far in current.items():
        new = _new_name(so_far, names, patterns)
        if new is None:
            left_out.setdefault("by `--names`", []).append(name)
            continue
        if new in owners:
            raise UsageProblem(
                f"`{owners[new]}` and `{name}` would both be called `{new}`",
                "give one of them another name in `--names`",
            )
        if not new or new == _RESERVED or not _is_text(new):
            raise UsageProblem(f"`{name}` would be called `{new}`, which no tensor can be called", "see `--names`")
        owners[new] = name
        renamed[name] = new
    if not renamed:
        raise UsageProblem(
            "no tensor is left to write",
            "`tunetool checkpoint show` lists the names; `--prefix` selects by their begin",
        )
    return Renamed(renamed, left_out)


def _new_name(name: str, names: Mapping[str, str | None], patterns: Sequence[str]) -> str | None:
    if name in names:
        return names[name]
    for pattern in patterns:
        stands_for = _matched(pattern, name)
        if stands_for is not None:
            new = names[pattern]
            if new is None or "*" not in new:
                return new
            parts = new.split("*")
            return "".join(part for pair in zip(parts, (*stands_for, ""), strict=True) for part in pair)
    return name


@cache
def _pattern(glob: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(map(re.escape, glob.split("*"))), re.DOTALL)


def _matched(glob: str, name: str) -> tuple[str, ...] | None:
    """What each ``*`` stands for."""
    found = _pattern(glob).fullmatch(name)
    return None if found is None else found.groups()


def _is_text(name: str) -> bool:
    return not any("\ud800" <= each <= "\udfff" for each in name)


def _near(name: str, known: Sequence[str]) -> str | None:
    near = difflib.get_close_matches(name, known, n=2, cutoff=0.6)
    return f"did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else None
