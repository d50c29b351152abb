"""A goal: which figure of which run, and its bound; how its parts are written. Pure."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

from tunetool.errors import UsageProblem
from tunetool.node.units import UnitError, parse_bandwidth, parse_rate, parse_size
from tunetool.record import LABELS, Measurement, Unit, chosen

Sense = Literal["at least", "at most"]
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
_EXAMPLES: Mapping[str, str] = {"B/s": "50GBps", "s": "20s", "1/s": "5MIOPS` or `26/s", "B": "8GB", "1": "0.9"}


@dataclass(frozen=True)
class Pick:
    """What picks one figure of a record."""

    figure: str
    labels: Mapping[str, str]

    def words(self) -> str:
        """As ``durable engine=direct``."""
        return " ".join([self.figure, *(f"{name}={value}" for name, value in sorted(self.labels.items()))])

    def of(self, measurements: Sequence[Measurement]) -> list[Measurement]:
        """Those that it means: of several, the one that has no further label but ``subject``."""
        found = chosen(measurements, self.figure, **self.labels)
        fitting = [each for each in found if each.rank is None and each.host is None]
        exact = [each for each in fitting if each.labels.keys() - {"subject"} == self.labels.keys() - {"subject"}]
        return exact if len(exact) == 1 else fitting


@dataclass(frozen=True, eq=False)
class Goal:
    """One promise."""

    run: tuple[str, ...]
    """The words of the command line, without ``tunetool``; empty where it is what is being run."""
    pick: Pick
    of: Pick | None
    sense: Sense
    bound: float
    unit: Unit
    why: str = ""
    needs: tuple[str, ...] = ()
    name: str = ""
    """For people; empty: its figure's."""

    def words(self) -> str:
        """The figure without its bound."""
        return self.pick.words() + (f" of {self.of.words()}" if self.of is not None else "")


def parse_bound(value: str | float, units: Sequence[Unit], of: bool) -> tuple[float, Unit]:
    """A bound and its unit. ``units``: those that the figure may have; ``of``: the bound of a ratio.

    Raises ``UsageProblem``.
    """
    allowed: Sequence[Unit] = ["1"] if of else units
    if not isinstance(value, str):
        if value > sys.float_info.max:  # an integer of TOML has no end
            raise UsageProblem("the bound is too large", _example(allowed))
        if "1" in allowed and value >= 0:
            return float(value), "1"
        raise UsageProblem(f"`{value}` has no unit", _example(allowed))
    problem = UsageProblem(f"`{value}` is no {_SORTS[allowed[0]]}", _example(allowed))
    for unit in allowed:
        try:
            bound = _READERS[unit](value)
        except UnitError as error:
            problem = UsageProblem(error.message, error.hint)
            continue
        if bound is not None and bound < float("inf"):
            return bound, unit
    raise problem


def _time(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*(us|ms|s|min|h)", text.strip())
    return float(match[1]) * _TIMES[match[2]] if match else None


def _rate(text: str) -> float | None:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)/s", text.strip())
    return float(match[1]) if match else parse_rate(text)


def _number(text: str) -> float | None:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text.strip()) else None


_READERS = {"B/s": parse_bandwidth, "s": _time, "1/s": _rate, "B": parse_size, "1": _number}
_SORTS = {"B/s": "bandwidth", "s": "time", "1/s": "rate", "B": "size", "1": "plain number"}


def _example(units: Sequence[str]) -> str:
    return f"such as `{'` or `'.join(_EXAMPLES[each] for each in units)}`"


def parse_expectation(text: str, figures: Mapping[Unit, Sequence[str]]) -> Goal:
    """A goal from ``durable,engine=direct>=5GBps`` or ``stall,engine=direct-async<=50ms``. Raises ``UsageProblem``.

    ``figures``: those of the command, by unit.
    """
    match = re.fullmatch(r"([^<>]*)([<>]=)([^<>]*)", text)
    if match is None:
        raise UsageProblem(
            f"`--expect {text}` has no bound",
            "write `FIGURE,LABEL=VALUE>=BOUND`, such as `durable,engine=direct>=5GBps`",
        )
    figure, *rest = (part.strip() for part in match[1].split(","))
    labels = {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in rest)}
    if problems := [*unknown_labels(labels), *unknown_figure(figure, figures)]:
        raise problems[0]
    units = units_of(figure, figures)
    bound, unit = parse_bound(match[3].strip(), units, of=False)
    return Goal((), Pick(figure, labels), None, "at least" if match[2] == ">=" else "at most", bound, unit)


def units_of(figure: str, figures: Mapping[Unit, Sequence[str]]) -> list[Unit]:
    """Units that the figure may have."""
    return [unit for unit, names in figures.items() if figure in names]


def unknown_figure(figure: str, figures: Mapping[Unit, Sequence[str]]) -> list[UsageProblem]:
    """The problem, where the command has no such figure."""
    names = sorted({name for each in figures.values() for name in each})
    return [] if figure in names else [unknown("a figure of this command", figure, names)]


def unknown_labels(labels: Mapping[str, str]) -> list[UsageProblem]:
    """A problem for each label that there is not, or that cannot have this value."""
    problems = [unknown("a label", name, LABELS) for name in labels if name not in LABELS]
    direction = labels.get("direction", "read")
    return problems + ([] if direction in ("read", "write") else [unknown("a direction", direction, ("read", "write"))])


def unknown(sort: str, word: str, words: Sequence[str]) -> UsageProblem:
    """The problem that ``word`` is none of ``words``, with the nearest."""
    near = get_close_matches(word, words, n=2, cutoff=0.6)
    hint = f"did you mean {' or '.join(f'`{each}`' for each in near)}?" if near else f"one of {', '.join(words)}"
    return UsageProblem(f"`{word}` is not {sort}", hint)
