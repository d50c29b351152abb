"""The check that jobs find the offload directory, on the volume, and as it was built."""

from __future__ import annotations

import errno
import os
from typing import Any, Mapping

from ..common.check_result import FAIL, PASS, SKIP, UNKNOWN, Check
from ..machine.mounts import Mount, described, mount_holding, place_within, read_mounts
from .named_volume import CHECK_ID as MOUNTED
from .offload_access import in_words, shuts_out
from .volume_answers import ANSWERS, forbidden, is_read_only, root_may_lack_rights, shut_down
from .write_read_probe import FULL, Answer

CHECK_ID = "offload.directory"


def check_offload(
    manifest: Mapping[str, Any], mount: Mount | None, answer: Answer | None, root: str, doubtful: bool = False
) -> Check:
    """``mount`` is the volume's; None where it is not mounted, or ``doubtful``: where nobody knows whether it is the
    volume's. ``answer``: None for a recorded node."""
    path = manifest["offload_dir"]
    if path is None:
        return Check(CHECK_ID, SKIP, "none asked for", "none")
    if mount is None:
        found, remedy = "its file system is not mounted", "mount it first"
        if doubtful:
            found, remedy = "not looked at: its file system may be another one", "see `%s`" % MOUNTED
        return Check(CHECK_ID, UNKNOWN, "`%s`" % path, found, remedy)
    hidden = _hidden(path, mount, root)
    if hidden is not None:
        return hidden
    if answer is None:
        there = os.path.isdir(os.path.join(root, path.lstrip("/")))
        # It has the owner and the mode of whoever laid it out.
        return Check(CHECK_ID, PASS, "`%s`" % path, "a directory") if there else _missing(path)
    if answer.is_directory is None:
        found = "not looked at: the volume does not answer"
        if answer.shut_down:
            found = shut_down(mount.fs_type)
        elif answer.error:
            found = os.strerror(answer.error)
        return Check(CHECK_ID, UNKNOWN, "`%s`" % path, found, "see `%s`" % ANSWERS)
    check = _judged(path, answer, manifest.get("offload"))
    return _written(check, path, mount, answer, manifest["array"] is not None)


def _written(check: Check, path: str, mount: Mount, answer: Answer, ours: bool) -> Check:
    """``check``, or where the directory is as it was built and root's write failed, the check of that."""
    number = answer.directory_error
    if check.status != PASS or not number:
        return check
    words = "%s (%s)" % (os.strerror(number), answer.directory_error_at)
    if not answer.directory_flag and root_may_lack_rights(number, mount.fs_type, ours):
        return Check(CHECK_ID, SKIP, check.expected, "%s; root cannot write there: %s" % (check.found, words), "")
    found, remedy = words, "see the kernel's log (`dmesg`)"
    if answer.directory_flag:
        found, remedy = forbidden(answer.directory_flag, path, words)
    elif number in FULL:
        found = "a quota of this directory is used up; the volume has room: %s" % words
        report = "xfs_quota -x -c 'report -pg -bi' %s" if mount.fs_type == "xfs" else "repquota -vPg %s"
        remedy = "see its project (`lsattr -pd %s`) and the limits (`%s`); remove what nobody needs there" % (
            path,
            report % mount.mount_point,
        )
    elif number in (errno.ENOENT, errno.ENOTDIR):
        found, remedy = "it went away while it was looked at: %s" % words, "run `tunetool provision`"
    return Check(CHECK_ID, FAIL, check.expected, found, remedy)


def _hidden(path: str, mount: Mount, root: str) -> Check | None:
    """The check where a mount lies over the directory and shows another one, or forbids writes; else None."""
    over = mount_holding(path, read_mounts(root))
    if over is None or over.mount_point == mount.mount_point:
        return None
    shown, built = ((each.device_number, place_within(path, each)) for each in (over, mount))
    if shown == built and not is_read_only(over):
        return None
    found = "%s lies there%s" % (described(over), ", read-only" if is_read_only(over) else "")
    return Check(CHECK_ID, FAIL, "`%s`" % path, found, "run `umount %s`" % over.mount_point)


def _missing(path: str) -> Check:
    return Check(CHECK_ID, FAIL, "`%s`" % path, "missing", "run `tunetool provision`")


def _judged(path: str, answer: Answer, wanted: Mapping[str, Any] | None) -> Check:
    """Of a volume that answers. ``wanted``: None in a manifest of an earlier version."""
    if not answer.is_directory:
        return _missing(path)
    if answer.leads_to:
        found = "it leads to `%s`, on another file system" % answer.leads_to
        remedy = "remove the link on the way to `%s`, then run `tunetool provision`" % path
        return Check(CHECK_ID, FAIL, "`%s`" % path, found, remedy)
    for above, access in answer.above:
        if answer.access is not None and shuts_out(access, wanted or answer.access):
            found = "no job reaches it: `%s` above it is %s" % (above, in_words(access))
            return Check(CHECK_ID, FAIL, "`%s`" % path, found, "run `chmod a+x %s`" % above)
    if wanted is None or answer.access is None:
        return Check(CHECK_ID, PASS, "`%s`" % path, "a directory")
    expected, found = "`%s`, %s" % (path, in_words(wanted)), "a directory, %s" % in_words(answer.access)
    if dict(answer.access) == dict(wanted):
        return Check(CHECK_ID, PASS, expected, found)
    owner = "%d:%d" % (wanted["uid"], wanted["gid"])
    remedy = "run `tunetool provision`, or `chown %s %s` and `chmod %s %s`" % (owner, path, wanted["mode"], path)
    return Check(CHECK_ID, FAIL, expected, found, remedy)
