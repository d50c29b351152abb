"""The checks that a volume can be written, that it answers, and that its drives do: what a job needs first."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, replace
from typing import Any, Mapping

from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..machine.drives import read_drives
from ..machine.file_system import BUILT
from ..machine.mounts import Mount
from ..units import format_size_binary
from .write_read_probe import BYTES, FULL, MAKE, PATIENCE, PIECE, Answer, Question

WRITABLE, ANSWERS, DRIVES = "filesystem.writable", "filesystem.answers", "drives.answer"
READ_ONLY = "ro"
_LOG = "see the kernel's log (`dmesg`)"
_NO_DIRECTORY = (errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS, errno.EOPNOTSUPP)
"""At the top of an owner's volume: an NFS server that trusts no root, a program's file system without directories."""
LOCAL = (BUILT.type, "ext2", "ext3", "ext4", "btrfs", "f2fs", "bcachefs", "zfs", "tmpfs")
"""File systems where root may write, whoever owns a directory, unless a flag forbids it or the directory is gone."""
_MANY_SECONDS = 120


@dataclass(frozen=True)
class Writing:
    """What a run may write to the volume."""

    bytes: int = BYTES + PIECE
    """At most, in the offload directory too; less than it takes: nothing."""
    refused: str = ""
    """Why it may write nothing; empty: it may."""
    doubtful: bool = False
    """Whether that leaves open if the volume takes data: a run that never writes says nothing of it."""


ALLOWED = Writing()
NOTHING = Writing(refused="this run writes nothing")


@dataclass(frozen=True)
class Asking:
    """What a volume that is mounted is asked."""

    mount: Mount
    question: Question
    reason: str
    """Why it is not asked to take data; empty: it is."""
    writing: Writing


def asking(manifest: Mapping[str, Any], mount: Mount, writing: Writing, root: str = "/") -> Asking:
    """What to ask the manifest's volume, which is mounted, and its drives.

    Root alone writes, and only where the volume is not read-only.
    """
    array, wanted = manifest["array"], manifest["filesystem"]
    reason = ""
    if is_read_only(mount):
        reason = "it is mounted read-only"
    elif writing.refused:
        reason = writing.refused
    elif os.geteuid() != 0:
        reason = "only root may write there: run it as root"
    drives = []
    if array is not None and os.geteuid() == 0:
        serials = {member["serial"] for member in array["members"]}
        drives = [(drive.serial, "/dev/" + drive.name) for drive in read_drives(root) if drive.serial in serials]
    question = Question(
        mount_point=wanted["mount_point"],
        directory=manifest["offload_dir"],
        write=not reason,
        pieces=max(1, wanted["data_sw"]),
        step=wanted["data_su_bytes"],
        bytes=min(BYTES, writing.bytes - PIECE),
        ours=array is not None,
        drives=tuple(drives),
    )
    return Asking(mount, question, reason, writing)


def answer_checks(asked: Asking, answer: Answer | None) -> list[Check]:
    """The checks of its answer; None for a recorded node."""
    question, mount, reason, writing = asked.question, asked.mount, asked.reason, asked.writing
    unwritten = reason if answer is not None else "a recorded node answers nothing"
    checks = [check_writable(mount), check_answers(question, answer, mount.fs_type, unwritten)]
    if checks[1].status == SKIP and reason and reason == writing.refused and writing.doubtful:
        checks[1] = replace(checks[1], status=UNKNOWN, remedy="check again tomorrow")
    if answer is not None and question.drives:
        checks.append(check_drives(question, answer))
    return checks


def is_read_only(mount: Mount) -> bool:
    """Whether the kernel has the mount, or the file system below it, as read-only."""
    return READ_ONLY in mount.options


def check_writable(mount: Mount) -> Check:
    """The flags of the mount, as the kernel has them."""
    point, expected = mount.mount_point, "`%s` mounted for writing" % mount.mount_point
    if not is_read_only(mount):
        return Check(WRITABLE, PASS, expected, "rw")
    remedy = "%s for why, then `mount -o remount,rw %s`; a file system with errors is repaired first" % (_LOG, point)
    return Check(WRITABLE, FAIL, expected, "`%s` is mounted read-only" % point, remedy)


def check_answers(question: Question, answer: Answer | None, fs_type: str, unwritten: str) -> Check:
    """``answer``: None where nothing was asked. ``unwritten``: why nothing was written, where that was not asked."""
    expected = "an answer within %g s" % PATIENCE
    if question.write:
        expected = "what is written is read back within %g s" % PATIENCE
    if answer is None:
        return Check(ANSWERS, SKIP, expected, unwritten)
    status, found, remedy = _judged(question, answer, fs_type, unwritten)
    return Check(ANSWERS, status, expected, found, remedy)


def _judged(question: Question, answer: Answer, fs_type: str, unwritten: str) -> tuple[str, str, str]:
    """Status, what was found, and the remedy."""
    point = question.mount_point
    if answer.hangs or answer.fault:
        return _no_answer(question, answer)
    if answer.shut_down:
        return FAIL, shut_down(fs_type), "unmount `%s`, mount it again, and %s for why it was" % (point, _LOG)
    if answer.error:
        return _error(question, answer, fs_type)
    if not answer.same:
        return FAIL, "it returned other bytes than were written", "%s, and replace the drive that it names" % _LOG
    if not question.write:
        return SKIP, "it answers; nothing was written: %s" % unwritten, ""
    way = "past the page cache" if answer.direct else "through the page cache: it has no direct I/O"
    return PASS, "%s written and read back %s" % (format_size_binary(answer.written), way), ""


def _no_answer(question: Question, answer: Answer) -> tuple[str, str, str]:
    if answer.silent_at:
        remedy = "%s and at the drives; where somebody froze it, `fsfreeze --unfreeze %s`" % (
            _LOG,
            question.mount_point,
        )
        return FAIL, silence(answer), remedy
    if answer.hangs_since is not None:
        return UNKNOWN, "not asked: %s" % _still(answer), "see `%s`" % DRIVES
    return UNKNOWN, "it could not be asked: %s" % answer.fault, "check again"


def _error(question: Question, answer: Answer, fs_type: str) -> tuple[str, str, str]:
    words = "%s (%s)" % (os.strerror(answer.error), answer.error_at)
    if answer.error in FULL:
        what = "it is full" if answer.error == errno.ENOSPC else "a quota of it is used up"
        if answer.no_inode:
            what = "it has room and no inode left (`df -i`)"
        remedy = "remove what nobody needs on `%s`, then check again" % question.mount_point
        return UNKNOWN, "%s, so nothing could be written: %s" % (what, words), remedy
    if answer.error in (errno.EACCES, errno.EPERM) and not question.write:
        return SKIP, "this user may not look there: %s" % words, ""
    if answer.flag:
        return FAIL, *forbidden(answer.flag, question.mount_point, words)
    if answer.error_at == MAKE and root_may_lack_rights(answer.error, fs_type, question.ours):
        return SKIP, "it answers; root cannot write at its top: %s" % words, ""
    if answer.error == errno.ENOENT and answer.error_at == MAKE:
        remedy = "run `umount %s`, and mount a directory that is there" % question.mount_point
        return FAIL, "the directory that was mounted is gone: %s" % words, remedy
    return FAIL, words, _LOG


def root_may_lack_rights(error: int, fs_type: str, ours: bool) -> bool:
    """Whether this error of root, who makes a directory, says nothing of whether a job may."""
    if fs_type in LOCAL and error in (errno.EPERM, errno.ENOENT):
        return False
    return error in _NO_DIRECTORY and not ours


def forbidden(flag: str, path: str, words: str) -> tuple[str, str]:
    """What a flag of chattr does to a directory, and the cure."""
    kind, effect = ("immutable", "nobody can write there")
    if flag == "a":
        kind, effect = ("append-only", "nobody can remove a file there")
    return "it is %s, so %s, root neither: %s" % (kind, effect, words), "run `chattr -%s %s`" % (flag, path)


def shut_down(fs_type: str) -> str:
    """A file system that answers everything with EIO."""
    name = str(BUILT) if fs_type == BUILT.type else fs_type
    return "%s is shut down: every access fails with an I/O error" % name


def silence(answer: Answer) -> str:
    """A volume that does not answer, in words."""
    if answer.hangs_since is not None:
        return "the volume does not answer: %s (%s)" % (_still(answer), answer.silent_at)
    return "the volume did not answer for %g s (%s)" % (PATIENCE, answer.silent_at)


def _still(answer: Answer) -> str:
    since = answer.hangs_since or 0.0
    ago = "%.0f s" % since if since < _MANY_SECONDS else "%.0f min" % (since / 60)
    return "a check that began %s ago still waits, and no second one is started" % ago


def check_drives(question: Question, answer: Answer) -> Check:
    """Whether each drive answers a read."""
    expected = "%d drives answer a read within %g s" % (len(question.drives), PATIENCE)
    silent = ["`%s` did not answer for %g s" % (serial, PATIENCE) for serial in answer.silent_drives]
    failed = ["`%s`: %s" % (serial, os.strerror(number)) for serial, number in answer.failed_drives]
    if silent or failed:
        remedy = "%s; reseat the drive, or replace it and run `ansible-playbook tunetool.node.replace_drive`" % _LOG
        return Check(DRIVES, FAIL, expected, "; ".join(silent + failed), remedy)
    if answer.hangs_since is not None or answer.fault:
        return Check(DRIVES, UNKNOWN, expected, "not asked", "see `%s`" % ANSWERS)
    return Check(DRIVES, PASS, expected, "all answer")
