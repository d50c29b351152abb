"""Model and data on every node of a fine-tune: here directly, elsewhere by one rank for each node.

``-m tunetool.bench.finetune.preparing --material JSON`` is that rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tunetool.bench.finetune import models
from tunetool.bench.finetune.prepare import prepare
from tunetool.bench.finetune.recorder import keep_error
from tunetool.bench.finetune.request import Material
from tunetool.bench.finetune.train import explained
from tunetool.bench.finetune.workload import rank_directory
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.launch import rank as launched
from tunetool.launch.job import Job, Launcher
from tunetool.launch.local import RankFailed
from tunetool.measure import busy
from tunetool.measure.progress import MovingProgress, Progress
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.container import device_nodes

_MODULE = "tunetool.bench.finetune.preparing"
_PREPARED = "prepared.json"


@dataclass(frozen=True)
class Ready:
    """What a node has for the ranks on it."""

    host: str
    model: str
    dataset: str
    model_bytes: int
    model_medium: str
    dataset_medium: str
    in_memory: bool
    """What the model lies on."""
    gpus: int
    busy: Sequence[str] = ()
    """Who is at work there."""


def gpus(environment: Mapping[str, str], root: str = "/") -> int:
    """GPUs that a process may use here, by the device nodes and CUDA_VISIBLE_DEVICES; torch is not asked."""
    there = len(device_nodes("nvidia[0-9]*", root))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return there
    chosen = [each for each in visible.split(",") if each.strip() and each.strip() != "-1"]
    return min(there, len(chosen))


def prepare_here(material: Material, host: str, progress: MovingProgress, look: bool) -> Ready:
    """Make what is missing. ``look``: also for a second at who else is at work. Raises ``TunetoolError``."""
    made = prepare(
        material.model, material.dataset, material.images, material.target or Path(), material.seed, progress
    )
    stacks = [read_stack(str(path.resolve())) for path in (made.model, made.dataset)]
    found: list[str] = []
    if look:
        with progress.step("looking for other work", busy.LOOK_SECONDS) as tick:
            found = list(dict.fromkeys(line for stack in stacks for line in busy.look(stack, tick)))
    return Ready(
        host=host,
        model=str(made.model),
        dataset=str(made.dataset),
        model_bytes=models.check(made.model).bytes,
        model_medium=stacks[0].medium,
        dataset_medium=stacks[1].medium,
        in_memory=stacks[0].in_memory,
        gpus=gpus(os.environ),
        busy=found,
    )


def prepare_on_hosts(
    material: Material, launcher: Launcher, job: Job, progress: Progress, look: bool, seconds: float = 0.0
) -> list[Ready]:
    """The same on each of the job's hosts, one rank for each. Raises as ``train.run_workload`` does."""
    told = json.dumps({**asdict(material), "look": look}, default=str)
    job = replace(job, program=("-m", _MODULE, "--material", told), ranks_per_host=1)
    with progress.step(f"model and data on {len(job.hosts)} hosts", seconds) as tick:
        try:
            launcher.run(job, tick)
        except RankFailed as error:
            raise explained(error, job) from error
    found = []
    for number, host in enumerate(job.hosts):
        file = rank_directory(job.directory, number) / _PREPARED
        try:
            found.append(Ready(**{**json.loads(file.read_text()), "host": host.name}))
        except (OSError, ValueError, TypeError) as error:
            raise CannotJudge(f"`{host.name}` did not say what it has: {error}") from None
    if len({(each.model, each.dataset) for each in found}) != 1:
        raise UsageProblem("model and data have different paths on the hosts", "give absolute ones")
    return found


class _Beating:
    """Progress of a rank: lines in its log, and a sign of life at each tick."""

    def say(self, line: str) -> None:
        sys.stderr.write(line + "\n")

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        self.say(name)
        yield launched.beat

    @contextlib.contextmanager
    def moving(self, name: str, total: int) -> Iterator[Callable[[int], None]]:
        self.say(name)
        yield lambda _: launched.beat()


def main(arguments: Sequence[str]) -> int:
    """Exit status as tunetool's own."""
    own = launched.out()
    try:
        told = json.loads(arguments[1])
        look = bool(told.pop("look"))
        paths = {name: Path(told[name]) if told[name] is not None else None for name in ("dataset", "target")}
        ready = prepare_here(Material(**{**told, **paths}), "", _Beating(), look)
    except TunetoolError as error:
        keep_error(own, error)
        sys.stderr.write(f"error: {error.message}\n")
        return int(error.exit_code)
    (own / _PREPARED).write_text(json.dumps(asdict(ready)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
