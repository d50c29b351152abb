"""`tunetool bench finetune --trainer llamafactory` with LLaMA-Factory itself, to its end: on CPUs, with the model `tiny`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

import environments
from calls import TUNETOOL, call
from programs import need_program
from tunetool.record import Measurement, Record, parse

pytestmark = pytest.mark.slow

SHM = Path("/dev/shm")
OF_RANKS = ("deepspeed_", "torch_", "psm_")
IMAGES = 24


@pytest.fixture(scope="module")
def installed() -> Iterator[dict[str, str]]:
    """The variables with which a user names LLaMA-Factory's environment, and where its ops are compiled."""
    need_program("c++")
    with environments.llamafactory() as directory:
        yield {"TUNETOOL_LLAMAFACTORY": str(directory), "TORCH_EXTENSIONS_DIR": str(environments.ops(directory))}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model and pictures, made once."""
    path = tmp_path_factory.mktemp("bulk")
    done = bench(path, {}, "--target", path, "--images", IMAGES, "--prepare")
    assert done.returncode == 0, done.stderr
    return path


def bench(directory: Path, environment: dict[str, str], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A run that leaves nothing in memory or in the temporary directory; what it caches lies below ``directory``."""
    common = ["--model", "tiny", "--device", "cpu", "--allow-busy", "--runs-dir", directory / "runs"]
    before = set(SHM.iterdir())
    # A path short enough for the sockets that it makes there.
    with tempfile.TemporaryDirectory(prefix="tunetool-") as temporary:
        apart = {"TMPDIR": temporary, "HF_HOME": str(directory / "cache"), "CUDA_VISIBLE_DEVICES": ""}
        done = call(*TUNETOOL, "bench", "finetune", *common, *arguments, env={**os.environ, **environment, **apart})
        assert list(Path(temporary).iterdir()) == []
    assert {path for path in SHM.iterdir() if path.name.startswith(OF_RANKS)} <= before
    return done


def trained(directory: Path, environment: dict[str, str], *arguments: object) -> tuple[Record, list[float]]:
    """The record of a run that passes, and the first loss of each rank."""
    done = bench(directory, environment, *arguments, "--json", "-")
    assert done.returncode == 0, done.stderr + done.stdout
    record = parse(done.stdout, "stdout")
    assert record.verdict is not None
    assert record.verdict.status == "pass"
    curves = sorted((directory / "runs").glob("*/series/rank-*/loss.csv"))
    return record, [float(curve.read_text().split()[2].split(",")[1]) for curve in curves]


def of_rank(record: Record, rank: int | None) -> dict[str, Measurement]:
    return {each.name.removeprefix("finetune."): each for each in record.measurements if each.rank == rank}


def found(record: Record) -> dict[str, str]:
    return {check.id: check.found for check in record.checks if check.status == "pass"}


def test_two_ranks_train_adapters_to_the_end(installed: dict[str, str], target: Path, tmp_path: Path) -> None:
    settings = ("--target", target, "--images", IMAGES, "--ranks-per-node", 2, "--learning-rate", 0.01)
    # As a build that was killed leaves it.
    Path(installed["TORCH_EXTENSIONS_DIR"], "deepspeed_shm_comm/lock").touch()
    theirs, their_first = trained(tmp_path, installed, *settings, "--trainer", "llamafactory", "--steps", 12)
    (tmp_path / "ours").mkdir()
    ours, our_first = trained(tmp_path / "ours", {}, *settings, "--steps", 1)
    # Of the same model, and of other samples of the same kind perhaps.
    assert their_first == [pytest.approx(fmean(our_first), rel=0.1)] * 2
    assert found(theirs)["finetune.steps"] == "12 steps on 2 ranks"
    before, after = map(float, found(theirs)["finetune.loss"].removeprefix("from ").split(" to "))
    assert after < 0.8 * before
    assert {("loss", 0), ("loss", 1), ("learning_rate", 0)} <= {(each.name, each.rank) for each in theirs.series}
    mine = of_rank(ours, 0)["end_to_end"].parameters
    for rank in (0, 1):
        figures = of_rank(theirs, rank)
        told = figures["end_to_end"].parameters
        assert (told["parameters"], told["trainable"]) == (mine["parameters"], mine["trainable"])
        assert (told["llamafactory_version"], told["compute"], told["tuning"]) == ("0.9.5", "cpu", "LoRA, rank 8")
        steps = figures["step"].samples or []
        assert len(steps) == 11, "the first is left out"
        assert all(seconds > 0 for seconds in steps)
        assert sum(steps) + figures["start"].value < figures["end_to_end"].value
        # 2 samples in each step, and a picture in each sample.
        assert 0 < figures["images"].value <= 2 * 12 / sum(steps)
        assert figures["tokens"].value > 10 * figures["images"].value
        assert not {"data", "batch", "model_load", "model_bandwidth"} & set(figures), "LLaMA-Factory tells none of them"


def own_data(target: Path, directory: Path) -> Path:
    """A user's folder with two datasets: the made one, and eight of its samples in the form alpaca."""
    shutil.copytree(next(target.glob("colours-*")), directory)
    samples = json.loads((directory / "data.json").read_text())[:8]
    with (directory / "mine.jsonl").open("w") as lines:
        for sample in samples:
            question, answer = (message["content"] for message in sample["messages"])
            lines.write(json.dumps({"ask": question, "say": answer, "seen": sample["images"]}) + "\n")
    info = json.loads((directory / "dataset_info.json").read_text())
    info["mine"] = {"file_name": "mine.jsonl", "columns": {"prompt": "ask", "response": "say", "images": "seen"}}
    (directory / "dataset_info.json").write_text(json.dumps(info))
    return directory


def test_one_rank_trains_everything_on_the_users_dataset(
    installed: dict[str, str], target: Path, tmp_path: Path
) -> None:
    data = own_data(target, tmp_path / "my data")
    settings = ("--dataset", f"{data}:mine", "--epochs", 2, "--micro-batch", 2, "--full", "--learning-rate", 0.001)
    record, _ = trained(tmp_path, installed, "--target", target, "--trainer", "llamafactory", *settings)
    assert found(record)["finetune.steps"] == "8 steps on 1 ranks", "eight samples in twos, twice"
    assert "finetune.loss" in found(record)
    figures = of_rank(record, 0)
    told = figures["end_to_end"].parameters
    assert (told["dataset"], told["tuning"]) == (f"{data}:mine", "all parameters")
    assert told["trainable"] == told["parameters"]
    assert len(figures["step"].samples or []) == 7


def test_what_stops_llamafactory_is_what_is_said(installed: dict[str, str], target: Path, tmp_path: Path) -> None:
    data = own_data(target, tmp_path / "data")
    for path in data.rglob("*.jpg"):
        path.write_bytes(path.read_bytes()[:500])
    settings = ("--dataset", f"{data}:mine", "--trainer", "llamafactory", "--steps", 1)
    done = bench(tmp_path, installed, "--target", target, *settings)
    assert done.returncode == 3, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert "LLaMA-Factory ended with status 1: OSError: " in said
    assert "its whole log is in `llamafactory/` beside the record" in said
    (log,) = (tmp_path / "runs").glob("*/llamafactory/rank-0.log")
    assert "Traceback" in log.read_text()
    assert "Traceback" not in done.stdout + done.stderr
