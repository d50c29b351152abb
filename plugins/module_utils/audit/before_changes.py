"""Every difference of a built node from what is asked, before anything is changed.

The roles mend one after the other, and the first thing that cannot be mended ends the run. So the first of them
compares everything: the owner reads every difference in one run.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping

from ..array.drift import Asked, array_differences, built_array, complete
from ..array.md_arrays import examine, read_arrays
from ..common.commands import CommandError
from ..common.drift import Difference, Ledger, built_manifest
from ..common.files import content
from ..common.manifest import MANIFEST_PATH
from ..common.refusal import Refusal
from ..machine.drive_contents import UnreadableDevice
from ..machine.drives import read_drives
from ..machine.fstab import FSTAB, foreign_entry
from ..memory.apply import MemoryJob
from ..units import UnitError
from ..volume.apply import Volume


def overview(asked: Asked, wishes: Mapping[str, Any], root: str = "/") -> list[Difference]:
    """Every difference on a built node; none on any other, nor where its drives carry no array at all.

    Where mdadm cannot be asked what they carry and the kernel runs none of it, the array is unknown: one difference.

    ``wishes`` has what M(tunetool.node.scratch_filesystem) and M(tunetool.node.host_memory) will be asked for, as
    ``filesystem`` and ``memory``; either may be None.
    """
    manifest = built_manifest(root.rstrip("/") + MANIFEST_PATH)
    if manifest is None:
        return []
    drives = read_drives(root)
    serials = {drive.name: drive.serial for drive in drives}
    arrays = read_arrays(root)
    superblocks, no_answer = {}, ""
    if not any(array.uuid == manifest["array"]["uuid"] for array in arrays):
        try:
            superblocks = examine([drive.name for drive in drives])
        except CommandError as error:
            no_answer = str(error)
    array = built_array(manifest, arrays, superblocks, serials)
    if array is None:
        return [_unknown_array(manifest, no_answer)] if no_answer else []
    differences = array_differences(manifest, asked, arrays, superblocks, serials, root)
    volume, memory = wishes.get("filesystem"), wishes.get("memory")
    if volume and array.device and complete(array):
        # Compare the file system with the present array: otherwise one wrong chunk would be reported three times.
        wanted = dict(volume, array=array.name, chunk_bytes=array.chunk_bytes, members=array.raid_disks)
        differences += _look(manifest, "filesystem", lambda ledger: Volume(wanted, ledger, array, root).all())
    if memory:
        differences += _look(manifest, "memory", lambda ledger: MemoryJob(memory, ledger, root).all())
    return differences


def _unknown_array(manifest: Mapping[str, Any], no_answer: str) -> Difference:
    built = manifest["array"]
    return Difference(
        "array",
        "array `%s` UUID %s" % (built["name"], built["uuid"]),
        "no answer: %s" % no_answer,
        mended=False,
        hint="`mdadm --examine` must answer for the drives: `site.yml --tags packages` installs it where it is missing",
    )


def in_the_way(mount_point: str, root: str = "/") -> str | None:
    """The fstab entry of something else at the volume's mount point; checked before any drive is touched."""
    manifest = built_manifest(root.rstrip("/") + MANIFEST_PATH)
    ours = ["UUID=%s" % manifest["filesystem"]["uuid"]] if manifest else []
    return foreign_entry(content(root.rstrip("/") + FSTAB), mount_point, ours)


def _look(manifest: Mapping[str, Any], name: str, work: Callable[[Ledger], object]) -> list[Difference]:
    ledger = Ledger(manifest, acting=False)
    try:
        work(ledger)
    except (Refusal, CommandError, UnreadableDevice, UnitError, ValueError) as error:
        text, _, hint = str(error).partition(". hint: ")
        ledger.cannot(name, "as asked", text, hint or "look at the node first", "")
    return ledger.differences
