"""Tasks of a node between two runs: report its resources, stage the files to memory, evict them.

``answer`` does it here; ``python -m tunetool.bench.staging.node_task TASK`` as the one rank that a launcher starts on a
node, so that every launcher reaches every node in the same way and leaves no process there when it is interrupted.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from tunetool.bench.staging.advice import Room, refusal
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure import page_cache
from tunetool.measure.progress import MovingProgress
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.memory import bytes_left
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.stage.room import Limit, limits, space_needed
from tunetool.stage.run import Request as Stage
from tunetool.stage.run import run as stage
from tunetool.stage.tree import scan, total_bytes
from tunetool.training.data.conversations import read_conversations
from tunetool.training.model import reference_model
from tunetool.training.preparation import HEIGHT, TINY, WIDTH, Prepared, RankProgress, Ready, gpus, prepare
from tunetool.training.rank.recorder import leave_answer
from tunetool.training.workload import Material

MODULE = "tunetool.bench.staging.node_task"
ANSWER = "node.json"
MODEL, DATASET = "model", "dataset"
"""Names of the two trees in memory."""


@dataclass(frozen=True)
class Task:
    """``directory`` is the run's own directory under ``memory``; it is made where it is absent."""

    do: Literal["look", "stage", "evict"]
    material: Material
    memory: str
    directory: str = ""

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Task:
        """From what ``to_json`` wrote. Raises ``UsageProblem``."""
        return cls(**{**document, "material": Material.parse(document["material"])})

    def to_json(self) -> str:
        """The task as arguments of a command line."""
        return json.dumps(asdict(self), default=str)


@dataclass(frozen=True)
class Answer:
    """The answer of a node. Bytes are those of files; ``needed``: of the memory pages that they take."""

    host: str
    model: str = ""
    dataset: str = ""
    """Directories of model and data."""
    model_bytes: int = 0
    data_bytes: int = 0
    images: int = 0
    """Number of samples of the data set."""
    needed: int = 0
    limits: tuple[tuple[int, str], ...] = ()
    """Of the directory in memory: bytes that are left, and what says so; the tightest first."""
    bulk: str = ""
    """The medium that model and data lie on."""
    bulk_in_memory: bool = False
    memory: str = ""
    ram: int = 0
    """Bytes that a process or the page cache may still take; 0: unknown."""
    gpus: int = 0
    missing: tuple[str, ...] = ()
    """Those of model and data that must be made first."""
    seconds: float = 0.0
    """Seconds of staging."""
    staged: int = 0
    """Bytes."""
    records: tuple[str, ...] = ()
    """Of ``tunetool stage``, as JSON."""

    @property
    def room(self) -> Room:
        """Whether model and data fit into memory."""
        return Room(self.needed, [Limit(left, what) for left, what in self.limits])

    @property
    def ready(self) -> Ready:
        """The node as ``training`` counts its ranks."""
        return Ready(
            self.host, self.model, self.dataset, self.model_bytes, self.bulk, self.bulk, self.bulk_in_memory, self.gpus
        )


def answer(task: Task, progress: MovingProgress) -> Answer:
    """Do the task on this node. Raises ``UsageProblem``, ``CannotJudge``."""
    if task.do == "look":
        return look(task)
    if task.do == "stage":
        return take(task, progress)
    give_back(Path(task.directory))
    return Answer(socket.gethostname())


def look(task: Task) -> Answer:
    """Sizes, also of what is not made yet, and room. Raises ``UsageProblem`` if they do not fit."""
    asked, memory = task.material, Path(task.memory)
    prepared = prepare(asked, RankProgress(quiet=True), dry_run=True)
    sizes = _sizes(asked, prepared)
    bulk = read_stack(nearest(prepared.model))
    reply = Answer(
        socket.gethostname(),
        model=str(prepared.model),
        dataset=str(prepared.dataset),
        model_bytes=sizes[0][0],
        data_bytes=sizes[1][0],
        images=asked.images if asked.dataset is None else _samples(prepared.dataset, asked.entry),
        needed=sizes[0][1] + sizes[1][1],
        limits=room_in(memory),
        bulk=bulk.medium,
        bulk_in_memory=bulk.in_memory,
        memory=read_stack(str(memory.resolve())).medium,
        ram=bytes_left(),
        gpus=gpus(os.environ),
        missing=tuple(str(each) for each in prepared if not each.is_dir()),
    )
    if not reply.room.fits:
        raise UsageProblem(
            f"`{memory}` is too small: {refusal(reply.room)}",
            "stage less (`--images`, a smaller `--model`), enlarge it (`mount -o remount,size=SIZE /dev/shm`), or "
            "raise the memory limit",
        )
    return reply


def _sizes(asked: Material, prepared: Prepared) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of model and data: bytes of the files, and of the pages that a copy of them takes."""
    model, data = _tree(prepared.model), _tree(prepared.dataset)
    if model is None:
        size = reference_model.describe(asked.model).bytes
        model = (size, size)
    if data is None:
        from tunetool.training.data import pictures  # noqa: PLC0415  (numpy and Pillow)

        room = pictures.room(asked.images, *(TINY if asked.model == "tiny" else (WIDTH, HEIGHT)))
        data = (room, room)
    return model, data


def _tree(directory: Path) -> tuple[int, int] | None:
    if not directory.is_dir():
        return None
    tree = scan(directory)
    return total_bytes(tree), space_needed(tree)


def _samples(dataset: Path, entry: str | None) -> int:
    return len(read_conversations(dataset, entry))


def nearest(path: Path) -> str:
    """The nearest existing directory above, whose medium new files will be on."""
    while not path.exists():
        path = path.parent
    return str(path.resolve())


def room_in(memory: Path) -> tuple[tuple[int, str], ...]:
    """What a directory in memory can still take: bytes, and what says so. Raises ``UsageProblem``."""
    if not memory.is_dir() or not os.access(memory, os.W_OK | os.X_OK):
        raise UsageProblem(
            f"`{memory}` is not a writable directory", "`--memory-target` takes a directory such as /dev/shm"
        )
    stack = read_stack(str(memory.resolve()))
    if not stack.in_memory:
        raise UsageProblem(
            f"`{memory}` lies on {stack.medium}, not in memory", "`--memory-target` takes a directory such as /dev/shm"
        )
    mount = mount_holding(os.path.realpath(memory), read_mounts())
    return tuple((limit.left, limit.what) for limit in limits(memory, mount.fs_type if mount else "unknown"))


def take(task: Task, progress: MovingProgress) -> Answer:
    """Stage model and data in memory, from a cold cache. ``material`` names both directories."""
    directory = Path(task.directory)
    directory.mkdir(mode=0o700, exist_ok=True)
    pairs = [(Path(task.material.model), directory / MODEL), (Path(str(task.material.dataset)), directory / DATASET)]
    for source, _ in pairs:
        page_cache.drop(source)
    records, staged = [], 0
    with tempfile.TemporaryDirectory(prefix="tunetool-") as runs:
        started = time.perf_counter()
        for source, destination in pairs:
            result = stage(Stage("stage", str(destination), str(source), runs_dir=Path(runs)), progress)
            assert result.record is not None and result.path is not None  # noqa: PT018, S101  (no dry run)
            if result.code != ExitCode.OK:
                reasons = result.record.verdict.reasons if result.record.verdict is not None else []
                raise CannotJudge(next(iter(reasons), f"`{source}` was not staged"))
            records.append(result.path.read_text())
            staged += sum(int(figure.parameters["bytes"]) for figure in result.record.measurements)
        seconds = time.perf_counter() - started
    return Answer(socket.gethostname(), seconds=seconds, staged=staged, records=tuple(records))


def give_back(staged: Path) -> None:
    """Remove a staged copy. Lets Ctrl-C through, unlike ``stage.destination.remove_tree``: the caller tries again."""
    with contextlib.suppress(FileNotFoundError):
        for directory, names, _ in os.walk(staged):
            for path in (Path(directory, name) for name in names):
                if not path.is_symlink():
                    path.chmod(0o700)  # copies have the modes of their sources
        shutil.rmtree(staged)


def parse(text: str) -> Answer:
    """What ``main`` wrote. Raises ``ValueError``, ``KeyError``, ``TypeError`` for anything else."""
    fields: dict[str, Any] = json.loads(text)
    pairs = tuple((int(left), str(what)) for left, what in fields.pop("limits"))
    return Answer(
        **{**fields, "limits": pairs, "records": tuple(fields["records"]), "missing": tuple(fields["missing"])}
    )


def main(text: str) -> int:
    """Run a task on a node: write the answer, or the error, to the rank's own directory."""
    return leave_answer(lambda: answer(Task.parse(json.loads(text)), RankProgress()), ANSWER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
