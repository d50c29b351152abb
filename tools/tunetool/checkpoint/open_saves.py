"""The unfinished saves of this process, and the removal of their files when they fail.

A save ends with ``close`` and a commit. It has failed when ``dcp.save`` returns without a commit (another rank failed),
when the next save begins, or when the process exits. After SIGKILL or a power cut the files remain; the lock of the
directory and its list of unfinished saves (``commit``) name these saves, and the next save removes their files before
it checks the free space.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from tunetool.checkpoint import commit, saver_lock
from tunetool.checkpoint.direct import Created
from tunetool.checkpoint.torch_call import TorchCall

_POLL_SECONDS = 0.5
"""Seconds between two checks whether a save is over."""


@dataclass
class _Coordinated:
    """A save that this process coordinates."""

    saving: commit.Saving
    call: TorchCall
    ended: threading.Event


@dataclass
class _HandedOver:
    """Files that this rank has written for a save that another process coordinates. Only the coordinator knows whether
    the save was committed."""

    directory: Path
    token: str
    files: Sequence[Created]
    call: TorchCall
    shared: bool
    """Whether the coordinator's lock, and so its `.metadata`, is in the same directory as this rank's files."""


_guard = threading.RLock()
_open: dict[Path, _Coordinated] = {}
_handed: list[_HandedOver] = []
_abandoned: deque[str] = deque(maxlen=1000)
"""Tokens of failed saves that this process coordinated. Other nodes may have files of them."""
_registered: list[int] = []
"""Id of the process that has registered ``_abandon_at_exit``; a forked child must register it again."""


def _forget_in_child() -> None:
    # The saves belong to the parent, and a thread that does not exist here may hold its lock.
    global _guard  # noqa: PLW0603  no other way to get an unlocked one
    _guard = threading.RLock()
    _open.clear()
    _handed.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def begin(directory: Path, *, alone: bool) -> commit.Saving:
    """Lock ``directory`` for a save that this thread coordinates. ``alone``: no other process takes part in the save.

    Raises ``CannotJudge`` if another process saves there or the directory cannot be written.
    """
    end_overdue()
    entry = _Coordinated(commit.Saving.open(directory, alone=alone), TorchCall.current(), threading.Event())
    with _guard:
        _open[directory] = entry
        # After the lock's own exit function, so that this runs before it: last in, first out.
        _register()
    threading.Thread(target=_watch, args=(directory, entry), name="tunetool-save-watch", daemon=True).start()
    return entry.saving


def current(directory: Path) -> commit.Saving | None:
    """The unfinished save to ``directory`` that this process coordinates, None if there is none."""
    with _guard:
        entry = _open.get(directory)
        return entry.saving if entry else None


def close(directory: Path) -> commit.Saving:
    """Stop tracking the save to ``directory``: the caller must commit or abandon it."""
    with _guard:
        entry = _open.pop(directory)
        entry.ended.set()
        return entry.saving


def abandon(directory: Path, token: str) -> None:
    """Abandon the save ``token`` if this process coordinates it and it has not ended yet."""
    with _guard:
        entry = _open.get(directory)
        if entry is not None and entry.saving.token == token:
            _abandon(directory, entry)


def give_up(directory: Path) -> None:
    """Abandon the unfinished save to ``directory``, if this process coordinates one, without waiting for its storage:
    that does not answer."""
    with _guard:
        entry = _open.pop(directory, None)
        if entry is not None:
            entry.ended.set()
            _abandoned.append(entry.saving.token)
    if entry is not None:
        threading.Thread(target=entry.saving.abandon, name="tunetool-abandon", daemon=True).start()


def failed(token: str) -> None:
    """Tell the ranks of the next save that this one, which this process coordinated, failed."""
    with _guard:
        _abandoned.append(token)


def remove_handed_over(token: str) -> None:
    """Remove the files that this rank has written for a save of another coordinator, which has failed."""
    with _guard:
        files = [file for entry in _handed if entry.token == token for file in entry.files]
        _handed[:] = [entry for entry in _handed if entry.token != token]
    for file in files:
        file.remove()


def abandoned(saving: commit.Saving) -> tuple[str, ...]:
    """Tokens of all saves known to have failed, for the ranks of the save that begins."""
    return tuple(dict.fromkeys((*saving.failed, *_abandoned)))


def end_overdue() -> None:
    """Abandon the saves whose call of ``dcp.save`` is over, or whose thread begins the next save."""
    with _guard:
        for directory, entry in list(_open.items()):
            if entry.call.is_here or entry.call.is_over:
                _abandon(directory, entry)


def hand_over(directory: Path, token: str, files: Sequence[Created], shared: bool) -> None:
    """Record the files that this rank has written for a save. The coordinator decides whether they are committed."""
    with _guard:
        coordinated = next((entry.saving for entry in _open.values() if entry.saving.token == token), None)
        if coordinated is not None:
            coordinated.written = tuple(files)
        else:
            _handed.append(_HandedOver(directory, token, files, TorchCall.current(), shared))
            _register()


def learn(failed: Collection[str]) -> None:
    """Process the list of ``failed`` saves (tokens) that comes with the next save of the coordinator: remove this
    rank's files of them, and stop tracking all other saves that are over."""
    with _guard:
        over = [entry for entry in _handed if entry.call.is_here or entry.call.is_over]
        _handed[:] = [entry for entry in _handed if entry not in over]
    for entry in over:
        if entry.token in failed:
            for file in entry.files:
                file.remove()


def is_shared(directory: Path, token: str) -> bool:
    """Whether the lock of the save ``token`` is in ``directory``: the coordinator uses the same directory."""
    holder = saver_lock.holder_in(directory)
    return holder is not None and token in holder.tokens


def _register() -> None:
    if os.getpid() not in _registered:
        atexit.register(_abandon_at_exit)
        _registered[:] = [os.getpid()]


def _abandon(directory: Path, entry: _Coordinated) -> None:
    del _open[directory]
    entry.ended.set()
    _abandoned.append(entry.saving.token)
    entry.saving.abandon()


def _watch(directory: Path, entry: _Coordinated) -> None:
    while not entry.ended.wait(_POLL_SECONDS):
        if entry.call.is_over:
            abandon(directory, entry.saving.token)
            return


def _abandon_at_exit() -> None:
    """At exit: abandon the unfinished saves and remove this rank's uncommitted files."""
    if _registered != [os.getpid()]:
        return
    with _guard:
        for directory, entry in list(_open.items()):
            with contextlib.suppress(Exception):
                _abandon(directory, entry)
        handed, _handed[:] = list(_handed), []
    for not_committed in handed:
        if not_committed.shared:
            with contextlib.suppress(Exception):
                commit.remove_uncommitted(not_committed.directory, not_committed.token, not_committed.files)
