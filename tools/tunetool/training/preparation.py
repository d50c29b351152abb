"""Prepare model and data on every node of a fine-tune: make them below ``--target``, or reuse complete ones.

``prepare_here`` does it on this machine; ``prepare_on_hosts`` starts one rank on each node, which runs
``-m tunetool.training.preparation --material JSON``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch import rank as launched
from tunetool.launch.job import Job, Launcher
from tunetool.launch.local import RankFailed
from tunetool.measure import busy
from tunetool.measure.progress import MovingProgress, Progress
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.node.units import format_count, format_size
from tunetool.origin import install_hint
from tunetool.stage.destination import Destination, alone, building, inode_of
from tunetool.stage.room import need_room
from tunetool.training.data import pictures
from tunetool.training.data.conversations import INFO, choose
from tunetool.training.model import reference_model
from tunetool.training.rank.recorder import leave_answer
from tunetool.training.run_workload import explained
from tunetool.training.workload import Material, rank_directory

MANIFEST = "tunetool.json"
"""Name of the manifest in each directory that was made; it exists only in a complete one."""
SCHEMA = "tunetool.prepared/1"
WIDTH, HEIGHT = 1928, 1208
TINY = (448, 280)
"""Width and height of pictures for the model ``tiny``, whose training larger ones would dominate."""


class Prepared(NamedTuple):
    """The directories of model and dataset, ready for the ranks."""

    model: Path
    dataset: Path


@dataclass(frozen=True)
class Part:
    """One directory to make. ``wanted``: what its manifest must contain; ``room``: the bytes that it needs."""

    directory: Path
    what: str
    wanted: Mapping[str, Any]
    room: int
    write: Callable[[Path, Callable[[int], None]], None]
    whole: Callable[[Path, Mapping[str, Any]], None]
    """Takes the directory and its manifest; raises ``UsageProblem`` where files are missing."""


def prepare(
    material: Material, progress: MovingProgress, size: tuple[int, int] | None = None, dry_run: bool = False
) -> Prepared:
    """Make the model and the dataset where the material does not name directories of the user, which are only checked.

    ``size``: width and height of the pictures. ``dry_run``: report what would be made, but make nothing. Raises
    ``UsageProblem`` for a directory that is incomplete or was made with another seed; ``CannotJudge`` where there is no
    room, before anything is written.
    """
    parts, target = [], material.target or Path()
    if material.model in reference_model.SIZES:
        model = target / f"qwen2.5-vl-{material.model}"
        parts.append(_model_part(material.model, model, material.seed))
    else:
        model = Path(material.model).absolute()
        reference_model.check(model)
    width, height = size or (TINY if material.model == "tiny" else (WIDTH, HEIGHT))
    if material.folder is None:
        dataset = target / f"colours-{material.images}x{width}x{height}"
        parts.append(_dataset_part(dataset, material.images, width, height, material.seed))
    else:
        dataset = material.folder.absolute()
        if not (dataset / INFO).is_file():
            raise UsageProblem(f"`{dataset}` has no `{INFO}`", "a dataset is a directory as LLaMA-Factory reads it")
        choose(dataset, material.entry)
    if parts and not dry_run:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageProblem(
                f"`{target}` cannot be created: {error.strerror}", "name a writable `--target`"
            ) from None
    missing = [part for part in parts if not _is_complete(part)]
    if missing:
        _announce(missing, target, progress)
    if missing and not dry_run:
        _need_libraries()
        for part in missing:
            _make(part, progress)
    return Prepared(model, dataset)


def _need_libraries() -> None:
    for module, package in (("numpy", "numpy"), ("PIL", "pillow")):
        if importlib.util.find_spec(module) is None:
            raise UsageProblem(f"`{package}` is not installed in `{sys.executable}`", install_hint("finetune"))


def _announce(missing: list[Part], target: Path, progress: MovingProgress) -> None:
    room = sum(part.room for part in missing)
    progress.say(f"makes {' and '.join(part.what for part in missing)}: {format_size(room)} in `{target}`")
    existing = target
    while not existing.exists():
        existing = existing.parent
    need_room(existing.resolve(), room, " and ".join(part.what for part in missing))


def _is_complete(part: Part) -> bool:
    """Whether the directory exists. Raises ``UsageProblem`` where it is incomplete or was made differently."""
    directory = part.directory
    if inode_of(directory) is None:
        return False
    hint = f"remove `{directory}`, or name another `--target`"
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UsageProblem(f"`{directory}` was not made by tunetool: it has no `{MANIFEST}`", hint) from None
    different = {key for key, value in part.wanted.items() if manifest.get(key) != value}
    if different:
        key = min(different)
        raise UsageProblem(f"`{directory}` was made with {key} {manifest.get(key)}, needed is {part.wanted[key]}", hint)
    try:
        part.whole(directory, manifest)
    except UsageProblem as error:
        raise UsageProblem(error.message, hint) from None
    return True


def _make(part: Part, progress: MovingProgress) -> None:
    with alone(part.directory, progress.say) as destination:
        if not _is_complete(part):  # another run may have made it while this one waited
            _build(part, destination, progress)


def _build(part: Part, destination: Destination, progress: MovingProgress) -> None:
    with building(destination) as built, progress.moving(f"making {part.what}", part.room) as tick:
        part.write(built, tick)
        files = [path for path in built.rglob("*") if path.is_file()]
        sizes = {"files": len(files), "bytes": sum(path.stat().st_size for path in files)}
        (built / MANIFEST).write_text(json.dumps({**part.wanted, **sizes}, indent=2) + "\n")


def _model_part(size: str, directory: Path, seed: int) -> Part:
    return Part(
        directory=directory,
        what=f"the model `{size}`",
        wanted={"schema": SCHEMA, "model": size, "seed": seed},
        room=reference_model.room(size),
        write=lambda built, tick: reference_model.write(size, built, seed, tick=tick),
        whole=_require_whole_model,
    )


def _require_whole_model(directory: Path, _: Mapping[str, Any]) -> None:
    reference_model.check(directory)


def _dataset_part(directory: Path, images: int, width: int, height: int, seed: int) -> Part:
    return Part(
        directory=directory,
        what=f"{images} pictures of {width}x{height}",
        wanted={"schema": SCHEMA, "images": images, "width": width, "height": height, "seed": seed},
        room=pictures.room(images, width, height),
        write=lambda built, tick: pictures.write(built, images, width, height, seed, tick),
        whole=_require_all_pictures,
    )


def _require_all_pictures(directory: Path, manifest: Mapping[str, Any]) -> None:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST]
    size = sum(path.stat().st_size for path in files)
    if (len(files), size) != (manifest.get("files"), manifest.get("bytes")):
        raise UsageProblem(
            f"`{directory}` has {len(files)} files with {size} bytes, but was made with "
            f"{manifest.get('files')} files with {manifest.get('bytes')} bytes"
        )


_MODULE = "tunetool.training.preparation"
_PREPARED = "prepared.json"


@dataclass(frozen=True)
class Ready:
    """The model, data and GPUs that a node has for its ranks."""

    host: str
    model: str
    dataset: str
    model_bytes: int
    model_medium: str
    dataset_medium: str
    in_memory: bool
    """Whether the model is on a file system in memory."""
    gpus: int
    busy: Sequence[str] = ()
    """Lines that name other work on the devices of model and data."""


def gpus(environment: Mapping[str, str], root: str = "/") -> int:
    """Number of GPUs that a process may use here, by the device nodes and CUDA_VISIBLE_DEVICES, without torch."""
    present = len(device_nodes("nvidia[0-9]*", root))
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return present
    chosen = [each for each in visible.split(",") if each.strip() and each.strip() != "-1"]
    return min(present, len(chosen))


def prepare_here(material: Material, host: str, progress: MovingProgress, look: bool) -> Ready:
    """Make what is missing on this machine. ``look``: also watch its devices for other work for a second.

    Raises ``TunetoolError`` as ``prepare`` does.
    """
    made = prepare(material, progress)
    stacks = [read_stack(str(path.resolve())) for path in made]
    other_work: list[str] = []
    if look:
        with progress.step("looking for other work", busy.LOOK_SECONDS) as tick:
            other_work = list(dict.fromkeys(line for stack in stacks for line in busy.look(stack, tick)))
    return Ready(
        host=host,
        model=str(made.model),
        dataset=str(made.dataset),
        model_bytes=reference_model.check(made.model).bytes,
        model_medium=stacks[0].medium,
        dataset_medium=stacks[1].medium,
        in_memory=stacks[0].in_memory,
        gpus=gpus(os.environ),
        busy=other_work,
    )


def prepare_on_hosts(
    material: Material, launcher: Launcher, job: Job, progress: Progress, look: bool, seconds: float = 0.0
) -> list[Ready]:
    """As ``prepare_here``, on each of the job's hosts with one rank each. Raises as ``run_workload`` does."""
    material_json = json.dumps({**asdict(material), "look": look}, default=str)
    job = replace(job, program=("-m", _MODULE, "--material", material_json), ranks_per_host=1)
    with progress.step(f"model and data on {format_count(len(job.hosts), 'host')}", seconds) as tick:
        try:
            launcher.run(job, tick)
        except RankFailed as error:
            raise explained(error, job) from error
    ready = []
    for number, host in enumerate(job.hosts):
        file = rank_directory(job.directory, number) / _PREPARED
        try:
            ready.append(Ready(**{**json.loads(file.read_text()), "host": host.name}))
        except (OSError, ValueError, TypeError) as error:
            raise CannotJudge(f"`{host.name}` left no result of its preparation: {error}") from None
    if len({(each.model, each.dataset) for each in ready}) != 1:
        raise UsageProblem("model and data have different paths on the hosts", "use absolute paths")
    return ready


class RankProgress:
    """Progress of a rank: lines in its log unless ``quiet``, and a heartbeat for the watchdog at each tick."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def say(self, line: str) -> None:
        if not self._quiet:
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
    """Prepare this node as one rank; returns tunetool's exit status."""
    order = json.loads(arguments[1])
    look = bool(order.pop("look"))
    return leave_answer(lambda: prepare_here(Material.parse(order), "", RankProgress(), look), _PREPARED)


def stacks_of(ready: Ready) -> list[BlockStack]:
    """The block devices below model and data on this machine."""
    return [read_stack(str(Path(path).resolve())) for path in (ready.model, ready.dataset)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
