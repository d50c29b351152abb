"""What every benchmark promises when its real run is stopped: one line, its exit code, and nothing of it is left.

It belongs to tests/unit/test_benchmark_contract.py. A new benchmark passes this by its line in ``STOPS``. A run is
stopped by its own changes of the file system, so that speed plays no part (tests/stops.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

from calls import ROOT, TUNETOOL
from hidden_files import nobody_hides
from skips import no_loops
from stops import points
from tunetool.bench.registry import BENCHMARKS, Benchmark
from tunetool.measure.marked_processes import marked
from tunetool.node.machine.mounts import read_mounts
from tunetool.record import read
from waiting import PATIENCE, until

pytest_plugins = ["disks"]


DEEPSPEED = ("torch", "deepspeed")
FINETUNE = (*DEEPSPEED, "peft")
TINY = "--model tiny --images 4 --steps 3 --device cpu"


@dataclass(frozen=True)
class Stop:
    """A small run, and the changes of the file system at which it is stopped, as ``stops.install`` writes them."""

    options: str
    work: str
    """A change in the middle of its work, whichever of its processes makes it."""
    begin: str = "open /.tunetool-*/owner.json"
    """Its first file below the target."""
    needs: tuple[str, ...] = ()
    """Packages."""
    records: int = 1
    """Records that an interrupted run keeps."""
    slow: bool = False
    """Whether the way to ``work`` takes more than 10 seconds."""
    next_call: str | None = None
    """What cleans up after SIGKILL; None: a process that waits for that."""


def trains(options: str = "") -> Stop:
    """It makes a model below the target, which stays there for later runs once it is whole."""
    beginning = "/.qwen2.5-vl-tiny.tunetool-stage"
    return Stop(
        f"{TINY} {options}",
        f"open {beginning}-*/model-00003-of-00004.safetensors",
        f"open {beginning}.lock",
        FINETUNE,
        next_call=f"finetune {TINY} --prepare",
    )


STOPS: Mapping[str, Stop] = {
    "checkpoint": Stop(
        "--model tiny --engines torch-save-zip",
        "fsync /.tunetool-*/torch-save-zip-1/rank0.pt",
        needs=("torch",),
    ),
    "loading": Stop(
        "--model tiny --engines direct",
        "pwrite /.tunetool-*/model/model-00002-of-00004.safetensors",
        needs=("torch",),
    ),
    "offload": Stop(
        "--model {around}/model.json --aio {around}/aio.json --sequence-length 32 --without-dram --device cpu",
        "open /.tunetool-*/rung-0",
        needs=DEEPSPEED,
        slow=True,
    ),
    "dataset": Stop("--size 1MiB", "open /.tunetool-*/pictures/images/000003.jpg"),
    "finetune": trains(),
    "staging": trains("--scenarios single"),
    "reference": Stop(
        f"{TINY} --checkpoint-model tiny --state-bytes 20MB --rounds 1 --skip verify --skip strategies",
        "mkdir /.tunetool-*/dcp-t1-single-1",
        needs=FINETUNE,
        records=2,
        slow=True,
    ),
    "strategies": trains("--matrix 1x1:z2"),
    "ds-io": Stop("--io_size 1MiB", "open /.tunetool-*/aio.data", needs=DEEPSPEED),
    "experts": Stop("", "fsync /.tunetool-*/experts.data"),
    "kv-cache": Stop(
        "--model llama-tiny --size 200MB --prefix-tokens 1024 --engines direct,page-cache",
        "mkdir /.tunetool-*/page-cache",
    ),
    "inference": Stop(
        "--model {around}/model.json --device cpu --weights nvme --batch 2 --prompt 4 --new-tokens 3",
        "mkdir /.tunetool-*/zero_stage_3/bfloat16params/rank0",
        needs=DEEPSPEED,
        slow=True,
    ),
    "api": Stop("--size 1MiB", "remove /.tunetool-*/sync/sync", needs=DEEPSPEED),
    "drives": Stop(
        "--virtual 2 --virtual-size 400MiB --layout xfs-per-drive --counts 2",
        "open /.tunetool-*/volume-2/aio.data",
        needs=DEEPSPEED,
    ),
}
SIZES = {"hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {"model_type": "llama", **SIZES, "intermediate_size": 1024, "vocab_size": 2048}
AIO = {
    "block_size": 2**20,
    "queue_depth": 16,
    "intra_op_parallelism": 2,
    "single_submit": False,
    "overlap_events": True,
}
THEIRS = ("theirs", ".tunetool-theirs", ".theirs.tunetool-stage-1")
"""What is not of the run: a directory, and two that other runs make just now."""
MARK = "TUNETOOL_TEST_MARK"


class Run:
    """A benchmark as a process with directories of its own."""

    def __init__(self, benchmark: Benchmark, target: Path, around: Path) -> None:
        self.benchmark, self.target, self.around = benchmark, target, around
        self.stop = STOPS[benchmark.name]
        (around / "model.json").write_text(json.dumps(MODEL))
        (around / "aio.json").write_text(json.dumps({"aio": AIO}))
        for name in ("locks", "temporary"):
            (around / name).mkdir()
        self.runs = around / "runs"
        for name in THEIRS:
            (target / name).mkdir()
            (target / name / "data").write_text(name)

    def stopped(self, *orders: tuple[str, int]) -> tuple[int, str]:
        """Its exit code and what it said, after it was sent each signal at a change below the target."""
        logs = [self.around / f"log-{index}" for index, _ in enumerate(orders)]
        listed = [
            {"under": str(self.target), "log": str(log), "at": at, "number": number}
            for log, (at, number) in zip(logs, orders, strict=True)
        ]
        options = self.stop.options.format(around=self.around)
        done = self.call(f"{self.benchmark.name} {options} --allow-busy", json.dumps(listed))
        for log, (at, _) in zip(logs, orders, strict=True):
            assert any(line.startswith(at) for line in points(log)), (at, points(log), done.stdout)
        return done.returncode, done.stdout

    def call(self, words: str, stops: str = "[]") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*TUNETOOL, "bench", *words.split(), "--target", str(self.target), "--runs-dir", str(self.runs)],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "tests/stopped"), os.environ.get("PYTHONPATH", "")]),
                "TUNETOOL_TESTS_STOP": stops,
                "TUNETOOL_LOCK_DIR": str(self.around / "locks"),
                "TMPDIR": str(self.around / "temporary"),
                MARK: str(self.around),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE,
            check=False,
        )

    def left(self) -> list[str]:
        """What is left of it, but for its record."""
        processes = [f"process {pid}" for pid in marked(MARK, str(self.around))]
        files = [path for path in self.target.iterdir() if path.name not in THEIRS]
        # torch keeps a cache of its own there.
        temporary = [*(self.around / "temporary").glob("tunetool-*")]
        half = list(self.runs.glob(".*"))
        locks = [path for path in (self.around / "locks").iterdir() if is_locked(path)]
        inside = str(self.target.resolve()) + "/"
        mounts = [mount.mount_point for mount in read_mounts("/") if mount.mount_point.startswith(inside)]
        backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
        loops = [f"loop device over {file}" for file in backing if file.startswith(inside)]
        return [*processes, *mounts, *loops, *map(str, [*files, *temporary, *half, *locks])]

    def cleaned(self) -> None:
        """After SIGKILL: waits until nothing of it is left, not even a record."""
        if self.stop.next_call is None:
            until(lambda: not self.left(), "the end of all that the run had")
        else:
            until(lambda: not marked(MARK, str(self.around)), "the end of all that it had started")
            done = self.call(self.stop.next_call)
            assert done.returncode == 0, done.stdout
            assert [Path(path).name for path in sorted(self.left())] == ["colours-4x448x280", "qwen2.5-vl-tiny"]
        assert self.others_stay()
        assert list(self.runs.glob("*")) == []

    def others_stay(self) -> bool:
        return all((self.target / name / "data").read_text() == name for name in THEIRS)


def is_locked(path: Path) -> bool:
    with path.open() as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.fixture
def run(request: pytest.FixtureRequest, disk: Path, tmp_path: Path) -> Iterator[Run]:
    benchmark: Benchmark = request.param
    needs = STOPS[benchmark.name].needs
    if missing := [name for name in needs if find_spec(name) is None]:
        pytest.skip(f"DeepSpeed or {missing[0]} is not installed")
    if "deepspeed" in needs:
        request.getfixturevalue("ready")
    if benchmark.name == "drives" and no_loops():
        pytest.skip("needs root and loop devices")
    around = tmp_path / "around"
    around.mkdir()
    with nobody_hides() if benchmark.name == "drives" else contextlib.nullcontext():
        yield Run(benchmark, disk, around)


def stops(*names: str) -> pytest.MarkDecorator:
    """Every benchmark, stopped at these points of ``Stop``."""
    each = [
        pytest.param(
            benchmark,
            name,
            id=f"{benchmark.name}-{name}",
            marks=[pytest.mark.slow] if name == "work" and STOPS[benchmark.name].slow else [],
        )
        for benchmark in BENCHMARKS
        for name in names
    ]
    return pytest.mark.parametrize(("run", "point"), each, indirect=["run"])


@stops("begin", "work")
def test_ctrl_c_is_said_and_leaves_the_record_alone(run: Run, point: str) -> None:
    interrupt(run, point, signal.SIGINT)


@stops("begin")
def test_sigterm_does_the_same(run: Run, point: str) -> None:
    interrupt(run, point, signal.SIGTERM)


def interrupt(run: Run, point: str, number: int) -> None:
    code, said = run.stopped((getattr(run.stop, point), number))
    assert code == 130, said
    assert run.left() == [], said
    assert run.others_stay()
    assert said.splitlines()[-1] == "interrupted", said
    assert [line for line in said.splitlines() if line.startswith(("Traceback", "error:", "Exception"))] == [], said
    kept = [read(path) for path in sorted(run.runs.iterdir())]
    assert run.benchmark.kind in [record.kind for record in kept]
    assert len(kept) == run.stop.records
    for record in kept:
        assert record.verdict is not None
        assert (record.verdict.status, record.verdict.reasons[0]) == ("error", "interrupted before it was done")


@stops("begin", "work")
def test_of_a_killed_run_nothing_is_left(run: Run, point: str) -> None:
    code, said = run.stopped((getattr(run.stop, point), signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    run.cleaned()


@stops("work")
def test_nothing_is_left_of_a_run_killed_while_it_cleans_up(run: Run, point: str) -> None:
    if run.stop.next_call is not None:
        last = "remove /.qwen2.5-vl-tiny.tunetool-stage.lock"
    else:
        last = "remove /.tunetool-*/owner.json"
    code, said = run.stopped((getattr(run.stop, point), signal.SIGINT), (last, signal.SIGKILL))
    assert code == -signal.SIGKILL, said
    run.cleaned()
