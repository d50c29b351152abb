"""A goals file: read whole and checked whole, before anything runs. Every problem has its line."""

from __future__ import annotations

import hashlib
import importlib
import re
import shlex
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import tomli

from tunetool.accept.goal import Goal, Pick, Sense, parse_bound, units_of, unknown, unknown_figure, unknown_labels
from tunetool.bench.registry import BENCHMARKS
from tunetool.errors import UsageProblem
from tunetool.record import Unit

SCHEMA = "tunetool.goals/1"
_KEYS = ("schema", "title", "values", "runs", "goal")
_OF_A_GOAL = ("name", "run", "figure", "of", "at_least", "at_most", "why", "needs")
_NEEDS = ("gpu", "gpus:N", "root", "package:NAME", "program:NAME")
OURS = ("--json", "--runs-dir", "--dry-run", "-i", "--inventory", "--expect", "-o", "--output", "--store-vars")
"""Options that acceptance sets itself, that would have a judgement of their own, or that write a file elsewhere."""
_RUN_PROGRAMS = ("--python", "--engine-python", "--manifest", "--slurm")
"""Options whose value names a program that is started: the file of somebody else must not choose it."""
_NAME = re.compile(r"[A-Za-z0-9_-]+")
"""A name of a command line."""
_OTHERS = {"verify": "verify.request", "tune": "tune.request", "stage": "stage.outcome"}
"""Commands beside the benchmarks that measure: modules with their FIGURES."""

CheckCall = Callable[[Sequence[str]], "UsageProblem | None"]
"""Why the command line cannot be parsed; it is not run."""
FiguresOf = Callable[[Sequence[str]], "Mapping[Unit, Sequence[str]] | None"]
"""The figures of a command, by unit; None where it measures none."""


@dataclass(frozen=True)
class GoalsFile:
    """What the file says, with the values in their places."""

    name: str
    title: str
    goals: Sequence[Goal]
    sha256: str
    """Of its text and the values that were set beside it."""

    @property
    def runs(self) -> list[tuple[str, ...]]:
        """The distinct command lines, in the order of the file."""
        return list(dict.fromkeys(each.run for each in self.goals))


class Problems(UsageProblem):
    """The file is wrong. ``lines``: each problem with its line, where there are several."""

    def __init__(self, name: str, found: Sequence[tuple[int, UsageProblem]]) -> None:
        said = [
            (f"`{name}`, line {line}: {each.message}", each.hint) for line, each in sorted(found, key=lambda at: at[0])
        ]
        self.lines = [f"{message}; hint: {hint}" if hint else message for message, hint in said]
        if len(said) == 1:
            self.lines = []
            super().__init__(*said[0])
        else:
            super().__init__(f"`{name}` has {len(said)} problems", "nothing was run: mend the lines above")


def parse(
    text: str, name: str, settings: Mapping[str, str], check_call: CheckCall, figures: FiguresOf | None = None
) -> GoalsFile:
    """The file called ``name``. ``settings``: values from the command line. ``figures``: those of a line of ``run``,
    where that is no command of tunetool. Raises ``Problems``."""
    try:
        document = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # also for numbers and nesting that no reader takes
        at = re.search(r"line (\d+)", str(error))
        last = len(text.splitlines()) or 1
        found = UsageProblem(f"not TOML: {re.sub(r' *[(]at .*', '', str(error))}", "write strings in quotation marks")
        raise Problems(name, [(int(at[1]) if at else last, found)]) from None
    reader = _Reader(text, check_call, figures or figures_of)
    goals = reader.read(document, settings)
    if reader.found:
        raise Problems(name, reader.found)
    said = "\n".join([text, *(f"{key}={value}" for key, value in sorted(settings.items()))])
    return GoalsFile(name, document["title"], goals, hashlib.sha256(said.encode()).hexdigest())


def figures_of(words: Sequence[str]) -> Mapping[Unit, Sequence[str]] | None:
    """The figures of the command, by unit; None where it measures none."""
    if len(words) > 1 and words[0] == "bench":
        known = next((each for each in BENCHMARKS if each.name == words[1]), None)
        figures: Mapping[Unit, Sequence[str]] | None = known.module("request").FIGURES if known else None
        return figures
    module = _OTHERS.get(words[0]) if words else None
    return importlib.import_module(f"tunetool.{module}").FIGURES if module else None


class _Reader:
    """Collects what is wrong instead of stopping at it."""

    def __init__(self, text: str, check_call: CheckCall, figures: FiguresOf) -> None:
        self.found: list[tuple[int, UsageProblem]] = []
        self._lines = text.splitlines()
        self._starts = [
            number for number, line in enumerate(self._lines, 1) if re.match(r"\s*\[\[\s*goal\s*\]\]", line)
        ]
        self._check_call, self._figures = check_call, figures
        self._settings: Mapping[str, str] = {}
        self._named: Mapping[str, str] = {}
        """Command lines by the names of the file for them."""
        self._calls: dict[tuple[str, ...], UsageProblem | None] = {}

    def read(self, document: Mapping[str, Any], settings: Mapping[str, str]) -> list[Goal]:
        self._settings = settings
        for key in document:
            if key not in _KEYS:
                self._say(self._line(rf"\s*\[*\s*{re.escape(key)}\b"), unknown("a key of a goals file", key, _KEYS))
        if document.get("schema") != SCHEMA:
            self._say(self._line(r"\s*schema\b"), UsageProblem("the schema is another", f'write `schema = "{SCHEMA}"`'))
        if not _is_text(document.get("title")):
            self._say(self._line(r"\s*title\b"), UsageProblem("`title` is no text", 'write `title = "..."`'))
        values = self._values(document.get("values", {}), settings)
        self._named = self._runs(document.get("runs", {}))
        goals = document.get("goal")
        if not isinstance(goals, list) or not goals or not all(isinstance(each, dict) for each in goals):
            self._say(1, UsageProblem("it has no goal", "write each below a line `[[goal]]`"))
            return []
        made = [self._goal(number, each, values) for number, each in enumerate(goals)]
        if not self.found:  # else it may be the name that a goal misspells
            self._unused({each["run"] for each in goals})
        return [each for each in made if each is not None]

    def _values(self, values: Any, settings: Mapping[str, str]) -> dict[str, str]:
        if not isinstance(values, dict) or not all(_is_text(each) for each in values.values()):
            self._say(
                self._line(r"\s*\[\s*values"), UsageProblem("`values` is no table of texts", 'write `NAME = "..."`')
            )
            return {}
        for name in settings:
            if name not in values:
                self._say(self._line(r"\s*\[\s*values"), unknown("a value of this file (`--set`)", name, list(values)))
        return {**values, **settings}

    def _runs(self, runs: Any) -> dict[str, str]:
        line = self._line(r"\s*\[?\s*runs\b")
        if not isinstance(runs, dict) or not all(_is_text(each) for each in runs.values()):
            problem = UsageProblem("`runs` is no table of texts", 'write `NAME = "verify --target {target}"`')
            self._say(line, problem)
            return {}
        for name in {"bench", *_OTHERS} & runs.keys():
            self._say(line, UsageProblem(f"`{name}` in `runs` is a command", "give the line another name"))
        for name in runs:
            # A name that reads like a command line would hide which one is run.
            if not _NAME.fullmatch(name):
                self._say(line, UsageProblem(f"`{name}` is no name in `runs`", "take letters, digits, `-` and `_`"))
        return runs

    def _unused(self, used: Collection[str]) -> None:
        """Lines of no goal, which would be checked by nobody."""
        for name in self._named:
            if name not in used:
                unused = UsageProblem(f"no goal has the run `{name}`", "take it out of `runs`, or name it in a goal")
                self._say(self._of_run(name), unused)

    def _of_run(self, name: str) -> int:
        """The line of a name in `runs`."""
        key = rf"[\"']?{re.escape(name)}[\"']?\s*="
        first = self._line(r"\s*\[\s*[\"']?runs[\"']?\s*\]")
        if first > 1:
            return self._line(rf"\s*{key}", first)
        return self._line(rf"\s*[\"']?runs[\"']?\s*(\.\s*|=.*?[{{,]\s*){key}")

    def _goal(self, number: int, goal: Mapping[str, Any], values: Mapping[str, str]) -> Goal | None:
        before = len(self.found)
        for key in goal:
            if key not in _OF_A_GOAL:
                self._say(self._at(number, key), unknown("a key of a goal", key, _OF_A_GOAL))
        run = self._run(number, goal.get("run"), values)
        figures = self._figures(run) if run else None
        pick = self._pick(number, "figure", goal, figures)
        of = self._pick(number, "of", goal, figures) if "of" in goal else None
        if pick is not None and of is not None and figures is not None:
            ours, theirs = units_of(pick.figure, figures), units_of(of.figure, figures)
            if not set(ours) & set(theirs):
                both = UsageProblem(
                    f"`{pick.figure}` is in {' or '.join(ours)}, and `{of.figure}` in {' or '.join(theirs)}",
                    "a share is of a figure in the same unit",
                )
                self._say(self._at(number, "of"), both)
        name, why = self._text(number, "name", goal), self._text(number, "why", goal)
        needs = self._needs(number, goal.get("needs", []))
        senses = [key for key in ("at_least", "at_most") if key in goal]
        if len(senses) != 1:
            self._say(self._at(number), UsageProblem("a goal has one of `at_least` and `at_most`", "give one"))
        units = units_of(pick.figure, figures) if pick is not None and figures is not None else []
        bound = self._bound(number, senses[0], goal, units, of is not None) if len(senses) == 1 and units else None
        if pick is None or bound is None or len(self.found) > before:
            return None
        sense: Sense = "at least" if senses[0] == "at_least" else "at most"
        return Goal(run, pick, of, sense, *bound, why, needs, name)

    def _run(self, number: int, run: Any, values: Mapping[str, str]) -> tuple[str, ...]:
        line = self._at(number, "run")
        if not _is_text(run):
            self._say(line, UsageProblem("`run` is no command line", 'such as `run = "verify --target {target}"`'))
            return ()
        names: Sequence[str] = tuple(self._named)
        if run in self._named:
            line, run, names = self._of_run(run), self._named[run], ()
        try:
            parts = shlex.split(run)
            words = [self._filled(each, values) for each in parts]
        except (UsageProblem, ValueError) as error:
            wrong = (
                error if isinstance(error, UsageProblem) else UsageProblem(f"`{run}`: {error}", "close the quotation")
            )
            self._say(line, wrong)
            return ()
        if self._figures(words) is None and (words[:1] != ["bench"]):
            commands = ("bench", *_OTHERS, *names)
            self._say(line, unknown("a command that measures", words[0] if words else "", commands))
            return ()
        ours = next((each for each in words if each.partition("=")[0] in OURS), None)
        key = tuple(words)
        if key not in self._calls:
            # Said once, of the first goal that has it.
            refused = UsageProblem(f"`{ours}` does not go into `run`", "`tunetool accept` gives it itself")
            problem = refused if ours else self._foreign(words, parts, values) or self._check_call(words)
            self._calls[key] = problem
            if problem is not None:
                self._say(line, problem)
        return key if self._calls[key] is None else ()

    def _foreign(self, words: Sequence[str], parts: Sequence[str], values: Mapping[str, str]) -> UsageProblem | None:
        """Why the call must not be made as the file says it: a program is named by whoever calls, never by the file."""
        if any("\0" in each for each in words):
            return UsageProblem("`run` has a character that no command line can have", "take the NUL out")
        if words[:2] == ["stage", "evict"]:
            return UsageProblem("`stage evict` removes, and measures nothing", "use `stage copy` or `stage verify`")
        # What `--set` says is a NUL here, so that it cannot be taken for a text of the file.
        own = [self._filled(each, {**values, **dict.fromkeys(self._settings, "\0")}) for each in parts]
        for number, word in enumerate(words):
            option, sign, _ = word.partition("=")
            value = own[number].partition("=")[2] if sign else next(iter(own[number + 1 :]), "")
            if option in _RUN_PROGRAMS and value != "\0":
                hint = f"write `{option} {{program}}`, and call it with `--set program=...`"
                return UsageProblem(f"`{option}` in `run` starts what the file names", hint)
        return None

    def _filled(self, word: str, values: Mapping[str, str]) -> str:
        def value(match: re.Match[str]) -> str:
            if match[1] not in values:
                raise unknown("a value of this file", match[1], list(values) or ["none"])
            return values[match[1]]

        return re.sub(r"\{(\w+)\}", value, word)

    def _pick(
        self, number: int, key: str, goal: Mapping[str, Any], figures: Mapping[Unit, Sequence[str]] | None
    ) -> Pick | None:
        table, line = goal.get(key), self._at(number, key)
        hint = f'such as `{key} = {{figure = "bandwidth", direction = "read"}}`'
        if not isinstance(table, dict) or not _is_text(table.get("figure")):
            self._say(line, UsageProblem(f"`{key}` names no figure", hint))
            return None
        if not all(isinstance(each, str | int) for each in table.values()):
            self._say(line, UsageProblem(f"labels of `{key}` are texts", hint))
            return None
        labels = {name: str(value) for name, value in table.items() if name != "figure"}
        problems = unknown_labels(labels) + (unknown_figure(table["figure"], figures) if figures is not None else [])
        for each in problems:
            self._say(line, each)
        return None if problems else Pick(table["figure"], labels)

    def _bound(
        self, number: int, key: str, goal: Mapping[str, Any], units: Sequence[Unit], of: bool
    ) -> tuple[float, Unit] | None:
        value, line = goal[key], self._at(number, key)
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self._say(line, UsageProblem(f"`{key}` is no number or quantity", "such as `50GBps`, or 0.9 with `of`"))
            return None
        try:
            return parse_bound(value, units, of)
        except UsageProblem as error:
            self._say(line, error)
            return None

    def _text(self, number: int, key: str, goal: Mapping[str, Any]) -> str:
        value = goal.get(key, "")
        if not isinstance(value, str):
            self._say(self._at(number, key), UsageProblem(f"`{key}` is no text", f'write `{key} = "..."`'))
            return ""
        return value

    def _needs(self, number: int, needs: Any) -> tuple[str, ...]:
        if not isinstance(needs, list):
            self._say(self._at(number, "needs"), UsageProblem("`needs` is no list", 'such as `needs = ["gpu"]`'))
            return ()
        for each in needs:
            if not isinstance(each, str) or not re.fullmatch(r"gpu|gpus:[1-9]\d*|root|(package|program):[\w.-]+", each):
                self._say(self._at(number, "needs"), unknown("something that a goal can need", str(each), _NEEDS))
        return tuple(map(str, needs))

    def _say(self, line: int, problem: UsageProblem) -> None:
        self.found.append((line, problem))

    def _line(self, pattern: str, first: int = 1, last: int | None = None) -> int:
        """The first line from ``first`` on that begins so; ``first`` where none does."""
        lines = enumerate(self._lines[first - 1 : last], first)
        return next((number for number, line in lines if re.match(pattern, line)), first)

    def _at(self, number: int, key: str = "") -> int:
        """The line of a goal's key, or of the goal."""
        if number >= len(self._starts):
            return 1  # goals as one array in one line
        first = self._starts[number]
        last = self._starts[number + 1] - 1 if number + 1 < len(self._starts) else None
        return self._line(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[=.]", first, last) if key else first


def _is_text(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and bool(value.strip())
