"""`tunetool bench finetune` end to end with the model `tiny`: real ranks, a real disk, and their faults."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from calls import TUNETOOL, call
from tunetool.measure.marked_processes import marked
from tunetool.record import Measurement, Record, parse
from waiting import PATIENCE, until

IMAGES = 48
SHM = Path("/dev/shm")


def command(target: Path, runs: Path, *arguments: str) -> list[str]:
    common = ["--model", "tiny", "--target", str(target), "--images", str(IMAGES), "--device", "cpu", "--allow-busy"]
    return [*TUNETOOL, "bench", "finetune", *common, "--runs-dir", str(runs), *arguments]


def bench(
    target: Path, runs: Path, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return call(*command(target, runs, *arguments), env={**os.environ, **(environment or {})})


def of_rank(record: Record, rank: int) -> dict[str, Measurement]:
    return {each.name.removeprefix("finetune."): each for each in record.measurements if each.rank == rank}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and pictures, which the command makes once."""
    path = tmp_path_factory.mktemp("bulk")
    done = bench(path, path / "runs", "--prepare")
    assert done.returncode == 0, done.stderr
    assert not (path / "runs").exists() or not list((path / "runs").iterdir()), "what judges nothing keeps no record"
    return path


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path, set[Path]]:
    """A run of two ranks with all features; its record, its directory, and what it left in /dev/shm.

    The directory of DeepSpeed's extensions has the locks of a dead build: loading an op from it waits for ever.
    """
    directory = tmp_path_factory.mktemp("whole")
    for name in ("deepspeed_shm_comm", "cpu_adam", "utils"):
        lock = directory / "extensions" / name / "lock"
        lock.parent.mkdir(parents=True)
        lock.touch()
    before = set(SHM.iterdir())
    settings = ("--steps", "12", "--learning-rate", "0.01", "--cold", "--checkpoint", str(directory / "saved"))
    apart = {"TORCH_EXTENSIONS_DIR": str(directory / "extensions")}
    done = bench(target, directory / "runs", "--ranks-per-node", "2", *settings, "--json", "-", environment=apart)
    assert done.returncode == 0, done.stderr + done.stdout
    (kept,) = (directory / "runs").iterdir()
    return parse(done.stdout, "stdout"), kept, set(SHM.iterdir()) - before


def test_every_rank_tells_where_its_time_went(whole: tuple[Record, Path, set[Path]]) -> None:
    record, kept, left = whole
    assert record.kind == "bench.finetune"
    for rank in (0, 1):
        figures = of_rank(record, rank)
        durations = ("rendezvous", "imports", "communicator", "model_load", "engine", "first_batch", "checkpoint")
        for name in durations:
            assert figures[name].value > 0, name
            assert figures[name].host == record.node.host
        assert sum(figures[name].value for name in durations) < figures["end_to_end"].value
        assert len(figures["step"].samples or []) == len(figures["data"].samples or []) == 11, "the first is left out"
        steps = sum(figures["step"].samples or [])
        # 2 samples in each of 12 steps; the first one of them took longer than the rest.
        assert 0 < figures["images"].value <= 2 * 12 / steps
        assert figures["tokens"].value > 10 * figures["images"].value
        assert int(figures["data"].parameters["logical_read_bytes"]) > 0
    assert left == set()
    saved = kept.parent.parent / "saved"
    parts = [path for path in saved.rglob("*.pt") if path.stat().st_size]
    assert len([path for path in parts if "optim_states" in path.name]) == 2, "each rank saves its part"


def test_each_rank_reads_the_whole_model_from_where_is_known(
    whole: tuple[Record, Path, set[Path]], target: Path
) -> None:
    record = whole[0]
    held = sum(path.stat().st_size for path in (target / "qwen2.5-vl-tiny").glob("*.safetensors"))
    loads = [of_rank(record, rank)["model_bandwidth"] for rank in (0, 1)]
    fetched = sum(float(load.parameters["storage_read_bytes"]) for load in loads)
    for load in loads:
        assert 0.98 * held < float(load.parameters["model_bytes"]) <= held
        assert float(load.parameters["logical_read_bytes"]) >= float(load.parameters["model_bytes"])
        assert load.evidence is not None
        assert load.evidence.kind == "block", "the cache was dropped before"
        # The number of reads from a drive depends on other users of memory; test_model_and_data.py shows that ranks share.
        assert load.evidence.counted_bytes == fetched, "one rank may read for both"


def test_it_learns_and_its_curves_lie_beside_the_record(whole: tuple[Record, Path, set[Path]]) -> None:
    record, kept, _ = whole
    (loss,) = [check for check in record.checks if check.id == "finetune.loss"]
    assert loss.status == "pass"
    before, after = map(float, re.findall(r"\d+\.?\d*", loss.found))
    assert after < 0.7 * before, loss.found
    curves = {(each.name, each.rank) for each in record.series}
    assert {("loss", 0), ("loss", 1), ("learning_rate", 1), ("step_time", 0), ("node.cpu", 0)} <= curves
    assert all((kept / each.file).is_file() for each in record.series)
    assert "<svg" in (kept / "report.html").read_text()
    assert list((kept / "tensorboard/rank-1").glob("events.out.tfevents.*"))
    shown = call(*TUNETOOL, "report", "show", str(kept), check=True).stdout
    assert "bottleneck: " in shown
    assert f"tensorboard --logdir {kept}" in shown
    assert shown.endswith("PASS\n")


@pytest.mark.slow  # gathers every layer over gloo: half a minute
def test_zero_3_sees_the_same_samples_and_computes_the_same(
    whole: tuple[Record, Path, set[Path]], target: Path, tmp_path: Path
) -> None:
    settings = ("--steps", "12", "--learning-rate", "0.01", "--zero", "3", "--ranks-per-node", "2", "--workers", "0")
    done = bench(target, tmp_path / "runs", *settings, "--json", "-")
    assert done.returncode == 0, done.stderr + done.stdout
    (kept,) = (tmp_path / "runs").iterdir()
    for rank in (0, 1):
        stage_1, stage_3 = (
            [
                float(line.split(",")[1])
                for line in (run_directory / f"series/rank-{rank}/loss.csv").read_text().split()[2:]
            ]
            for run_directory in (whole[1], kept)
        )
        assert len(stage_1) == len(stage_3) == 12
        assert stage_3[:6] == pytest.approx(stage_1[:6], rel=1e-3), "same samples in the same order, same arithmetic"


@pytest.mark.slow
def test_a_picture_that_cannot_be_read_is_named(target: Path, tmp_path: Path) -> None:
    (pictures,) = target.glob("colours-*")
    copy = tmp_path / "data"
    shutil.copytree(pictures, copy)
    broken = sorted(copy.rglob("*.jpg"))
    for path in broken:
        path.write_bytes(path.read_bytes()[:500])
    arguments = [*TUNETOOL, "bench", "finetune", "--model", str(target / "qwen2.5-vl-tiny"), "--dataset", str(copy)]
    arguments += ["--device", "cpu", "--allow-busy", "--runs-dir", str(tmp_path / "runs"), "--curves", "off"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "rank 0: " in done.stdout
    flat = " ".join(done.stdout.split())
    assert any(str(path) in flat for path in broken)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.slow  # ranks that die, and what they leave, are in test_launch.py
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGILL])
def test_a_rank_that_dies_is_named_and_nothing_of_the_run_stays(
    target: Path, tmp_path: Path, number: signal.Signals
) -> None:
    name, value = "TUNETOOL_TEST_MARK", str(tmp_path)
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    before = set(SHM.iterdir())
    arguments = ("--ranks-per-node", "2", "--steps", "100000", "--json", "-")
    with subprocess.Popen(
        command(target, tmp_path / "runs", *arguments),
        env={**os.environ, name: value, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        losses = "*/run/rank-1/series/loss.csv"
        until(lambda: [path for path in temporary.glob(losses) if path.stat().st_size > 40], "a step", process)
        (victim,) = [
            pid
            for pid in marked(name, value)
            if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes().replace(b"LOCAL_RANK", b"")
            and Path(f"/proc/{pid}/stat").read_text().split()[5] == str(pid)
        ] or [0]
        assert victim, process.poll()
        os.kill(victim, number)
        out, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 3, out + said
    verdict = json.loads(out)["verdict"]
    assert verdict["status"] == "error"
    assert "rank 1" in verdict["reasons"][0]
    assert number.name in verdict["reasons"][0]
    if number == signal.SIGILL:
        assert "ONEDNN_MAX_CPU_ISA" in verdict["reasons"][0]
    until(lambda: not marked(name, value), "the end of all its processes")
    assert list(temporary.iterdir()) == []
    assert set(SHM.iterdir()) - before == set()


def test_calls_that_cannot_be_done_do_nothing(target: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(target / "qwen2.5-vl-tiny", model)
    shard = sorted(model.glob("*.safetensors"))[0]
    shard.unlink()
    data = str(next(target.glob("colours-*")))
    runs = tmp_path / "runs"
    for code, arguments, said in (
        (2, ("--model", str(model), "--dataset", data), shard.name),
        (2, ("--model", "tiny"), "must be made, but there is no `--target`"),
        (2, ("--model", "tiny", "--target", str(target), "--steps", "1", "--epochs", "2"), "`--epochs`"),
        (2, ("--model", "tiny", "--target", str(target), "--learning-rate", "0"), "`learning_rate`"),
        (3, ("--model", "tiny", "--target", str(target), "--device", "cuda"), "no GPU"),
    ):
        done = call(
            *TUNETOOL,
            "bench",
            "finetune",
            *arguments,
            "--allow-busy",
            "--runs-dir",
            str(runs),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )
        assert done.returncode == code, done.stdout + done.stderr
        assert said in done.stderr
        assert "hint: " in done.stderr
        assert not runs.exists() or list(runs.iterdir()) == []
