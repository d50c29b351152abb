"""Rebuild the scratch volume on blank drives that replaced the old ones: ``tunetool ephemeral-rebuild``.

It runs before anything is mounted. The array and the file system get the UUIDs of the manifest, so that fstab,
mdadm.conf and the initramfs stay valid.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.node.array.create import create, refuse_unless_blank, settled
from tunetool.node.array.md_arrays import Array, read_arrays
from tunetool.node.common import manifest
from tunetool.node.common.commands import CommandError, run
from tunetool.node.common.file_lock import Locked, only_one
from tunetool.node.common.files import read_text, replace_file
from tunetool.node.common.raid_levels import LEVELS
from tunetool.node.common.refusal import Refusal
from tunetool.node.common.waiting import wait_for
from tunetool.node.ephemeral import boot_decision
from tunetool.node.ephemeral.boot_decision import BUILD, LEAVE, NOTHING, Finding, Scene
from tunetool.node.machine.drive_contents import UnreadableDevice, read_contents, read_signatures
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.file_system import BUILT, Geometry, wipe_half_made
from tunetool.node.tuning.apply import follow_members

Say = Callable[[str], None]
LOCK_SECONDS = 60.0
LINK_SECONDS = 10.0
SETTLE_SECONDS = 30


def rebuild(dry_run: bool, say: Say, unless: str | None = None) -> ExitCode:
    """Rebuild the volume if every drive is blank. Passes one line about the state and one about the result to ``say``.

    Where the file system with the UUID ``unless`` is present, nothing is read or changed. Returns ``FALLS_SHORT`` where
    the volume cannot be rebuilt; raises ``UsageProblem`` for a damaged configuration and ``CannotJudge`` where a
    command failed or drives could not be read.
    """
    if unless and _present(unless):
        return _leave_present(unless, say)
    try:
        config = boot_decision.load()
        built = manifest.load()
    except (boot_decision.ConfigError, manifest.ManifestError, FileNotFoundError) as error:
        if unless:
            # udev may be assembling the volume right now; then it is intact although our file is damaged.
            run(["udevadm", "settle", f"--timeout={SETTLE_SECONDS}"], accept=(0, 1))
            if _present(unless):
                return _leave_present(unless, say)
        if isinstance(error, FileNotFoundError):
            say("nothing was changed: there is no manifest. hint: run `tunetool provision` for this node")
            return ExitCode.FALLS_SHORT
        message, _, hint = str(error).partition(". hint: ")
        raise UsageProblem(message, hint or getattr(error, "hint", None)) from None
    try:
        with only_one(patience=LOCK_SECONDS):
            finding = _watch(built, config, 0.0 if dry_run else float(config["wait_seconds"]))
            say(finding.line)
            if finding.action == LEAVE:
                return ExitCode.FALLS_SHORT
            if finding.action != NOTHING and not dry_run:
                _carry_out(finding, built, config, say)
                say(
                    f"`{built['filesystem']['mount_point']}` was rebuilt and is empty: "
                    f"{LEVELS[built['array']['level']]} over " + ", ".join(drive.serial for drive in finding.members)
                )
    except (Refusal, Locked) as error:
        message, _, hint = str(error).partition(". hint: ")
        raise CannotJudge(message, hint or None) from None
    except (CommandError, UnreadableDevice) as error:
        raise CannotJudge(str(error), boot_decision.ADVICE) from error
    return ExitCode.OK


def _present(uuid: str) -> bool:
    return Path("/dev/disk/by-uuid", uuid).exists() and not Path(boot_decision.BEGUN_PATH).exists()


def _leave_present(uuid: str, say: Say) -> ExitCode:
    say(f"file system `{uuid}` is present: nothing to do")
    return ExitCode.OK


def _watch(built: Mapping[str, Any], config: Mapping[str, Any], patience: float) -> Finding:
    """Read the drives until a decision is possible or ``patience`` seconds are over.

    Drives appear one after another, and udev assembles arrays meanwhile.
    """
    deadline = time.monotonic() + patience
    link = _link(built)
    while True:
        arrays = read_arrays()
        if boot_decision.assembled(built, arrays) is None or not link.exists():
            seconds_left = max(1, int(deadline - time.monotonic()))
            run(["udevadm", "settle", f"--timeout={seconds_left}"], accept=(0, 1))
            arrays = read_arrays()
        drives = read_drives()
        contents, unreadable = ({}, {}) if boot_decision.assembled(built, arrays) else read_contents(drives)
        begun = read_text(boot_decision.BEGUN_PATH) or ""
        scene = Scene(drives, contents, unreadable, arrays, link.exists(), begun)
        finding = boot_decision.decide(built, config, scene)
        if finding.action != LEAVE or time.monotonic() >= deadline:
            return finding
        time.sleep(0.5)


def _link(built: Mapping[str, Any]) -> Path:
    return Path("/dev/disk/by-uuid", built["filesystem"]["uuid"])


def _carry_out(finding: Finding, built: Mapping[str, Any], config: Mapping[str, Any], say: Say) -> None:
    wanted, members = built["array"], list(finding.members)
    begun = Path(boot_decision.BEGUN_PATH)
    if finding.action == BUILD:
        refuse_unless_blank(members)
        replace_file(boot_decision.BEGUN_PATH, wanted["uuid"] + "\n")
        create(wanted["name"], wanted["chunk_bytes"], members, wanted["uuid"], wanted["level"])
    array = _require_manifest_geometry(settled(wanted["uuid"]), wanted, [drive.name for drive in members])
    try:
        _make_filesystem(array, built["filesystem"], config["label"], fresh=finding.action == BUILD)
    except Refusal:
        # The content is not ours: a later boot must not take it for an interrupted rebuild.
        begun.unlink(missing_ok=True)
        raise
    if built["offload_dir"] is not None and config["offload"] is not None:
        _create_offload_directory(
            array, os.path.relpath(built["offload_dir"], built["filesystem"]["mount_point"]), config["offload"]
        )
    after = boot_decision.with_members(built, members)
    if after != built:
        manifest.write(after)
    begun.unlink(missing_ok=True)
    try:
        follow_members(after)
    except (OSError, Refusal, CommandError) as error:
        # The volume serves without them, and `verify` names what does not hold.
        say(f"I/O settings were not set: {str(error).splitlines()[0]}. hint: run `tunetool provision`")
    _wait_for_link(array, _link(built))


def _require_manifest_geometry(array: Array | None, wanted: Mapping[str, Any], names: list[str]) -> Array:
    if array is None:
        raise Refusal(f"array `{wanted['name']}` did not appear. hint: see `dmesg | grep md`")
    actual = (array.uuid, array.level, array.chunk_bytes, list(array.members))
    if actual != (wanted["uuid"], wanted["level"], wanted["chunk_bytes"], names):
        raise Refusal(f"array `{wanted['name']}` differs from the manifest. hint: see `mdadm --detail {array.path}`")
    return array


def _make_filesystem(array: Array, wanted: Mapping[str, Any], label: str, *, fresh: bool) -> None:
    """Make it with the manifest's UUID and geometry. Only an interrupted mkfs of that file system may be overwritten;
    raises ``Refusal`` for any other content.
    """
    geometry = Geometry(wanted["data_su_bytes"], wanted["data_sw"], wanted["log_su_bytes"])
    signatures = read_signatures([array.device])
    ours = [(signature.type, signature.uuid) for signature in signatures] == [(wanted["type"], wanted["uuid"])]
    if ours and not fresh and BUILT.half_made(array.path, label):
        # It cannot be mounted, so that it holds no files.
        wipe_half_made(array.path)
        signatures = []
    if not signatures:
        BUILT.mkfs(array.path, geometry, label, wanted["uuid"])
    elif fresh or not ours:
        raise Refusal(
            f"the array over blank drives shows {', '.join(map(str, signatures))}. "
            "hint: this is old data, which was not changed; look at it, then decide"
        )
    wrong = geometry.apart(BUILT.read_geometry(array.path))
    if wrong:
        differences = "; ".join(f"{name}: expected {expected}, found {actual}" for name, expected, actual in wrong)
        raise Refusal(f"the file system differs from the manifest: {differences}. hint: {boot_decision.ADVICE}")


def _create_offload_directory(array: Array, relative_path: str, offload: Mapping[str, Any]) -> None:
    """Create the offload directory before the volume is mounted, so that no job sees the volume without it."""
    with tempfile.TemporaryDirectory(prefix="tunetool-rebuild-", dir="/run") as mount_point:
        run(["mount", "-t", BUILT.type, array.path, mount_point])
        try:
            directory = Path(mount_point, relative_path)
            directory.mkdir(parents=True, exist_ok=True)
            os.chown(directory, offload["uid"], offload["gid"])
            directory.chmod(int(offload["mode"], 8))
        finally:
            run(["umount", mount_point])


def _wait_for_link(array: Array, link: Path) -> None:
    """Wait for the link that the mount unit needs. udev creates it when mkfs closes the device, which may come late."""

    def nudge() -> None:
        run(["udevadm", "trigger", "--action=change", f"/sys/class/block/{array.device}"])
        run(["udevadm", "settle", "--timeout=5"], accept=(0, 1))

    if not wait_for(link.exists, LINK_SECONDS, 0.0, nudge):
        raise Refusal(f"`{link}` does not appear. hint: see `udevadm info {array.path}`")
