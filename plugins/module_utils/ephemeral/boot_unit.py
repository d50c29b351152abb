"""The systemd unit that runs `tunetool ephemeral-rebuild` at boot, before the scratch volume is mounted."""

from __future__ import annotations

import glob
import os
from typing import Any, Mapping, Sequence

from ..common.commands import run
from ..volume.unit_dropins import UNITS_DIRECTORY, Change, device_unit, escape, exact_changes, link_to, quoted
from .boot_decision import BEGUN_PATH, CONFIG_PATH

UNIT = "tunetool-ephemeral.service"
HEADER = "# Written by tunetool (ephemeral_enabled); it goes when that is false."

# wipefs, mdadm and mkfs.xfs have time limits of their own, which together stay below this.
TIMEOUT_SECONDS = 2700

_TEMPLATE = """\
%(header)s
[Unit]
Description=Rebuild the scratch volume if every local drive came back blank
DefaultDependencies=no
# No systemd-udev-settle.service: one dead drive would hold the whole boot. The program waits by itself, with a limit.
Wants=systemd-udevd.service systemd-udev-trigger.service
After=systemd-remount-fs.service systemd-udevd.service systemd-udev-trigger.service
RequiresMountsFor=%(needs)s
Before=%(before)s
Conflicts=shutdown.target
Before=shutdown.target
# The mount requires this unit: a stop by hand would unmount the volume.
RefuseManualStop=yes

[Service]
Type=oneshot
RemainAfterExit=yes
# A volume that is there is mounted, whatever became of the manifest and the configuration.
ExecStart=%(program)s ephemeral-rebuild --unless %(uuid)s
PrivateMounts=yes
TimeoutStartSec=%(timeout)d

[Install]
RequiredBy=%(mount)s
"""

# A device cannot be ordered after a service, so the time-out in /etc/fstab would run out during a long rebuild. The
# unit ends well only when the file system is there, and the mount fails with it at once: nothing waits so long.
_DEVICE = """\
%s
[Unit]
JobRunningTimeoutSec=%d
"""
_DEVICE_FILE = "60-tunetool-ephemeral.conf"


def mount_unit(manifest: Mapping[str, Any]) -> str:
    """The volume's unit, which systemd makes from /etc/fstab."""
    return escape(manifest["filesystem"]["mount_point"]) + ".mount"


def render(manifest: Mapping[str, Any], program: str, services: Sequence[str]) -> str:
    """The unit's text. It runs before the users of the volume; nothing else of a boot waits for it."""
    mount = mount_unit(manifest)
    needs = [os.path.dirname(CONFIG_PATH), os.path.dirname(program), "/usr"]
    return _TEMPLATE % {
        "header": HEADER,
        "needs": " ".join(quoted(path) for path in needs),
        "before": " ".join([mount, *services]),
        "mount": mount,
        "uuid": manifest["filesystem"]["uuid"],
        "program": quoted(program),
        "timeout": TIMEOUT_SECONDS,
    }


def files(manifest: Mapping[str, Any], program: str, services: Sequence[str], config: str) -> dict[str, str]:
    """Every file by path, including the links that `systemctl enable` would make, as ``-> TARGET``."""
    device = device_unit(manifest["filesystem"]["uuid"])
    return {
        CONFIG_PATH: config,
        os.path.join(UNITS_DIRECTORY, UNIT): render(manifest, program, services),
        os.path.join(UNITS_DIRECTORY, device + ".d", _DEVICE_FILE): _DEVICE % (HEADER, TIMEOUT_SECONDS + 60),
        os.path.join(UNITS_DIRECTORY, mount_unit(manifest) + ".requires", UNIT): link_to("../" + UNIT),
    }


def changes(wanted: Mapping[str, str], root: str = "/") -> list[Change]:
    """Differences from exactly these files; without files, all must be absent. Raises ``ForeignDropIn``."""
    units = os.path.join(root, UNITS_DIRECTORY.lstrip("/"))
    present = glob.glob(os.path.join(glob.escape(units), "*.device.d", _DEVICE_FILE))
    present += glob.glob(os.path.join(glob.escape(units), "*.mount.requires", UNIT))
    present += [os.path.join(units, UNIT), os.path.join(root, CONFIG_PATH.lstrip("/"))]
    if not wanted:
        # Of a rebuild that was cut, which nothing will continue.
        present.append(os.path.join(root, BEGUN_PATH.lstrip("/")))
    texts = {os.path.join(root, path.lstrip("/")): text for path, text in wanted.items()}
    return exact_changes(os.path.join(units, UNIT), HEADER, texts, present)


def has_run() -> bool:
    """Whether the unit has succeeded since the boot; True if systemd does not run."""
    if not os.path.isdir("/run/systemd/system"):
        return True
    return run(["systemctl", "is-active", UNIT], accept=range(256)).stdout.strip() == "active"


def take_effect(enabled: bool) -> None:
    """Let systemd, where it runs, read its files again and learn that the unit has done its work for this boot.

    Started now it finds the volume and ends well, or says at once why it could not serve; then it stays active, so that
    only a boot runs it. Raises ``CommandError``.
    """
    if not os.path.isdir("/run/systemd/system"):
        return
    run(["systemctl", "daemon-reload"])
    if enabled:
        run(["systemctl", "start", UNIT])
        return
    # Only after the mount no longer requires it.
    run(["systemctl", "stop", UNIT], accept=(0, 5))
    run(["systemctl", "reset-failed", UNIT], accept=(0, 1))
