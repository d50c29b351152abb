"""Which blocks each request wants: drawn by seed, or of a trace; and which slots of a store hold them. Pure but for the
file of a trace."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from tunetool.errors import UsageProblem
from tunetool.node.units import format_size
from tunetool.regular_files import open_regular

MOONCAKE_TOKENS = 512
"""Of the block that one of ``hash_ids`` stands for (FAST25-release of kvcache-ai/Mooncake)."""
_LARGEST_ID = 1 << 40
_MOST_LINES, _LONGEST_LINE, _MOST_BYTES = 1_000_000, 1 << 20, 1 << 30
"""What is read of a file: its lines are lists in memory, which are many times as large."""
_FILLER = 1 << 60
"""Blocks with ids from here on are wanted by no request: they fill what a short trace leaves free."""
_DOCUMENTS, _SHORTEST_TURN, _LONGEST_TURN, _OPEN, _GOES_ON = 64, 64, 512, 16, 0.6


class Wanted(NamedTuple):
    """A request, by whole blocks: the part of its prompt that may be there, and all that is there after it."""

    prompt: Sequence[int]
    after: Sequence[int]
    """Begins with the prompt."""
    second: float | None = None
    """Of its arrival, where the trace says it."""


@dataclass(frozen=True)
class Demand:
    """Conversations over documents: one in ``_DOCUMENTS`` by Zipf, then turns that grow it up to ``longest`` tokens.

    Conversations over the same document share its blocks; those of the turns are their own.
    """

    block_tokens: int
    longest: int
    exponent: float = 1.0
    seed: int = 0

    def requests(self) -> Iterator[Wanted]:
        """Without an end; the same for the same demand."""
        drawn = random.Random(f"{self.seed}/requests")  # noqa: S311  (a trace, no secret)
        weights = [rank**-self.exponent for rank in range(1, _DOCUMENTS + 1)]
        most = max(1, self.longest // self.block_tokens)
        documents = [
            range(number << 20, (number << 20) + drawn.randint(1, max(1, most // 2))) for number in range(_DOCUMENTS)
        ]
        own = itertools.count(_DOCUMENTS << 20)
        talks: list[tuple[list[int], int]] = []
        while True:
            if talks and drawn.random() < _GOES_ON:
                blocks, tokens = talks.pop(drawn.randrange(len(talks)))
            else:
                blocks = list(drawn.choices(documents, weights)[0])
                tokens = len(blocks) * self.block_tokens
            asked, answered = (drawn.randint(_SHORTEST_TURN, _LONGEST_TURN) for _ in range(2))
            whole = min((tokens + asked) // self.block_tokens, most)
            blocks = [*blocks, *itertools.islice(own, max(0, whole - len(blocks)))]
            prompt = tuple(blocks)
            tokens += asked + answered
            whole = min(tokens // self.block_tokens, most)
            blocks += itertools.islice(own, max(0, whole - len(blocks)))
            yield Wanted(prompt, tuple(blocks))
            if tokens < self.longest:
                talks = [*talks[-_OPEN + 1 :], (blocks, tokens)]


def read_mooncake(path: Path) -> list[Wanted]:
    """The requests of a file in the format of Mooncake's traces. Raises ``UsageProblem`` with the line that is wrong.

    A block that is not whole is nobody else's prefix: it is left out, and so are the tokens that were put out.
    """
    requests: list[Wanted] = []
    try:
        with os.fdopen(open_regular(path), encoding="utf-8") as lines:
            if os.fstat(lines.fileno()).st_size > _MOST_BYTES:
                raise UsageProblem(f"`{path}` has more than {format_size(_MOST_BYTES)}", "give a part of the trace")
            for number, line in enumerate(iter(lambda: lines.readline(_LONGEST_LINE), ""), 1):
                if len(line) >= _LONGEST_LINE:
                    raise UsageProblem(
                        f"`{path}` line {number} has {_LONGEST_LINE} characters or more", "leave the request out"
                    )
                if number > _MOST_LINES:
                    raise UsageProblem(f"`{path}` has more than {_MOST_LINES} lines", "give a part of the trace")
                if line.strip():
                    requests.append(_of_line(line, f"`{path}` line {number}"))
    except OSError as error:
        raise UsageProblem(f"`{path}` cannot be read: {error.strerror}", "name a file of JSON lines") from None
    except UnicodeDecodeError:
        raise UsageProblem(f"`{path}` is no text in UTF-8", "name a file of JSON lines") from None
    if not any(each.prompt for each in requests):
        raise UsageProblem(f"`{path}` has no request of {MOONCAKE_TOKENS} tokens or more", "give a longer trace")
    return requests


def _of_line(line: str, where: str) -> Wanted:
    hint = 'a line is such as {"timestamp": 27482, "input_length": 600, "output_length": 52, "hash_ids": [46, 47]}'
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise UsageProblem(f"{where} is no JSON", hint) from None
    if not isinstance(document, dict):
        raise UsageProblem(f"{where} is no JSON object", hint)
    numbers: dict[str, Any] = {name: document.get(name) for name in ("timestamp", "input_length", "output_length")}
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _LARGEST_ID:
            raise UsageProblem(f"{where}: `{name}` is missing or no number from 0 on", hint)
    ids = document.get("hash_ids")
    if not isinstance(ids, list) or any(type(each) is not int or not 0 <= each < _LARGEST_ID for each in ids):
        raise UsageProblem(f"{where}: `hash_ids` is missing or no list of whole numbers from 0 on", hint)
    length = int(numbers["input_length"])
    if len(ids) != -(-length // MOONCAKE_TOKENS) or len(set(ids)) < len(ids):
        raise UsageProblem(
            f"{where}: {len(ids)} `hash_ids` are not the different blocks of {length} tokens",
            f"one for each {MOONCAKE_TOKENS} tokens",
        )
    whole = tuple(ids[: length // MOONCAKE_TOKENS])
    return Wanted(whole, whole, numbers["timestamp"] / 1000)


def repeated(requests: Sequence[Wanted]) -> Iterator[Wanted]:
    """A trace again and again, each time with blocks of its own: the second time finds nothing of the first."""
    for number in itertools.count():
        first = number * _LARGEST_ID % _FILLER
        for each in requests:
            blocks = [first + block for block in each.after]
            yield Wanted(blocks[: len(each.prompt)], blocks, each.second)


class Read(NamedTuple):
    """A block that is there."""

    slot: int
    block: int


class Write(NamedTuple):
    """A block that is put into the place of another one."""

    slot: int
    block: int
    evicted: int


class Step(NamedTuple):
    """What a request does to the store."""

    wanted: int
    """Blocks of its prompt."""
    reads: list[Read]
    writes: list[Write]


@dataclass
class Index:
    """Which slot holds which block: a full store of ``slots``, from which the block goes that was not used for longest.

    Of a prefix its end goes before its beginning, without which the end is of no use.
    """

    slots: int
    _held: OrderedDict[int, int] = field(default_factory=OrderedDict)
    """Slots by block, the one that goes first at the front."""

    def __post_init__(self) -> None:
        self._held = OrderedDict((_FILLER + slot, slot) for slot in range(self.slots))

    def take(self, wanted: Wanted) -> Step:
        """The longest prefix that is there is read, and the rest is written. It fits into the store."""
        there = list(itertools.takewhile(self._held.__contains__, wanted.prompt))
        for block in reversed(wanted.after):
            if block in self._held:
                self._held.move_to_end(block)
        reads = [Read(self._held[block], block) for block in there]
        writes = []
        for block in wanted.after[len(there) :]:
            if block not in self._held:
                evicted, slot = self._held.popitem(last=False)
                self._held[block] = slot
                writes.append(Write(slot, block, evicted))
        for block in reversed(wanted.after):
            self._held.move_to_end(block)
        return Step(len(wanted.prompt), reads, writes)

    def held(self) -> list[int]:
        """Blocks by slot."""
        by_slot = {slot: block for block, slot in self._held.items()}
        return [by_slot[slot] for slot in range(self.slots)]

    def warmed(self, requests: Iterator[Wanted], most: int) -> Index:
        """This, after so many requests that its first contents are gone, or ``most``."""
        for wanted in itertools.islice(requests, most):
            self.take(wanted)
            if next(iter(self._held)) < _FILLER:
                break
        return self


def undo(steps: Sequence[Step]) -> list[list[Write]]:
    """The writes, step by step, after which the store is as it was before ``steps``."""
    return [[Write(each.slot, each.evicted, each.block) for each in step.writes] for step in reversed(steps)]


def hit_rate(steps: Sequence[Step]) -> float:
    """Share of the blocks of all prompts that were there."""
    return sum(len(step.reads) for step in steps) / max(1, sum(step.wanted for step in steps))


def written_a_second(requests: Sequence[Wanted], steps: Sequence[Step]) -> float | None:
    """Blocks, by the arrivals that a trace has; None where it has none, or all at once."""
    seconds = [each.second for each in requests if each.second is not None]
    span = seconds[-1] - seconds[0] if seconds else 0.0
    return sum(len(step.writes) for step in steps) / span if span > 0 else None


def longest_of(requests: Sequence[Wanted]) -> int:
    """Blocks of the longest request."""
    return max((len(each.after) for each in requests), default=0)
