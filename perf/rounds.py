"""What the programs here share: arms in rounds, their record, the verdict of its goals, and what several arms do.

A program is a function that prepares its arms; each arm gives the samples of one turn. In each round every arm has its
turn, in an order drawn from ``--seed``. Its goals stand in programs.toml. It ends as a command of tunetool does.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
from rich.console import Console

from tunetool.accept.expect import expected
from tunetool.accept.goal import Goal
from tunetool.accept.goals_file import GoalsFile, parse
from tunetool.accept.needs import lacks
from tunetool.cli.main import main
from tunetool.cli.output import finish
from tunetool.errors import CannotJudge
from tunetool.measure import session
from tunetool.measure.figure import Quantity, What, figure
from tunetool.measure.fio import Job, find_fio, run
from tunetool.measure.rounds import drawn_order
from tunetool.measure.sequential import MIB, takes_direct_io
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Measurement, Record, Unit
from tunetool.report.kinds import function, view_of
from tunetool.report.progress import PlainProgress
from tunetool.user_directories import default_runs_dir
from tunetool.verdict import Case

ResultT = TypeVar("ResultT")
GOALS = Path(__file__).with_name("programs.toml")
TIMES = ("time", "cpu", "stall")
FIGURES: Mapping[Unit, Sequence[str]] = {"B/s": ["bandwidth"], "s": TIMES, "B": ["memory"], "1": ["share"]}
QUANTITIES: Mapping[str, Quantity] = {"bandwidth": "bandwidth", "memory": "memory", "share": "ratio"}
"""Of a figure; all others are times."""


Key = tuple[str, tuple[tuple[str, str], ...]]
"""A figure and its labels, which are those of records."""
Samples = Iterable[tuple[Key, float]]
"""Values of figures, one of each in a turn."""


@dataclass(frozen=True)
class Call:
    """What a program prepares its arms from."""

    asked: argparse.Namespace
    folder: Path
    """In the target, gone afterwards."""
    held: ExitStack
    """Left after the last round."""


Arms = Mapping[str, Callable[[], Samples]]
Prepare = Callable[[Call], Arms]


def sample(figure: str, value: float, **labels: object) -> tuple[Key, float]:
    return (figure, tuple((name, str(each)) for name, each in sorted(labels.items()))), value


def program(prepare: Prepare, **options: Any) -> NoReturn:
    """Run a program, whose module calls this. ``options``: its own, each with its default."""
    shown = sys.modules["__main__"]
    name = Path(str(shown.__file__)).stem

    def measure(debug: bool, runs_dir: Path, **asked: Any) -> int:
        work = _Rounds(name, prepare, argparse.Namespace(**asked))
        done = session.run(f"perf.{name}", session.Run(runs_dir, command=sys.argv), work, PlainProgress())
        record: Any = done.record  # there is one: this is no dry run
        if done.code:
            raise CannotJudge(record.verdict.reasons[0])
        goals = goals_of(name, record.measurements)
        return finish(expected(done, goals, [name]) if goals else done, None, _show)

    shared = {"target": Path("/var/tmp"), "rounds": 6, "seed": 1, "runs_dir": default_runs_dir()}
    parameters: list[click.Parameter] = [click.Option(["--debug"], is_flag=True)]
    for option, default in {**shared, **options}.items():
        names = [f"--{option.replace('_', '-')}"]
        parameters.append(click.Option(names, type=type(default), default=default, show_default=True))
    paragraphs = "\n\n".join(f"\b\n{each}" for each in (shown.__doc__ or "").split("\n\n"))
    main(click.Command(name, callback=measure, params=parameters, help=paragraphs))


@dataclass
class _Rounds(session.Work):
    """The work of a program."""

    name: str
    prepare: Prepare
    asked: argparse.Namespace
    figures: Sequence[Measurement] = ()

    def announce(self, session: session.Session) -> None: ...

    def measure(self, session: session.Session) -> None:
        folder, held = session.directory(self.asked.target), session.hold(ExitStack())
        taken = measured(self.prepare(Call(self.asked, folder, held)), self.asked.rounds, self.asked.seed)
        medium = read_stack(str(folder)).medium
        self.figures = [figure_of(self.name, medium, *each) for each in taken.items()]

    def findings(self) -> session.Findings:
        target = str(self.asked.target)
        return session.Findings(Case(self.figures, judged="work"), target, read_stack(target))


def measured(arms: Arms, rounds: int, seed: int) -> dict[Key, list[float]]:
    """The values, one of each round."""
    taken: dict[Key, list[float]] = {}
    for number in range(1, rounds + 1):
        row = [each for arm in drawn_order(arms, seed, number) for each in arms[arm]()]
        for key, value in row:
            taken.setdefault(key, []).append(value)
        said = (f"{' '.join(word for _, word in labels)} {of} {value:.4g}" for (of, labels), value in row)
        print(f"round {number} (load {os.getloadavg()[0]:.1f}): {', '.join(said)}", flush=True)
    return taken


def figure_of(name: str, medium: str, key: Key, values: Sequence[float]) -> Measurement:
    of, labels = key
    form = ".".join([name, *(f"{{{label}}}" for label, _ in labels), "{figure}"])
    return figure(What(form, QUANTITIES.get(of, "duration"), "perf", medium, of, dict(labels)), values)


def goals_of(name: str, measured: Sequence[Measurement]) -> list[Goal]:
    """The goals of a program in programs.toml, for which this machine has what they need: of its lines there, those of
    which something was measured."""
    mine = [goal for goal in read_goals({}).goals if goal.run[0] == name and not lacks(goal.needs)]
    runs = {goal.run for goal in mine if goal.pick.of(measured)}
    return list({goal.words() + goal.sense: goal for goal in mine if goal.run in runs}.values())


def read_goals(settings: Mapping[str, str]) -> GoalsFile:
    """All of them; each ``run`` is a line of a program here."""
    return parse(GOALS.read_text(), GOALS.name, settings, lambda words: None, lambda words: FIGURES)


def _show(record: Record, path: Path | None, console: Console) -> None:
    function("render_terminal.print_view")(view_of(record, path), record, path, console)


def timed(act: Callable[[], ResultT]) -> tuple[ResultT, float, float]:
    """What it returns, its seconds, and those of the CPU, of all threads."""
    began, worked = time.perf_counter(), time.process_time()
    result = act()
    return result, time.perf_counter() - began, time.process_time() - worked


def output(*command: object, codes: Sequence[int] = (0,), **more: Any) -> str:
    """What a program prints. Raises ``RuntimeError`` where it ends with another code."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **more)
    if done.returncode not in codes:
        raise RuntimeError(f"`{command[0]}` ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return str(done.stdout)


def tunetool(*words: object, codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """The JSON of a command of this checkout. Raises ``CannotJudge`` where that could not judge, unless 3 is a code."""
    printed = output(sys.executable, "-m", "tunetool", *words, "--json", "-", codes=(*codes, 3))
    document: dict[str, Any] = json.loads(printed)
    if 3 not in codes and document.get("verdict", {"status": "pass"})["status"] != "pass":
        raise CannotJudge(document["verdict"]["reasons"][0])
    return document


def fio(directory: Path, direction: Any, files: int, size: int) -> float:
    """Bytes per second of fio with a job for each file, past the page cache where there is one; reads what it wrote."""
    direct = takes_direct_io(directory)
    job = Job(direction, files, size // files // MIB * MIB, direct=direct, fallocate="native" if direct else "truncate")
    return run(find_fio(os.environ), job, directory, os.environ, 1800).bandwidth


def fio_samples(source: Path, target: Path, files: int, size: int) -> Samples:
    """fio's read at ``source``, its write at ``target``, and the slower of both: what a copy can reach."""
    with tempfile.TemporaryDirectory(dir=source) as folder:
        fio(Path(folder), "write", files, size)
        read = fio(Path(folder), "read", files, size)
    with tempfile.TemporaryDirectory(dir=target) as folder:
        write = fio(Path(folder), "write", files, size)
    yield sample("bandwidth", read, engine="fio", direction="read")
    yield sample("bandwidth", write, engine="fio", direction="write")
    yield sample("bandwidth", min(read, write), engine="fio", way="the slower")


def keep_compiled(folder: Path) -> None:
    """Programs that start from now on keep compiled files there, as those of an installed package do."""
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
