"""What the programs here share: arms in rounds, their figures with intervals, a record, and the verdict of its goals.

A program is a function that prepares its arms; each arm gives the samples of one turn. In each round every arm has its
turn, in an order drawn from ``--seed``. The record goes where those of tunetool go (``--runs-dir``); its goals stand
in programs.toml, and the judge is that of `tunetool accept`. Ends with 0, 1 or 3 as tunetool does, where it broke with
70.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from tunetool import record as records
from tunetool.accept.goal import Goal
from tunetool.accept.goals_file import GoalsFile, parse
from tunetool.accept.judge import judged, skipped, title, verdict_over
from tunetool.accept.needs import lacks
from tunetool.ctrl_c import as_interrupt
from tunetool.errors import CannotJudge, TunetoolError
from tunetool.measure.figure import Quantity, What, figure
from tunetool.measure.fio import Job, find_fio, run
from tunetool.measure.made_by import made_by, node_facts
from tunetool.measure.rounds import drawn_order
from tunetool.measure.sampling import Counting
from tunetool.measure.sequential import MIB, takes_direct_io
from tunetool.measure.statistics import estimate
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.drives import read_drives
from tunetool.record import GoalResult, Measurement, Record, Unit
from tunetool.user_directories import default_runs_dir, prepare_runs_dir
from tunetool.verdict import code_of

ResultT = TypeVar("ResultT")
GOALS = Path(__file__).with_name("programs.toml")
BROKE, MOST_AGAIN, PAUSE = 70, 12, 5.0
FIGURES: Mapping[Unit, Sequence[str]] = {
    "B/s": ("bandwidth",),
    "s": ("time", "cpu", "stall"),
    "B": ("memory",),
    "1": ("share",),
}
QUANTITIES: Mapping[str, Quantity] = {"bandwidth": "bandwidth", "memory": "memory", "share": "ratio"}
"""Of a figure; all others are times."""


class Again(CannotJudge):
    """Something else used the drives: the round is repeated, whatever its speeds were."""


class Sample(NamedTuple):
    """One value of a figure; its labels are those of records."""

    figure: str
    value: float
    labels: tuple[tuple[str, str], ...]
    once: bool = False
    """It is the same in every round, and counts as one."""


Arm = Callable[[], Iterable[Sample]]
Prepare = Callable[[argparse.Namespace, Path, contextlib.ExitStack], Mapping[str, Arm]]


def sample(figure: str, value: float, **labels: object) -> Sample:
    return Sample(figure, value, tuple((name, str(each)) for name, each in sorted(labels.items())))


def program(prepare: Prepare, **options: Any) -> NoReturn:
    """Run a program, whose module calls this. ``options``: its own, each with its default."""
    main = sys.modules["__main__"]
    name = Path(str(main.__file__)).stem
    reader = argparse.ArgumentParser(description=main.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = {"target": Path("/var/tmp"), "rounds": 6, "seed": 1, "runs_dir": default_runs_dir()}
    for option, default in {**shared, **options}.items():
        how: dict[str, Any] = {"action": "store_true"} if default is False else {"type": type(default)}
        reader.add_argument(f"--{option.replace('_', '-')}", default=default, help=f"default: {default}", **how)
    asked = reader.parse_args()
    try:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, as_interrupt)  # what it made is removed then too
        with contextlib.ExitStack() as held:
            began = records.utc_now()
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix=f"tunetool-{name}-", dir=asked.target))
            stack = read_stack(folder)
            taken = measured(prepare(asked, Path(folder).resolve(), held), asked.rounds, asked.seed)
            figures = [_figure(name, stack.medium, *each) for each in taken.items()]
        record = Record(
            kind=f"perf.{name}", id=records.new_id(), started=began, finished=records.utc_now(), tool=made_by(),
            node=node_facts(read_drives(), stack), command=sys.argv, target=str(asked.target), measurements=figures,
        )  # fmt: skip
        sys.exit(conclude(record, goals_of(name, figures), asked.runs_dir))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except TunetoolError as error:
        print(f"error: {error.message}", *([f"hint: {error.hint}"] if error.hint else []), sep="\n", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception:
        traceback.print_exc()
        sys.exit(BROKE)


def measured(arms: Mapping[str, Arm], rounds: int, seed: int) -> dict[tuple[Any, ...], list[float]]:
    """The samples by figure and labels, one of each round."""
    taken: dict[tuple[Any, ...], list[float]] = {}
    again = 0
    for number in range(1, rounds + 1):
        while True:
            try:
                row = [each for arm in drawn_order(arms, seed, number) for each in arms[arm]()]
                break
            except Again:
                again += 1
                if again > MOST_AGAIN:
                    raise
                time.sleep(PAUSE)
        for each in row:
            values = taken.setdefault((each.figure, each.labels), [])
            values += [each.value] * (not (each.once and values))
        said = ", ".join(
            f"{' '.join(value for _, value in each.labels)} {each.figure} {each.value:.4g}" for each in row
        )
        print(f"round {number} (load {os.getloadavg()[0]:.1f}): {said}", flush=True)
    if again:
        print(f"{again} rounds repeated: something else used the drives")
    return taken


def _figure(name: str, medium: str, key: tuple[str, tuple[tuple[str, str], ...]], values: list[float]) -> Measurement:
    of, labels = key
    form = ".".join([name, *(f"{{{label}}}" for label, _ in labels), "{figure}"])
    return figure(What(form, QUANTITIES.get(of, "duration"), "perf", medium, of, dict(labels)), values)


def goals_of(name: str, measured: Sequence[Measurement]) -> list[Goal]:
    """The goals of a program in programs.toml: of its lines there, those of which something was measured."""
    mine = [goal for goal in read_goals({}).goals if goal.run[0] == name]
    runs = {goal.run for goal in mine if goal.pick.of(measured)}
    return list({goal.words() + goal.sense: goal for goal in mine if goal.run in runs}.values())


def read_goals(settings: Mapping[str, str]) -> GoalsFile:
    """All of them; each ``run`` is a line of a program here."""
    return parse(GOALS.read_text(), GOALS.name, settings, lambda words: None, lambda words: FIGURES)


def conclude(record: Record, goals: Sequence[Goal], runs_dir: Path) -> int:
    """Print figures and verdicts, keep the record; the exit status."""
    for each in record.measurements:
        of = estimate(each.samples or [each.value])
        spread = f"[{of.low:.4g} to {of.high:.4g}, {of.level:.0%}]"
        print(f"{each.name}: {of.value:.4g} {each.unit.replace('1', '', 1) or 'x'} {spread}")
    results: list[GoalResult] = []
    for goal in goals:
        lack = lacks(goal.needs)
        results.append(skipped(goal, lack) if lack else judged(goal, [record]))
        said, value = results[-1], results[-1].value
        found = said.reason if value is None else f"{value:.4g}"
        print(f"{title(said)}: {found}; goal: {said.sense} {said.bound:g}: {said.verdict}")
    verdict = verdict_over(results) if results else None
    prepare_runs_dir(runs_dir)
    kept = records.write(record.model_copy(update={"goals": results or None, "verdict": verdict}), runs_dir)
    print(f"record: {kept}")
    return 0 if verdict is None else int(code_of(verdict))


def apart(work: Callable[..., ResultT], *arguments: Any) -> tuple[ResultT, int]:
    """What it returns in a process of its own, and the bytes that this took at most."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_and_peak, work, arguments).result()


def _and_peak(work: Callable[..., ResultT], arguments: tuple[Any, ...]) -> tuple[ResultT, int]:
    result = work(*arguments)
    return result, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def output(*command: object, env: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)) -> str:
    """What a program prints. Raises ``RuntimeError`` where it ends with another code."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env)
    if done.returncode not in codes:
        raise RuntimeError(f"`{command[0]}` ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


def tunetool(*words: object, codes: Sequence[int] = (0,)) -> dict[str, Any]:
    """The JSON of a command of this checkout."""
    document: dict[str, Any] = json.loads(output(sys.executable, "-m", "tunetool", *words, "--json", "-", codes=codes))
    return document


def fio(directory: Path, direction: Any, files: int, size: int, proven: bool = False, **more: Any) -> float:
    """Bytes per second of fio with a job for each file, past the page cache where there is one; reads what it wrote.

    ``proven``: raises ``Again`` where the drives' counters do not prove them. ``more``: of its ``Job``.
    """
    direct, found = takes_direct_io(directory), find_fio(os.environ)
    how = {"direct": direct, "fallocate": "native" if direct else "truncate", **more}
    with Counting(read_stack(str(directory)), f"fio's {direction}") as counting:
        job = Job(direction, files, size // files // MIB * MIB, **how)
        outcome = run(found, job, directory, os.environ, 1800)
    counted = counting.count(direction, outcome.claimed_bytes) if proven else None
    if counted is not None and counted.judgement != "proven":
        raise Again(f"fio's {direction}: {counted.judgement}")
    return outcome.bandwidth


def fio_samples(source: Path, target: Path, files: int, size: int) -> Iterator[Sample]:
    """fio's read at ``source``, its write at ``target``, and the slower of both: what a copy can reach."""
    speeds = {}
    for direction, place in (("read", source), ("write", target)):
        directory = Path(tempfile.mkdtemp(prefix="fio-", dir=place))
        if direction == "read":
            fio(directory, "write", files, size)
        speeds[direction] = fio(directory, direction, files, size)
        shutil.rmtree(directory)
        yield sample("bandwidth", speeds[direction], engine="fio", direction=direction)
    yield sample("bandwidth", min(speeds.values()), engine="fio", way="the slower")


def keep_compiled(folder: Path) -> None:
    """Programs that start from now on keep compiled files there, as those of an installed package do."""
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder / "compiled")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
