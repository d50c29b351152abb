"""Owner, group and mode of the offload directory: what is asked for, what is there, and both in words.

One form everywhere, that of the manifest and of ephemeral.json: ``{"uid": int, "gid": int, "mode": "1777"}``. By
numbers, since a name server that is away must not look like a change.
"""

from __future__ import annotations

import grp
import os
import pwd
from typing import Any, Mapping


def asked(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked for. Raises ``KeyError`` for a user or group that this node does not know."""
    return {
        "uid": pwd.getpwnam(wanted["offload_owner"]).pw_uid,
        "gid": grp.getgrnam(wanted["offload_group"]).gr_gid,
        "mode": "%04o" % int(wanted["offload_mode"], 8),
    }


def access_of(status: os.stat_result) -> dict[str, Any]:
    """What a directory has."""
    return {"uid": status.st_uid, "gid": status.st_gid, "mode": "%04o" % (status.st_mode & 0o7777)}


def shuts_out(above: Mapping[str, Any], access: Mapping[str, Any]) -> bool:
    """Whether a directory above lets nobody through to one of this ``access`` for whom that is made.

    In doubt not: who is in a group is not looked up, but for root's own, in which nobody else is; and an access control
    list (``listed``) may let anybody through.
    """
    mode, wanted = int(above["mode"], 8), int(access["mode"], 8)
    if access["uid"] != 0 and above["uid"] == access["uid"]:
        return not mode & 0o100
    for_others = access["uid"] != 0 or bool(wanted & 0o022)
    by_its_owner = above["uid"] != 0 and access["uid"] == 0 and bool(mode & 0o100)
    by_a_group = bool(mode & 0o010) and (above["gid"] != 0 or (access["gid"] == 0 and not wanted & 0o002))
    return for_others and not (mode & 0o001 or by_a_group or by_its_owner or above.get("listed"))


def in_words(access: Mapping[str, Any]) -> str:
    """Such as ``root:root 1777``."""
    return "%s:%s %s" % (name_of(access["uid"]), group_of(access["gid"]), access["mode"])


def name_of(uid: int) -> str:
    """Login name, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_of(gid: int) -> str:
    """Group name, or the number."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
