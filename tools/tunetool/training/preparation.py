"""Model and data on every node of a fine-tune: made below ``--target`` where missing, reused where whole.

``prepare_here`` does it on this machine; ``prepare_on_hosts`` starts one rank on each node, which is
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
from typing import Any

from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.launch import rank as launched
from tunetool.launch.job import Job, Launcher
from tunetool.launch.local import RankFailed
from tunetool.measure import busy
from tunetool.measure.progress import MovingProgress, Progress
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.container import device_nodes
from tunetool.node.units import format_size
from tunetool.stage.destination import Place, inode_of
from tunetool.stage.whole_directory import alone, building, need_room
from tunetool.training.data import pictures
from tunetool.training.model import reference_model
from tunetool.training.rank.recorder import keep_error
from tunetool.training.run_workload import explained
from tunetool.training.settings import Material
from tunetool.training.workload import rank_directory

MANIFEST = "tunetool.json"
"""Inside of what was made, so that it is there if and only if all of it is."""
SCHEMA = "tunetool.prepared/1"
WIDTH, HEIGHT = 1928, 1208
TINY = (448, 280)
"""Pictures for the model ``tiny``: larger ones would be all that its training does."""


@dataclass(frozen=True)
class Prepared:
    """Directories that a rank can be given."""

    model: Path
    dataset: Path


@dataclass(frozen=True)
class Part:
    """One directory to make: ``wanted`` is what its manifest must say."""

    directory: Path
    what: str
    wanted: Mapping[str, Any]
    room: int
    write: Callable[[Path, Callable[[int], None]], None]
    whole: Callable[[Path, Mapping[str, Any]], None]
    """Raises ``UsageProblem`` where something of it is gone. Is given the manifest."""


def prepare(
    model: str,
    dataset: Path | None,
    images: int,
    target: Path,
    seed: int,
    progress: MovingProgress,
    size: tuple[int, int] | None = None,
    dry_run: bool = False,
) -> Prepared:
    """Model (a size or a directory) and dataset (None: ``images`` synthetic ones), ready to be used.

    A directory of the user's is only checked. ``size``: width and height of the pictures. ``dry_run``: says what would
    be made and makes nothing. Raises ``UsageProblem`` for a directory that is not whole, or was made with another seed;
    ``CannotJudge`` where there is no room, before anything is written.
    """
    parts = []
    if model in reference_model.SIZES:
        found_model = target / f"qwen2.5-vl-{model}"
        parts.append(_model_part(model, found_model, seed))
    else:
        found_model = Path(model).absolute()
        reference_model.check(found_model)
    width, height = size or (TINY if model == "tiny" else (WIDTH, HEIGHT))
    if dataset is None:
        found_dataset = target / f"colours-{images}x{width}x{height}"
        parts.append(_dataset_part(found_dataset, images, width, height, seed))
    else:
        found_dataset = dataset.absolute()
        if not (found_dataset / "dataset_info.json").is_file():
            raise UsageProblem(
                f"`{found_dataset}` has no `dataset_info.json`", "a dataset is a directory as LLaMA-Factory reads it"
            )
    if parts and not dry_run:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageProblem(
                f"`{target}` cannot be made: {error.strerror}", "name a `--target` you may write"
            ) from None
    missing = [part for part in parts if not _made(part)]
    if missing:
        _say(missing, target, progress)
    if missing and not dry_run:
        _need_libraries()
        for part in missing:
            _make(part, progress)
    return Prepared(found_model, found_dataset)


def _need_libraries() -> None:
    for module, package in (("numpy", "numpy"), ("PIL", "pillow")):
        if importlib.util.find_spec(module) is None:
            raise UsageProblem(
                f"`{package}` is not installed in `{sys.executable}`", "`pip install 'tunetool[finetune]'`"
            )


def _say(missing: list[Part], target: Path, progress: MovingProgress) -> None:
    room = sum(part.room for part in missing)
    progress.say(f"makes {' and '.join(part.what for part in missing)}: {format_size(room)} in `{target}`")
    existing = target
    while not existing.exists():
        existing = existing.parent
    need_room(existing.resolve(), room, " and ".join(part.what for part in missing))


def _made(part: Part) -> bool:
    """Whether it is there. Raises ``UsageProblem`` where it is, and is not that or not whole."""
    directory = part.directory
    if inode_of(directory) is None:
        return False
    hint = f"remove `{directory}`, or name another `--target`"
    try:
        found = json.loads((directory / MANIFEST).read_text())
    except (OSError, ValueError):
        raise UsageProblem(f"`{directory}` was not made by tunetool: it has no `{MANIFEST}`", hint) from None
    different = {key for key, value in part.wanted.items() if found.get(key) != value}
    if different:
        key = min(different)
        raise UsageProblem(f"`{directory}` was made with {key} {found.get(key)}, asked for is {part.wanted[key]}", hint)
    try:
        part.whole(directory, found)
    except UsageProblem as error:
        raise UsageProblem(error.message, hint) from None
    return True


def _make(part: Part, progress: MovingProgress) -> None:
    with alone(part.directory, progress.say) as place:
        if not _made(part):  # another run may have made it while this one waited
            _build(part, place, progress)


def _build(part: Part, place: Place, progress: MovingProgress) -> None:
    with building(place) as built, progress.moving(f"making {part.what}", part.room) as tick:
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
        whole=_whole_model,
    )


def _whole_model(directory: Path, _: Mapping[str, Any]) -> None:
    reference_model.check(directory)


def _dataset_part(directory: Path, images: int, width: int, height: int, seed: int) -> Part:
    return Part(
        directory=directory,
        what=f"{images} pictures of {width}x{height}",
        wanted={"schema": SCHEMA, "images": images, "width": width, "height": height, "seed": seed},
        room=pictures.room(images, width, height),
        write=lambda built, tick: pictures.write(built, images, width, height, seed, tick),
        whole=_all_pictures,
    )


def _all_pictures(directory: Path, manifest: Mapping[str, Any]) -> None:
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST]
    size = sum(path.stat().st_size for path in files)
    if (len(files), size) != (manifest.get("files"), manifest.get("bytes")):
        raise UsageProblem(
            f"`{directory}` holds {len(files)} files with {size} bytes, and was made with "
            f"{manifest.get('files')} files with {manifest.get('bytes')} bytes"
        )


_MODULE = "tunetool.training.preparation"
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
        model_bytes=reference_model.check(made.model).bytes,
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


def stacks_of(ready: Ready) -> list[BlockStack]:
    """What model and data lie on, on this machine."""
    return [read_stack(str(Path(path).resolve())) for path in (ready.model, ready.dataset)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
