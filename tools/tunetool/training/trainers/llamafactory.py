"""The same fine-tune with LLaMA-Factory, as users run it: rendered files, `llamafactory-cli train`, its results.

LLaMA-Factory needs its own virtual environment, since it pins an older transformers. The first rank of each node starts
it there and the other ranks wait, so that every launcher works unchanged. LLaMA-Factory starts its own ranks to
compute; the `rank.*` curves show the waiting ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from tunetool import user_directories
from tunetool.advise import precision as formats
from tunetool.advise.precision import Capability, Precision, need
from tunetool.errors import CannotJudge, TunetoolError, UsageProblem
from tunetool.launch import rank as launched
from tunetool.measure.aio.ops import LOCK, builders
from tunetool.node.common.commands import captured
from tunetool.training.data.conversations import choose
from tunetool.training.model import reference_model
from tunetool.training.rank import gpu_reading
from tunetool.training.rank.recorder import Recorder
from tunetool.training.trainers import llamafactory_files as files
from tunetool.training.trainers.deepspeed import Trainer, note_precision
from tunetool.training.trainers.llamafactory_files import Outcome, cure, last_error, read_outcome
from tunetool.training.workload import Workload

_T = TypeVar("_T")
PROGRAM = "llamafactory-cli"
_LOOK = 0.5
_VERSIONS_SECONDS = 300.0
_PATIENCE = 30.0
_OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_", "MASTER_", "PYTHONPATH", "OMP_NUM_THREADS")
"""Prefixes of variables that LLaMA-Factory must not inherit: torchrun's for this rank, and our module path."""
_OP = "deepspeed_shm_comm"
"""DeepSpeed's op that ranks on CPUs load, and compile where it is missing."""
_LIBRARIES = ("llamafactory", "torch", "deepspeed", "transformers", "peft")


def find_program(environment: Mapping[str, str]) -> Path | None:
    """Path of `llamafactory-cli`: as ``files.VARIABLE`` says, beside this Python, or on PATH; None where there is none.

    Raises ``UsageProblem`` where ``files.VARIABLE`` is wrong.
    """
    configured = environment.get(files.VARIABLE)
    if configured:
        for program in (Path(configured), Path(configured) / "bin" / PROGRAM):
            if program.is_file() and os.access(program, os.X_OK):
                return program.absolute()
        raise UsageProblem(
            f"`{configured}` has no `{PROGRAM}` ({files.VARIABLE})", "set it to LLaMA-Factory's virtual environment"
        )
    beside = Path(sys.executable).with_name(PROGRAM)
    located = str(beside) if beside.is_file() else shutil.which(PROGRAM, path=environment.get("PATH"))
    return Path(located) if located else None


@dataclass
class LlamaFactory:
    """One rank of the run; the first rank of each node starts LLaMA-Factory."""

    workload: Workload
    recorder: Recorder
    local_world: int
    directory: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self) -> None:
        """Train. Raises ``CannotJudge`` where LLaMA-Factory is missing or fails, ``UsageProblem`` for invalid input."""
        if self.workload.checkpoint is not None:
            raise UsageProblem(
                "LLaMA-Factory does not support `--checkpoint`: it saves to its own output directory",
                "omit the option, or use `--trainer deepspeed`",
            )
        program = find_program(os.environ)
        cuda = self._cuda()
        mine = self._capability() if cuda else None
        if program is None:
            raise self._missing(self._run_files(program, cuda, self._choose([mine], cuda)))
        with self.recorder.phase("communicator"):
            group = _Group(self.recorder.rank, self.recorder.world)
            port = group.share_port()
            precision = self._choose(group.all(mine), cuda)
        note_precision(self.recorder, precision)
        run_files = self._run_files(program, cuda, precision)
        if self.workload.cold:
            Trainer(self.workload, self.recorder, self.local_world).drop()
        began = time.monotonic()
        try:
            if self.recorder.local_rank == 0:
                if not cuda:
                    clear_dead_locks(os.environ)
                self._start(files.write(self.workload, run_files), port)
            self._wait(group)
        finally:
            self._end()
            _drop_weights(run_files.directory / files.OUTPUT)
        self.recorder.seconds["llamafactory"] = time.monotonic() - began
        self._note(*group.first(lambda: (read_outcome(run_files.directory, self._log_text()), versions(program))))

    def _run_files(self, program: Path | None, cuda: bool, precision: Precision) -> files.RunFiles:
        facts = reference_model.check(Path(self.workload.model))
        self.recorder.model_bytes = facts.bytes
        return files.RunFiles(
            directory=self.directory / "llamafactory",
            nodes=max(1, self.recorder.world // self.local_world),
            ranks=self.local_world,
            cuda=cuda,
            precision=precision.format,
            dataset_name=choose(Path(self.workload.dataset), self.workload.entry)[0],
            pixels=_pixels(Path(self.workload.model)),
            programs=program.parent if program else None,
        )

    def _cuda(self) -> bool:
        """Whether to use GPUs, decided without CUDA: a context here would take memory from the computing ranks."""
        if self.workload.device != "auto":
            return self.workload.device == "cuda"
        return Path("/proc/driver/nvidia/gpus").is_dir() and any(Path("/proc/driver/nvidia/gpus").iterdir())

    def _capability(self) -> Capability | None:
        """Compute capability of this rank's GPU by NVML, for the same reason; None if NVML does not give it.

        Notes the GPU's name.
        """
        self.recorder.device = "cuda"
        try:
            gpu = gpu_reading.open_gpu("cuda", self.recorder.local_rank, os.environ)
            try:
                self.recorder.device = gpu.name()
                return gpu.capability()
            finally:
                gpu.close()
        except gpu_reading.NoGpu as error:
            if self.workload.precision == "auto":
                raise CannotJudge(
                    f"whether the GPU computes in bf16 is unknown: {error}", "say it: `--precision bf16` or `fp16`"
                ) from None
            return None

    def _choose(self, capabilities: Sequence[Capability | None], cuda: bool) -> Precision:
        """One format for the GPUs of all ranks. Raises ``UsageProblem`` where they lack what was asked for."""
        known = [each for each in capabilities if each is not None]
        chosen = formats.choose(self.workload.precision, known)
        # Where NVML does not say what the GPUs have, what was asked for is taken.
        return chosen if cuda and not known else need(chosen, known)

    def _missing(self, run_files: files.RunFiles) -> CannotJudge:
        hint = f"`pip install llamafactory` into its own virtual environment, and set {files.VARIABLE} to that"
        try:
            script = files.write(self.workload, _kept(self.workload, run_files))
        except OSError as error:
            return CannotJudge(f"`{PROGRAM}` is not installed", f"{hint}; nothing was rendered: {error.strerror}")
        return CannotJudge(f"`{PROGRAM}` is not installed", f"{hint}; its configuration is in `{script.parent}`")

    def _start(self, script: Path, port: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        environment |= {
            "NODE_RANK": str(self.recorder.rank // self.local_world),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": str(port),
        }
        with (self.directory / files.LOG).open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def _wait(self, group: _Group) -> None:
        """Wait until LLaMA-Factory has ended on every node. Raises ``CannotJudge`` when it failed on one."""
        written = -1
        while True:
            status = self._process.poll() if self._process is not None else 0
            size = self._size()
            # Progress of any rank counts for all: waiting ranks have no other sign of life for the watchdog.
            running, failed, moved = group.total(status is None, bool(status), size != written)
            written = size
            if moved:
                self.recorder.beat()
            if failed:
                log = self._log_text()
                failure = (f"LLaMA-Factory ended with status {status}: {last_error(log)}", cure(log))
                # Which rank ends first is random: all report the same failure.
                raise CannotJudge(*next(each for each in group.all(failure if status else None) if each))
            if not running:
                return
            time.sleep(_LOOK)

    def _end(self) -> None:
        """End LLaMA-Factory if it runs; torchrun forwards SIGTERM to its ranks."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_PATIENCE)

    def _size(self) -> int:
        # The log includes the progress bar, so that each step changes its size.
        path = self.directory / files.LOG
        return path.stat().st_size if path.is_file() else 0

    def _log_text(self) -> str:
        path = self.directory / files.LOG
        return path.read_text(errors="replace") if path.is_file() else ""

    def _note(self, outcome: Outcome, libraries: Mapping[str, str]) -> None:
        recorder = self.recorder
        recorder.libraries = dict(libraries)
        recorder.parameters, recorder.trainable = outcome.parameters, outcome.trainable
        recorder.seconds["start"] = max(0.0, recorder.seconds["llamafactory"] - outcome.seconds)
        share = 1 / recorder.world
        tokens, images = round(outcome.tokens * share), round(outcome.samples * share)
        steps = zip(outcome.step_seconds, outcome.losses, outcome.learning_rates, outcome.ends, strict=True)
        for step, (took, loss, rate, end) in enumerate(steps):
            last = step == len(outcome.losses) - 1
            recorder.step(None, None, took, loss, rate, tokens if last else 0, images if last else 0, end)
        recorder.notes.append(
            "LLaMA-Factory: the time of a step includes the wait for data; losses are means over the ranks"
        )
        if recorder.precision == "fp16":
            count = outcome.overflows or "no"
            recorder.notes.append(f"LLaMA-Factory's log names {count} updates that loss scaling skipped")


def clear_dead_locks(environment: Mapping[str, str]) -> None:
    """Remove the locks that killed builds left on ``_OP``: torch's loader waits for them for ever."""
    named = environment.get("TORCH_EXTENSIONS_DIR")
    root = Path(named) if named else user_directories.cache().parent / "torch_extensions"
    # Below the user's own directory there is one for each Python and torch.
    for lock in root.glob(f"{'' if named else '*/'}{_OP}/{LOCK}"):
        if not builders(lock):
            lock.unlink(missing_ok=True)


def versions(program: Path) -> dict[str, str]:
    """Versions of the libraries in LLaMA-Factory's environment; empty where its Python fails."""
    code = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {_LIBRARIES!r}:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    try:
        done = captured([str(program.with_name("python")), "-c", code], _VERSIONS_SECONDS, env=clean)
        return dict(json.loads(done.stdout))
    except (ValueError, subprocess.TimeoutExpired):
        return {}


def _kept(workload: Workload, run_files: files.RunFiles) -> files.RunFiles:
    """The same files in a cache directory that remains after the run; equal runs get the same directory."""
    identity = f"{workload.to_json()} {run_files.nodes} {run_files.ranks} {run_files.cuda} {run_files.precision}"
    name = hashlib.sha256(identity.encode()).hexdigest()[:12]
    return replace(run_files, directory=user_directories.cache() / "llamafactory" / name)


def _drop_weights(output: Path) -> None:
    """Remove the weights that LLaMA-Factory always saves, since this folder is copied to the control machine."""
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        for path in output.rglob(pattern):
            path.unlink(missing_ok=True)


def _pixels(model: Path) -> int:
    """Pixels that pictures are scaled down to, as with the other trainers: the model's limit, at most ``PIXELS``."""
    try:
        size: Any = json.loads((model / "preprocessor_config.json").read_text())
        return min(int(size["size"]["longest_edge"]), reference_model.PIXELS)
    except (OSError, ValueError, KeyError, TypeError):
        return reference_model.PIXELS


def train(workload: Workload, recorder: Recorder) -> None:
    """Train one rank with LLaMA-Factory; the worker's entry point."""
    LlamaFactory(workload, recorder, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), launched.out()).run()


class _Group:
    """All ranks of the run, which only coordinate, over gloo without a GPU.

    The methods are collective: every rank must call them in the same order.
    """

    def __init__(self, rank: int, world: int) -> None:
        import torch

        self._rank, self._world, self._torch = rank, world, torch
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)

    def share_port(self) -> int:
        """A TCP port that is free on the first rank's node."""
        return self.first(_free_port)

    def total(self, *counts: int | bool) -> list[int]:
        """The sum of each count over all ranks."""
        tensor = self._torch.tensor([int(count) for count in counts], dtype=self._torch.int64)
        self._torch.distributed.all_reduce(tensor)
        return [int(count) for count in tensor.tolist()]

    def first(self, ask: Callable[[], _T]) -> _T:
        """Call ``ask`` on the first rank only, and return its result, or raise its ``TunetoolError``, on all ranks."""
        box: list[Any] = [None]
        if self._rank == 0:
            try:
                box = [ask()]
            except TunetoolError as error:
                box = [error]
        self._torch.distributed.broadcast_object_list(box, src=0)
        if isinstance(box[0], TunetoolError):
            raise box[0]
        result: _T = box[0]
        return result

    def all(self, mine: _T) -> list[_T]:
        """The values ``mine`` of all ranks, by rank."""
        box: list[Any] = [None] * self._world
        self._torch.distributed.all_gather_object(box, mine)
        return box


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
