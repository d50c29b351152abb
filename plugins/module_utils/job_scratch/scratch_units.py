"""The files that the role writes: the settings, the program's starter, and the timer that sweeps."""

from __future__ import annotations

import contextlib
import os
from typing import Callable, Iterator, Mapping

from ..common.commands import CommandError, run
from ..common.drift import diff_entry
from ..common.settings_file import SettingsError
from ..volume import program_units
from ..volume.program_units import any_of, put, unit_path
from ..volume.unit_dropins import Change, link_to, quoted
from .settings import CONFIG_PATH, load

SERVICE = "tunetool-scratch.service"
TIMER = "tunetool-scratch.timer"
STARTER_NAME = "tunetool-scratch"
METRICS = "tunetool-scratch.prom"
VARIABLE = "TUNETOOL_SCRATCH"
HEADER = "# Written by tunetool (job_scratch_enabled); it goes when that is false."
_SYSTEMD = "/run/systemd/system"

# As TaskProlog it runs as the user, once for each task: the shell alone answers.
_STARTER = """\
#!/bin/sh
%(header)s
# Without an argument it is a program for Slurm's Prolog, Epilog and TaskProlog, which take none.
if [ $# = 0 ] && [ "${SLURM_SCRIPT_CONTEXT:-}" = prolog_task ]; then
    [ -d "%(directory)s/job-$SLURM_JOB_ID" ] && echo "export %(variable)s=%(directory)s/job-$SLURM_JOB_ID"
    exit 0
fi
# slurmd may start it without a PATH.
PATH=${PATH:+$PATH:}/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin
export PATH
program=$(readlink -f %(program)s)
python=${program%%/*}/python
if ! [ -x "$python" ]; then
    echo "error: tunetool is not installed. hint: set tunetool_install: true, then run tunetool provision" >&2
    # An epilog never fails the end of a job.
    [ $# = 0 ] && [ "${SLURM_SCRIPT_CONTEXT:-}" = epilog_slurmd ] && exit 0
    exit 3
fi
exec "$python" -I -m tunetool.node.job_scratch.program "$@"
"""

_SERVICE = """\
%(header)s
[Unit]
Description=Remove the scratch directories of jobs that have ended
# Not a requirement, which would mount what somebody has unmounted.
ConditionPathIsMountPoint=%(mount_point)s

[Service]
Type=oneshot
# What is left after that time is the next one's.
ExecStart=%(starter)s sweep --seconds 240
Nice=10
IOSchedulingClass=idle
TimeoutStartSec=600
"""

_TIMER = """\
%(header)s
[Unit]
Description=Remove the scratch directories of jobs that have ended, after a boot and every 5 minutes

[Timer]
OnBootSec=60
OnUnitInactiveSec=300
AccuracySec=15

[Install]
WantedBy=timers.target
"""


def starter_path(program: str) -> str:
    """The path of the starter."""
    return program_units.starter_path(program, STARTER_NAME)


def files(program: str, settings: str, mount_point: str, directory: str) -> dict[str, str]:
    """Every file by path, including the link that `systemctl enable` would make."""
    words = {
        "header": HEADER,
        "program": "'%s'" % program.replace("'", "'\\''"),
        "starter": quoted(starter_path(program)),
        "mount_point": mount_point,
        "directory": directory,
        "variable": VARIABLE,
    }
    units = {
        SERVICE: _SERVICE % words,
        TIMER: _TIMER % words,
        "timers.target.wants/" + TIMER: link_to("../" + TIMER),
    }
    return {
        CONFIG_PATH: settings,
        starter_path(program): _STARTER % words,
        **{unit_path(name): text for name, text in units.items()},
    }


def changes(wanted: Mapping[str, str], program: str, root: str = "/") -> list[Change]:
    """Differences from exactly these files; without files, all must be absent. Raises ``ForeignDropIn``."""
    return program_units.changes(wanted, files(program, "", "/", "/"), starter_path(program), SERVICE, HEADER, root)


def installed(root: str = "/") -> bool:
    """Whether anything of it is on the node."""
    return any_of([CONFIG_PATH, *map(unit_path, (SERVICE, TIMER))], root)


def converge(
    program: str,
    wanted: Mapping[str, str],
    directory: str,
    acting: bool,
    begins: Callable[[], None] = lambda: None,
) -> list[dict[str, str]]:
    """Compare, then write or remove; without ``wanted`` all of it goes, and the metrics. Returns the diff.

    ``directory``: of the metrics, empty for none; ``begins`` is called before the first change. Directories of jobs
    stay where they are. Raises ``CommandError``, ``ForeignDropIn`` and ``OSError``.
    """
    changed = changes(wanted, program)
    diff = [diff_entry(each.path, each.before, each.after) for each in changed]
    directory = directory if wanted else ""
    metrics = _stale_metrics(directory) if changed else ""
    if metrics:
        diff.append(diff_entry(metrics, "metrics\n", ""))
    if directory and not os.path.isdir(directory):
        diff.append(diff_entry(directory, "", "a directory\n"))
    if wanted and not diff and not _is_active():
        diff.append(diff_entry(TIMER, "", "active\n"))
    if not acting or not diff:
        return diff
    begins()
    if not wanted:
        _systemctl("stop", TIMER, SERVICE)
    if metrics:
        os.unlink(metrics)
    if directory:
        os.makedirs(directory, exist_ok=True)
    for each in changed:
        put(each)
    _systemctl("daemon-reload")
    if wanted:
        _systemctl("restart", TIMER)
    return diff


@contextlib.contextmanager
def halted(acting: bool) -> Iterator[list[dict[str, str]]]:
    """Stop what runs of it on a volume that is to be unmounted, and give the diff. It runs again if the block fails.

    Raises ``CommandError``.
    """
    running = installed() and os.path.isdir(_SYSTEMD) and _is_active()
    if running and acting:
        _systemctl("stop", TIMER, SERVICE)
    try:
        yield [diff_entry(TIMER, "active\n", "")] if running else []
    except BaseException:
        if running and acting:
            # Its own error would hide the first one.
            with contextlib.suppress(CommandError):
                _systemctl("start", TIMER)
        raise


def _is_active() -> bool:
    """Whether the timer runs; True if systemd does not."""
    if not os.path.isdir(_SYSTEMD):
        return True
    return run(["systemctl", "is-active", TIMER], accept=range(256)).returncode == 0


def _systemctl(*words: str) -> None:
    if os.path.isdir(_SYSTEMD):
        # 5: a unit that is not loaded.
        run(["systemctl", *words], accept=(0, 5) if words[0] == "stop" else (0,))


def _stale_metrics(directory: str) -> str:
    """Metrics that nobody will renew, where the settings until now had them written; empty for none."""
    try:
        before = load()["textfile_directory"]
    except SettingsError:
        return ""
    path = os.path.join(before, METRICS)
    return path if before and before != directory and os.path.exists(path) else ""
