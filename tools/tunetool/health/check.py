"""The checks of ``verify --level config`` and of the kernel's log, every few minutes: 1 MiB of I/O, and little CPU. And
the rule by which a node is idle, so that its storage may be measured."""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tunetool.health import results, wear
from tunetool.health.results import publish
from tunetool.node.common import manifest as manifests
from tunetool.node.common.check_result import UNKNOWN, Check
from tunetool.node.common.commands import CommandError, run
from tunetool.node.common.files import read_text, replace_file
from tunetool.node.health.health_units import MEASURE, METRICS, revive_socket
from tunetool.node.health.kernel_check import Incident, check_log
from tunetool.node.health.kernel_log import Log
from tunetool.node.health.settings import load
from tunetool.node.machine.busy import gpu_holders, scheduler_jobs, volume_users
from tunetool.node.memory.memory_checks import Attempt, Locker, lock_memory
from tunetool.node.volume.volume_answers import Writing
from tunetool.node.volume.write_read_probe import BYTES, PIECE, Answer, Question, ask_all
from tunetool.report.prometheus import of_checks
from tunetool.verify.configuration import manifest_checks, static_checks

RETRY = 3600.0
"""Seconds between two tries to measure. Each costs a start of the whole program."""
DAILY = 100 << 20
"""Bytes that the checks of a day may write to the volume."""
DAY = 86400.0
REMEMBERED = 86400.0
"""Seconds for which a lock of memory that succeeded counts: it starts a login and a service, and little changes it."""


def main() -> int:
    """Check this node."""
    try:
        revive_socket()
    except CommandError as error:
        print(f"error: {error}", flush=True)
    check(load())
    return 0


def check(settings: Mapping[str, Any], files: results.Files = results.NODE) -> str:
    """Check the node, keep the result and its metrics, and start a measurement if that is due. Returns the status."""
    earlier = results.read_document(files.checked).get("locked")
    locker = _Remembering(earlier if isinstance(earlier, dict) else {}, time.time())
    kept = results.read_document(files.kept)
    volume = _Volume(kept.get("written"), settings, time.time())
    manifest, checks = _checks(files.manifest, locker, volume)
    at = time.time()
    log, incidents = kept.get("kernel") or {}, list[Incident]()
    if manifest is not None:
        built, wanted = files.manifest.stat().st_mtime, settings.get("kernel_log", True)
        log, told, incidents = check_log(log, manifest, at, Log(str(files.root)), wanted, built)
        checks += told
    results.write_document(files.kept, {"kernel": log, "written": volume.written})
    drives = wear.keep(files, manifest, checks, at)
    result = results.of_checks(checks, settings["ignored_checks"], at)
    for warning in result.warnings:
        print(f"warning: {warning}", flush=True)
    results.keep(files.checked, result, locked=locker.locked)
    publish(files)
    directory = settings["textfile_directory"]
    if directory:
        figures = [*volume.figures(), *_figures(incidents), *wear.figures(drives)]
        text = of_checks("health", socket.gethostname(), at, result.status, checks, _cpu_seconds(), figures)
        # The directory may belong to the exporter's user: a link there must not let root write elsewhere.
        replace_file(f"{directory}/{METRICS[0]}", text, sync=False, follow=False)
    # Without an expectation there is nothing to judge the figures by.
    if manifest is not None and manifest["expect"] and not result.failed and _due(files, settings, at):
        _measure_if_idle([volume["filesystem"]["mount_point"] for _, volume in manifests.each_volume(manifest)])
    return result.status


def _checks(path: Path, locker: Locker, volume: _Volume) -> tuple[Mapping[str, Any] | None, list[Check]]:
    try:
        manifest: Mapping[str, Any] = manifests.load(str(path))
    except FileNotFoundError:
        return None, [
            Check("manifest", UNKNOWN, "a manifest", "there is none", "run `tunetool provision` for this node")
        ]
    except manifests.ManifestError as error:
        return None, [Check("manifest", UNKNOWN, "a manifest that can be read", error.message, error.hint)]
    volume.divide([name for name, _ in manifests.each_volume(manifest)])
    checks = manifest_checks(path, manifest, locker, volume, volume.writing)
    return manifest, [*checks, *static_checks(manifest, os.environ)]


Figure = tuple[str, str, Mapping[str, str], float]


class _Volume:
    """Asks the volume, or each of several, and counts what that writes in a day."""

    def __init__(self, written: Any, settings: Mapping[str, Any], now: float) -> None:
        self.written = _within_a_day(written, now)
        self._now, self._settings = now, settings
        self._answers: list[tuple[dict[str, str], Answer]] = []
        self.divide([""])

    def divide(self, names: Sequence[str]) -> None:
        """What each volume gets of the bytes of a day, which are for all of them together."""
        self._several = len(names) > 1
        if not self._settings.get("write", True):
            self.writing = Writing(refused="`node_health_write` is false")
            return
        period = self._settings["period_seconds"]
        left = DAILY - sum(size for _, size in self.written)
        share = int(DAILY * period / DAY) // len(names)
        if share < 2 * PIECE:
            # So many volumes, checked so often: some checks write nothing, the next ones do.
            wait = period * -(-2 * PIECE // share)
            if any(0 <= self._now - at < wait - period / 2 for at, _ in self.written):
                self.writing = Writing(refused=f"{len(names)} volumes are written to every {wait} s")
                return
            share = 2 * PIECE
        # Checks by hand come on top: then each writes less, and for long none writes nothing.
        most = min(BYTES + PIECE, share, left // (2 * len(names)))
        refused = "" if most >= 2 * PIECE else f"the checks of a day have written {DAILY >> 20} MiB"
        self.writing = Writing(most, refused, doubtful=True)

    def __call__(self, questions: Sequence[Question]) -> Sequence[Answer]:
        """See ``write_read_probe.Asker``."""
        answers = ask_all(questions)
        for question, answer in zip(questions, answers, strict=True):
            labels = {"volume": Path(question.mount_point).name} if self._several else {}
            self._answers.append((labels, answer))
            if question.write and answer.hangs_since is None:
                self.written.append((self._now, question.moved))
        return answers

    def figures(self) -> Iterator[Figure]:
        """For the metrics."""
        for labels, answer in self._answers or [({}, Answer())]:
            yield "probe_bytes", "Bytes that were written to the volume and read back", labels, answer.written
            if answer.seconds is not None:
                yield "probe_seconds", "What that took", labels, round(answer.seconds, 6)
        yield "probe_day_bytes", "Bytes that checks wrote within a day", {}, sum(size for _, size in self.written)


def _within_a_day(written: Any, now: float) -> list[tuple[float, int]]:
    """What a file has of that. One that somebody edited has none."""
    try:
        return [(float(at), int(size)) for at, size in written or () if 0 <= now - at < DAY and size > 0]
    except (TypeError, ValueError):
        return []


def _figures(incidents: list[Incident]) -> Iterator[Figure]:
    counted: dict[tuple[str, str], tuple[int, int]] = {}
    for each in incidents:
        times, lines = counted.get((each.fault, each.about), (0, 0))
        counted[each.fault, each.about] = (times + 1, lines + each.lines)
    for (fault, about), (times, lines) in counted.items():
        labels = {"fault": fault, "device": about.replace("`", "")}
        yield "kernel_faults", "Faults in the kernel's log within a day", labels, times
        yield "kernel_fault_lines", "Lines of the kernel's log that told of them", labels, lines


class _Remembering:
    """Locks memory, and remembers for a day what could be locked in this boot."""

    def __init__(self, earlier: Mapping[str, Any], now: float, lock: Locker = lock_memory) -> None:
        self.locked = dict(earlier)
        self._now, self._lock = now, lock

    def __call__(self, kind: str, size: int) -> Attempt:
        """See ``memory_checks.Locker``."""
        try:
            at, attempt = self.locked[kind]["at"], Attempt(**self.locked[kind]["attempt"])
            if 0 <= self._now - at < REMEMBERED and attempt.locked >= size and not attempt.error:
                return attempt
        except (KeyError, TypeError):
            pass
        self.locked.pop(kind, None)
        attempt = self._lock(kind, size)
        self.locked[kind] = {"at": self._now, "attempt": vars(attempt)}
        return attempt


def due(measured: Mapping[str, Any], settings: Mapping[str, Any], now: float) -> bool:
    """Whether it is time to measure: the last record is old, or it failed, and no try was lately."""
    every = settings["measure_seconds"]
    recorded, tried = (_number(measured.get(name)) for name in ("recorded", "tried"))
    settled = measured.get("status") != "fail" and 0 <= now - recorded < every
    return bool(every) and not settled and not 0 <= now - tried < RETRY


def _due(files: results.Files, settings: Mapping[str, Any], now: float) -> bool:
    return due(results.read_document(files.measured), settings, now)


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _measure_if_idle(mount_points: Sequence[str], start: Callable[[list[str]], object] = run) -> None:
    if busy(mount_points, os.cpu_count() or 1) is not None:
        return
    try:
        # In a unit of its own: a check in a few minutes must not wait for it.
        start(["systemctl", "start", "--no-block", MEASURE])
    except CommandError as error:
        print(f"error: {error}", flush=True)


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return round(sum(each.ru_utime + each.ru_stime for each in used), 4)


LOAD_SHARE = 0.05
"""Of the CPUs; a load of 1 is allowed on any node."""


def busy(mount_points: Sequence[str], cpus: int, root: str = "/") -> str | None:
    """Why the node is not idle; None where it is. The cheapest question comes first.

    Idle: a load over five minutes of at most 5 % of the CPUs (or 1), no job of Slurm, no process that has a GPU open,
    and none that has a file of a volume open. ``verify`` itself then watches the drives for a second.
    """
    return next(_reasons(mount_points, cpus, root), None)


def _reasons(mount_points: Sequence[str], cpus: int, root: str) -> Iterator[str]:
    load = _load(root)
    if load is None:
        yield "the load cannot be read"
    elif load > max(1.0, LOAD_SHARE * cpus):
        yield f"the load is {load:g}"
    yield from scheduler_jobs({}, root)
    yield from gpu_holders(root)
    for mount_point in mount_points:
        yield from volume_users(mount_point, root)


def _load(root: str) -> float | None:
    fields = (read_text(f"{root.rstrip('/')}/proc/loadavg") or "").split()
    try:
        return float(fields[1])
    except (IndexError, ValueError):
        return None
