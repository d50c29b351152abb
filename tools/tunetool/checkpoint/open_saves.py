"""The saves of this process that have not ended yet, and what removes their files when they end badly.

A save ends by ``close`` and a commit. Each other end is noticed: the call of ``dcp.save`` is over without a commit
(another rank failed), the next save begins, or the process exits. SIGKILL and a loss of power leave files, whose saves
are known by the directory's lock and its list of unfinished saves (``commit``); the next save there removes them before
it asks for space.
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
from tunetool.checkpoint.created import Created
from tunetool.checkpoint.torch_call import TorchCall

_LOOK_EVERY = 0.5
"""Seconds between two looks at whether a save is over."""


@dataclass
class _Coordinated:
    """A save that this process coordinates."""

    saving: commit.Saving
    call: TorchCall
    ended: threading.Event


@dataclass
class _Handed:
    """Files of this rank that are written, of a save that another process coordinates. It alone knows what became of
    them."""

    directory: Path
    token: str
    files: Sequence[Created]
    call: TorchCall
    shared: bool
    """Whether the coordinator's lock lay in this rank's directory too, and so its `.metadata` will."""


_guard = threading.RLock()
_open: dict[Path, _Coordinated] = {}
_handed: list[_Handed] = []
_abandoned: deque[str] = deque(maxlen=1000)
"""Tokens of saves that this process coordinated and that failed. Other nodes may have files of them."""
_registered: list[int] = []
"""The process for which ``_leave`` is registered; a child of a fork is another one."""


def _forget_in_child() -> None:
    # They are the parent's, and its lock may be held by a thread that does not exist here.
    global _guard  # noqa: PLW0603  no other way to get an unlocked one
    _guard = threading.RLock()
    _open.clear()
    _handed.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def begin(directory: Path, *, alone: bool) -> commit.Saving:
    """Lock ``directory`` for a save that this thread coordinates. ``alone``: no other process takes part.

    Raises ``CannotJudge`` when another one saves there, or the directory cannot be written.
    """
    end_overdue()
    entry = _Coordinated(commit.Saving.open(directory, alone=alone), TorchCall(), threading.Event())
    with _guard:
        _open[directory] = entry
        # After the lock's own exit function, so that this runs before it: last in, first out.
        _register()
    threading.Thread(target=_watch, args=(directory, entry), name="tunetool-save-watch", daemon=True).start()
    return entry.saving


def current(directory: Path) -> commit.Saving | None:
    """The save that this process coordinates there."""
    with _guard:
        entry = _open.get(directory)
        return entry.saving if entry else None


def close(directory: Path) -> commit.Saving:
    """Take the save out of care: whoever calls commits or abandons it."""
    with _guard:
        entry = _open.pop(directory)
        entry.ended.set()
        return entry.saving


def abandon(directory: Path, token: str) -> None:
    """Abandon the save ``token`` if this process coordinates it and nothing has ended it yet."""
    with _guard:
        entry = _open.get(directory)
        if entry is not None and entry.saving.token == token:
            _abandon(directory, entry)


def abandoned(saving: commit.Saving) -> tuple[str, ...]:
    """Tokens of all saves that are known to have failed, for the ranks of the save that begins."""
    return tuple(dict.fromkeys((*saving.failed, *_abandoned)))


def end_overdue() -> None:
    """Abandon the saves whose call of ``dcp.save`` is over, or whose thread asks for the next save."""
    with _guard:
        for directory, entry in list(_open.items()):
            if entry.call.is_here or entry.call.is_over:
                _abandon(directory, entry)


def hand_over(directory: Path, token: str, files: Sequence[Created], shared: bool) -> None:
    """This rank's files of a save are written. Whether they count is up to the coordinator."""
    with _guard:
        coordinated_here = any(entry.saving.token == token for entry in _open.values())
        if not coordinated_here:
            _handed.append(_Handed(directory, token, files, TorchCall(), shared))
            _register()


def learn(failed: Collection[str]) -> None:
    """The coordinator's next save began: what it says failed is removed, the rest of what was handed over is its own
    business by now."""
    with _guard:
        over = [entry for entry in _handed if entry.call.is_here or entry.call.is_over]
        _handed[:] = [entry for entry in _handed if entry not in over]
    for entry in over:
        if entry.token in failed:
            for file in entry.files:
                file.remove()


def is_shared(directory: Path, token: str) -> bool:
    """Whether the coordinator of the save ``token`` has its lock in this very directory."""
    holder = saver_lock.holder_in(directory)
    return holder is not None and token in holder.tokens


def _register() -> None:
    if os.getpid() not in _registered:
        atexit.register(_leave)
        _registered[:] = [os.getpid()]


def _abandon(directory: Path, entry: _Coordinated) -> None:
    del _open[directory]
    entry.ended.set()
    _abandoned.append(entry.saving.token)
    entry.saving.abandon()


def _watch(directory: Path, entry: _Coordinated) -> None:
    seen_over = False
    while not entry.ended.wait(_LOOK_EVERY):
        over = entry.call.is_over
        # Twice, so that nothing hangs on one look at a stack that moves.
        if over and seen_over:
            abandon(directory, entry.saving.token)
            return
        seen_over = over


def _leave() -> None:
    """At exit: no save goes on after it."""
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
