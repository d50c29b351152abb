"""Locks and busy check: one run at a time on a device, and none while a job uses it. And who moved bytes on the drives
beside a measurement; nobody looks before a sample was disturbed."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tunetool.errors import CannotJudge
from tunetool.measure import Direction, process_io
from tunetool.measure.process_io import Mover, movers
from tunetool.node.array.md_arrays import sync_actions
from tunetool.node.common.file_lock import FileLock, ForeignLock
from tunetool.node.common.files import RUN_DIRECTORY, make_run_directory
from tunetool.node.machine.block_stack import BlockStack, Counters, CountersChanged, devices_under, difference, snapshot
from tunetool.node.machine.busy import gpu_processes, scheduler_jobs
from tunetool.node.units import format_size

LOOK_SECONDS = 1.0
QUIET_BYTES = 8 * 10**6
QUIET_IOS = 500
"""Bytes in one second. Journals and logs of an idle system stay below; a job that reads its data does not."""

_ALLOW = "wait until it is done, or pass `--allow-busy` to measure beside it"


def lock_directory(environment: Mapping[str, str], is_root: bool) -> Path:
    """The directory of the locks: the same for everyone who may measure the same device.

    ``TUNETOOL_LOCK_DIR`` names it where there is none by itself: containers of one node each have their own /run.
    """
    named = environment.get("TUNETOOL_LOCK_DIR")
    if named:
        return Path(named)
    if is_root:
        # Not /run/lock, where every user may make a file of that name first, and hold it.
        return Path(RUN_DIRECTORY)
    runtime_directory = environment.get("XDG_RUNTIME_DIR")
    return Path(runtime_directory) if runtime_directory else _last_resort()


def _last_resort() -> Path:
    # A directory of this user: another user's lock file could not be opened.
    return Path(tempfile.gettempdir()) / f"tunetool-{os.geteuid()}"


def _is_ours(directory: Path) -> bool:
    """Whether it is a directory of this user, and no link."""
    status = directory.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def lock_key(stack: BlockStack) -> str:
    """The name of a lock: the mounted device, if there is one."""
    return stack.device_number or f"dev-{Path(stack.directory).stat().st_dev}"


@contextlib.contextmanager
def alone(stacks: Iterable[BlockStack], environment: Mapping[str, str]) -> Iterator[None]:
    """Hold the locks of all devices under ``stacks``. Raises ``CannotJudge`` at once when another run holds one."""
    directory = lock_directory(environment, os.geteuid() == 0)
    with contextlib.ExitStack() as held:
        for key in sorted({lock_key(part) for stack in stacks for part in stack.parts or [stack]}):
            held.enter_context(device_lock(key, directory))
        yield


@contextlib.contextmanager
def device_lock(key: str, directory: Path) -> Iterator[None]:
    """Hold the lock of one device. Raises ``CannotJudge`` at once when another run holds it.

    The lock file stays: removing it would let two runs lock two files of one name.
    """
    path = directory / f"tunetool-{re.sub(r'[^A-Za-z0-9]', '-', key)}.lock"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if directory == _last_resort() and not _is_ours(directory):
            raise CannotJudge(
                f"`{directory}` belongs to somebody else, who could let two runs measure at once",
                "set `XDG_RUNTIME_DIR` or `TUNETOOL_LOCK_DIR` to a directory of yours",
            )
        if str(directory) == RUN_DIRECTORY:
            make_run_directory()
        lock = FileLock.our_file(path)
    except ForeignLock as error:
        raise CannotJudge(error.message, f"{error.hint}; `TUNETOOL_LOCK_DIR` names another directory") from None
    except OSError as error:
        raise CannotJudge(f"`{path}` cannot be locked: {error.strerror}") from None
    with lock:
        if not lock.take(patience=0):
            raise CannotJudge(
                f"busy: another tunetool run is measuring (`{path}` is locked)",
                "wait until it is done: two runs on one device would measure each other, with `--allow-busy` too",
            )
        yield


def look(stack: BlockStack, tick: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """One line for each job of a scheduler, each busy device and each GPU process."""
    return [*scheduler_jobs(os.environ), *busy_devices(stack, tick, sleep), *gpu_processes()]


def busy_devices(stack: BlockStack, tick: Callable[[], None], sleep: Callable[[float], None] = time.sleep) -> list[str]:
    """Watch the drives for a second; where they are busy for another one, to say who it is."""
    if not stack.leaves:
        return []
    lines = _activities(_watch(stack, tick, sleep))
    if not lines:
        return []
    others = Others(stack)
    changes = _watch(stack, tick, sleep)
    others.end()
    # Whoever is done by now is not among those who move bytes.
    who = others.in_words(sum(map(_moved, changes.values())), "read", "write") if _activities(changes) else ""
    return [lines[0] + (f" ({who})" if who else ""), *lines[1:]]


def _activities(changes: Mapping[str, Counters]) -> list[str]:
    return [line for name, change in changes.items() if (line := _activity(name, change))]


def _watch(stack: BlockStack, tick: Callable[[], None], sleep: Callable[[float], None]) -> dict[str, Counters]:
    """What each drive did within a second. Raises ``CannotJudge`` where the drives change meanwhile."""
    try:
        before = snapshot(stack)
        for _ in range(5):
            sleep(LOOK_SECONDS / 5)
            tick()
        change = difference(snapshot(stack), before)
    except CountersChanged as error:
        raise CannotJudge(f"the drives changed during the measurement: {error}", "see `dmesg | tail`") from None
    return {leaf.name: change[leaf.name] for leaf in stack.leaves}


def _moved(change: Counters) -> int:
    return change.moved_bytes("read") + change.moved_bytes("write")


def _activity(name: str, change: Counters) -> str | None:
    moved = _moved(change)
    ios = change.read_ios + change.write_ios
    if moved <= QUIET_BYTES and ios <= QUIET_IOS:
        return None
    return f"`{name}` moved {format_size(moved)} in {ios} requests within a second"


def refuse(users: list[str]) -> None:
    """Raises ``CannotJudge`` if ``users``, others at work on the device, has any."""
    if users:
        more = f" and {len(users) - 1} more" if len(users) > 1 else ""
        raise CannotJudge(f"busy: {users[0]}{more}", _ALLOW)


_NAMED = 3
"""Processes that are named; further ones are counted."""
_WORTH_NAMING = 0.05
"""Share of the bytes to explain: every node has daemons that write a log."""
_EXPLAINS = 0.5
"""Share of the bytes that the processes must have moved, of all devices together, to be taken for the cause."""
_VERBS = {"read": "read", "write": "wrote"}


class Others:
    """A look at all processes now, to be compared with one at the end."""

    def __init__(self, stack: BlockStack, root: str = "/", own: int | None = None) -> None:
        """``own``: the process that measures, which is left out with all of its descendants; None: this one."""
        self._stack, self._root = stack, root
        self._own = os.getpid() if own is None else own
        self._before = self._after = process_io.look(root)
        self._syncs: list[str] = []

    def end(self) -> None:
        """The second look."""
        self._after = process_io.look(self._root)
        self._syncs = self._find_syncs()

    def in_words(self, foreign: int, *directions: Direction) -> str:
        """Who moved the ``foreign`` bytes that the drives counted besides the program's own; empty where the kernel
        counts nothing."""
        if not self._after.counts:
            return "; ".join(self._syncs)
        found = movers(self._before, self._after, directions, self._own)
        parts = [*_named(found, foreign, directions), *self._syncs]
        if sum(mover.bytes for mover in found) < _EXPLAINS * foreign and not self._syncs:
            parts.append(self._nobody(bool(parts)))
        return "; ".join(parts)

    def _nobody(self, partly: bool) -> str:
        text = "no process that can be read moved " + ("the rest" if partly else "so much")
        if self._after.hidden and os.geteuid() != 0:
            return text + ", and root sees those of other users"
        return text + ", so it may be the kernel itself, as in write-back, or another container"

    def _find_syncs(self) -> list[str]:
        """The arrays on the same drives that the kernel itself reads or writes."""
        ours = {leaf.name for leaf in self._stack.leaves} | set(self._stack.devices)
        return [
            f"array `{device}` does a `{action}`"
            for device, action in sync_actions(self._root).items()
            if ours & set(devices_under(device, self._root))
        ]


def _named(found: Sequence[Mover], foreign: int, directions: Sequence[Direction]) -> list[str]:
    """The processes that matter, as one text; none if there are none."""
    worth = [mover for mover in found if mover.bytes >= _WORTH_NAMING * foreign]
    if not worth:
        return []
    verb = _VERBS[directions[0]] if len(directions) == 1 else "moved"
    names = [f"`{mover.name}` (pid {mover.pid}) {verb} {format_size(mover.bytes)}" for mover in worth[:_NAMED]]
    more = f" and {len(worth) - _NAMED} more" if len(worth) > _NAMED else ""
    return [", ".join(names) + more]
