"""Checks that DeepSpeed reads a configuration as it is written.

DeepSpeed ignores unknown keys (in `aio`, and at the top level), so a job that starts proves nothing. A process with
DeepSpeed's own classes reports what it understood, key by key; then a handle built from that moves real bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tunetool import record as records
from tunetool.advise.precision import Capability
from tunetool.errors import CannotJudge
from tunetool.measure import aio
from tunetool.measure.aio.spec import granule
from tunetool.measure.progress import Progress
from tunetool.measure.rundir import remove_stale, run_directory, stale_directories
from tunetool.measure.worker import Worker, child_command
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.units import format_size_binary

START_SECONDS = 180.0
"""Time limit in seconds; includes the import of torch and DeepSpeed, perhaps from a cold disk."""
LEAST_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Accepted:
    """What DeepSpeed understood."""

    deepspeed: str
    keys: int
    """Number of settings that were compared."""
    moved: int
    """Bytes written and read back by the handle."""

    def __str__(self) -> str:
        moved = f"{format_size_binary(self.moved)} written and read by its handle, equal"
        return f"deepspeed {self.deepspeed} understood all {self.keys} settings as written; {moved}"


@dataclass(frozen=True)
class Facts:
    """DeepSpeed's accelerator on this machine."""

    accelerator: str
    """DeepSpeed's name of it: cpu, cuda ..."""
    bf16: bool
    """What the accelerator says of itself; of CUDA's, ``capabilities`` are what counts."""
    capabilities: Sequence[Capability] = ()
    """CUDA's compute capability of each GPU."""


class Classes:
    """DeepSpeed's configuration classes in a process of their own. A context manager, which ends it."""

    def __init__(self, python: Path, environment: Mapping[str, str]) -> None:
        program = Path(__file__).with_name("check_child.py")
        self._child = Worker(child_command(python, program), "DeepSpeed's configuration classes", environment)

    def __enter__(self) -> Classes:
        return self

    def __exit__(self, *error: object) -> None:
        self._child.__exit__(*error)

    def facts(self) -> Facts:
        """The accelerator, as DeepSpeed reports it."""
        answer = self._child.ask({"do": "facts"}, START_SECONDS)
        capabilities = [(int(major), int(minor)) for major, minor in answer.pop("capabilities")]
        return Facts(**answer, capabilities=capabilities)

    def parse(self, path: Path, world: int) -> dict[str, Any]:
        """The configuration in a file as one of ``world`` ranks reads it. Raises ``CannotJudge`` if DeepSpeed refuses
        it."""
        answer = self._child.ask({"do": "parse", "path": str(path), "world": world}, START_SECONDS)
        if "refused" in answer:
            refusal = f"{answer['kind']}: {answer['refused'][:300]}"
            raise CannotJudge(f"DeepSpeed refuses the configuration: {refusal}", "nothing was written")
        parsed: dict[str, Any] = answer["parsed"]
        return parsed


def check_block(block: Mapping[str, int | bool], python: Path, target: Path, environment: Mapping[str, str]) -> str:
    """Check an ``aio`` block by itself; returns the result in words. Raises ``CannotJudge`` if DeepSpeed refuses it."""
    installed = ready(python, environment, block)
    with Classes(python, environment) as classes:
        document = {"train_micro_batch_size_per_gpu": 1, "aio": dict(block)}
        return str(check_config(document, 1, classes, installed, target, environment))


def ready(python: Path, environment: Mapping[str, str], block: Mapping[str, Any]) -> aio.Probe:
    """Raises ``Missing`` unless DeepSpeed and the op that ``block`` asks for are there."""
    installed = aio.probe(python, environment)
    aio.need(installed, "gds" if block.get("use_gds") else "async_io")
    return installed


def check_config(
    document: Mapping[str, Any],
    world: int,
    classes: Classes,
    installed: aio.Probe,
    target: Path,
    environment: Mapping[str, str],
    progress: Progress | None = None,
) -> Accepted:
    """Check a whole configuration for ``world`` ranks, in a new directory inside ``target``.

    Raises ``CannotJudge`` when DeepSpeed refuses it or understands something else.
    """
    remove_stale(stale_directories(target))
    with run_directory(target, records.new_id()) as directory:
        path = directory / "ds_config.json"
        path.write_text(json.dumps(document))
        parsed = classes.parse(path, world)
        unlike = differences(document, parsed)
        if unlike:
            raise CannotJudge(
                f"DeepSpeed {installed.deepspeed} does not read the configuration as it was written: {unlike[0]}",
                "this version of DeepSpeed spells it in another way; nothing was written",
            )
        moved = _move(parsed["aio"], directory, environment, progress or _Silent(), installed)
    return Accepted(str(installed.deepspeed), count_keys(document), moved)


def differences(written: Any, parsed: Any, path: str = "") -> list[str]:
    """Differences of ``parsed`` from ``written``, for every written key. ``True`` is not 1, and 8 is not "8"."""
    if isinstance(written, Mapping):
        if not isinstance(parsed, Mapping):
            return [f"`{path}` became {parsed!r}"]
        unequal = []
        for key, value in written.items():
            inner = f"{path}.{key}" if path else str(key)
            unequal += differences(value, parsed[key], inner) if key in parsed else [f"`{inner}` is ignored"]
        return unequal
    if isinstance(written, list | tuple):
        same = isinstance(parsed, list | tuple) and list(parsed) == list(written)
    elif isinstance(written, bool) or isinstance(parsed, bool):
        same = written is parsed
    elif isinstance(written, str) or isinstance(parsed, str):
        # DeepSpeed keeps an optimizer's name in lower case.
        same = written == parsed or (path == "optimizer.type" and str(written).lower() == parsed)
    else:
        same = written == parsed
    return [] if same else [f"`{path}` is {written!r} in the file and became {parsed!r}"]


def count_keys(document: Any) -> int:
    """Number of settings."""
    if isinstance(document, Mapping):
        return sum(count_keys(value) for value in document.values())
    return 1


def _move(
    block: Mapping[str, Any],
    directory: Path,
    environment: Mapping[str, str],
    progress: Progress,
    installed: aio.Probe,
) -> int:
    """Write and read once by a handle with the settings that DeepSpeed understood; returns the bytes moved."""
    parallelism = int(block["intra_op_parallelism"])
    unit = granule(parallelism, 4096)
    size = -(-max(LEAST_BYTES, parallelism * int(block["block_size"])) // unit) * unit
    spec = aio.Spec(
        directory=directory,
        io_bytes=size,
        device="gds" if block["use_gds"] else "cpu",
        block_bytes=int(block["block_size"]),
        queue_depth=int(block["queue_depth"]),
        intra_op_parallelism=parallelism,
        single_submit=bool(block["single_submit"]),
        overlap_events=bool(block["overlap_events"]),
        python=Path(installed.python),
        samples=1,
        seconds=None,
        warm_ups=0,
    )
    try:
        aio.run(spec, read_stack(str(directory)), environment, progress, installed=installed)
    finally:
        spec.file.unlink(missing_ok=True)
    return size


class _Silent:
    """A progress without output: the check takes seconds."""

    def say(self, line: str) -> None:
        pass

    def step(self, name: str, seconds: float) -> AbstractContextManager[Callable[[], None]]:
        return nullcontext(lambda: None)
