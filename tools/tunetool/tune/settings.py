"""One setting of DeepSpeed's ``aio`` block (the parameters of ``aio_handle``), and the settings to try: the default
space, or a file with the values of each key. Pure except for the file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.node.common import documents
from tunetool.node.units import UnitError, format_size_binary, parse_size

NAMES = ("block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds")
"""Keys of the block, all of them: DeepSpeed silently ignores any other (runtime/swap_tensor/aio_config.py)."""


@dataclass(frozen=True, order=True)
class AioSettings:
    """The settings under DeepSpeed's names; ``block_size`` in bytes."""

    block_size: int
    queue_depth: int
    intra_op_parallelism: int
    single_submit: bool
    overlap_events: bool
    use_gds: bool = False

    @property
    def flags(self) -> list[str]:
        """The flags that differ from DeepSpeed's defaults, in short."""
        flags = {"single": self.single_submit, "sequential": not self.overlap_events, "gds": self.use_gds}
        return [name for name, is_set in flags.items() if is_set]

    def block(self) -> dict[str, int | bool]:
        """The block for DeepSpeed's configuration: numbers and booleans."""
        return asdict(self)

    def __str__(self) -> str:
        """The settings in short, for people: ``1 MiB x 32 x 4, single, sequential``."""
        shape = f"{format_size_binary(self.block_size)} x {self.queue_depth} x {self.intra_op_parallelism}"
        return ", ".join([shape, *self.flags])


DEFAULTS = AioSettings(
    block_size=2**20,
    queue_depth=8,
    intra_op_parallelism=1,
    single_submit=False,
    overlap_events=True,
    use_gds=False,
)
"""DeepSpeed's default of each key (runtime/swap_tensor/constants.py of deepspeed 0.19.8)."""


def from_block(block: Mapping[str, int | bool]) -> AioSettings:
    """The settings in a whole block, such as one that ``block`` made."""
    return AioSettings(**{field.name: block[field.name] for field in fields(AioSettings)})  # type: ignore[arg-type]


SWEEP: Mapping[str, Sequence[int | bool]] = {
    "block_size": (2**20, 8 * 2**20),
    "queue_depth": (32, 128),
    "intra_op_parallelism": (1, 2, 4, 8),
    "single_submit": (False, True),
    "overlap_events": (True, False),
}
"""The values that ds_nvme_tune tries (nvme/perf_run_sweep.py of deepspeed 0.19.8); DeepSpeed's default is always added
to it."""

_LARGEST_BLOCK = 2**30
_MOST = {"queue_depth": 65536, "intra_op_parallelism": 256}
_MOST_SETTINGS = 10_000
"""A sample of each takes days."""
_BOOLEANS = ("single_submit", "overlap_events", "use_gds")
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30}
_THEIRS = {
    "io_parallel": "`intra_op_parallelism`",
    "num_threads": "`intra_op_parallelism`",
    "thread_count": "`intra_op_parallelism`",
    "sequential_requests": "`overlap_events`, which is its opposite",
}
"""Names that ds_nvme_tune and older texts use."""


def settings_of(space: Mapping[str, Sequence[int | bool]]) -> list[AioSettings]:
    """Every setting of ``space``, with DeepSpeed's default first, which is always included."""
    values = [space.get(name, (getattr(DEFAULTS, name),)) for name in NAMES]
    every = [AioSettings(*combination) for combination in product(*values)]
    return list(dict.fromkeys([DEFAULTS, *every]))


def read_space(path: Path) -> dict[str, list[int | bool]]:
    """The space in the JSON file at ``path``. Raises ``UsageProblem`` for an invalid file."""
    try:
        document = documents.read(path)
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name a file that holds a space") from None
    except ValueError as error:
        raise UsageProblem(
            f"`{path}` is not JSON: {error}", 'write such as {"block_size": ["1M", "8M"], "queue_depth": [32, 128]}'
        ) from None
    if not isinstance(document, dict):
        raise UsageProblem(f"`{path}` is not a space", 'write such as {"queue_depth": [32, 128]}')
    for key in document:
        if key not in NAMES:
            meaning = f"; here it is {_THEIRS[key]}" if key in _THEIRS else ""
            raise UsageProblem(f"`{path}` has the unknown key `{key}`", f"known are {', '.join(NAMES)}{meaning}")
    space = {key: [_value(path, key, value) for value in _list(path, key, values)] for key, values in document.items()}
    count = prod(len(set(values)) for values in space.values())
    if count > _MOST_SETTINGS:
        hint = f"name fewer values: at most {_MOST_SETTINGS} settings can be tried"
        raise UsageProblem(f"`{path}` has {count} settings", hint)
    return space


def _list(path: Path, key: str, values: Any) -> list[Any]:
    if not isinstance(values, list) or not values:
        raise UsageProblem(f"`{key}` in `{path}` is not a list of values", f'write such as "{key}": [...]')
    return values


def _value(path: Path, key: str, value: Any) -> int | bool:
    shown = json.dumps(value)
    if key in _BOOLEANS:
        if not isinstance(value, bool):
            raise UsageProblem(f"`{key}` in `{path}` is `{shown}`", "write true or false, without quotes")
        return value
    if key == "block_size" and isinstance(value, str):
        value = _size(path, value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageProblem(f"`{key}` in `{path}` is `{shown}`", "write a whole number of at least 1")
    most = _MOST.get(key, _LARGEST_BLOCK)
    if value > most:
        raise UsageProblem(f"`{key}` in `{path}` is `{shown}`", f"at most {most} is possible")
    if key == "block_size" and value % 4096:
        raise UsageProblem(f"`{key}` in `{path}` is `{shown}`", "a block must be a multiple of 4096 bytes")
    return value


def _size(path: Path, text: str) -> int:
    if text[-1:] in _BINARY and text[:-1].isdigit():
        return int(text[:-1]) * _BINARY[text[-1]]
    try:
        return parse_size(text)
    except UnitError as error:
        raise UsageProblem(f"`block_size` in `{path}`: {error.message}", "write such as 1048576 or `1M`") from None
