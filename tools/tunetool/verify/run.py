"""One node: check it against its manifest, measure its storage, judge, keep the record."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import UsageProblem
from tunetool.measure import figures, rundir, session
from tunetool.measure.aio import rung as deepspeed
from tunetool.measure.balance import balance
from tunetool.measure.checks import as_result
from tunetool.measure.evidence import obstacles
from tunetool.measure.fio import Fio, find_fio
from tunetool.measure.gds import rung as gds
from tunetool.measure.gds.config import default_mode
from tunetool.measure.gds.spec import Mode
from tunetool.measure.ladder import climb as ladder
from tunetool.measure.ladder import facts as ladder_facts
from tunetool.measure.ladder.gpu import PINNED
from tunetool.measure.ladder.rung import Wish
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import Plan, Results, Sequential, free_bytes
from tunetool.measure.sequential import plan as plan_sequential
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.target import check_directory, refuse_unanswering
from tunetool.measure.worker import foreign_code
from tunetool.node.array.md_arrays import HALTED_STATES
from tunetool.node.common.check_result import Check
from tunetool.node.common.manifest import MANIFEST_PATH, ManifestError, load
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.mounts import Mount, mount_at, read_mounts
from tunetool.node.volume.volume_answers import ANSWERS, DRIVES, WRITABLE
from tunetool.record import CheckResult, Expectation, Ladder, Measurement
from tunetool.verdict import Case, limit_of
from tunetool.verify.ceiling import ceiling
from tunetool.verify.configuration import manifest_checks, static_checks
from tunetool.verify.drive_errors import Watch
from tunetool.verify.request import Request, expectations_of

MOUNTED = "filesystem.mounted"
"""The check without which nothing is written: the bare mount point belongs to the root file system."""

LIVE = (WRITABLE, ANSWERS, DRIVES)
"""The checks after whose failure nothing is measured: I/O of ours would fail, or wait for ever."""


@dataclass
class _Findings:
    """What the run has found so far; kept if the run fails."""

    checks: list[CheckResult] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    unproven: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    climbed: ladder.Climbed | None = None
    """Of level full."""


@dataclass(frozen=True)
class _Scene:
    """The target, and how it will be measured."""

    stack: BlockStack
    shape: Plan
    stale: Sequence[Path]
    """Directories that dead runs left in the target."""
    rung: deepspeed.Rung
    gds: Mode
    wish: Wish
    """Of level full."""


def verify(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Verify this node. Raises ``UsageProblem`` before any work when the call is wrong."""
    return session.run("verify", request.run, _Verification(request), progress, environment)


@dataclass
class _Verification:
    request: Request
    manifest: dict[str, Any] | None = None
    scene: _Scene | None = None
    """None where nothing is to be measured."""
    collected: _Findings = field(default_factory=_Findings)
    results: Results = field(default_factory=Results)
    fio: Fio | None = None

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, findings, progress, environment = self.request, self.collected, session.progress, session.environment
        manifest = self.manifest = read_manifest(request.manifest)
        if manifest is not None:
            findings.checks += map(as_result, _against(request, manifest))
        if request.level == "config":
            findings.checks += map(as_result, static_checks(manifest, environment, request.gds))
        else:
            self.scene = _set_scene(request, manifest, findings, progress, environment)
        if manifest is None:
            progress.say("no manifest: the configuration checks are skipped")
        if self.scene is None and request.run.dry_run:
            progress.say("writes nothing but the record")

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        if self.scene is None:
            return
        stack = self.scene.stack
        session.subject = stack.directory
        self.collected.doubts += obstacles(stack)
        self.collected.doubts += [f"{doubt} and verify again" for doubt in foreign_code(session.environment)]
        self.fio = find_fio(session.environment)
        session.hold(_watched(stack, self.collected.checks))
        _run(self.request, self.scene, self.fio, self.results, self.collected, session)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        return _conclude(self)


def _against(request: Request, manifest: Mapping[str, Any]) -> list[Check]:
    """The node against its manifest. A dry run writes no file either."""
    return manifest_checks(request.manifest, manifest, writes=not request.run.dry_run)


def read_manifest(path: Path | None) -> dict[str, Any] | None:
    """The manifest at ``path``, or the node's own, or None where there is none. Raises ``UsageProblem``."""
    try:
        return load(str(path or MANIFEST_PATH))
    except FileNotFoundError:
        if path is not None:
            raise UsageProblem(f"`{path}` does not exist", "give the path of a manifest") from None
        return None
    except ManifestError as error:
        raise UsageProblem(error.message, error.hint) from None


def expectations(request: Request, manifest: Mapping[str, Any] | None) -> list[Expectation]:
    """The caller's, else the manifest's; one for each direction that is to be judged."""
    if request.expect or manifest is None:
        return expectations_of(request.expect, "--expect")
    return expectations_of(manifest["expect"], str(request.manifest or MANIFEST_PATH))


def _target(request: Request, manifest: Mapping[str, Any] | None) -> tuple[Path, bool]:
    """The directory to measure, and whether it is the manifest's own mount point."""
    mount_point = Path(manifest["filesystem"]["mount_point"]) if manifest else None
    if request.target is not None:
        if mount_point is None or request.target.absolute() != mount_point:
            # The manifest's own array has a check, and a record that says so.
            refuse_unanswering(request.target)
        check_directory(request.target)
        target = request.target.resolve()
        return target, target == mount_point
    if mount_point is None:
        raise UsageProblem(
            "nothing to measure: there is no manifest and no `--target`",
            f"give `--target DIR`, or provision the node, which writes `{MANIFEST_PATH}`",
        )
    return mount_point, True


def _is_mounted(checks: Sequence[CheckResult]) -> bool:
    return any(check.id == MOUNTED and check.status == "pass" for check in checks)


def _halted(checks: Sequence[CheckResult]) -> CheckResult | None:
    """The check of an array that somebody stopped, if there is one."""
    found = [f"state `{state}`" for state in HALTED_STATES]
    return next((check for check in checks if check.status == "fail" and check.found in found), None)


def _doubt_manifest(
    request: Request, manifest: Mapping[str, Any] | None, stack: BlockStack, findings: _Findings
) -> None:
    """The manifest's expectations hold for the manifest's file system, and for no other."""
    if manifest is None or request.expect or not manifest["expect"]:
        return
    mount_point = manifest["filesystem"]["mount_point"]
    if not (_shows(stack.mount, mount_point) and _is_mounted(findings.checks)):
        findings.doubts.append(
            f"`{stack.directory}` is not on the manifest's file system (`{mount_point}`), whose expectations do not "
            "apply to it: pass `--expect`, or leave out `--target`"
        )


def _shows(mount: Mount | None, mount_point: str) -> bool:
    """Whether ``mount`` is that of ``mount_point``, or a bind mount of the same file system."""
    if mount is None or mount.mount_point == mount_point:
        return mount is not None
    there = mount_at(mount_point, read_mounts())
    return there is not None and there.device_number == mount.device_number


def _set_scene(
    request: Request,
    manifest: Mapping[str, Any] | None,
    findings: _Findings,
    progress: Progress,
    environment: Mapping[str, str],
) -> _Scene | None:
    """Inspect the target and announce the run; None if nothing may be written. Writes nothing itself."""
    target, own_mount = _target(request, manifest)
    if own_mount and not _is_mounted(findings.checks):
        progress.say(f"`{target}` is not the mount that the manifest names: nothing is written there")
        findings.errors.append(f"`{target}` was not measured: see {MOUNTED}")
        return None
    halted = _halted(findings.checks) if own_mount else None
    if halted is not None:
        # I/O of ours would wait with everybody else's, in a state in which no signal ends it.
        progress.say(f"`{target}` lies on an array with {halted.found}: nothing is written there")
        findings.errors.append(f"`{target}` was not measured: see {halted.id}")
        return None
    dead = next((check for check in findings.checks if check.status == "fail" and check.id in LIVE), None)
    if own_mount and dead is not None:
        progress.say(f"`{target}`: {dead.found}: nothing is written there")
        findings.errors.append(f"`{target}` was not measured: see {dead.id}")
        return None
    try:
        check_directory(target)
        free = free_bytes(target)
    except OSError as error:
        # A file system that shut itself down.
        findings.errors.append(f"`{target}` was not measured: {error.strerror or error}; see `dmesg | tail`")
        return None
    stack = read_stack(str(target))
    _doubt_manifest(request, manifest, stack, findings)
    limit = ceiling(stack, read_drives())
    if limit is not None:
        findings.measurements.append(figures.ceiling_figure(stack, limit))
    cpus = os.cpu_count() or 1
    named = {wanted.name: limit_of(wanted.value, request.tolerance) for wanted in expectations(request, manifest)}
    limits = {direction: named[name] for direction, name in figures.NAMES.items() if name in named}
    shape = plan_sequential(target, stack.medium, free, cpus, request.duration, limit, limits)
    stale = rundir.stale_directories(target)
    rung = deepspeed.prepare(request.python, request.duration, request.require, environment, request.chosen)
    above = ladder.announcement(shape, stack) if request.level == "full" else []
    left = [f"`{path}` was left by a run that died" for path in stale]
    direct = request.gds or default_mode(manifest)
    for line in [*shape.announcement(), rung.announcement(), *gds.announcement(direct), *above, *left]:
        progress.say(line)
    return _Scene(stack, shape, stale, rung, direct, Wish(named, request.python, "deepspeed" in request.require))


@contextmanager
def _watched(stack: BlockStack, checks: list[CheckResult]) -> Iterator[None]:
    """Turns errors that the drives report, until the files are removed, into a check."""
    with Watch(stack) as watch:
        try:
            yield
        finally:
            checks += watch.findings()


def _run(request: Request, scene: _Scene, fio: Fio, results: Results, findings: _Findings, session: Session) -> None:
    stack, environment, progress = scene.stack, session.environment, session.progress
    directory = session.directory(Path(scene.shape.target), stack)
    try:
        Sequential(scene.shape, stack, fio, directory, environment, progress, results).execute()
    finally:
        session.raw.update(results.raw)
    seen = min((each.outcome.bandwidth for samples in results.samples.values() for each in samples), default=0.0)
    rung = deepspeed.measure(scene.rung, stack, directory, seen, environment, progress)
    findings.checks.append(rung.check)
    findings.measurements += rung.measurements
    session.raw.update(rung.raw)
    direct = gds.measure(scene.gds, request.python, stack, directory, seen, environment, progress)
    findings.checks += direct.checks
    findings.measurements += direct.measurements
    session.raw.update(direct.raw)
    if request.level == "full":
        findings.climbed = ladder.Climbed()
        try:
            ladder.climb(
                scene.shape,
                stack,
                fio,
                directory,
                results,
                read_drives(),
                scene.wish,
                environment,
                progress,
                findings.climbed,
            )
        finally:
            session.raw.update(findings.climbed.raw)


def _conclude(work: _Verification) -> Findings:
    request, findings, results = work.request, work.collected, work.results
    stack = work.scene.stack if work.scene else None
    if findings.climbed is not None:
        findings.measurements += findings.climbed.measurements
        findings.unproven.update(findings.climbed.unproven)
        findings.errors += findings.climbed.errors
    findings.doubts += dict.fromkeys(results.incomplete)
    if results.samples and work.scene is not None and work.fio is not None:
        scene = work.scene
        findings.measurements += figures.bandwidths(scene.stack, work.fio, scene.shape, results)
        findings.measurements += figures.service_time_figures(scene.stack, results)
        findings.unproven.update(figures.unproven(scene.stack, results))
        findings.checks.append(balance(scene.stack, figures.counted_samples(results)))
    if request.level == "config" and work.manifest is None:
        findings.errors.append("there is no manifest to check against: provision the node, or measure a `--target`")
    case = Case(
        measurements=findings.measurements,
        expectations=expectations(request, work.manifest),
        checks=findings.checks,
        unproven=findings.unproven,
        doubts=findings.doubts,
        errors=findings.errors,
        tolerance=request.tolerance,
        judged="checks" if request.level == "config" else "speed",
        ladder=_ladder(findings, stack),
    )
    return Findings(case, target=stack.directory if stack else None, stack=stack)


def _ladder(findings: _Findings, stack: BlockStack | None) -> Ladder | None:
    climbed = findings.climbed
    if climbed is None or stack is None:
        return None
    # The handle to pinned memory is measured at every level; where it was left out, its check says why.
    left_out = {name: check.found for check in findings.checks if check.id == deepspeed.CHECK_ID for name in PINNED}
    return ladder.conclude(
        findings.measurements,
        {**left_out, **climbed.skipped},
        findings.unproven,
        lambda: ladder_facts.read_facts(stack, read_drives(), findings.measurements),
    )
