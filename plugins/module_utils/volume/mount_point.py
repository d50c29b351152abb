"""The mount point and its surroundings: the bare directory, the services, the offload directory."""

from __future__ import annotations

import errno
import os
from typing import Any, Callable, Mapping, Sequence

from ..array.md_arrays import Array
from ..common.commands import run
from ..common.drift import Job, Ledger
from ..common.refusal import Refusal
from ..machine.mounts import Mount, described, hidden_by, mount_at, plain_path, read_mounts
from . import late_mount
from .immutable_flag import Directory, Unsupported, look, look_beneath, set_immutable, set_immutable_beneath
from .offload_access import access_of, asked, in_words
from .unit_dropins import UNITS_DIRECTORY, Change, ForeignDropIn, apply, changes


class MountPoint(Job):
    """The steps, each comparing before it acts. ``array`` is None where check mode would make it."""

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, array: Array | None, root: str = "/") -> None:
        super().__init__(ledger, root)
        self.wanted = wanted
        self.array = array
        self.point: str = plain_path(wanted["mount_point"])
        self.points: Sequence[str] = [self.point]
        """What the services need: the mount points of all volumes, where there are several."""
        self.volume: str = wanted.get("volume") or ""
        """Its name, where it is one of several."""
        self.blocked = False
        """Whether ``bare_mount_point`` reported why the volume is not mounted there: one difference, not two."""

    def _mount(self) -> Mount | None:
        """What is mounted at the mount point, if it is the array, and the whole of it."""
        mount = mount_at(self.point, read_mounts(self.root))
        if mount is None or self.array is None or mount.device_number != self.array.device_number:
            return None
        return mount if mount.root == "/" else None

    def bare_mount_point(self) -> Directory | None:
        """The bare mount point; None, with a warning, if its flag cannot be read."""
        point, mounts = self.point, read_mounts(self.root)
        mount = mount_at(point, mounts)
        if self._is_anothers(mount, mounts):
            return None
        mount_points = [
            entry.mount_point for entry in mounts if self.array and entry.device_number == self.array.device_number
        ]
        if mount_points and mount is None:
            # Refuse a second mount of the same volume.
            self.blocked = True
            hint = "set `scratch_filesystem_mount_point: %s`, or unmount it first" % mount_points[0]
            self.ledger.cannot(
                "mount",
                "`%s`" % point,
                "`%s`" % mount_points[0],
                hint,
                "array `%s` is mounted at `%s`, not at `%s`. hint: %s"
                % (self.wanted["array"], mount_points[0], point, hint),
            )
            return None
        real = self._path(point)
        if mount is None and os.path.lexists(real):
            if os.path.islink(real) or not os.path.isdir(real):
                self._taken("no directory", "is not a directory", "name the directory itself")
                return None
            entries = tuple(sorted(os.listdir(real)))
            if entries:
                self._taken(
                    "not mounted, with %s in its place" % named(entries),
                    "is not mounted and holds %s, which the mount would hide" % named(entries),
                    "nothing was changed; move that away first",
                )
                return None
        try:
            bare = look(real) if mount is None else look_beneath(point)
        except Unsupported as error:
            self._unprotected(error)
            return None
        if mount is not None and bare.entries:
            self.ledger.warnings.append("the mount at `%s` hides %s" % (point, named(bare.entries)))
        return bare

    def _is_anothers(self, mount: Mount | None, mounts: list[Mount]) -> bool:
        """Whether another mount is at the mount point, or over one of its parents and so hides the volume."""
        over = hidden_by(self.point, mounts)
        if over is not None:
            by = "hidden by %s at `%s`" % (described(over), over.mount_point)
            self._taken(by, "is " + by, "`umount %s` first" % over.mount_point)
        elif mount is not None and self._mount() is None:
            self._taken(described(mount), "is already " + described(mount), "`umount %s` first" % self.point)
        return self.blocked

    def _taken(self, found: str, what: str, hint: str) -> None:
        self.blocked = True
        refusal = "`%s` %s. hint: %s" % (self.point, what, hint)
        self.ledger.cannot("mount", "the volume at `%s`" % self.point, found, hint, refusal)

    def _unprotected(self, error: Unsupported) -> None:
        """Warn that the flag is not supported; the build continues."""
        if self.wanted["protect_mount_point"]:
            self.ledger.warnings.append("the bare mount point cannot be protected: %s" % error)

    def protect(self, bare: Directory) -> None:
        """Make the bare mount point immutable or writable, as asked, also beneath a mount."""
        wanted = self.wanted["protect_mount_point"]
        words = {True: "immutable", False: "writable"}
        before = "%s, %s\n" % (self.point, words[bare.immutable]) if bare.exists else ""
        after = "%s, %s\n" % (self.point, words[wanted])
        state = words[bare.immutable] if bare.exists else "no directory"
        if not self.ledger.differs("mount.bare", words[wanted], state, "bare mount point", before, after):
            return
        try:
            if self._mount() is not None:
                set_immutable_beneath(self.point, wanted)
            else:
                os.makedirs(self.point, mode=0o755, exist_ok=True)
                set_immutable(self.point, wanted)
        except Unsupported as error:
            self._unprotected(error)

    def services(self) -> None:
        """Write the drop-ins of the services that need the volume; of several, with the first for all."""
        if self.point != self.points[0]:
            return
        changed = self._changes(
            "services",
            "tunetool's drop-in",
            lambda: changes(self.wanted["services"], self.points, self._path(UNITS_DIRECTORY)),
        )
        self._write(
            [
                change
                for change in changed
                if self.ledger.file_differs(
                    "services[%s]" % os.path.basename(os.path.dirname(change.path))[: -len(".d")],
                    change.path,
                    change.before,
                    change.after,
                )
            ]
        )

    def late(self, uuid: str | None) -> None:
        """Write the unit that mounts a volume which appears after the boot went on without it."""
        changed = self._changes(
            "mount.late",
            "tunetool's unit",
            lambda: late_mount.changes(
                late_mount.files(self.point, uuid or "(new)", self.volume), self.root, self.volume
            ),
        )
        # In words: the lines of a unit that is missing are the whole unit.
        self._write(
            [
                change
                for change in changed
                if self.ledger.differs(
                    "mount.late", *late_mount.in_words(change), change.path, change.before, change.after
                )
            ]
        )

    def _changes(self, name: str, expected: str, compare: Callable[[], Sequence[Change]]) -> Sequence[Change]:
        """What differs; nothing, with a report, where somebody else's file has the name of one of these."""
        try:
            return compare()
        except ForeignDropIn as error:
            self.ledger.cannot(name, expected, str(error), "move it to another name", str(error))
            return ()

    def _write(self, acted: Sequence[Change]) -> None:
        for change in acted:
            apply(change)
        if acted:
            reload_systemd()

    def offload(self) -> str | None:
        """Make the offload directory with its owner and mode."""
        path = self.wanted["offload_dir"]
        if not path:
            return None
        mounted = self._mount() is not None
        if not mounted and self.ledger.manifest is not None:
            return str(path)  # it is on the volume, which is not mounted yet
        try:
            access = asked(self.wanted)
        except KeyError as error:
            hint = "make the user or group first"
            self.ledger.cannot(
                "offload.directory",
                "owned by `%s:%s`" % (self.wanted["offload_owner"], self.wanted["offload_group"]),
                str(error.args[0]),
                hint,
                "offload directory: %s. hint: %s" % (error.args[0], hint),
            )
            return str(path)
        after, before = in_words(access), ""
        if mounted and os.path.isdir(self._path(path)):
            before = in_words(access_of(os.stat(self._path(path))))
        lines = ["%s %s\n" % (path, text) if text else "" for text in (before, after)]
        if self.ledger.differs("offload.directory", after, before or "no directory", "offload directory", *lines):
            os.makedirs(path, exist_ok=True)
            try:
                handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR) or not os.path.islink(path):
                    raise
                raise Refusal("`%s` is a symbolic link. hint: name the directory itself" % path) from None
            try:
                # By the handle: between two calls by name, somebody could put a link there.
                os.fchown(handle, access["uid"], access["gid"])
                os.fchmod(handle, int(access["mode"], 8))
            finally:
                os.close(handle)
        return str(path)


def reload_systemd() -> None:
    """Let systemd read its files again, where it runs."""
    if os.path.isdir("/run/systemd/system"):
        run(["systemctl", "daemon-reload"])


def named(entries: tuple[str, ...]) -> str:
    """The number of names, and the first three."""
    shown = ", ".join("`%s`" % entry for entry in entries[:3])
    return "%d %s: %s%s" % (
        len(entries),
        "entry" if len(entries) == 1 else "entries",
        shown,
        " ..." if len(entries) > 3 else "",
    )
