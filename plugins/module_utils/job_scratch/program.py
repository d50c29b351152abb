"""``tunetool-scratch``: what Slurm, other schedulers and a timer call for the directories of jobs."""

from __future__ import annotations

import argparse
import json
import os
import pwd
import socket
import sys
import time
from typing import Any, Mapping, NoReturn, Sequence

from ..common.commands import CommandError, run
from ..common.files import replace_file
from ..common.refusal import Expected, Refusal
from ..units import UnitError, format_size
from . import slurm_jobs
from .directories import Directories, described, this_boot
from .scratch_units import METRICS, SERVICE
from .settings import limit_bytes, load

NOBODY = 65534
FAILED = 3
"""Exit status of what could not be done; 2 is a wrong call."""
_LONG = 3600.0 * 24


def main(argv: Sequence[str]) -> int:
    """Do one act; without arguments, what Slurm's variables say."""
    if not argv:
        return by_slurm(os.environ)
    wanted = _parser().parse_args(argv)
    return _in_words(lambda: ACTS[wanted.act](wanted, load()))


def by_slurm(environment: Mapping[str, str]) -> int:
    """Prolog and epilog are one program: Slurm says which it calls. An epilog never fails the end of a job."""
    context = environment.get(slurm_jobs.CONTEXT, "")
    if context == "epilog_slurmd":
        _in_words(lambda: _after_job(environment))
        return 0
    if context == "prolog_slurmd":
        return _in_words(lambda: _before_job(environment), environment.get("SLURMD_NODENAME", ""))
    _say_error(
        "`%s` is `%s`, neither of a prolog nor of an epilog. hint: call it as `Prolog` or `Epilog` of Slurm 20.11 or "
        "later, or with an act: `tunetool-scratch --help`" % (slurm_jobs.CONTEXT, context)
    )
    return 2


def _in_words(act: Any, node: str = "") -> int:
    """Run it; an error is one line. ``node``: it is drained in Slurm with that line."""
    try:
        act()
        return 0
    except (Expected, UnitError, OSError, KeyError, ValueError) as error:
        words = _words_of(error)
    _say_error(words)
    if node:
        try:
            slurm_jobs.drain(node, words)
        except CommandError as error:
            _say_error(str(error))
    return FAILED


def _words_of(error: Exception) -> str:
    if isinstance(error, UnitError):
        return "%s. hint: %s" % (error.message, error.hint)
    if isinstance(error, OSError):
        return "`%s`: %s. hint: see `dmesg`" % (error.filename or "the volume", error.strerror or error)
    if isinstance(error, KeyError):
        return "`%s` is not there. hint: call it as a program of Slurm" % error.args[0]
    return str(error)


def _say_error(words: str) -> None:
    print("error: %s" % words, file=sys.stderr)


def _opened(settings: Mapping[str, Any]) -> Directories:
    return Directories(settings["mount_point"], settings["directory"])


def _before_job(environment: Mapping[str, str]) -> None:
    settings = load()
    job, uid, gid = slurm_jobs.job_in(environment)
    asked = slurm_jobs.requested(job) if settings["by_request"] else ""
    with _opened(settings) as directories:
        limit = limit_bytes(asked or settings["limit"], directories.size)
        directories.make(job, uid, _group_of(uid) if gid is None else gid, limit, slurm=True)


def _after_job(environment: Mapping[str, str]) -> None:
    job, _, _ = slurm_jobs.job_in(environment)
    with _opened(load()) as directories:
        removed = directories.remove(job)
    if removed:
        _sweep_soon()


def _sweep_soon() -> None:
    """Delete in the background: a job's end must not wait for its files."""
    if os.path.isdir("/run/systemd/system"):
        run(["systemctl", "start", "--no-block", SERVICE])
        return
    if os.fork():
        return
    # Nothing of the caller's: Slurm ends the group of an epilog's processes, and waits for what it prints.
    os.setsid()
    null = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1, 2):
        os.dup2(null, number)
    os._exit(main(["sweep"]))


def _make(wanted: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    uid = _user_of(wanted.user)
    with _opened(settings) as directories:
        text = settings["limit"] if wanted.limit is None else wanted.limit
        print(directories.make(wanted.job, uid, _group_of(uid), limit_bytes(text, directories.size), slurm=False))


def _remove(wanted: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    with _opened(settings) as directories:
        if not directories.remove(wanted.job):
            print("job `%s` has no directory" % wanted.job)
        elif wanted.seconds:
            _tell(directories.empty(time.monotonic() + wanted.seconds))
    if not wanted.seconds:
        _sweep_soon()


def _sweep(wanted: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    until = time.monotonic() + wanted.seconds
    with _opened(settings) as directories:
        sweep_ended(directories)
        troubles = directories.empty(until)
        if settings["textfile_directory"]:
            # The directory may belong to the exporter's user: a link there must not let root write elsewhere.
            path = os.path.join(settings["textfile_directory"], METRICS)
            replace_file(path, metrics(directories), sync=False, follow=False)
    _tell(troubles)


def sweep_ended(directories: Directories, over: Any = slurm_jobs.is_over) -> None:
    """Take the directories from their names whose jobs have ended without an epilog.

    Of a job of Slurm only Slurm knows. Of any other, nothing runs on after a boot.
    """
    boot = this_boot()
    silent = False
    for record in directories.records():
        try:
            ended = not silent and over(record.job) if record.slurm else record.boot != boot
            if ended and directories.remove(record.job, record.made):
                print("job `%s` has ended: its directory is removed" % record.job)
        except CommandError as error:
            # Asked for each job, it could take all of the time in which files are deleted.
            silent = True
            print("stays: what jobs of Slurm left without an epilog, for it does not answer: %s" % error)
        except (Refusal, OSError) as error:
            print("stays: job `%s`: %s" % (record.job, _words_of(error)))


def _tell(troubles: Sequence[str]) -> None:
    for trouble in troubles:
        print("stays: %s" % trouble)


def _list(wanted: argparse.Namespace, settings: Mapping[str, Any]) -> None:
    with _opened(settings) as directories:
        rows = [described(held, user_name) for held in directories.held()]
        removing = directories.removing()
    if wanted.json:
        print(json.dumps({"jobs": rows, "removing": removing}))
        return
    for row in rows:
        print("job %s" % in_words(row))
    if removing:
        print("%d more being removed" % removing)


def jobs_of_node(mount_point: str | None = None) -> list[Mapping[str, Any]]:
    """Who holds how much on this node, for root; nothing where jobs have no directories, or the volume is not there.

    ``mount_point``: only if theirs is this volume.
    """
    try:
        settings = load()
        if mount_point not in (None, settings["mount_point"]):
            return []
        with Directories(settings["mount_point"], settings["directory"], make=False) as directories:
            return [described(held, user_name) for held in directories.held()]
    except (Expected, OSError):
        return []


def in_words(row: Mapping[str, Any]) -> str:
    """A job's line for people."""
    used = "unknown" if row["bytes"] is None else format_size(row["bytes"])
    limit = "no limit" if row["limit_bytes"] is None else "of %s" % format_size(row["limit_bytes"])
    return "%s of %s: %s, %s" % (row["job"], row["user"], used, limit)


def metrics(directories: Directories) -> str:
    """For the textfile collector of Prometheus' node exporter."""
    rows = [described(held, user_name) for held in directories.held()]
    host = 'host="%s"' % socket.gethostname()
    lines = []
    for key, name, meaning in (
        ("bytes", "tunetool_scratch_bytes", "Bytes in a job's directory"),
        ("limit_bytes", "tunetool_scratch_limit_bytes", "Bytes that it may hold"),
    ):
        lines += ["# HELP %s %s" % (name, meaning), "# TYPE %s gauge" % name]
        for row in rows:
            if row[key] is not None:
                labels = (host, row["job"], row["user"].replace("\\", "\\\\").replace('"', '\\"'))
                lines.append('%s{%s,job="%s",user="%s"} %d' % (name, *labels, row[key]))
    name = "tunetool_scratch_removing"
    lines += ["# HELP %s Directories that are still to be deleted" % name, "# TYPE %s gauge" % name]
    lines.append("%s{%s} %d" % (name, host, directories.removing()))
    return "\n".join(lines) + "\n"


def user_name(uid: int) -> str:
    """The user's name, or the number of one without."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _user_of(text: str) -> int:
    try:
        return slurm_jobs.number_of(text) if text.isdigit() else pwd.getpwnam(text).pw_uid
    except KeyError:
        raise Refusal("`%s` is no user of this node. hint: one that `getent passwd` has, or a number" % text) from None


def _group_of(uid: int) -> int:
    """His first group; the directory is for its owner alone."""
    try:
        return pwd.getpwuid(uid).pw_gid
    except KeyError:
        return NOBODY


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """In one line."""
        _say_error("%s. hint: `%s --help`" % (message, self.prog))
        sys.exit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tunetool-scratch",
        description="Directories of jobs on the scratch volume. Without an act it is Slurm's Prolog and Epilog.",
    )
    acts = parser.add_subparsers(dest="act", metavar="ACT", required=True)
    make = acts.add_parser("make", help="make a job's directory and print its path")
    make.add_argument("job", metavar="JOB")
    make.add_argument("--user", required=True, metavar="USER", help="owner of the directory, a name or a number")
    make.add_argument("--limit", metavar="SIZE", help="share of the volume or size with unit; default: the settings'")
    remove = acts.add_parser("remove", help="remove a job's directory; its files go in the background")
    remove.add_argument("job", metavar="JOB")
    remove.add_argument("--seconds", type=float, default=0, metavar="N", help="time to delete files in now; default: 0")
    sweep = acts.add_parser("sweep", help="remove the directories of jobs that ended, and delete their files")
    sweep.add_argument("--seconds", type=float, default=_LONG, metavar="N", help="time to delete in; default: a day")
    shown = acts.add_parser("list", help="show who holds how much")
    shown.add_argument("--json", action="store_true", help="one object for programs")
    return parser


ACTS = {"make": _make, "remove": _remove, "sweep": _sweep, "list": _list}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
