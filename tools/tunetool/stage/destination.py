"""DST and its hidden siblings: one run at a time, never an incomplete tree at DST, and no leftovers.

Beside ``DST = DIR/NAME`` lie ``DIR/.NAME.tunetool-stage.json`` (the manifest), and while a run
works ``.NAME.tunetool-stage.lock`` and ``.NAME.tunetool-stage-RUN`` (the tree being built). For the holder of the lock,
every other such sibling belongs to a dead run.

The manifest is the journal: it is written when the tree is complete and names its inode; only then is the tree renamed
to DST. If a run is killed between the two, the next run does the rename. If the manifest cannot be read then, the tree
that was at DST gets its name back.

Directories of a fine-tune and of benchmarks are made in the same way, without a manifest (``making``).
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tunetool.ctrl_c import CtrlC
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common.file_lock import FileLock, ForeignLock
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.mounts import mount_at, read_mounts
from tunetool.stage import manifest as manifests
from tunetool.stage.manifest import Manifest
from tunetool.stage.system import exchange, flush


@dataclass(frozen=True)
class Destination:
    """``path`` is DST, absolute, its parent's links resolved."""

    path: Path

    @property
    def manifest(self) -> Path:
        """The path of the manifest."""
        return self._sibling("stage.json")

    @property
    def lock(self) -> Path:
        """The path of the lock file, which a working run holds."""
        return self._sibling("stage.lock")

    def fresh(self, purpose: str) -> Path:
        """A new, unique path for a hidden sibling."""
        return self._sibling(f"{purpose}-{uuid.uuid4().hex[:12]}")

    def siblings(self, purpose: str) -> list[Path]:
        """The existing siblings: ``stage`` are trees being built, ``gone`` are trees being removed."""
        head = self._sibling(f"{purpose}-").name
        with os.scandir(self.path.parent) as entries:
            return sorted(Path(entry.path) for entry in entries if entry.name.startswith(head))

    def _sibling(self, end: str) -> Path:
        return self.path.parent / f".{self.path.name}.tunetool-{end}"


def find_destination(text: str) -> Destination:
    """DST from the command line. Raises ``UsageProblem`` for a path that cannot be DST."""
    absolute = Path(os.path.abspath(text))
    parent = absolute.parent
    if not absolute.name:
        raise UsageProblem(f"`{text}` is the root directory", "name a directory under it")
    if not parent.is_dir():
        raise UsageProblem(f"`{parent}` does not exist", "create it first: only DST itself is created")
    path = Path(os.path.realpath(parent)) / absolute.name
    if path.is_symlink():
        raise UsageProblem(f"`{path}` is a link", f"name its target: `{os.path.realpath(path)}`")
    if path.exists() and not path.is_dir():
        raise UsageProblem(f"`{path}` is not a directory", "DST becomes the copy of what SRC holds")
    if mount_at(str(path), read_mounts()) is not None:
        raise UsageProblem(
            f"`{path}` is a mount point, which nothing can be renamed to",
            f"name a directory in it, such as `{path}/NAME`",
        )
    return Destination(path)


def inode_of(path: Path) -> int | None:
    """The inode of the directory ``path``; None if there is no such directory."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status.st_ino if stat.S_ISDIR(status.st_mode) else None


@contextlib.contextmanager
def only_one(destination: Destination, wait: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of DST; finish and clean up after dead runs first, and remove the lock file at the end.

    If another run holds the lock: with ``wait``, names it by ``say`` and waits; otherwise raises ``CannotJudge``.
    """
    lock = _locked(destination, wait, say)
    try:
        lock.sign(f"process {os.getpid()} on {os.uname().nodename}\n")
        settle(destination)
        yield
    finally:
        # Remove the file while it is locked: a waiting run finds another file, or none, and tries again.
        with contextlib.suppress(OSError):
            destination.lock.unlink()
        lock.close()


def _locked(destination: Destination, wait: bool, say: Callable[[str], None]) -> FileLock:
    announced = False
    while True:
        try:
            lock = FileLock.our_file(destination.lock)
        except ForeignLock as error:
            raise UsageProblem(error.message, f"{error.hint}, or choose another DST") from None
        except OSError as error:
            raise UsageProblem(
                f"`{destination.path.parent}` cannot be written: {error.strerror}", "choose a DST that you may write"
            ) from None
        with contextlib.ExitStack() as stack:
            stack.enter_context(lock)
            if lock.take(patience=0):
                if lock.is_named():
                    stack.pop_all()
                    return lock
                continue
            holder = lock.note() or "another run"
            if not wait:
                raise CannotJudge(
                    f"busy: `{destination.path}` is being staged by {holder}", "omit `--no-wait` to wait for it"
                )
            if not announced:
                say(f"waiting for {holder}, which is working on `{destination.path}`")
                announced = True
            time.sleep(0.1)


def known(destination: Destination) -> Manifest | None:
    """The manifest of the tree at DST; None if there is none or it belongs to another tree."""
    manifest = manifests.read(destination.manifest)
    return manifest if manifest is not None and manifest.inode == inode_of(destination.path) else None


def settle(destination: Destination) -> None:
    """Finish the rename of a dead run, then remove its leftovers. The caller must hold the lock."""
    unfinished = destination.siblings("stage")
    unreadable = False
    try:
        # Of 100,000 files it takes a second to read.
        needed = unfinished or inode_of(destination.path) is None
        journal = manifests.read(destination.manifest) if needed else None
    except UsageProblem:
        journal, unreadable = None, True
    for path in unfinished:
        # Never replace a tree that was put there since.
        if journal is not None and inode_of(path) == journal.inode and free_for(destination, journal.replaces):
            put(path, destination)
    if unreadable and unfinished and inode_of(destination.path) is None:
        # It died between the two renames of ``put``. Whether the new tree is complete is not known; the old one is.
        for path in destination.siblings("gone")[:1]:
            path.rename(destination.path)
    for path in [*destination.siblings("stage"), *destination.siblings("gone")]:
        remove_tree(path)
    if journal is not None and inode_of(destination.path) is None:
        destination.manifest.unlink(missing_ok=True)


def free_for(destination: Destination, replaced: int | None) -> bool:
    """Whether DST is absent, empty, or the directory with the inode ``replaced``."""
    inode = inode_of(destination.path)
    return inode is None or inode == replaced or is_empty(destination.path)


def is_empty(path: Path) -> bool:
    """Whether a directory is empty."""
    with os.scandir(path) as entries:
        return next(entries, None) is None


def put(built: Path, destination: Destination) -> None:
    """Rename the complete tree ``built`` to DST and remove the old tree. DST exists at every moment.

    If the file system cannot exchange two names, DST is absent for a moment; if the process dies then, ``settle`` does
    the rename.
    """
    if inode_of(destination.path) is None:
        built.rename(destination.path)
    elif exchange(built, destination.path):
        built.rename(destination.fresh("gone"))
    else:
        gone = destination.fresh("gone")
        try:
            destination.path.rename(gone)
            built.rename(destination.path)
        except BaseException:
            if inode_of(destination.path) is None:
                gone.rename(destination.path)
            raise
    for path in destination.siblings("gone"):
        remove_tree(path)


def take_away(destination: Destination) -> None:
    """Remove DST and its manifest. DST is renamed first, so that no process finds an incomplete tree."""
    gone = destination.fresh("gone")
    destination.path.rename(gone)
    destination.manifest.unlink(missing_ok=True)
    remove_tree(gone)


def remove_tree(path: Path) -> None:
    """Remove a tree, including read-only directories. Ctrl-C counts once that is done."""
    ctrl_c = CtrlC()
    for _ in range(3):
        with ctrl_c.held():
            with contextlib.suppress(FileNotFoundError):
                for directory, _, _ in os.walk(path):
                    if not os.access(directory, os.W_OK | os.X_OK):
                        Path(directory).chmod(0o700)
                shutil.rmtree(path)
            break
    ctrl_c.deliver()


@contextlib.contextmanager
def alone(directory: Path, say: Callable[[str], None]) -> Iterator[Destination]:
    """Hold the lock of ``directory``, after the leftovers of killed runs were removed. Waits for other runs."""
    destination = find_destination(str(directory))
    with only_one(destination, True, say):
        yield destination


@contextlib.contextmanager
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


@contextlib.contextmanager
def making(directory: Path, contents: str) -> Iterator[Path]:
    """``alone`` and ``building`` together. Raises ``UsageProblem`` if ``directory`` exists already."""
    with alone(directory, lambda _: None) as destination:
        if inode_of(destination.path) is not None:
            raise UsageProblem(f"`{directory}` is there already", f"name a directory in which {contents} is to be made")
        with building(destination) as built:
            yield built
