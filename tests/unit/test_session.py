"""Faults during a measurement: a record is kept that names the fault, and no file remains.

One table over every kind of record. Each row runs the benchmark's entry point; only its lowest real call is replaced
(fio, a child process, a launcher of ranks), which works a few times and then fails.
"""

from __future__ import annotations

import errno
import fcntl
import importlib.util
import json
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("numpy")  # what the ranks of the fine-tune need

from test_bench_finetune import result as rank_result
from test_verify import Drives, stack_on

from pythons import bare_python
from staged import Quiet
from staged import stage as stage_tree
from tunetool import record as records
from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.bench.checkpoint import preflight
from tunetool.bench.checkpoint import rank_processes as checkpoint_ranks
from tunetool.bench.checkpoint import request as checkpoint
from tunetool.bench.checkpoint import run as checkpoint_run
from tunetool.bench.ds_io import request as ds_io
from tunetool.bench.ds_io import run as ds_io_run
from tunetool.bench.finetune import request as finetune
from tunetool.bench.finetune import run as finetune_run
from tunetool.bench.reference import request as reference
from tunetool.bench.reference.chain import Step
from tunetool.bench.reference.run import follow
from tunetool.bench.staging import node_task
from tunetool.bench.staging import request as staging
from tunetool.bench.staging import run as staging_run
from tunetool.bench.strategies import hooks, matrix, network
from tunetool.bench.strategies import request as strategies
from tunetool.bench.strategies import run as strategies_run
from tunetool.cli.main import main
from tunetool.errors import CannotJudge, Unforeseen
from tunetool.launch.job import Job
from tunetool.launch.local import RankFailed
from tunetool.launch.this_machine import LocalLauncher
from tunetool.measure import aio, busy, rundir, sampling, tester
from tunetool.measure.aio import driver as aio_driver
from tunetool.measure.fio import Fio, Outcome
from tunetool.measure.ladder import sequential
from tunetool.measure.session import Run
from tunetool.node.machine.block_stack import BlockStack
from tunetool.record import Record
from tunetool.training.preparation import prepare
from tunetool.training.rank.recorder import keep_result
from tunetool.training.workload import Material, rank_directory
from tunetool.tune import fio_driver
from tunetool.tune import request as tuning
from tunetool.tune import run as tune_run
from tunetool.tune.request import View
from tunetool.tune.settings import DEFAULTS
from tunetool.verify import request as verification
from tunetool.verify import run as verify_run

FIO = Fio("/nowhere/fio", "3.33")
"""No fio is needed: the function that runs it is replaced."""
GB = 10**9
MIB = 2**20


@dataclass
class Seam:
    """A replaced call: it calls ``well`` a number of times, and then fails."""

    fault: BaseException
    well: int = 0
    failed: bool = False

    def call(self) -> None:
        if self.well == 0:
            self.failed = True
            raise self.fault
        self.well -= 1


@dataclass
class Scene:
    """The directories and helpers of a row of the table."""

    folder: Path
    patch: pytest.MonkeyPatch
    fault: BaseException
    material: Material
    seams: list[Seam] = field(default_factory=list)

    @property
    def target(self) -> Path:
        return self.folder / "target"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    def seam(self, well: int) -> Seam:
        self.seams.append(Seam(self.fault, well))
        return self.seams[-1]

    @property
    def training(self) -> dict[str, Any]:
        """What every benchmark with a training is asked."""
        material = {"model": self.material.model, "images": self.material.images, "target": self.material.target}
        kept = {"runs_dir": self.runs, "allow_busy": True}
        return {**material, **kept, "device": "cpu", "ranks_per_node": 1, "steps": 10}

    @property
    def run(self) -> Run:
        return Run(self.runs, allow_busy=True, command=["tunetool"])


def verify(scene: Scene) -> Any:
    fake_fio_of_verify(scene, scene.seam(9))  # probe, layout, all of writing, a warm-up
    python = bare_python(scene.folder)
    request = verification.Request(target=scene.target, expect={"read": 1.0}, python=python, run=scene.run)
    return verify_run.verify(request, Quiet())


def fake_fio_of_verify(scene: Scene, seam: Seam) -> None:
    drives = Drives(scene.folder, [1.0])

    def fio(*_: object) -> Outcome:
        seam.call()
        with drives.started.open("a") as runs:
            runs.write("x")
        return Outcome(2 * GB, 1.0, {}, "{}")

    scene.patch.setattr(verify_run, "find_fio", lambda _: FIO)
    scene.patch.setattr(verify_run, "read_stack", stack_on)
    scene.patch.setattr(sampling, "snapshot", drives.snapshot)
    scene.patch.setattr(verify_run, "MANIFEST_PATH", str(scene.folder / "no-manifest"))
    scene.patch.setattr(verify_run, "free_bytes", lambda path: 10**14)
    scene.patch.setattr(sequential, "incomplete", lambda *_: [])
    scene.patch.setattr(sequential, "run", fio)
    scene.patch.setattr(tester, "measure_ceiling", lambda *_: [])


def tune(scene: Scene) -> Any:
    seam = scene.seam(9)

    def fio(driver: fio_driver.FioDriver, *_: object) -> Outcome:
        seam.call()
        return Outcome(driver.io_bytes, 1.0, {}, "{}")

    scene.patch.setattr(tune_run, "find_fio", lambda _: FIO)
    scene.patch.setattr(tune_run, "obstacles", lambda stack: [])
    scene.patch.setattr(fio_driver.FioDriver, "_run", fio)
    scene.patch.setattr(fio_driver, "incomplete", lambda *_: [])
    space = [DEFAULTS, replace(DEFAULTS, queue_depth=64)]
    request = tuning.Request(scene.target, space, driver="fio", io_bytes=8 * MIB, run=scene.run)
    return tune_run.tune(request, View())


def deepspeed_io(scene: Scene) -> Any:
    seam = scene.seam(4)  # layout, warm-up, two samples

    class Worker:
        def __init__(self, *_: object) -> None:
            self.tick: Callable[[], None] = lambda: None

        def __enter__(self) -> Worker:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def ask(self, order: Mapping[str, Any], longest: float) -> dict[str, Any]:
            return {"address": 0}

        def messages(self) -> str:
            return "it began"

    def take(*_: object) -> aio.Pass:
        seam.call()
        return aio.Pass(MIB, 0.001, 0.001, (0.001,), None, float(-seam.well))

    scene.patch.setattr(aio_driver, "Worker", Worker)
    scene.patch.setattr(aio_driver, "take", take)
    scene.patch.setattr(aio_driver, "need", lambda *_: None)
    scene.patch.setattr(aio, "need", lambda *_: None)
    scene.patch.setattr(aio, "probe", lambda *_: aio.Probe("python", "3", "2.13", "", "0.19", ""))
    scene.patch.setattr(aio_driver._Run, "_stored", lambda run: None)
    # `--python` is not asked what it has.
    request = ds_io.Request(
        folder=scene.target, io_size=MIB, python=sys.executable, runs_dir=scene.runs, allow_busy=True
    )
    return ds_io_run.bench(request, Quiet())


def bench_checkpoint(scene: Scene) -> Any:
    seam = scene.seam(3)  # saves
    starts: list[int] = []

    def start(ranks: checkpoint_ranks.RankProcesses) -> None:
        if starts and isinstance(scene.fault, RankFailed):
            raise scene.fault  # nor does it start again
        starts.append(1)
        ranks.starts += 1
        ranks.rank_facts = {"device": "cpu"}

    def ask(ranks: checkpoint_ranks.RankProcesses, order: Mapping[str, Any]) -> list[dict[str, Any]]:
        if order["do"] == "place":
            facts = {"family": "torch.save", "remark": "", "unavailable": None}
            return [{"engines": dict.fromkeys(order["engines"], facts)}]
        if order["do"] == "save":
            seam.call()
            Path(order["directory"]).mkdir()
            (Path(order["directory"]) / "state").write_bytes(b"x" * 4096)
        moved = {"began": 1.0, "returned": 1.5, "ended": 2.0, "cpu_seconds": 0.1, "peak_bytes": 1}
        return [{**moved, "different": None}]

    scene.patch.setattr(preflight, "engines", lambda request: ["torch-save-zip", "safetensors"])
    scene.patch.setattr(checkpoint_ranks.RankProcesses, "start", start)
    scene.patch.setattr(checkpoint_ranks.RankProcesses, "ask", ask)
    scene.patch.setattr("os.sync", lambda: None)
    scene.patch.setattr(preflight, "check_space", lambda *_: None)
    scene.patch.setattr(preflight, "check_memory", lambda *_: None)
    request = checkpoint.Request(
        model="phi3-mini",
        target=scene.target,
        state_bytes=4 * GB,
        device="cpu",
        rounds=2,
        runs_dir=scene.runs,
        allow_busy=True,
    )
    return checkpoint_run.bench(request, Quiet())


def launching(scene: Scene, well: int) -> None:
    """Replace the launcher of this machine: its ranks succeed a number of times, then it fails."""
    seam = scene.seam(well)

    def launch(launcher: LocalLauncher, job: Job, tick: Callable[[], None]) -> None:
        for rank in range(job.ranks_per_host):
            directory = rank_directory(job.directory, rank)
            (directory / "series").mkdir(parents=True)
            (directory / "series" / "loss.csv").write_text("seconds,value (1),step\n1.000,2.5,1\n")
        seam.call()
        for rank in range(job.ranks_per_host):
            directory = rank_directory(job.directory, rank)
            if network.MODULE in job.program:
                answer = network.RankFigures(
                    rank, "n1", "gloo", "cpu", [0.1], GB, configuration=dict(CONFIGURATIONS["tiny"]), communicator=0.1
                )
                (directory / network.FILE).write_text(json.dumps(asdict(answer)))
            elif hooks.MODULE in job.program:
                probed = hooks.Probed({case: [0.1] for case in hooks.CASES})
                (directory / hooks.FILE).write_text(json.dumps(asdict(probed)))
            else:
                keep_result(directory, rank_result(rank))

    scene.patch.setattr(LocalLauncher, "run", launch)


def bench_finetune(scene: Scene) -> Any:
    launching(scene, 0)
    request = finetune.Request(**scene.training)
    return finetune_run.bench(request, Quiet())


def bench_staging(scene: Scene) -> Any:
    launching(scene, 2)  # one round of both paths
    memory = scene.folder / "memory"
    memory.mkdir()
    scene.patch.setattr(node_task, "room_in", lambda path: ((10**12, "the test has"),))
    scene.patch.setattr(
        importlib.util, "find_spec", lambda name, real=importlib.util.find_spec: real(name) or name == "torch"
    )
    request = staging.Request(**scene.training, memory=memory, scenarios=("single",), rounds=2)
    return staging_run.bench(request, Quiet())


def bench_strategies(scene: Scene) -> Any:
    launching(scene, 3)  # one rank alone, its probe of hooks, one cell
    request = strategies.Request(**scene.training, matrix=tuple(matrix.parse("1x1:z2,1x1:z3")), rounds=1)
    return strategies_run.bench(request, Quiet())


def stage(scene: Scene) -> Any:
    seam = scene.seam(0)  # when everything is copied, and the copy is to get its name
    source = scene.folder / "source"
    source.mkdir()
    (source / "data").write_bytes(b"x" * 5000)
    scene.patch.setattr("tunetool.stage.build.put", lambda *_: seam.call())
    return stage_tree(source, scene.target / "copy", scene.runs)


def bench_reference(scene: Scene) -> Any:
    seam = scene.seam(1)

    def run() -> tuple[Record, Path]:
        seam.call()
        now = records.utc_now()
        record = Record(
            kind="verify",
            id=records.new_id(),
            started=now,
            finished=now,
            node=records.Node(host="n1"),
            command=["tunetool"],
            verdict=records.Verdict(status="pass", reasons=[]),
        )
        return record, scene.folder / "verify" / "record.json"

    given = {**scene.training, "target": scene.target}
    request = reference.Complete(**given, checkpoint_model="tiny", matrix="1x1:z2")
    return follow(request, [Step("verify", run), Step("checkpoint", run)], Quiet())


def has(prefix: str) -> Callable[[Record], bool]:
    return lambda record: any(each.name.startswith(prefix) for each in record.measurements)


KINDS: Mapping[str, tuple[Callable[[Scene], Any], Callable[[Record], bool]]] = {
    "verify": (verify, has("sequential.write")),
    "tune": (tune, has("tune.")),
    "bench.ds-io": (deepspeed_io, has("ds_io.write")),
    "bench.checkpoint": (bench_checkpoint, has("checkpoint.")),
    # A fine-tune is one launch: only the curves that its ranks wrote remain of it.
    "bench.finetune": (bench_finetune, lambda record: [each.name for each in record.series] == ["loss"]),
    "bench.staging": (bench_staging, has("staging.")),
    "bench.strategies": (bench_strategies, has("strategies.step.")),
    # A copy is either complete or absent.
    "stage": (stage, lambda record: record.measurements == [] and Path(record.target or "").name == "copy"),
    "bench.reference": (
        bench_reference,
        lambda record: [each.status for each in record.parts or []] == ["pass", "error"],
    ),
}
FAULTS: Mapping[str, tuple[Callable[[], BaseException], str]] = {
    "EIO": (lambda: OSError(errno.EIO, "Input/output error", "/mnt/x/file"), "`/mnt/x/file`: Input/output error"),
    "ENOSPC": (lambda: OSError(errno.ENOSPC, "No space left on device"), "No space left on device"),
    "cannot judge": (lambda: CannotJudge("`nvme1n1` went away", "look at `dmesg`"), "`nvme1n1` went away"),
    "failed rank": (lambda: RankFailed("rank 1 was killed", None, 1, "its last words"), "rank 1 was killed"),
    "bug": (lambda: ZeroDivisionError("division by zero"), "`ZeroDivisionError`: division by zero"),
    "ctrl-c": (KeyboardInterrupt, "interrupted"),
}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    """A tiny model and four pictures."""
    folder = tmp_path_factory.mktemp("material")
    made = Material("tiny", images=4, target=folder)
    prepare(made, Quiet())
    return made


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, material: Material) -> Scene:
    for name in ("target", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr(busy, "lock_directory", lambda environment, is_root: tmp_path / "locks")
    for module in (tune_run, ds_io_run, preflight):
        monkeypatch.setattr(module, "read_stack", uncounted)
    return Scene(tmp_path, monkeypatch, KeyboardInterrupt(), material)


def uncounted(path: str) -> BlockStack:
    """A target without a drive whose counters would have to change."""
    return BlockStack(path, None, "overlay", None, None, "overlay", (), redundant=False, in_memory=False)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_in_the_middle_is_a_record(kind: str, fault: str, scene: Scene) -> None:
    door, measured = KINDS[kind]
    make, said = FAULTS[fault]
    scene.fault = make()
    raised: BaseException | None = None
    result = None
    try:
        result = door(scene)
    except BaseException as error:  # its exit code is checked below
        raised = error
    assert any(seam.failed for seam in scene.seams), raised
    kept = list(scene.runs.glob(f"*-{kind}-*"))
    assert len(kept) == 1, f"no record: {raised!r}"
    record = records.read(kept[0])
    assert record.kind == kind
    assert record.verdict is not None
    assert record.verdict.status == "error"
    assert any(said in reason for reason in record.verdict.reasons), record.verdict.reasons
    assert measured(record), [each.name for each in record.measurements]
    if fault == "ctrl-c":
        assert isinstance(raised, KeyboardInterrupt)
    elif fault == "bug":
        assert type(raised).__name__ == "Unforeseen"
        assert raised.exit_code == 3
        assert raised.__cause__ is scene.fault
    else:
        assert raised is None
        assert result.code == 3
        assert result.path == kept[0] / "record.json"
    # Nothing is left.
    assert list(scene.target.iterdir()) == []
    assert list((scene.folder / "temporary").iterdir()) == []
    assert list(scene.folder.glob("memory/*")) == []
    for lock in (scene.folder / "locks").glob("*"):
        with lock.open() as stream:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize(
    ("fault", "code"),
    [(ZeroDivisionError("division by zero"), 3), (KeyboardInterrupt(), 130), (OSError(errno.EIO, "I/O error"), 3)],
    ids=["bug", "ctrl-c", "EIO"],
)
def test_what_a_shell_sees(fault: BaseException, code: int, scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    scene.fault = fault
    seam = scene.seam(9)
    argv = ["verify", "--target", str(scene.target), "--runs-dir", str(scene.runs), "--allow-busy"]
    scene.patch.setattr("sys.argv", ["tunetool", *argv, "--python", str(bare_python(scene.folder))])
    fake_fio_of_verify(scene, seam)
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == code
        said = capsys.readouterr().err.splitlines()
        assert not any(line.startswith("Traceback") for line in said)
        if code == 130:
            assert said[-1] == "interrupted"
        elif isinstance(fault, ZeroDivisionError):
            assert said[-2] == "error: a fault of tunetool itself: `ZeroDivisionError`: division by zero"
            assert said[-1].startswith(f"hint: report it with its record, `{scene.runs}/")
        # With --debug, the traceback of a fault is shown besides.
        if isinstance(fault, ZeroDivisionError):
            seam.well = 9
            scene.patch.setattr("sys.argv", ["tunetool", "--debug", *sys.argv[1:]])
            with pytest.raises(SystemExit) as ended:
                main()
            assert ended.value.code == code
            said = capsys.readouterr().err.splitlines()
            assert [line for line in said if line.startswith("Traceback")]
            assert "ZeroDivisionError: division by zero" in said
            assert said[-2].startswith("error: ")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert len(list(scene.runs.iterdir())) == (2 if isinstance(fault, ZeroDivisionError) else 1)


def test_two_runs_on_one_device_exclude_each_other(scene: Scene) -> None:
    with busy.alone([uncounted(str(scene.target))], {}):
        result = deepspeed_io(scene)
    assert result.code == 3
    assert result.record is not None
    (reason,) = result.record.verdict.reasons[:1]
    assert "another tunetool run is measuring" in reason
    assert "with `--allow-busy` too" in reason
    assert not scene.seams[0].failed


def test_what_cannot_be_removed_is_told_and_the_record_is_kept(scene: Scene) -> None:
    scene.fault = CannotJudge("it stopped")

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with scene.patch.context() as patch:
        patch.setattr(rundir, "_remove", refuse)
        result = deepspeed_io(scene)
    assert result.code == 3
    reasons = result.record.verdict.reasons
    assert reasons[0] == "it stopped"
    assert any("could not be removed: Input/output error" in reason for reason in reasons), reasons


def test_a_fault_in_what_is_handed_over_still_keeps_a_record(scene: Scene) -> None:
    scene.fault = OSError(errno.EIO, "Input/output error", "/mnt/x/file")
    scene.patch.setattr(ds_io_run, "_figures", lambda *_: 1 // 0)
    with pytest.raises(Unforeseen, match="ZeroDivisionError"):
        deepspeed_io(scene)
    record = records.read(next(scene.runs.iterdir()))
    assert record.verdict is not None
    assert record.verdict.status == "error"
    assert "`/mnt/x/file`: Input/output error" in record.verdict.reasons[0]
    assert "ZeroDivisionError" in record.verdict.reasons[1]
