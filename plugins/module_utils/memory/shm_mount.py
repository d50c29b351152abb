"""The mount options of /dev/shm in /etc/fstab. Pure."""

from __future__ import annotations

from ..machine.fstab import FstabConflict, entries_at, with_entry

POINT = "/dev/shm"
POLICIES = ("always", "within_size", "advise", "never")
"""Values of ``huge=`` (tmpfs(5))."""


def with_shm(text: str, size: int | None, huge: str | None) -> str:
    """fstab with the size (bytes) and the huge pages of /dev/shm; None leaves what an entry has.

    ``huge``: empty takes the option away. A size replaces all other options of the entry, ``huge`` alone keeps them.
    Raises ``FstabConflict`` for two entries, and where ``huge`` alone would change an entry that is no tmpfs.
    """
    present = entries_at(text, POINT)
    before = list(present[0].options) if present else []
    kept = [option for option in before if option.startswith("huge=")]
    asked = kept if huge is None else ["huge=%s" % huge] if huge else []
    if size is not None:
        others = ["nosuid", "nodev", "size=%d" % size]
    elif asked == kept:
        return text
    elif present and present[0].fs_type != "tmpfs":
        raise FstabConflict("/etc/fstab line %d mounts no tmpfs at `%s`" % (present[0].line_number, POINT))
    else:
        others = [option for option in before if option not in kept] or ["nosuid", "nodev"]
    return with_entry(text, "tmpfs", POINT, "tmpfs", ",".join(others + asked), replace_any_spec=True)
