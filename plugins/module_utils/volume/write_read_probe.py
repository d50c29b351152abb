"""Asks a volume and its drives whether they still answer: by a child process, since a dead drive or a frozen file
system would hold whoever touches the volume."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
import threading
import time
from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping, Sequence

from ..common.file_lock import ForeignLock
from ..common.outlived import Errand, Messages, Outcome, Say, in_children
from ..common.temporary import new_directory, prefix_of_this_host, remove_stale_directories_of
from .immutable_flag import forbidding_flag
from .offload_access import access_of

PATIENCE = 10.0
"""Seconds after which silence is a fault: many times what a busy drive needs for 1 MiB."""
PIECE = 16 << 10
"""A write is of so many bytes, or a multiple: of every block that a drive or a file system addresses directly."""
BYTES = 1 << 20
"""What is written at most, spread over the drives of the stripe."""
NAME = ".tunetool-probe"
MAKE = "make a directory"
"""The first step that changes something."""
FULL = (errno.ENOSPC, errno.EDQUOT)
_OF_A_DIRECTORY = (
    *FULL,
    *(errno.EPERM, errno.EACCES, errno.EROFS),
    *(errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EMLINK),
)
"""Errors that concern one directory. Any other is the volume's."""
_FILE = "probe"
_BLOCK = 4096


@dataclass(frozen=True)
class Question:
    """What is asked of a volume."""

    mount_point: str
    directory: str | None = None
    """A directory that must be there, and that is written to as well."""
    write: bool = True
    pieces: int = 1
    """Pieces that are written, so that each drive of a stripe gets one."""
    step: int = 0
    """Bytes from one piece to the next."""
    bytes: int = BYTES
    """What all pieces have together at most; the directory gets one ``PIECE``."""
    ours: bool = True
    """Whether the file system is this node's own. Another host could be at work in one that several share."""
    drives: tuple[tuple[str, str], ...] = ()
    """Serial and path of the drives to read from."""

    @property
    def piece(self) -> int:
        """Bytes of one piece."""
        most = self.bytes // self.pieces // PIECE * PIECE
        return max(PIECE, min(most, self.step // PIECE * PIECE) if self.step else most)

    @property
    def moved(self) -> int:
        """Bytes that are written at most, in a directory too."""
        if not self.write:
            return 0
        return max(self.piece, self.bytes) + PIECE


@dataclass(frozen=True)
class Answer:
    """What came back."""

    silent_at: str = ""
    """The step in which the volume was when patience ended; empty: it answered."""
    silent_drives: tuple[str, ...] = ()
    hangs_since: float | None = None
    """Seconds for which an earlier child hangs, so that none was started now."""
    error: int = 0
    """Number of the volume's error, which came in ``error_at``."""
    error_at: str = ""
    flag: str = ""
    """The letter of chattr that forbids writes at the top: ``i`` or ``a``."""
    directory_error: int = 0
    """As ``error``, of the directory, where the top takes data."""
    directory_error_at: str = ""
    directory_flag: str = ""
    no_inode: bool = False
    """Whether the error is one for want of inodes: there is room for data."""
    shut_down: bool = False
    """Whether not even the top directory can be looked at."""
    failed_drives: tuple[tuple[str, int], ...] = ()
    """Drives that cannot be read, each with its error."""
    is_directory: bool | None = None
    """None: not known."""
    access: Mapping[str, Any] | None = None
    """Owner, group and mode of the directory, as in the manifest."""
    leads_to: str = ""
    """Where the directory's path leads, if not to the volume."""
    above: Sequence[tuple[str, Mapping[str, Any]]] = ()
    """The directories above it, from `/`, each with its access."""
    written: int = 0
    """Bytes that were written and read back."""
    direct: bool = False
    """Whether that went past the page cache."""
    seconds: float | None = None
    """What the write, the fsync and the read took together."""
    same: bool = True
    """Whether the bytes that were read are those that were written."""
    fault: str = ""
    """Why the child ended without an answer."""

    @property
    def hangs(self) -> bool:
        """Whether whoever touches the volume now may never come back."""
        return bool(self.silent_at) or self.hangs_since is not None


Asker = Callable[[Sequence[Question]], Sequence[Answer]]
"""Asks volumes at the same time: an answer to each question, in their order."""


def ask(question: Question, patience: float = PATIENCE, directory: str | None = None) -> Answer:
    """Ask one volume, as ``ask_all``."""
    return ask_all([question], patience, directory)[0]


def ask_all(questions: Sequence[Question], patience: float = PATIENCE, directory: str | None = None) -> list[Answer]:
    """Ask now, all at the same time: however many volumes are silent, one ``patience`` is for all.

    ``directory``: of the locks; None: that of this user, who may have none.
    """
    return list(map(_answered, questions, in_children(list(map(_errand, questions)), patience, directory)))


def _errand(question: Question) -> Errand:
    def noted(messages: Messages, ended: bool) -> Mapping[str, Any]:
        answer = _answer(question, messages, ended)
        return {"step": answer.silent_at, "drives": answer.silent_drives}

    return Errand(lambda say: _ask(question, say), "probe" + question.mount_point, noted)


def _answered(question: Question, outcome: Outcome | OSError | ForeignLock) -> Answer:
    if isinstance(outcome, ForeignLock):
        return Answer(fault="%s: %s" % (outcome.message, outcome.hint))
    if isinstance(outcome, OSError):
        return Answer(fault="`%s`: %s" % (outcome.filename or "system call", outcome.strerror or outcome))
    if outcome.hangs_since is None:
        return _answer(question, outcome.messages, outcome.ended)
    return Answer(
        silent_at=str(outcome.note.get("step", "start")),
        silent_drives=tuple(str(drive) for drive in outcome.note.get("drives", ())),
        hangs_since=outcome.hangs_since,
    )


def _answer(question: Question, messages: Messages, ended: bool) -> Answer:
    """What the child said, as one answer."""
    said: dict[str, Any] = {}
    drives: dict[str, int] = {}
    for message in messages:
        if "drive" in message:
            drives[message["drive"]] = message["number"]
        else:
            said.update(message)
    step = said.pop("step", "start")
    done = said.pop("done", False)
    if not done and "fault" not in said:
        said["fault" if ended else "silent_at"] = "the child ended in step `%s`" % step if ended else step
    silent = tuple(serial for serial, _ in question.drives if serial not in drives) if not ended else ()
    failed = tuple((serial, number) for serial, number in drives.items() if number)
    if said.get("error"):
        said["error_at"] = step
    return Answer(silent_drives=silent, failed_drives=failed, **said)


def _ask(question: Question, say: Say) -> None:
    """Ask, and say what came."""
    threads = [threading.Thread(target=_read_drive, args=(say, *drive), daemon=True) for drive in question.drives]
    for thread in threads:
        thread.start()
    try:
        _ask_volume(question, say)
        say(done=True)
    except OSError as error:
        number = error.errno or errno.EIO
        say(error=number, shut_down=number == errno.EIO and _is_shut_down(question.mount_point))
        if number == errno.ENOSPC:
            say(no_inode=_has_no_inode(question.mount_point))
        say(done=True)
    except Exception as error:
        say(fault="%s: %s" % (type(error).__name__, error))
    for thread in threads:
        thread.join()


def _read_drive(say: Callable[..., None], serial: str, path: str) -> None:
    """Read two blocks of a drive, past the page cache: a throttle may let the first one pass."""
    number = 0
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        try:
            with mmap.mmap(-1, _BLOCK) as block:
                for offset in (_BLOCK, 2 * _BLOCK):
                    os.preadv(handle, [block], offset)
        finally:
            os.close(handle)
    except OSError as error:
        number = error.errno or errno.EIO
    say(drive=serial, number=number)


def _is_shut_down(mount_point: str) -> bool:
    try:
        os.stat(mount_point)
    except OSError as error:
        return error.errno == errno.EIO
    return False


def _has_no_inode(mount_point: str) -> bool:
    """XFS, which makes inodes of free blocks, counts none left only where its limit is reached. 0 in all: no limit."""
    room = os.statvfs(mount_point)
    return room.f_files > 0 and room.f_ffree == 0 and room.f_bfree > 0


def _ask_volume(question: Question, say: Callable[..., None]) -> None:
    """Raises ``OSError`` in the step that was said last."""

    def step(name: str) -> None:
        say(step=name)

    step("look at `%s`" % question.mount_point)
    top = os.stat(question.mount_point)
    look: dict[str, Any] = {}
    if question.directory is not None:
        step("look at `%s`" % question.directory)
        look = _look(question.directory, top.st_dev)
        say(**look)
    if not question.write:
        return
    say(**_write(question, question.mount_point, step, lambda flag: say(flag=flag)))
    if question.directory is not None and look["is_directory"] and not look["leads_to"]:
        _write_in_directory(question, question.directory, top, say)


def _write_in_directory(question: Question, path: str, top: os.stat_result, say: Callable[..., None]) -> None:
    """Write one piece to the directory. Raises ``OSError`` of the volume; one of the directory alone is said."""
    last = "open `%s`" % path

    def step(name: str) -> None:
        nonlocal last
        last = "%s in `%s`" % (name, path)
        say(step=last)

    try:
        say(step=last)
        handle = os.open(os.path.realpath(path), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(handle)
            # Whoever may rename there may have put another one in place since it was looked at.
            if status.st_dev != top.st_dev or os.path.samestat(status, top):
                return
            # By its handle, so that it stays the one that was looked at.
            within = "/proc/self/fd/%d" % handle
            one = replace(question, pieces=1, bytes=PIECE)
            if not _write(one, within, step, lambda flag: say(directory_flag=flag))["same"]:
                say(same=False)
        finally:
            os.close(handle)
    except OSError as error:
        if error.errno not in _OF_A_DIRECTORY:
            raise
        at, number = last, error.errno
        if number in FULL:
            # A job may have filled the volume at this moment: then this one fails too.
            _write(question, question.mount_point, lambda name: say(step=name), lambda flag: say(flag=flag))
        say(directory_error=number, directory_error_at=at)


def _look(path: str, device: int) -> dict[str, Any]:
    """What ``Answer`` says of the directory, which must lie on ``device``. Raises ``OSError``.

    As ``os.path.isdir``, which also calls a directory absent that cannot be read.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"is_directory": False}
    if not stat.S_ISDIR(status.st_mode):
        return {"is_directory": False}
    if status.st_dev != device:
        return {"is_directory": True, "access": access_of(status), "leads_to": os.path.realpath(path)}
    return {"is_directory": True, "access": access_of(status), "leads_to": "", "above": _above(path)}


def _has_list(path: str) -> bool:
    """Whether an access control list may say who else may enter."""
    try:
        return bool(os.getxattr(path, "system.posix_acl_access"))
    except OSError as error:
        return error.errno not in (errno.ENODATA, errno.EOPNOTSUPP)


def _above(path: str) -> list[tuple[str, dict[str, Any]]]:
    """See ``Answer.above``."""
    found: list[tuple[str, dict[str, Any]]] = []
    while path != os.path.dirname(path):
        path = os.path.dirname(path)
        found.insert(0, (path, dict(access_of(os.stat(path)), listed=_has_list(path))))
    return found


def _write(
    question: Question, within: str, step: Callable[[str], None], forbid: Callable[[str], None]
) -> dict[str, Any]:
    """Write, fsync and read back in a new directory of mode 0700, which is gone afterwards: what ``Answer`` says of it.

    Raises ``OSError``. ``forbid`` is called before, with the flag that explains it.
    """
    prefix = NAME + "-" if question.ours else prefix_of_this_host(NAME)
    step("remove what an earlier check left")
    remove_stale_directories_of([_FILE], prefix, within)
    step(MAKE)
    _refuse_flag(within, forbid)
    directory, path = new_directory(prefix, within)
    try:
        return _write_file(question, directory, step)
    finally:
        with contextlib.suppress(OSError):
            os.rmdir(path)
        os.close(directory)


def _refuse_flag(within: str, forbid: Callable[[str], None]) -> None:
    """Raises ``OSError`` where a flag forbids to write, or to remove what was written: no leftover is made there."""
    try:
        handle = os.open(within, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        # Whoever may not list a directory may still be able to write there.
        return
    try:
        flag = forbidding_flag(handle)
    finally:
        os.close(handle)
    if flag:
        forbid(flag)
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def _write_file(question: Question, directory: int, step: Callable[[str], None]) -> dict[str, Any]:
    """As ``_write``, in an open directory."""
    # Never a file that is there: it would be another's.
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
    step("make a file")
    direct = True
    try:
        handle = os.open(_FILE, flags | os.O_DIRECT, 0o600, dir_fd=directory)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        # Some file systems have no direct I/O, as a tmpfs in older kernels. They may have made the file all the same.
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_FILE, dir_fd=directory)
        handle, direct = os.open(_FILE, flags, 0o600, dir_fd=directory), False
    began = time.monotonic()
    try:
        same, written = _fill(question, handle, direct, step)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(_FILE, dir_fd=directory)
        raise
    finally:
        os.close(handle)
    seconds = time.monotonic() - began
    step("remove the file")
    os.unlink(_FILE, dir_fd=directory)
    return {"written": written, "direct": direct, "same": same, "seconds": seconds}


def _fill(question: Question, handle: int, direct: bool, step: Callable[[str], None]) -> tuple[bool, int]:
    """Whether what was read back is what was written, and its bytes."""
    size = question.piece
    pieces = max(1, min(question.pieces, question.bytes // size)) if _allocated(handle, question, step) else 1
    contents = [os.urandom(size) for _ in range(pieces)]
    with mmap.mmap(-1, size) as area:
        step("write")
        for index, content in enumerate(contents):
            area[:] = content
            if os.pwritev(handle, [area], index * question.step) != size:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        step("fsync")
        os.fsync(handle)
        if not direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        step("read back")
        same = True
        for index, content in enumerate(contents):
            area[:] = bytes(size)
            same = os.preadv(handle, [area], index * question.step) == size and area[:] == content and same
    return same, pieces * size


def _allocated(handle: int, question: Question, step: Callable[[str], None]) -> bool:
    """Allocate all pieces at once: then they lie beside each other, so that each drive of the stripe gets one.

    Raises ``OSError`` where there is no room for that, which is less than a job's first file needs.
    """
    if question.pieces == 1:
        return True
    step("allocate")
    try:
        os.posix_fallocate(handle, 0, question.pieces * question.step)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    return True
