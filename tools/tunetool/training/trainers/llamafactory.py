"""The same fine-tune by LLaMA-Factory, as people run it: rendered files, `llamafactory-cli train`, its own results.

It needs a virtual environment of its own (it pins older transformers). The first rank of each node starts it there and
the others wait, so every launcher works as it is; the ranks that compute are its own, and `rank.*` curves show those
that wait.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.launch import rank as launched
from tunetool.training.model import reference_model
from tunetool.training.rank.recorder import Recorder
from tunetool.training.trainers import llamafactory_files as files
from tunetool.training.trainers.deepspeed import Trainer
from tunetool.training.trainers.group import Group
from tunetool.training.trainers.llamafactory_results import Outcome, last_error, read_outcome
from tunetool.training.workload import Workload

PROGRAM = "llamafactory-cli"
VARIABLE = "TUNETOOL_LLAMAFACTORY"
"""Names the directory of its virtual environment, or the program itself, on each node."""
_LOG = "llamafactory.log"
_LOOK = 0.5
_PATIENCE = 30.0
_OURS = ("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "TORCHELASTIC_", "MASTER_", "PYTHONPATH", "OMP_NUM_THREADS")
"""What torchrun gave this rank, and where our own packages are: its own ranks need their own."""
_LIBRARIES = ("llamafactory", "torch", "deepspeed", "transformers", "peft")


def find_program(environment: Mapping[str, str]) -> Path | None:
    """Where `llamafactory-cli` is: as told, beside this Python, or on PATH."""
    told = environment.get(VARIABLE)
    if told:
        for place in (Path(told), Path(told) / "bin" / PROGRAM):
            if place.is_file() and os.access(place, os.X_OK):
                return place.absolute()
        raise UsageProblem(f"`{told}` has no `{PROGRAM}` ({VARIABLE})", "name the virtual environment that it is in")
    beside = Path(sys.executable).with_name(PROGRAM)
    found = str(beside) if beside.is_file() else shutil.which(PROGRAM, path=environment.get("PATH"))
    return Path(found) if found else None


@dataclass
class LlamaFactory:
    """One rank; the first of its node starts the program."""

    workload: Workload
    recorder: Recorder
    local_world: int
    own: Path
    _process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def run(self) -> None:
        """All of it. Raises ``CannotJudge`` where LLaMA-Factory is missing or fails, ``UsageProblem`` for its input."""
        if self.workload.checkpoint is not None:
            raise UsageProblem(
                "LLaMA-Factory takes no `--checkpoint`: it saves what it trained into its own output",
                "leave it out, or use `--trainer deepspeed`",
            )
        program = find_program(os.environ)
        place = self._place(program)
        if program is None:
            raise self._missing(place)
        with self.recorder.phase("communicator"):
            group = Group(self.recorder.rank, self.recorder.world)
            port = group.share_port()
        if self.workload.cold:
            Trainer(self.workload, self.recorder, self.local_world).drop()
        began = time.monotonic()
        try:
            if self.recorder.local_rank == 0:
                self._start(files.write(self.workload, place), port)
            self._wait(group)
        finally:
            self._end()
            _drop_weights(place.directory / files.OUTPUT)
        self.recorder.seconds["llamafactory"] = time.monotonic() - began
        self._note(*group.first(lambda: (read_outcome(place.directory, self._said()), versions(program))))

    def _place(self, program: Path | None) -> files.Place:
        facts = reference_model.check(Path(self.workload.model))
        self.recorder.model_bytes = facts.bytes
        return files.Place(
            directory=self.own / "llamafactory",
            nodes=max(1, self.recorder.world // self.local_world),
            ranks=self.local_world,
            cuda=self._cuda(),
            dataset_name=_dataset_name(Path(self.workload.dataset)),
            pixels=_pixels(Path(self.workload.model)),
            programs=program.parent if program else None,
        )

    def _cuda(self) -> bool:
        """Asked of NVML's files, not of CUDA: a context here would take memory from the ranks that compute."""
        if self.workload.device != "auto":
            return self.workload.device == "cuda"
        return Path("/proc/driver/nvidia/gpus").is_dir() and any(Path("/proc/driver/nvidia/gpus").iterdir())

    def _missing(self, place: files.Place) -> CannotJudge:
        hint = f"`pip install llamafactory` into a virtual environment of its own, and name that in {VARIABLE}"
        try:
            script = files.write(self.workload, _kept(self.workload, place))
        except OSError as error:
            return CannotJudge(f"`{PROGRAM}` is not installed", f"{hint}; nothing was rendered: {error.strerror}")
        return CannotJudge(f"`{PROGRAM}` is not installed", f"{hint}; what it would be told is in `{script.parent}`")

    def _start(self, script: Path, port: int) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
        environment |= {
            "NODE_RANK": str(self.recorder.rank // self.local_world),
            "MASTER_ADDR": os.environ.get("MASTER_ADDR", "127.0.0.1"),
            "MASTER_PORT": str(port),
        }
        with (self.own / _LOG).open("wb") as log:
            self._process = subprocess.Popen(
                ["sh", str(script)], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def _wait(self, group: Group) -> None:
        """Until it ended on every node. Raises ``CannotJudge`` when it failed on one."""
        written = -1
        while True:
            status = self._process.poll() if self._process is not None else 0
            size = self._size()
            # Any rank's progress is everybody's: those that wait have nothing else to show a watchdog.
            running, failed, moved = group.total(status is None, bool(status), size != written)
            written = size
            if moved:
                self.recorder.beat()
            if failed:
                said = self._said()
                mine = (f"LLaMA-Factory ended with status {status}: {last_error(said)}", _hint(said))
                # Which rank dies first is chance: each says the same.
                raise CannotJudge(*next(each for each in group.all(mine if status else None) if each))
            if not running:
                return
            time.sleep(_LOOK)

    def _end(self) -> None:
        """torchrun hands SIGTERM on to its ranks."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_PATIENCE)

    def _size(self) -> int:
        # Its progress bar is in the log as well: a step that is done changes it.
        path = self.own / _LOG
        return path.stat().st_size if path.is_file() else 0

    def _said(self) -> str:
        path = self.own / _LOG
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
            "LLaMA-Factory: a step's time has its wait for data in it; losses are means over the ranks"
        )


def versions(program: Path) -> dict[str, str]:
    """Of the libraries in LLaMA-Factory's own environment; none where that does not answer."""
    code = (
        "import importlib.metadata as m, json\nfound = {}\n"
        f"for name in {_LIBRARIES!r}:\n"
        "    try: found[name] = m.version(name)\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(_OURS)}
    done = subprocess.run(
        [str(program.with_name("python")), "-c", code], env=clean, capture_output=True, text=True, check=False
    )
    try:
        return dict(json.loads(done.stdout))
    except ValueError:
        return {}


def _kept(workload: Workload, place: files.Place) -> files.Place:
    """A place that outlives the run, the same for the same run."""
    told = f"{workload.to_json()} {place.nodes} {place.ranks} {place.cuda}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return replace(place, directory=cache / "tunetool/llamafactory" / hashlib.sha256(told.encode()).hexdigest()[:12])


def _drop_weights(output: Path) -> None:
    """LLaMA-Factory always saves what it trained, and this folder is brought to the control machine."""
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        for path in output.rglob(pattern):
            path.unlink(missing_ok=True)


def _dataset_name(directory: Path) -> str:
    try:
        return str(next(iter(json.loads((directory / "dataset_info.json").read_text()))))
    except (OSError, ValueError, StopIteration, TypeError) as error:
        raise UsageProblem(
            f"`{directory}` is no dataset of LLaMA-Factory: dataset_info.json: {error}", "it names the datasets there"
        ) from None


def _pixels(model: Path) -> int:
    """As our own loop scales pictures: what the model says, and not more than is usual."""
    try:
        size: Any = json.loads((model / "preprocessor_config.json").read_text())
        return min(int(size["size"]["longest_edge"]), reference_model.PIXELS)
    except (OSError, ValueError, KeyError, TypeError):
        return reference_model.PIXELS


def _hint(said: str) -> str:
    if "No module named" in said or "ImportError" in said:
        return f"a package is missing in LLaMA-Factory's environment ({VARIABLE})"
    return f"its whole log is `{_LOG}` in the rank's folder"


def train(workload: Workload, recorder: Recorder) -> None:
    """What the worker calls."""
    LlamaFactory(workload, recorder, int(os.environ.get("LOCAL_WORLD_SIZE", "1")), launched.out()).run()
