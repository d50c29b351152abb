"""Creates a directory atomically, as ``tunetool stage`` does: it is built as a hidden sibling, then renamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_holding, read_mounts
from tunetool.node.units import format_size
from tunetool.stage.destination import Destination, find_destination, inode_of, only_one, put, remove_tree
from tunetool.stage.room import limits
from tunetool.stage.system import flush


def need_room(directory: Path, count: int, purpose: str) -> None:
    """Raises ``CannotJudge`` if ``count`` bytes do not fit below ``directory`` or, for a tmpfs, into memory."""
    mount = mount_holding(str(directory), read_mounts())
    bounds = limits(directory, mount.fs_type if mount else "unknown")
    if bounds and count > bounds[0].left:
        other_limits = "".join(f"; {bound.what} {format_size(bound.left)}" for bound in bounds[1:])
        raise CannotJudge(
            f"{purpose} takes {format_size(count)}, {bounds[0].what} {format_size(bounds[0].left)}{other_limits}",
            "free some, choose a smaller model or fewer images, or another `--target`",
        )


@contextmanager
def alone(directory: Path, say: Callable[[str], None]) -> Iterator[Destination]:
    """Hold the lock of ``directory``, after the leftovers of killed runs were removed. Waits for other runs."""
    destination = find_destination(str(directory))
    with only_one(destination, True, say):
        yield destination


@contextmanager
def building(destination: Destination) -> Iterator[Path]:
    """A hidden directory to fill. It is renamed to its destination on success and removed on an error.

    Raises ``CannotJudge`` for an ``OSError`` within the block.
    """
    built = destination.fresh("stage")
    try:
        built.mkdir()
        yield built
        if not read_stack(str(built)).in_memory:
            flush(built)
        put(built, destination)
    except OSError as error:
        remove_tree(built)
        raise CannotJudge(
            f"`{destination.path}` could not be made: {error.strerror or error}",
            "see `df`, `quota`, `ulimit -f` and `dmesg | tail`; nothing of it is left",
        ) from error
    except BaseException:
        remove_tree(built)
        raise


@contextmanager
def making(directory: Path, contents: str) -> Iterator[Path]:
    """``alone`` and ``building`` together. Raises ``UsageProblem`` if ``directory`` exists already."""
    with alone(directory, lambda _: None) as destination:
        if inode_of(destination.path) is not None:
            raise UsageProblem(f"`{directory}` is there already", f"name a directory in which {contents} is to be made")
        with building(destination) as built:
            yield built
