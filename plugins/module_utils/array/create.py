"""Creates or assembles the array; every step checks the drives again before it writes."""

from __future__ import annotations

from ..common.commands import run
from ..common.raid_levels import DEFAULT, LEVELS
from ..common.refusal import Refusal
from ..machine.drive_contents import read_signatures, read_unlabelled, use_problems
from ..machine.drives import Drive, disks_under, read_drives
from ..machine.held_drives import refuse, untouched
from .md_arrays import Array, find, read_arrays


def members_by_serial(serials: list[str]) -> list[Drive]:
    """The drives in the requested order. Raises ``Refusal`` if one is absent or a serial is not unique."""
    drives = read_drives()
    chosen = []
    for serial in serials:
        matching = [drive for drive in drives if drive.serial == serial]
        if len(matching) != 1:
            cure = (
                "every member needs its own"
                if matching
                else "see `lsblk -do NAME,SERIAL`, or `tunetool inspect` where drives share one"
            )
            raise Refusal("serial `%s` is on %d drives. hint: %s" % (serial, len(matching), cure))
        chosen.append(matching[0])
    return chosen


def refuse_unless_blank(members: list[Drive], deep: bool = False) -> None:
    """Check the drives again before md writes to them: they may have changed during the run.

    ``deep``: data of no known kind counts too.
    """
    for drive in members:
        problem = "; ".join(drive.uses)
        if drive.partitions:
            problem = "has partitions " + ", ".join(drive.partitions)
        refuse(drive, problem)
    used = use_problems(members)
    for drive in members:
        refuse(drive, used.get(drive.name))
    with untouched(members):
        signatures = read_signatures([drive.name for drive in members])
        for drive in members if not signatures else ():
            signatures += read_unlabelled(drive.name, deep)
    for drive in members:
        held_there = [str(signature) for signature in signatures if signature.device == drive.name]
        refuse(drive, "holds %s" % held_there[0] if held_there else None)


def create(name: str, chunk: int, members: list[Drive], uuid: str | None = None, level: str = DEFAULT) -> None:
    """Create the array. Without --run, mdadm asks if it sees something on a drive, gets no answer and stops."""
    run(
        ["mdadm", "--create", "/dev/md/" + name, "--metadata=1.2", "--name=" + name]
        + [*LEVELS[level].create_arguments(chunk), "--raid-devices=%d" % len(members)]
        + (["--uuid=" + uuid] if uuid else [])
        + [drive.path for drive in members]
    )


def assemble(name: str, uuid: str, members: list[Drive]) -> None:
    """Assemble an array whose members are all present; md itself refuses members that do not fit.

    What udev began with some of them is stopped first. Often it would take the others; not once its start was tried
    (`mdadm --run`, as Debian's initramfs does where the root file system is late).
    """
    names = {drive.name for drive in members}
    begun = {array.device for array in read_arrays() if array.state == "inactive"}
    for device in sorted(begun & {array for drive in members for array in drive.idle_arrays}):
        if disks_under("/", device) <= names:
            run(["mdadm", "--stop", "/dev/" + device])
    run(["mdadm", "--assemble", "/dev/md/" + name, "--uuid=" + uuid] + [drive.path for drive in members])


def settled(uuid_or_member: str) -> Array | None:
    """The array once udev has named it: found by UUID, or by a member's kernel name right after creation."""
    run(["udevadm", "settle", "--timeout=60"], accept=(0, 1))
    arrays = read_arrays()
    return find(arrays, uuid_or_member) or next((array for array in arrays if uuid_or_member in array.members), None)
