"""``tunetool tune`` on one node: search, prove, let DeepSpeed check the block, write it, keep the record."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure import aio, session
from tunetool.measure.aio.spec import Device
from tunetool.measure.evidence import obstacles
from tunetool.measure.fio import find_fio
from tunetool.measure.sequential import free_bytes
from tunetool.measure.session import Findings, Session
from tunetool.measure.target import check_target
from tunetool.measure.worker import preloads
from tunetool.node.common.files import replace_file
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.node.machine.memory import memory_total
from tunetool.node.units import format_size_binary
from tunetool.record import CheckResult
from tunetool.tune.check import check_block
from tunetool.tune.fio_driver import FioDriver
from tunetool.tune.outcome import ACCEPTED, KIND, Work, conclude
from tunetool.tune.pool import Pool, aio_shortage, largest, unit_of
from tunetool.tune.request import Request, Result, View
from tunetool.tune.samples import Samples
from tunetool.tune.search import Plan, Search, SettingFailed
from tunetool.tune.settings import DEFAULTS, AioSettings

CHECK_SECONDS = 25.0
"""Seconds of the budget, at most, for the check by DeepSpeed's classes, which may be imported from a cold disk."""
END_SECONDS = 2.0
"""Seconds of the budget for the proof."""


def tune(request: Request, view: View, environment: Mapping[str, str] | None = None) -> Result:
    """Tune. Raises ``UsageProblem`` before any work when the call is wrong, ``CannotJudge`` when it cannot start."""
    tuning = _Tuning(request, view)
    kept = session.run(KIND, request.run, tuning, view, environment)
    done = kept.record is not None and kept.code == ExitCode.OK
    return Result(kept.record, kept.path, tuning.work.findings if done else None, request.mix)


def _check_request(request: Request, target: Path) -> None:
    unit = unit_of(request.space)
    if request.io_bytes % unit:
        raise UsageProblem(
            f"`--io-size` of {request.io_bytes} bytes cannot be moved exactly by every parallelism of the space",
            f"it must be a multiple of {format_size_binary(unit)}",
        )
    free, memory = free_bytes(target), memory_total()
    if not request.io_bytes and largest(free, memory, request.processes, unit) < unit:
        raise CannotJudge(
            f"`{target}` has too little space, or this node too little memory: {format_size_binary(free)} and "
            f"{format_size_binary(memory)}, of which a tenth may be used",
            f"free some; a transfer is {format_size_binary(unit)} or a multiple, for each of the processes",
        )
    if request.driver == "fio" and (request.device != "cpu" or request.processes != 1):
        raise UsageProblem(
            "`--driver fio` supports only one process and host memory", "leave out `--device`, `--processes`"
        )
    if request.device == "cpu" and any(settings.use_gds for settings in request.space):
        raise UsageProblem("`use_gds` in the space needs GPU memory", "add `--device cuda`")
    output = request.output
    if output is not None:
        if output.is_dir():
            raise UsageProblem(f"`{output}` is a directory", "`-o` takes a file, such as `aio.json`")
        if not os.access(output.parent, os.W_OK | os.X_OK) or (output.exists() and not os.access(output, os.W_OK)):
            raise UsageProblem(f"`{output}` cannot be written", "`-o` takes a file in a directory that exists")


def _probe(request: Request, environment: Mapping[str, str]) -> aio.Probe | None:
    if request.driver == "fio":
        return None
    installed = aio.probe(request.python, environment)
    aio.need(installed, "async_io")
    if any(settings.use_gds for settings in request.space):
        aio.need(installed, "gds")
    if request.device != "cpu" and not installed.cuda:
        raise CannotJudge(
            f"torch in `{installed.python}` sees no GPU", "leave out `--device`, or name another `--python`"
        )
    return installed


def _announcement(request: Request, stack: BlockStack, target: Path) -> list[str]:
    how = "all of them, six rounds" if request.exhaustive else f"about {request.budget:.0f} s in all"
    size = f"of {format_size_binary(request.io_bytes)}" if request.io_bytes else "of at most 1 GiB"
    each = f"{request.processes} files" if request.processes > 1 else "a file"
    return [
        f"writes to `{target}` ({stack.medium}): {each} {size}, again and again, removed afterwards",
        f"{len(request.space)} settings, mix {request.mix}; {how}",
    ]


@dataclass
class _Tuning:
    request: Request
    view: View
    began: float = field(default_factory=time.monotonic)
    work: Work = field(default_factory=Work)
    refused: dict[AioSettings, str] = field(default_factory=dict)
    driver: Pool | FioDriver | None = None
    start_seconds: float = 0.0
    target: Path = field(init=False)
    stack: BlockStack = field(init=False)
    installed: aio.Probe | None = field(init=False)
    environment: Mapping[str, str] = field(init=False)

    def announce(self, session: Session) -> None:
        """See ``session.Work``."""
        request, self.environment = self.request, session.environment
        check_target(request.target)
        self.target = request.target.resolve()
        self.stack = read_stack(str(self.target))
        for obstacle in obstacles(self.stack):
            fault, _, cure = obstacle.partition(": ")
            raise CannotJudge(fault, cure)
        for name in preloads(self.environment):
            raise CannotJudge(f"`{name}` is set, so foreign code runs in tunetool itself", "unset it")
        _check_request(request, self.target)
        self.installed = _probe(request, self.environment)
        for line in _announcement(request, self.stack, self.target):
            self.view.say(line)

    def measure(self, session: Session) -> None:
        """See ``session.Work``."""
        directory = session.directory(self.target, self.stack)
        try:
            with self.view.open(), ExitStack() as held:
                self._search(held, directory)
        finally:
            if self.driver is not None and self.driver.messages:
                session.raw["driver.txt"] = self.driver.messages
        self._accept()

    def findings(self) -> Findings:
        """See ``session.Work``."""
        return conclude(self.request, self.stack, self.work)

    def _search(self, held: ExitStack, directory: Path) -> None:
        space = self._possible()
        driver = self.driver = self._make_driver(held, directory, space)
        opened = time.monotonic()
        driver.open()
        self.start_seconds = time.monotonic() - opened
        self.view.say(f"started in {self.start_seconds:.1f} s; transfers of {format_size_binary(driver.io_bytes)}")
        self.work.samples = samples = Samples(driver, self.stack, time.monotonic, self.view.say, directory)
        kept = END_SECONDS + driver.end_seconds
        kept += min(CHECK_SECONDS, 2 + 2 * self.start_seconds) if self.request.driver == "deepspeed" else 0.0
        left = max(5.0, self.request.budget - (time.monotonic() - self.began) - kept)
        plan = Plan(space, self.request.mix, left, self.request.exhaustive, self.request.seed)
        try:
            search = Search(plan, samples.take, time.monotonic, self.view.update)
            findings = search.run()
        except SettingFailed as error:
            raise CannotJudge(f"DeepSpeed's own default fails here: {error}") from None
        findings.failed.update(self.refused)
        for settings, reason in findings.failed.items():
            self.view.say(f"left out: {settings}: {reason}")
        driver.prove(findings.choices[self.request.mix.goals[-1]].settings)
        self.work.findings = findings
        for settings, direction in findings.decided:
            samples.ask_without_storage(settings, direction)

    def _possible(self) -> list[AioSettings]:
        """The space without the settings that the kernel would refuse."""
        for settings in self.request.space:
            reason = aio_shortage(settings, self.request.processes)
            if reason:
                self.refused[settings] = reason
        if DEFAULTS in self.refused:
            raise CannotJudge(f"DeepSpeed's own default {self.refused[DEFAULTS]}")
        return [settings for settings in self.request.space if settings not in self.refused]

    def _make_driver(self, held: ExitStack, directory: Path, space: Sequence[AioSettings]) -> Pool | FioDriver:
        request = self.request
        if request.driver == "fio":
            fio = find_fio(self.environment)
            return FioDriver(fio, directory, space, self.environment, request.io_bytes, self.view.tick)
        assert self.installed is not None  # noqa: S101  (probed for this driver)
        spec = aio.Spec(directory, 0, request.device, python=request.python, pinned_by=_pinned_by(request.device))
        pool = Pool(
            spec,
            request.processes,
            space,
            self.installed,
            self.stack,
            self.environment,
            request.io_bytes,
            self.view.tick,
        )
        return held.enter_context(pool)

    def _accept(self) -> None:
        """Let DeepSpeed check the block, then write it to the requested file."""
        assert self.work.findings is not None  # noqa: S101  (found above)
        block = self.work.findings.choices[self.request.mix.goals[-1]].settings.block()
        self.work.checks.append(accepted(block, self.request, self.target, self.environment))
        if self.request.output is not None:
            replace_file(str(self.request.output), render(block))


def render(block: Mapping[str, int | bool]) -> str:
    """The block as JSON that can be merged into a ds_config, or loaded as one."""
    return json.dumps({"aio": dict(block)}, indent=2) + "\n"


def accepted(
    block: Mapping[str, int | bool],
    request: Request,
    target: Path,
    environment: Mapping[str, str],
) -> CheckResult:
    """Check that DeepSpeed reads the block as it is written. Raises ``CannotJudge`` if it does not."""
    expected = "DeepSpeed's own classes read every key of the block as it is written"
    if request.driver == "fio":
        reason = "not checked: measured by fio, without DeepSpeed"
        return CheckResult(id=ACCEPTED, status="skip", expected=expected, found=reason)
    reading = check_block(block, request.python, target, environment)
    return CheckResult(id=ACCEPTED, status="pass", expected=expected, found=str(reading))


def _pinned_by(device: Device) -> Literal["deepspeed", "cuda"]:
    return "deepspeed" if device == "cpu" else "cuda"
