"""GPUDirect Storage as a step of ``tunetool verify``: whether it is required, its proof, and its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge
from tunetool.measure.aio.driver import Pass
from tunetool.measure.aio.figures import doubt
from tunetool.measure.checks import as_result
from tunetool.measure.direction import Direction
from tunetool.measure.figure import What, measured
from tunetool.measure.gds import config, judge
from tunetool.measure.gds.counters import FIRST, version_of
from tunetool.measure.gds.driver import START_SECONDS, Outcome, Run, start
from tunetool.measure.gds.spec import SMALLEST, Mode, Spec, Way, io_bytes
from tunetool.measure.progress import Progress
from tunetool.measure.sequential import free_bytes
from tunetool.measure.worker import Failed, Missing, Worker
from tunetool.node.gds.facts import read_gds_facts
from tunetool.node.gds.path_choice import Decision, current
from tunetool.node.machine.block_stack import BlockStack
from tunetool.node.units import format_size
from tunetool.origin import install_hint
from tunetool.record import CheckResult, Measurement, Scalar

_NOT_STARTED = "cuFile initialization failed"
"""libcufile, all releases from 1.11 to 1.20, on standard error."""
_ENGINES: Mapping[Way, str] = {
    "direct": "kvikio {kvikio} through cuFile (libcufile {libcufile})",
    "compat": "kvikio {kvikio} through cuFile's bounce buffers (libcufile {libcufile})",
    "posix": "kvikio {kvikio}, POSIX: no cuFile",
}


@dataclass
class Result:
    """The checks, figures and raw files."""

    checks: list[CheckResult] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    raw: dict[str, str] = field(default_factory=dict)


def announcement(mode: Mode) -> list[str]:
    """Lines that describe the rung before it starts."""
    if mode == "off":
        return []
    return ["then GPUDirect Storage: a file of at most 1.074 GB to and from HBM through cuFile, about 15 s"]


def measure(
    mode: Mode,
    python: Path,
    stack: BlockStack,
    directory: Path,
    seen: float,
    environment: Mapping[str, str],
    progress: Progress,
) -> Result:
    """Measure and judge inside the run's ``directory``; ``seen`` is fio's bandwidth, by which the file is sized."""
    result = Result()
    if mode == "off":
        return result
    facts = read_gds_facts("/", stack.mount.mount_point if stack.mount else None)
    path = config.config_path(environment)
    if not facts.gpus:
        result.checks.append(as_result(config.check(path, facts.libcufile, None, "there is no GPU")))
        result.checks.append(
            judge.answer(mode, "unknown", "there is no NVIDIA GPU here", "verify on a node that has one")
        )
        return result
    step = _Step(mode, python, stack, directory, seen, environment, progress, current(facts), result)
    try:
        step.execute(path)
    except CannotJudge as error:
        result.checks.append(judge.answer(mode, "unknown", error.message, error.hint or ""))
    return result


def opened(child: Worker, directory: Path) -> dict[str, Any]:
    """What libcufile answers once its driver is open, or why it is not (``refused``)."""
    settings = child.ask({"do": "settings", "directory": str(directory)}, START_SECONDS)
    messages = child.messages()
    if settings["refused"] is None and _NOT_STARTED in messages:
        # Newer bindings take the status that libcufile has for that as a success.
        settings["refused"] = {"status": None, "message": messages.strip().splitlines()[0].strip()}
    return settings


@dataclass
class _Step:
    mode: Mode
    python: Path
    stack: BlockStack
    directory: Path
    seen: float
    environment: Mapping[str, str]
    progress: Progress
    decision: Decision
    result: Result
    probed: dict[str, Any] = field(default_factory=dict)

    def execute(self, path: Path) -> None:
        environment = {**self.environment, **({config.VARIABLE: str(path)} if path.exists() else {})}
        with start(self.python, environment) as child:
            try:
                self._probe(child)
                refused = self._cufile(child, path)
            finally:
                self.result.raw["gds.txt"] = child.messages()
        if refused:
            self._posix(environment)

    def _probe(self, child: Worker) -> None:
        with self.progress.step(f"{self.directory.parent}: gds probe", 3) as tick:
            child.tick = tick
            self.probed = child.ask({"do": "probe"}, START_SECONDS)
        for name, what in (("libcufile", "cuda-bindings with libcufile"), ("kvikio", "kvikio")):
            if not self.probed.get(name):
                error = self.probed.get("bindings_error")
                hint = f"{install_hint('gds', self.python)}, or name the Python that has both with `--python`"
                raise Missing(f"`{self.python}` has no {what}" + (f" ({error})" if error else ""), hint)
        if not self.probed["gpu"]:
            raise Missing(f"CUDA sees no GPU: {self.probed.get('gpu_error')}", "`nvidia-smi` says more")
        version = version_of(self.probed["libcufile"])
        self.probed["libcufile"] = "{}.{}".format(*version)
        if version < FIRST:
            raise Missing(
                f"libcufile {self.probed['libcufile']} lets no program read its counters", "install 1.15 or newer"
            )

    def _cufile(self, child: Worker, path: Path) -> bool:
        """Move data through cuFile and judge; true if cuFile refused."""
        settings = opened(child, self.directory)
        values = settings["values"] if settings["refused"] is None else None
        self.result.checks.append(
            as_result(config.check(path, self.probed["libcufile"], values, "cuFile's driver would not open"))
        )
        spec = self._spec(True)
        refused = settings["refused"] or child.ask({"do": "register", "file": str(spec.file)}, START_SECONDS)["refused"]
        if refused is None:
            outcome = Outcome()
            try:
                Run(spec, self.stack, self.progress, outcome, child).execute()
            except Failed as error:
                refused = {"status": None, "message": error.message}
            finally:
                spec.file.unlink(missing_ok=True)
            self.result.raw["gds-counters.json"] = json.dumps(outcome.counters)
            if outcome.moved:
                way = judge.way_of(outcome.moved)
                self._conclude(judge.proven(self.mode, outcome.moved, self.decision), spec, outcome, way)
                return False
        spec.file.unlink(missing_ok=True)
        message = str(refused["message"]).splitlines()[0] + self._log()
        self.result.checks.append(judge.refused(self.mode, message, self.decision))
        return True

    def _posix(self, environment: Mapping[str, str]) -> None:
        """What kvikio reaches without cuFile: a figure by its right name, and no proof of GPUDirect."""
        spec, outcome = self._spec(False), Outcome()
        try:
            with start(self.python, environment) as child:
                Run(spec, self.stack, self.progress, outcome, child).execute()
        except CannotJudge as error:
            self.result.raw["gds-posix.txt"] = error.message
            return
        finally:
            spec.file.unlink(missing_ok=True)
        self._figures(spec, outcome, "posix")

    def _conclude(self, check: CheckResult, spec: Spec, outcome: Outcome, way: Way) -> None:
        reasons = [doubt(self.stack, direction, kept, "kvikio") for direction, kept in outcome.samples.items()]
        if check.status == "pass" and any(reasons):
            check = judge.answer(self.mode, "unknown", "; ".join(filter(None, reasons)))
        self.result.checks.append(check)
        self._figures(spec, outcome, way)

    def _figures(self, spec: Spec, outcome: Outcome, way: Way) -> None:
        engine = _ENGINES[way].format(**self.probed)
        for direction, samples in sorted(outcome.samples.items()):
            if samples:
                self.result.measurements.append(self._figure(spec, outcome, way, engine, direction, samples))

    def _figure(
        self, spec: Spec, outcome: Outcome, way: Way, engine: str, direction: Direction, samples: list[Pass]
    ) -> Measurement:
        parameters: dict[str, Scalar] = {
            "direction": direction,
            "device": way,
            "medium": self.stack.medium,
            "gpu": str(self.probed["gpu"]),
            "file_bytes": spec.io_bytes,
            "task_bytes": spec.task_bytes,
            "threads": spec.threads,
            "repeated_samples": outcome.repeated[direction].taken,
            "sample_seconds": spec.seconds,
        }
        moved = outcome.moved.get(direction)
        if moved is not None:
            counts = moved.counts
            parameters |= {"nvidia_fs_requests": counts.nvidia_fs, "p2pdma_requests": counts.p2pdma}
            parameters |= {"posix_requests": counts.posix, "cufile_bytes": counts.bytes}
        values = [each.bandwidth for each in samples]
        what = What(
            "gds.{way}.{direction}",
            "bandwidth",
            engine,
            self.stack.medium,
            "bandwidth",
            {"way": way, "direction": direction},
            parameters=parameters,
        )
        return measured(what, self.stack, samples, values)

    def _spec(self, cufile: bool) -> Spec:
        size = io_bytes(free_bytes(self.directory), self.seen)
        if not size:
            raise Failed(f"`{self.directory}` has too little space for {format_size(SMALLEST)}", "free some space")
        return Spec(self.directory, size, cufile, self.python)

    def _log(self) -> str:
        """The first complaint in the library's own log, which says what its error number does not; keeps the log."""
        logs = sorted(self.directory.glob("cufile*.log"))
        if not logs:
            return ""
        text = logs[-1].read_text(errors="replace")
        self.result.raw["cufile.log"] = text[-8000:]
        match = re.search(r"\bERROR\s+\S+:\d+ (.*)", text)
        return f"; cufile.log: {match.group(1).strip()}" if match else ""
