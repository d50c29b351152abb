"""The volumes of a node that has several, each made and compared as if it were alone."""

from __future__ import annotations

import contextlib
import os
from typing import Any, Mapping, Sequence

from ..array.present import present
from ..common.drift import Job, Ledger
from ..common.manifest import each_volume
from ..common.raid_levels import SINGLE
from ..machine.file_system import BUILT, Geometry
from ..machine.mounts import described, hidden_by, mount_at, plain_path, read_mounts
from .apply import Volume
from .immutable_flag import Unsupported, look, set_immutable
from .mount_options import shown_options
from .mount_point import named
from .volume_values import options_of


class Volumes(Job):
    """The volumes of a node that has several: each as if it were alone, in a directory of its name.

    The directory around them is made immutable too: what is written there, beside them, would land on the root file
    system.
    """

    def __init__(self, wanted: Mapping[str, Any], ledger: Ledger, root: str = "/", predicting: bool = False) -> None:
        """``predicting``: in check mode, where new volumes are not there yet."""
        super().__init__(ledger, root)
        self.predicting = predicting
        self.wanted = wanted
        self.point = plain_path(wanted["mount_point"])
        self.volumes: Sequence[Mapping[str, Any]] = wanted["volumes"]

    def all(self) -> list[dict[str, Any]]:
        """Do the whole job for each; returns the volumes as the manifest holds them."""
        self.around()
        present = dict(each_volume(self.ledger.manifest)) if self.ledger.manifest else {}
        answers = []
        for each in self.volumes:
            if each.get("later"):
                continue
            if each.get("left"):
                answers.append({key: each[key] for key in ("name", "array", "filesystem", "offload_dir", "left")})
                continue
            with self.ledger.about(each["name"], present.get(each["name"])):
                volume = self.volume(each)
                self._refuse_if_gone(each, volume)
                uuid, offload_dir = volume.all()
                answers.append(
                    {
                        "name": each["name"],
                        "array": each["array"],
                        "filesystem": as_built(volume.wanted, volume.geometry, uuid),
                        "offload_dir": offload_dir,
                    }
                )
        self.protect()
        return answers

    def volume(self, each: Mapping[str, Any]) -> Volume:
        """One of them, to be looked at or made. What is asked of all is asked of it, in its own directory."""
        name, array = each["name"], each["array"]
        point, offload = "%s/%s" % (self.point, name), self.wanted["offload_dir"]
        wanted = dict(
            self.wanted,
            volume=name,
            serial=array["members"][0]["serial"],
            array=array["name"],
            chunk_bytes=array["chunk_bytes"],
            members=len(array["members"]),
            mount_point=point,
            label=name,
            offload_dir=os.path.join(point, os.path.relpath(offload, self.point)) if offload else "",
        )
        # What check mode would wipe first is not looked into.
        there = None if each.get("new") and self.predicting else present(array, self.root)
        volume = Volume(wanted, self.ledger, there, self.root)
        volume.points = ["%s/%s" % (self.point, other["name"]) for other in self.volumes]
        return volume

    def _refuse_if_gone(self, each: Mapping[str, Any], volume: Volume) -> None:
        """Without it there is no UUID to write into fstab. It was there when the task before this one looked."""
        of_md = each["array"]["level"] != SINGLE.name
        if volume.array is not None or (self.predicting and (of_md or each.get("new"))):
            return  # or it would be made, or assembled
        if of_md:
            what, hint = "array `%s`" % each["array"]["name"], "nothing was changed; run `tunetool provision` again"
            refusal = "%s of volume `%s` is not assembled. hint: %s" % (what, each["name"], hint)
            self.ledger.cannot("array", what, "not assembled", hint, refusal)
            return
        serial, hint = volume.wanted["serial"], "nothing was changed; see `lsblk -do NAME,SERIAL`, then run it again"
        refusal = "drive `%s` of volume `%s` is gone, or on several drives. hint: %s" % (serial, each["name"], hint)
        self.ledger.cannot("drive", "`%s`" % serial, "none, or several", hint, refusal)

    def around(self) -> None:
        """The directory around the mount points holds nothing else, and nothing is mounted there."""
        real, names = self._path(self.point), [each["name"] for each in self.volumes]
        mounts = read_mounts(self.root)
        over = mount_at(self.point, mounts) or hidden_by(self.point, mounts)
        problem = hint = ""
        if over is not None:
            problem, hint = "has %s over it" % described(over), "`umount %s` first" % over.mount_point
        elif os.path.islink(real) or (os.path.lexists(real) and not os.path.isdir(real)):
            problem, hint = "is not a directory", "name the directory itself"
        elif os.path.isdir(real):
            others = tuple(sorted(set(os.listdir(real)) - set(names)))
            if others:
                problem, hint = "holds %s beside the volumes" % named(others), "move that away first"
        if problem:
            refusal = "`%s` %s. hint: nothing was changed; %s" % (self.point, problem, hint)
            self.ledger.cannot("mount.around", "a directory with the volumes", problem, hint, refusal)
        else:
            # A look at one that is broken fails.
            mine = [each["name"] for each in self.volumes if not each.get("left")]
            self._make([name for name in mine if not os.path.isdir(os.path.join(real, name))])

    def _make(self, missing: Sequence[str]) -> None:
        after = "".join("%s/%s\n" % (self.point, name) for name in missing)
        if not self.ledger.note("directories of the volumes", "", after):
            return
        os.makedirs(self._path(self.point), mode=0o755, exist_ok=True)
        with contextlib.suppress(Unsupported):
            set_immutable(self._path(self.point), False)
        for name in missing:
            os.mkdir(os.path.join(self._path(self.point), name), mode=0o755)

    def protect(self) -> None:
        """Make the directory around the mount points immutable or writable, as asked."""
        wanted = self.wanted["protect_mount_point"]
        words = {True: "immutable", False: "writable"}
        try:
            bare = look(self._path(self.point))
            before = "%s, %s\n" % (self.point, words[bare.immutable]) if bare.exists else ""
            after = "%s, %s\n" % (self.point, words[wanted])
            state = words[bare.immutable] if bare.exists else "no directory"
            if self.ledger.differs("mount.around", words[wanted], state, "directory of the volumes", before, after):
                set_immutable(self._path(self.point), wanted)
        except Unsupported as error:
            if wanted:
                self.ledger.warnings.append("`%s` cannot be protected: %s" % (self.point, error))


def as_built(wanted: Mapping[str, Any], geometry: Geometry, uuid: str | None) -> dict[str, Any]:
    """The manifest's part `filesystem`."""
    return {
        "uuid": uuid,
        "type": BUILT.type,
        "mount_point": plain_path(wanted["mount_point"]),
        "data_su_bytes": geometry.data_su_bytes,
        "data_sw": geometry.data_sw,
        "log_su_bytes": geometry.log_su_bytes,
        "mount_options": shown_options(options_of(wanted)),
    }
