"""A directory that is there whole or not at all, as ``tunetool stage`` makes one: a hidden sibling, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size
from tunetool.stage.destination import Place, find_place, inode_of, only_one, put, remove_tree
from tunetool.stage.room import limits
from tunetool.stage.system import flush


def need_room(directory: Path, count: int, what: str) -> None:
    """Raises ``CannotJudge`` when ``count`` bytes do not fit below ``directory``; in RAM, also by the memory left."""
    mount = mount_holding(str(directory), read_mounts())
    bounds = limits(directory, mount.fs_type if mount else "unknown")
    if bounds and count > bounds[0].left:
        others = "".join(f"; {other.what} {format_size(other.left)}" for other in bounds[1:])
        raise CannotJudge(
            f"{what} takes {format_size(count)}, {bounds[0].what} {format_size(bounds[0].left)}{others}",
            "free some, choose a smaller model or fewer pictures, or another `--target`",
        )


@contextmanager
def alone(directory: Path, say: Callable[[str], None]) -> Iterator[Place]:
    """Nobody else makes ``directory`` meanwhile, and what a killed run left of it is gone."""
    place = find_place(str(directory))
    with only_one(place, True, say):
        yield place


@contextmanager
def building(place: Place) -> Iterator[Path]:
    """A hidden directory to fill, which gets its name when the block ends well and goes away when it does not.

    Raises ``CannotJudge`` for what the system refuses meanwhile.
    """
    built = place.fresh("stage")
    try:
        built.mkdir()
        yield built
        if not read_stack(str(built)).in_memory:
            flush(built)
        put(built, place)
    except OSError as error:
        remove_tree(built)
        raise CannotJudge(
            f"`{place.path}` could not be made: {error.strerror or error}",
            "see `df`, `quota`, `ulimit -f` and `dmesg | tail`; nothing of it is left",
        ) from error
    except BaseException:
        remove_tree(built)
        raise


@contextmanager
def making(directory: Path, what: str) -> Iterator[Path]:
    """Both at once. Raises ``UsageProblem`` where ``directory`` is there already."""
    with alone(directory, lambda _: None) as place:
        if inode_of(place.path) is not None:
            raise UsageProblem(f"`{directory}` is there already", f"name a directory in which {what} is to be made")
        with building(place) as built:
            yield built
