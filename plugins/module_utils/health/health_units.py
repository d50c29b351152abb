"""The node's health check: its settings, the program's starter and its systemd units, as they are asked for and brought
to that."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Iterator, Mapping, Sequence

from ..common.commands import CommandError, Result, run
from ..common.drift import diff_entry
from ..common.settings_file import SettingsError
from ..common.waiting import wait_for
from ..volume import program_units
from ..volume.program_units import any_of, put, unit_path
from ..volume.unit_dropins import Change, link_to, quoted
from .settings import (
    ANSWER_PATH,
    CHECKED_PATH,
    CONFIG_PATH,
    KEPT_PATH,
    LINE_PATH,
    MEASURED_PATH,
    WEAR_PATH,
    load,
)

SERVICE = "tunetool-health.service"
TIMER = "tunetool-health.timer"
MEASURE = "tunetool-health-measure.service"
SOCKET = "tunetool-health.socket"
ANSWER = "tunetool-health@.service"
HEADER = "# Written by tunetool (node_health_enabled); it goes when that is false."
STARTER_NAME = "tunetool-health"
_RUNS = ("activating", "deactivating")
_CHECK_ENDS = 60.0
"""Seconds. One that hangs for longer is stopped, and what it left behind is a user as any other."""
METRICS = ("tunetool-health.prom", "tunetool-verify.prom")
"""Of the checks, and of measurements."""

# The link leads to the venv of the version that is installed now; its interpreter starts without the user's settings.
_STARTER = """\
#!/bin/sh
%(header)s
# Without an argument it is a program for Slurm's HealthCheckProgram, which takes none.
# slurmd may start it without a PATH.
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin
export PATH
program=$(readlink -f %(program)s) || exit 3
exec "${program%%/*}/python" -I -m tunetool.health "${1:-slurm}"
"""

_SERVICE = """\
%(header)s
[Unit]
Description=Check this node's storage against its manifest

[Service]
Type=oneshot
ExecStart=%(starter)s check
Nice=10
# What waits for a dead volume cannot be ended. It is left behind, and holds neither this check nor the next one.
KillMode=process
# A stuck drive must not hold it for ever. The age of the last result shows that then.
TimeoutStartSec=%(timeout)d
"""

_TIMER = """\
%(header)s
[Unit]
Description=Check this node's storage against its manifest, every %(period)d s

[Timer]
OnBootSec=120
OnUnitActiveSec=%(period)d
AccuracySec=15

[Install]
WantedBy=timers.target
"""

_MEASURE = """\
%(header)s
[Unit]
Description=Measure this idle node's storage

[Service]
Type=oneshot
ExecStart=%(starter)s measure
TimeoutStartSec=1800
"""

_SOCKET = """\
%(header)s
[Unit]
Description=Answer for this node's health

[Socket]
ListenStream=%(socket)s
Accept=yes
MaxConnections=16
# Else anybody could end it: systemd gives up a socket with 200 connections in 2 s.
TriggerLimitIntervalSec=0
# Jobs of every user ask.
SocketMode=0666
RemoveOnStop=yes

[Install]
WantedBy=sockets.target
"""

_ANSWER = """\
%(header)s
[Unit]
Description=Answer for this node's health
CollectMode=inactive-or-failed

[Service]
ExecStart=%(starter)s answer
StandardInput=socket
StandardOutput=journal
RuntimeMaxSec=120
# Whoever asks may be anybody.
DynamicUser=yes
NoNewPrivileges=yes
CapabilityBoundingSet=
ProtectHome=yes
ProtectSystem=strict
PrivateDevices=yes
PrivateNetwork=yes
RestrictAddressFamilies=AF_UNIX
MemoryMax=128M
TasksMax=4
"""


def starter_path(program: str) -> str:
    """The path of the starter."""
    return program_units.starter_path(program, STARTER_NAME)


def files(program: str, settings: str, period: int, socket: str) -> dict[str, str]:
    """Every file by path, including the links that `systemctl enable` would make, as ``-> TARGET``."""
    words = {
        "header": HEADER,
        "program": "'%s'" % program.replace("'", "'\\''"),
        "starter": quoted(starter_path(program)),
        "period": period,
        "timeout": max(60, period - 10),
        "socket": socket.replace("%", "%%"),
    }
    texts = {
        SERVICE: _SERVICE % words,
        TIMER: _TIMER % words,
        MEASURE: _MEASURE % words,
        "timers.target.wants/" + TIMER: link_to("../" + TIMER),
    }
    if socket:
        texts[SOCKET] = _SOCKET % words
        texts[ANSWER] = _ANSWER % words
        texts["sockets.target.wants/" + SOCKET] = link_to("../" + SOCKET)
    units = {unit_path(name): text for name, text in texts.items()}
    return {CONFIG_PATH: settings, starter_path(program): _STARTER % words, **units}


def changes(wanted: Mapping[str, str], program: str, root: str = "/") -> list[Change]:
    """Differences from exactly these files; without files, all must be absent. Raises ``ForeignDropIn``."""
    return program_units.changes(wanted, files(program, "", 60, "/"), starter_path(program), SERVICE, HEADER, root)


def installed(root: str = "/") -> bool:
    """Whether anything of it is on the node."""
    return any_of([CONFIG_PATH, *map(unit_path, (SERVICE, TIMER, MEASURE, SOCKET))], root)


def running(socket: bool) -> bool:
    """Whether what must run runs; True if systemd does not run."""
    if not os.path.isdir("/run/systemd/system"):
        return True
    return {TIMER, *([SOCKET] if socket else [])} <= set(active())


def active() -> list[str]:
    """The timer and the socket, where they run; none if systemd does not. Raises ``CommandError``."""
    if not os.path.isdir("/run/systemd/system"):
        return []
    units = [TIMER, SOCKET]
    states = run(["systemctl", "is-active", *units], accept=range(256)).stdout.split()
    return [unit for unit, state in zip(units, states) if state == "active"]


def to_stop(enabled: bool, socket: bool) -> list[str]:
    """The units that are not to run any more. First the timer, then the check, which may start a measurement."""
    return [*([] if enabled else [TIMER, SERVICE, MEASURE]), *([] if enabled and socket else [SOCKET])]


def stop(enabled: bool, socket: bool, root: str = "/", call: Callable[..., Result] = run) -> None:
    """Stop what is not to run any more. Raises ``CommandError``.

    It comes before the files go: without them systemd calls the timer failed, and leaves the socket's file behind.
    """
    gone = to_stop(enabled, socket)
    if not gone or not os.path.isdir(os.path.join(root, "run/systemd/system")):
        return
    # 5: one that is not loaded.
    if not enabled:
        call(["systemctl", "stop", TIMER], accept=(0, 5))
        wait_for_check(root, call)
    call(["systemctl", "stop", *gone], accept=(0, 5))


def wait_for_check(root: str = "/", call: Callable[..., Result] = run) -> None:
    """Let a check end that runs now. One that is stopped may leave a child in the volume, which keeps that busy.

    Raises ``CommandError``.
    """
    if os.path.isdir(os.path.join(root, "run/systemd/system")):
        question = ["systemctl", "is-active", SERVICE]
        wait_for(lambda: call(question, accept=range(256)).stdout.strip() not in _RUNS, _CHECK_ENDS)


def start(units: Sequence[str]) -> None:
    """Start them again, with their files as they are. Raises ``CommandError``."""
    if units:
        run(["systemctl", "start", *units])


def revive_socket(root: str = "/", call: Callable[..., Result] = run) -> None:
    """Start the socket again if systemd gave it up: nothing else does. Raises ``CommandError``."""
    unit = os.path.join(root, unit_path(SOCKET).lstrip("/"))
    if not os.path.isdir(os.path.join(root, "run/systemd/system")) or not os.path.exists(unit):
        return
    if call(["systemctl", "is-failed", SOCKET], accept=range(256)).returncode == 0:
        call(["systemctl", "restart", SOCKET])


def take_effect(enabled: bool, socket: bool) -> None:
    """Let systemd, where it runs, read its files again; start the timer and the socket. Raises ``CommandError``."""
    if not os.path.isdir("/run/systemd/system"):
        return
    run(["systemctl", "daemon-reload"])
    if enabled:
        run(["systemctl", "restart", TIMER, *([SOCKET] if socket else [])])


def stale_metrics(directory: str, root: str = "/") -> list[str]:
    """Metrics that nobody will renew: in the directory of the settings until now, where that is not ``directory``."""
    try:
        before = load(os.path.join(root, CONFIG_PATH.lstrip("/")))["textfile_directory"]
    except SettingsError:
        return []
    paths = [os.path.join(before, name) for name in METRICS] if before and before != directory else []
    return [path for path in paths if os.path.exists(path)]


def stale_results(enabled: bool, measures: bool, root: str = "/") -> list[str]:
    """Results that nobody will renew. Were it switched on again, an old failure would make a node sick that is well.

    The note of a drain in Slurm is not among them: only with it is the drain known as ours.
    """
    gone = [
        *([] if enabled else [CHECKED_PATH, ANSWER_PATH, LINE_PATH, KEPT_PATH, WEAR_PATH]),
        *([] if enabled and measures else [MEASURED_PATH]),
    ]
    return [path for path in (os.path.join(root, path.lstrip("/")) for path in gone) if os.path.exists(path)]


def converge(
    program: str,
    files: Mapping[str, str],
    directory: str,
    socket: bool,
    measures: bool,
    acting: bool,
    begins: Callable[[], None] = lambda: None,
) -> list[dict[str, str]]:
    """Compare, then write or remove. Returns the diff. Without ``files`` all of it goes.

    ``begins`` is called before the first change.
    ``directory``: of the metrics, empty for none. The caller lets systemd read its files again: ``take_effect``.
    Raises ``CommandError``, ``ForeignDropIn`` and ``OSError``.
    """
    changed = changes(files, program)
    diff = [diff_entry(each.path, each.before, each.after) for each in changed]
    if directory and not os.path.isdir(directory):
        diff.append(diff_entry(directory, "", "a directory\n"))
    if files and not diff and not running(socket):
        diff.append(diff_entry(TIMER, "", "active\n"))
    metrics = stale_metrics(directory) if changed else []
    results = stale_results(bool(files), measures)
    diff += [diff_entry(path, "metrics\n", "") for path in metrics]
    diff += [diff_entry(path, "a result\n", "") for path in results]
    if not acting:
        return diff
    if diff:
        begins()
    if changed:
        stop(bool(files), socket)
        # Again: a check or measurement that ran until now may have written more.
        metrics = stale_metrics(directory)
    for path in [*metrics, *stale_results(bool(files), measures)]:
        os.unlink(path)
    if directory:
        os.makedirs(directory, exist_ok=True)
    for each in changed:
        put(each)
    return diff


@contextlib.contextmanager
def halted(acting: bool) -> Iterator[list[dict[str, str]]]:
    """Stop what runs of it, and give the diff; ``remove`` then takes the files. What ran runs again if the block fails.

    Raises ``CommandError``.
    """
    ran = active()
    diff = [diff_entry(unit, "active\n", "") for unit in ran]
    if not acting or not installed():
        yield diff
        return
    try:
        stop(False, False)
        yield diff
    except BaseException:
        # Its own error would hide the first one.
        with contextlib.suppress(CommandError):
            start(ran)
        raise


def remove(program: str, acting: bool) -> list[dict[str, str]]:
    """Remove all of it, also from what systemd knows. Returns the diff. Raises as ``converge`` does."""
    diff = converge(program, {}, "", socket=False, measures=False, acting=acting)
    if diff and acting:
        take_effect(False, False)
    return diff
