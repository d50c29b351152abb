"""GPUDirect Storage as a step of ``tunetool verify``: whether it is required, its proof, and its figures."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from tunetool.errors import CannotJudge
from tunetool.measure import Direction
from tunetool.measure.aio.driver import Pass
from tunetool.measure.aio.figures import doubt
from tunetool.measure.figure import What, measured
from tunetool.measure.gds import config, counters
from tunetool.measure.gds.counters import FIRST, version_of
from tunetool.measure.gds.driver import START_SECONDS, Outcome, Run, start
from tunetool.measure.gds.spec import SMALLEST, Mode, Spec, Way, io_bytes
from tunetool.measure.ladder.rung import Context, Result, Rung
from tunetool.measure.sequential import Plan, free_bytes
from tunetool.measure.worker import Failed, Missing, Worker
from tunetool.node.gds.facts import read_gds_facts
from tunetool.node.gds.path_choice import Decision, current
from tunetool.node.units import format_size
from tunetool.origin import install_hint
from tunetool.record import CheckResult, Measurement, Scalar, as_result

_SECONDS = 15.0
_NOT_STARTED = "cuFile initialization failed"
"""libcufile, all releases from 1.11 to 1.20, on standard error."""
_ENGINES: Mapping[Way, str] = {
    "direct": "kvikio {kvikio} through cuFile (libcufile {libcufile})",
    "compat": "kvikio {kvikio} through cuFile's bounce buffers (libcufile {libcufile})",
    "posix": "kvikio {kvikio}, POSIX: no cuFile",
}


@dataclass(frozen=True)
class GpuDirect(Rung):
    """Whether it is required, its proof, and its figures."""

    mode: Mode
    """Not ``off``: then there is no such rung."""
    python: Path
    needs_direct_io: ClassVar[bool] = False
    name: str = "GPUDirect Storage"

    def announcement(self, shape: Plan) -> Sequence[str]:
        """What it will do, for how long, in a line."""
        return [
            "then GPUDirect Storage: a file of at most 1.074 GB to and from HBM through cuFile, "
            f"about {self.seconds(shape, 0):.0f} s"
        ]

    def seconds(self, shape: Plan, drives: int) -> float:
        """About how long it takes."""
        return _SECONDS

    def run(self, context: Context) -> Result:
        """Its checks and figures. What cannot be measured is the answer of its check, no error of the run."""
        result = Result()
        facts = read_gds_facts("/", context.stack.mount.mount_point if context.stack.mount else None)
        path = config.config_path(context.environment)
        if not facts.gpus:
            result.checks.append(as_result(config.check(path, facts.libcufile, None, "there is no GPU")))
            result.checks.append(
                counters.answer(self.mode, "unknown", "there is no NVIDIA GPU here", "verify on a node that has one")
            )
            return result
        try:
            _Step(self.mode, self.python, context, current(facts), result).execute(path)
        except CannotJudge as error:
            result.checks.append(counters.answer(self.mode, "unknown", error.message, error.hint or ""))
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
    context: Context
    decision: Decision
    result: Result
    probed: dict[str, Any] = field(default_factory=dict)

    def execute(self, path: Path) -> None:
        environment = {**self.context.environment, **({config.VARIABLE: str(path)} if path.exists() else {})}
        with start(self.python, environment) as child:
            try:
                self._probe(child)
                refused = self._cufile(child, path)
            finally:
                self.context.sampler.raw["gds.txt"] = child.messages()
        if refused:
            self._posix(environment)

    def _probe(self, child: Worker) -> None:
        with self.context.sampler.progress.step(f"{self.context.directory.parent}: gds probe", 3) as tick:
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
        settings = opened(child, self.context.directory)
        values = settings["values"] if settings["refused"] is None else None
        self.result.checks.append(
            as_result(config.check(path, self.probed["libcufile"], values, "cuFile's driver would not open"))
        )
        spec = self._spec(True)
        refused = settings["refused"] or child.ask({"do": "register", "file": str(spec.file)}, START_SECONDS)["refused"]
        if refused is None:
            outcome = Outcome()
            try:
                Run(spec, self.context.stack, self.context.sampler.progress, outcome, child).execute()
            except Failed as error:
                refused = {"status": None, "message": error.message}
            finally:
                spec.file.unlink(missing_ok=True)
            self.context.sampler.raw["gds-counters.json"] = json.dumps(outcome.counters)
            if outcome.moved:
                way = counters.way_of(outcome.moved)
                self._conclude(counters.proven(self.mode, outcome.moved, self.decision), spec, outcome, way)
                return False
        spec.file.unlink(missing_ok=True)
        message = str(refused["message"]).splitlines()[0] + self._log()
        self.result.checks.append(counters.refused(self.mode, message, self.decision))
        return True

    def _posix(self, environment: Mapping[str, str]) -> None:
        """What kvikio reaches without cuFile: a figure by its right name, and no proof of GPUDirect."""
        spec, outcome = self._spec(False), Outcome()
        try:
            with start(self.python, environment) as child:
                Run(spec, self.context.stack, self.context.sampler.progress, outcome, child).execute()
        except CannotJudge as error:
            self.context.sampler.raw["gds-posix.txt"] = error.message
            return
        finally:
            spec.file.unlink(missing_ok=True)
        self._figures(spec, outcome, "posix")

    def _conclude(self, check: CheckResult, spec: Spec, outcome: Outcome, way: Way) -> None:
        reasons = [doubt(self.context.stack, direction, kept, "kvikio") for direction, kept in outcome.samples.items()]
        if check.status == "pass" and any(reasons):
            check = counters.answer(self.mode, "unknown", "; ".join(filter(None, reasons)))
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
            "medium": self.context.stack.medium,
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
            self.context.stack.medium,
            "bandwidth",
            {"way": way, "direction": direction},
            parameters=parameters,
        )
        return measured(what, self.context.stack, samples, values)

    def _spec(self, cufile: bool) -> Spec:
        size = io_bytes(free_bytes(self.context.directory), self.context.slowest)
        if not size:
            raise Failed(
                f"`{self.context.directory}` has too little space for {format_size(SMALLEST)}", "free some space"
            )
        return Spec(self.context.directory, size, cufile, self.python)

    def _log(self) -> str:
        """The first complaint in the library's own log, which says what its error number does not; keeps the log."""
        logs = sorted(self.context.directory.glob("cufile*.log"))
        if not logs:
            return ""
        text = logs[-1].read_text(errors="replace")
        self.context.sampler.raw["cufile.log"] = text[-8000:]
        match = re.search(r"\bERROR\s+\S+:\d+ (.*)", text)
        return f"; cufile.log: {match.group(1).strip()}" if match else ""
