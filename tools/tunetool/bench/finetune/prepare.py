"""What a fine-tune needs below ``--target``: a model and pictures, made where they are missing, reused where whole."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool.bench.finetune import models, pictures
from tunetool.bench.finetune.making import alone, building, need_room
from tunetool.errors import UsageProblem
from tunetool.measure.progress import MovingProgress
from tunetool.node.units import format_size
from tunetool.stage.place import Place, inode_of

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
    if model in models.SIZES:
        found_model = target / f"qwen2.5-vl-{model}"
        parts.append(_model_part(model, found_model, seed))
    else:
        found_model = Path(model).absolute()
        models.check(found_model)
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
        room=models.room(size),
        write=lambda built, tick: models.write(size, built, seed, tick=tick),
        whole=_whole_model,
    )


def _whole_model(directory: Path, _: Mapping[str, Any]) -> None:
    models.check(directory)


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
