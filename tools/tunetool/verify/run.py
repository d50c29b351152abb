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
from tunetool.measure.balance import balance
from tunetool.measure.evidence import obstacles
from tunetool.measure.figures import ceiling
from tunetool.measure.fio import find_fio
from tunetool.measure.gds.config import default_mode
from tunetool.measure.ladder import facts as ladder_facts
from tunetool.measure.ladder import plan as ladder
from tunetool.measure.ladder.deepspeed_handles import prepare as pinned_handle
from tunetool.measure.ladder.gpudirect import GpuDirect
from tunetool.measure.ladder.rung import Context, Rung
from tunetool.measure.ladder.rung import Result as Found
from tunetool.measure.ladder.rung import run as run_rungs
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.ladder.sequential import Sequential
from tunetool.measure.ladder.volumes import OnVolumes
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import Plan, free_bytes
from tunetool.measure.sequential import plan as plan_sequential
from tunetool.measure.session import Findings, Result, Session
from tunetool.measure.target import check_directory, refuse_unanswering
from tunetool.measure.worker import foreign_code
from tunetool.node.array.md_arrays import HALTED_STATES
from tunetool.node.audit.manifest_checks import BY_ID
from tunetool.node.common.check_result import Check
from tunetool.node.common.manifest import MANIFEST_PATH, ManifestError, common_mount_point, each_volume, load
from tunetool.node.machine.block_stack import BlockStack, read_stack, together
from tunetool.node.machine.drives import read_drives
from tunetool.node.machine.mounts import Mount, mount_at, read_mounts
from tunetool.node.volume.named_volume import CHECK_ID as MOUNTED
from tunetool.node.volume.volume_answers import ALLOWED, NOTHING
from tunetool.record import CheckResult, Expectation, Ladder, as_result
from tunetool.verdict import Case, limit_of, part_of_limit
from tunetool.verify.configuration import manifest_checks, static_checks
from tunetool.verify.drive_errors import Watch
from tunetool.verify.request import Request, expectations_of


@dataclass(frozen=True)
class _Plan:
    """The target, and the rungs by which it will be measured."""

    stack: BlockStack
    shape: Plan
    limits: Mapping[str, float]
    """By measurement name, what its figure is judged against, tolerance taken off."""
    rungs: Sequence[Rung]


def verify(request: Request, progress: Progress, environment: Mapping[str, str] | None = None) -> Result:
    """Verify this node. Raises ``UsageProblem`` before any work when the call is wrong."""
    return session.run("verify", request.run, _Verification(request), progress, environment)


@dataclass
class _Verification:
    request: Request
    manifest: dict[str, Any] | None = None
    plan: _Plan | None = None
    """None where nothing is to be measured."""
    found: Found = field(default_factory=Found)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    context: Context | None = None
    """The run, once it began."""
    places: Sequence[Path] = ()
    """Where it writes: a directory of each volume."""

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, progress, environment = self.request, session.progress, session.environment
        manifest = self.manifest = _of_target(read_manifest(request.manifest), request.target)
        if manifest is not None:
            checks = _against(request, manifest)
            self.found.checks += map(as_result, checks)
            self.notes += [str(check) for check in checks if check.warns]
        if request.level == "config":
            self.found.checks += map(as_result, static_checks(manifest, environment, request.gds))
        else:
            self._plan(progress, environment)
        if manifest is None:
            progress.say("no manifest: the configuration checks are skipped")
        if self.plan is None and request.run.dry_run:
            progress.say("writes nothing but the record")

    def _plan(self, progress: Progress, environment: Mapping[str, str]) -> None:
        """Plan the run and announce it, unless nothing may be written. Writes nothing itself."""
        target, own_mount = _target(self.request, self.manifest)
        volumes = each_volume(self.manifest) if own_mount and self.manifest is not None else []
        places = [Path(volume["filesystem"]["mount_point"]) for _, volume in volumes] or [target]
        names = [name for name, _ in volumes if name]
        if names and self.request.level == "full":
            raise UsageProblem(
                f"`--level full` measures one volume, and `{target}` has {len(names)}",
                f"give `--target {places[0]}`, or take `--level quick`, which measures all at once",
            )
        obstacle = _obstacle(target, self.found.checks, own_mount, several=bool(names))
        if obstacle is not None:
            progress.say(f"{obstacle.what}: nothing is written there")
            self.found.errors.append(f"`{target}` was not measured: see {obstacle.check}")
            return
        try:
            for place in places:
                check_directory(place)
            free = min(map(free_bytes, places))
        except OSError as error:
            # A file system that shut itself down.
            self.found.errors.append(f"`{target}` was not measured: {error.strerror or error}; see `dmesg | tail`")
            return
        stack = together(str(target), [read_stack(str(place)) for place in places])
        doubt = _doubt_of_manifest(self.request, self.manifest, stack, self.found.checks)
        self.doubts += [doubt] if doubt is not None else []
        self.plan = _planned(self.request, self.manifest, stack, free, environment, names)
        self.places = places
        if self.plan.shape.ceiling is not None:
            self.found.measurements.append(figures.ceiling_figure(stack, self.plan.shape.ceiling))
        for rung in self.plan.rungs:
            for line in rung.announcement(self.plan.shape):
                progress.say(line)
        if self.request.level == "full":
            for line in ladder.announcement(self.plan.shape, stack):
                progress.say(line)
        for path in [path for place in places for path in rundir.stale_directories(place)]:
            progress.say(f"`{path}` was left by a run that died")

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        if self.plan is None:
            return
        stack, shape, environment = self.plan.stack, self.plan.shape, session.environment
        session.subject = stack.directory
        self.doubts += obstacles(stack)
        self.doubts += [f"{doubt} and verify again" for doubt in foreign_code(environment)]
        fio = find_fio(environment)
        session.hold(_watched(stack, self.found.checks))
        directory, *others = session.directories(self.places, stack)
        self.context = Context(
            shape=shape,
            stack=stack,
            directory=directory,
            sampler=Sampler(stack, fio, directory, environment, session.progress),
            environment=environment,
            drives=read_drives(),
            limits=self.plan.limits,
            python=self.request.python,
            require_deepspeed="deepspeed" in self.request.require,
            volumes=dict(zip(shape.volumes, [directory, *others], strict=False)),
        )
        try:
            run_rungs(self.plan.rungs, self.context, self.found)
        finally:
            session.raw.update(self.context.sampler.raw)

    def findings(self) -> Findings:
        """See ``session.Work``."""
        found, stack = self.found, self.plan.stack if self.plan is not None else None
        if self.context is not None:
            _add_sequential(self.context, found)
            self.doubts += dict.fromkeys(self.context.sequential.incomplete)
        if self.request.level == "config" and self.manifest is None:
            found.errors.append("there is no manifest to check against: provision the node, or measure a `--target`")
        case = Case(
            measurements=found.measurements,
            expectations=expectations(self.request, self.manifest),
            checks=found.checks,
            unproven=found.unproven,
            doubts=self.doubts,
            errors=found.errors,
            tolerance=self.request.tolerance,
            notes=self.notes,
            judged="checks" if self.request.level == "config" else "speed",
            ladder=_ladder(found, self.context) if self.request.level == "full" else None,
        )
        return Findings(case, target=stack.directory if stack else None, stack=stack)


def _against(request: Request, manifest: Mapping[str, Any]) -> list[Check]:
    """The node against its manifest. A dry run writes no file either."""
    return manifest_checks(request.manifest, manifest, writing=NOTHING if request.run.dry_run else ALLOWED)


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


def _of_target(manifest: dict[str, Any] | None, target: Path | None) -> dict[str, Any] | None:
    """The manifest, or that of the one of several volumes on which the target lies: what is expected is of all."""
    if manifest is None or target is None:
        return manifest
    for name, volume in each_volume(manifest):
        if name and target.absolute().is_relative_to(volume["filesystem"]["mount_point"]):
            return {**volume, "expect": {}}
    return manifest


def expectations(request: Request, manifest: Mapping[str, Any] | None) -> list[Expectation]:
    """The caller's, else the manifest's; one for each direction that is to be judged."""
    if request.expect or manifest is None:
        return expectations_of(request.expect, "--expect")
    return expectations_of(manifest["expect"], str(request.manifest or MANIFEST_PATH))


def _target(request: Request, manifest: Mapping[str, Any] | None) -> tuple[Path, bool]:
    """The directory to measure, and whether it is the manifest's own mount point."""
    mount_point = Path(common_mount_point(manifest)) if manifest else None
    if request.target is not None:
        if manifest is not None and request.target.absolute() == mount_point and "volumes" in manifest:
            # Nobody writes there, only to the volumes in it.
            return mount_point, True
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


@dataclass(frozen=True)
class _Obstacle:
    """Why nothing is written to the manifest's own mount point."""

    what: str
    check: str
    """The check that says more."""


def _obstacle(target: Path, checks: Sequence[CheckResult], own_mount: bool, several: bool) -> _Obstacle | None:
    if not own_mount:
        return None
    if not _is_mounted(checks):
        # The bare mount point belongs to the root file system.
        what = "is not the mount that the manifest names"
        if several:
            what = "has volumes that are not the mounts that the manifest names"
        return _Obstacle(f"`{target}` {what}", MOUNTED)
    failed = [check for check in checks if check.status == "fail"]
    halted = [f"state `{state}`" for state in HALTED_STATES]
    for check in failed:
        # Of several volumes with the name of each before it.
        if any(state in check.found for state in halted):
            # I/O of ours would wait with everybody else's, in a state in which no signal ends it.
            return _Obstacle(f"`{target}` lies on an array with {check.found}", check.id)
    dead = next((check for check in failed if BY_ID[check.id].halts), None)
    return _Obstacle(f"`{target}`: {dead.found}", dead.id) if dead is not None else None


def _doubt_of_manifest(
    request: Request, manifest: Mapping[str, Any] | None, stack: BlockStack, checks: Sequence[CheckResult]
) -> str | None:
    """The manifest's expectations hold for the manifest's file system, and for no other."""
    if manifest is None or request.expect or not manifest["expect"]:
        return None
    mount_point = common_mount_point(manifest)
    volumes, parts = each_volume(manifest), stack.parts or (stack,)
    shown = len(volumes) == len(parts) and all(
        _shows(part.mount, volume["filesystem"]["mount_point"])
        for part, (_, volume) in zip(parts, volumes, strict=False)
    )
    if shown and _is_mounted(checks):
        return None
    return (
        f"`{stack.directory}` is not on the manifest's file system (`{mount_point}`), whose expectations do not "
        "apply to it: pass `--expect`, or leave out `--target`"
    )


def _shows(mount: Mount | None, mount_point: str) -> bool:
    """Whether ``mount`` is that of ``mount_point``, or a bind mount of the same file system."""
    if mount is None or mount.mount_point == mount_point:
        return mount is not None
    there = mount_at(mount_point, read_mounts())
    return there is not None and there.device_number == mount.device_number


def _planned(
    request: Request,
    manifest: Mapping[str, Any] | None,
    stack: BlockStack,
    free: int,
    environment: Mapping[str, str],
    volumes: Sequence[str] = (),
) -> _Plan:
    """The rungs, from fio's to the ladder's. Raises ``UsageProblem`` where there is too little space."""
    wanted = expectations(request, manifest)
    limits = {each.name: limit_of(each.value, request.tolerance) for each in wanted}
    by_direction = {direction: limits[name] for direction, name in figures.NAMES.items() if name in limits}
    top, cpus = ceiling(stack, read_drives()), os.cpu_count() or 1
    target, medium = Path(stack.directory), stack.medium
    parts = _parts(stack, volumes)
    shape = plan_sequential(target, medium, free, cpus, request.duration, top, by_direction, volumes, parts)
    handle: Rung = pinned_handle(request.python, request.duration, request.require, environment, request.chosen)
    # One file of it shows what the handle does; a path of GPUDirect is another one on each drive.
    rungs: list[Rung] = [Sequential(), OnVolumes(handle, volumes[:1]) if volumes else handle]
    mode = request.gds or default_mode(manifest)
    if mode != "off":
        direct = GpuDirect(mode, request.python)
        rungs.append(OnVolumes(direct, volumes) if volumes else direct)
    if request.level == "full":
        rungs += ladder.all_rungs()
    return _Plan(stack, shape, limits, rungs)


def _parts(stack: BlockStack, volumes: Sequence[str]) -> dict[str, float]:
    """By volume, the part of a limit that it is judged against; empty where the drives of one are not known."""
    counts = [len(part.leaves) for part in stack.parts]
    if not volumes or not all(counts):
        return {}
    return {name: part_of_limit(own, sum(counts)) for name, own in zip(volumes, counts, strict=False)}


@contextmanager
def _watched(stack: BlockStack, checks: list[CheckResult]) -> Iterator[None]:
    """Turns errors that the drives report, until the files are removed, into a check."""
    with Watch(stack) as watch:
        try:
            yield
        finally:
            checks += watch.findings()


def _add_sequential(context: Context, found: Found) -> None:
    """fio's figures, as far as there are samples of it: they are kept where it failed, too."""
    results, stack = context.sequential, context.stack
    if results.samples:
        found.measurements += figures.bandwidths(stack, context.sampler.fio, context.shape, results)
        alone, reasons = figures.of_volumes(stack, context.sampler.fio, context.shape, results)
        found.measurements += [*alone, *figures.service_time_figures(stack, results)]
        found.unproven.update({**figures.unproven(stack, results), **reasons})
        found.checks.append(balance(stack, figures.counted_samples(results)))


def _ladder(found: Found, context: Context | None) -> Ladder | None:
    if context is None:
        return None
    return ladder.conclude(
        found.measurements,
        found.skipped,
        found.unproven,
        lambda: ladder_facts.read_facts(context.stack, read_drives(), found.measurements),
    )
