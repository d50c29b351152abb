"""The directories of jobs on the volume: made, listed, taken from their names, and emptied.

What a directory is for is in its attribute ``trusted.tunetool``, which root alone reads and writes; nothing else is
remembered anywhere. One that is removed is moved at once into a directory that only root can enter: its name is free,
and no path leads a user there. The move makes nothing, so it also works on a full volume.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import re
import secrets
import time
from dataclasses import asdict, dataclass
from typing import Any, Callable, Iterator, Mapping, Sequence

from ..common.file_lock import FileLock
from ..common.files import read_text
from ..common.refusal import Refusal
from ..machine.file_system import BUILT
from ..machine.mounts import mount_at, read_mounts
from . import kernel
from .removal import STACKED, Emptying

ATTRIBUTE = "trusted.tunetool"
PREFIX = "job-"
REMOVED = ".removed"
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_ASIDE = re.compile(r"([0-9a-f]{8})\.[0-9a-f]{16}")
_FIRST_PROJECT, _LAST_PROJECT = 1 << 16, (1 << 31) - 1
"""Smaller ones may be the owner's."""
_LOCK_SECONDS = 60.0
_LOOKS = 10
_TURN = 10.0
"""Seconds in which one directory is emptied before the next one is."""


@dataclass(frozen=True)
class Record:
    """What a directory is for. ``project``: 0 without a limit; ``boot``: the boot in which it was made."""

    job: str
    uid: int
    limit: int
    project: int
    slurm: bool
    boot: str
    made: int


@dataclass(frozen=True)
class Held:
    """A job's directory and the bytes that count for it; None where no limit was set, since nothing counts then."""

    record: Record
    used: int | None


class Quota:
    """The limits of projects on the file system of an open directory."""

    def __init__(self, handle: int) -> None:
        self._handle = handle
        number = os.fstat(handle).st_dev
        name = "%d:%d" % (os.major(number), os.minor(number))
        self.enforced = any(
            mount.device_number == name and BUILT.project_quota in mount.options for mount in read_mounts()
        )

    def limit(self, project: int, size: int, files: int) -> None:
        """Set both; 0 is none."""
        kernel.set_limits(self._handle, project, size, files)

    def used(self, project: int) -> int:
        """Bytes."""
        return kernel.used(self._handle, project)[0]

    def unused(self, project: int) -> bool:
        """Whether nothing counts for it, not even what has no name any more."""
        return kernel.used(self._handle, project) == (0, 0)


class Directories:
    """Of one volume, as a context. Raises ``Refusal`` where it is not mounted, or where a user could exchange them.

    ``make``: the directory above them, where it is missing.
    """

    def __init__(
        self, mount_point: str, directory: str, quota: Callable[[int], Quota] = Quota, make: bool = True
    ) -> None:
        self.directory = directory
        with contextlib.ExitStack() as closing:
            volume = _open_volume(mount_point)
            closing.callback(os.close, volume)
            above = volume
            for name in os.path.relpath(directory, mount_point).split("/"):
                above = _opened(above, name, 0o711, directory, make)
                closing.callback(os.close, above)
            self._jobs = above
            # A user may mount over a directory of his own (FUSE). What it is for is read below that.
            self._below = kernel.uncovered(above)
            closing.callback(os.close, self._below)
            self._removed = _opened(above, REMOVED, 0o700, directory, make)
            closing.callback(os.close, self._removed)
            self._quota = quota(volume)
            space = os.fstatvfs(volume)
            self.size = space.f_blocks * space.f_frsize
            self._files = space.f_files
            self._closing = closing.pop_all()

    def __enter__(self) -> Directories:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def make(self, job: str, uid: int, gid: int, limit: int, slurm: bool) -> str:
        """The path of a job's directory, made if it is not there. Raises ``Refusal`` and ``OSError``."""
        name = _name_of(job)
        if limit and not self._quota.enforced:
            raise Refusal(
                "the volume of `%s` is mounted without `%s`, so no job can be limited. hint: unmount it, then run "
                "`tunetool provision`; or set `job_scratch_limit: ''`" % (self.directory, BUILT.project_quota)
            )
        boot = this_boot()
        with self._locked():
            present = self._record(name)
            if present is not None and (present.uid, present.slurm, present.boot) == (uid, slurm, boot):
                # A scheduler calls again for the same job, as when its daemon was restarted.
                self._note(name, present)
                return os.path.join(self.directory, name)
            if present is not None:
                self._take_name(name, present.project)
            project = self._free_project() if limit else 0
            record = Record(job, uid, limit, project, slurm, boot, time.time_ns())
            aside = _aside(project)
            os.mkdir(aside, 0o700, dir_fd=self._removed)
            self._prepare(aside, record, gid)
            os.rename(aside, name, src_dir_fd=self._removed, dst_dir_fd=self._jobs)
        return os.path.join(self.directory, name)

    def _prepare(self, aside: str, record: Record, gid: int) -> None:
        handle = kernel.open_inside(self._removed, aside)
        try:
            if record.project:
                # A volume has room for so many files: else one job could use it up with empty ones.
                files = max(1024, self._files * record.limit // self.size) if self._files else 0
                self._quota.limit(record.project, record.limit, files)
                kernel.set_project(handle, record.project)
            os.setxattr(handle, ATTRIBUTE, json.dumps(asdict(record)).encode())
            os.fchown(handle, record.uid, gid)
        finally:
            os.close(handle)

    def records(self) -> list[Record]:
        """Every job's, by name."""
        names = sorted(name for name in os.listdir(self._jobs) if name.startswith(PREFIX))
        return [record for record in map(self._record_or_none, names) if record is not None]

    def held(self) -> list[Held]:
        """Who holds how much. Raises ``OSError``."""
        return [
            Held(record, self._quota.used(record.project) if record.project and self._quota.enforced else None)
            for record in self.records()
        ]

    def removing(self) -> int:
        """How many directories are still to be emptied."""
        return len(os.listdir(self._removed))

    def remove(self, job: str, made: int | None = None) -> bool:
        """Take a job's directory from its name; false where there is none. ``made``: only the one of that moment."""
        name = _name_of(job)
        with self._locked():
            record = self._record(name)
            if record is None or made not in (None, record.made):
                return False
            self._take_name(name, record.project)
            return True

    def empty(self, until: float, clock: Callable[[], float] = time.monotonic) -> list[str]:
        """Delete what was taken from its name, as far as time allows. What stays against its will, a line each."""
        with self._locked():
            # One that comes after this is being prepared.
            names = list(filter(_ASIDE.fullmatch, os.listdir(self._removed)))
        troubles: list[str] = []
        # In turns, and not always in the same order: what takes long must not keep the rest from its turn.
        random.shuffle(names)
        while names and clock() < until:
            name = names.pop(0)
            end = min(until, clock() + _TURN)
            try:
                stays = self._empty(name, end, clock)
            except FileNotFoundError:
                continue
            except OSError as error:
                stays = ["`%s/%s/%s`: %s" % (self.directory, REMOVED, name, error.strerror)]
            if clock() < end:
                troubles += stays
            else:
                names.append(name)
        return troubles

    def _empty(self, name: str, until: float, clock: Callable[[], float]) -> Sequence[str]:
        directory = self._opened_aside(name)
        try:
            emptying = Emptying(directory, until, clock)
            done = emptying.finish()
        finally:
            os.close(directory)
        if not done:
            where = "`%s/%s/%s`" % (self.directory, REMOVED, name)
            return ["%s: %s" % (where, trouble) for trouble in emptying.troubles]
        project = _project_in(name)
        if project and self._quota.enforced and self._is_unused(project):
            self._quota.limit(project, 0, 0)
        os.rmdir(name, dir_fd=self._removed)
        return []

    def _opened_aside(self, name: str) -> int:
        for _ in range(STACKED):
            try:
                return kernel.open_inside(self._removed, name)
            except OSError as error:
                if error.errno != errno.EXDEV:
                    raise
                # A process that is in it mounted over it; once it is root's, none can.
                kernel.detach(self._removed, name)
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)

    def _is_unused(self, project: int) -> bool:
        """A process may write on in a file that it has open, or whose second name is elsewhere: its limit stays."""
        for _ in range(_LOOKS):
            if self._quota.unused(project):
                return True
            # XFS counts deleted files until it has freed them, a little later.
            time.sleep(0.05)
        return False

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # Opened again: a lock belongs to what was opened, not to the process.
        with FileLock(os.open(".", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._removed)) as lock:
            if not lock.take(patience=_LOCK_SECONDS):
                raise Refusal(
                    "`%s` is locked by another process for %g s. hint: `fuser -v %s/%s` names it"
                    % (self.directory, _LOCK_SECONDS, self.directory, REMOVED)
                )
            yield

    def _record(self, name: str) -> Record | None:
        """Of a directory that is there. Raises ``Refusal`` where something else has that name."""
        try:
            handle = kernel.open_inside(self._below, name)
        except FileNotFoundError:
            return None
        except OSError:
            raise self._foreign(name) from None
        try:
            record = Record(**json.loads(os.getxattr(handle, ATTRIBUTE)))
        except (OSError, ValueError, TypeError):
            raise self._foreign(name) from None
        finally:
            os.close(handle)
        if _name_of(record.job) != name:
            # Somebody keeps what a job left under another name.
            raise self._foreign(name)
        return record

    def _record_or_none(self, name: str) -> Record | None:
        with contextlib.suppress(Refusal):
            return self._record(name)
        return None

    def _foreign(self, name: str) -> Refusal:
        return Refusal(
            "`%s/%s` is not tunetool's. hint: look whose it is, and move it away" % (self.directory, ascii(name)[1:-1])
        )

    def _note(self, name: str, record: Record) -> None:
        handle = kernel.open_inside(self._below, name)
        try:
            os.setxattr(handle, ATTRIBUTE, json.dumps({**asdict(record), "made": time.time_ns()}).encode())
        finally:
            os.close(handle)

    def _take_name(self, name: str, project: int) -> None:
        for _ in range(STACKED):
            try:
                os.rename(name, _aside(project), src_dir_fd=self._jobs, dst_dir_fd=self._removed)
                return
            except OSError as error:
                if error.errno == errno.EBUSY:
                    kernel.detach(self._jobs, name)
                elif error.errno != errno.EPERM or not self._unprotected(name):
                    raise
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), name)

    def _unprotected(self, name: str) -> bool:
        """Whether it had a flag, which only a job of root's sets, that keeps it where it is."""
        handle = kernel.open_inside(self._below, name)
        try:
            return kernel.unprotect_open(handle)
        finally:
            os.close(handle)

    def _free_project(self) -> int:
        """A number that nobody uses, and that no user can guess: the kernel lets the owner of a file count it for any
        project, and so use up the limit of another job whose number is known. Since Linux 6.17 (``file_getattr``) it
        shows the number to all; they can fill the volume as well."""
        taken = {record.project for record in self.records()} | set(map(_project_in, os.listdir(self._removed)))
        while True:
            project = secrets.randbelow(_LAST_PROJECT - _FIRST_PROJECT) + _FIRST_PROJECT
            if project not in taken and self._quota.unused(project):
                return project


def this_boot() -> str:
    """Another one after every boot."""
    return read_text("/proc/sys/kernel/random/boot_id") or ""


def described(held: Held, user: Callable[[int], str]) -> Mapping[str, Any]:
    """For lists and metrics."""
    record = held.record
    return {"job": record.job, "user": user(record.uid), "bytes": held.used, "limit_bytes": record.limit or None}


def _name_of(job: str) -> str:
    if not _JOB.fullmatch(job):
        raise Refusal("`%s` is no job. hint: its number, or up to 64 letters, digits and `._-`" % ascii(job)[1:-1])
    return PREFIX + job


def _aside(project: int) -> str:
    """A name in the directory that only root enters; it tells the project."""
    return "%08x.%s" % (project, secrets.token_hex(8))


def _project_in(name: str) -> int:
    match = _ASIDE.fullmatch(name)
    return int(match.group(1), 16) if match else 0


def _open_volume(mount_point: str) -> int:
    mount = mount_at(mount_point, read_mounts())
    if mount is None:
        raise Refusal("`%s` is not mounted. hint: `mount %s`" % (mount_point, mount_point))
    handle = os.open(mount_point, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(handle)
    number = "%d:%d" % (os.major(status.st_dev), os.minor(status.st_dev))
    try:
        if number != mount.device_number:
            raise Refusal("`%s` is hidden by another mount. hint: unmount that first" % mount_point)
        # In a directory with the sticky bit no user renames what is root's.
        if status.st_uid != 0 or (status.st_mode & 0o022 and not status.st_mode & 0o1000):
            raise _unsafe(mount_point)
    except Refusal:
        os.close(handle)
        raise
    return handle


def _opened(above: int, name: str, mode: int, directory: str, make: bool) -> int:
    if make:
        # Whatever umask the scheduler has; a change of mode after it could be cut, and would never come.
        before = os.umask(0)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, mode, dir_fd=above)
        finally:
            os.umask(before)
    try:
        handle = kernel.open_inside(above, name)
    except OSError as error:
        raise Refusal(
            "`%s` on the way to `%s` is no directory of this volume: %s. hint: remove the link, mount or file"
            % (name, directory, error.strerror)
        ) from None
    status = os.fstat(handle)
    if status.st_uid != 0 or status.st_mode & 0o022:
        os.close(handle)
        raise _unsafe(directory)
    return handle


def _unsafe(path: str) -> Refusal:
    return Refusal(
        "users may exchange what is below `%s`. hint: it has to be root's, and no others may write there "
        "(`chown root %s; chmod go-w %s`)" % (path, path, path)
    )
