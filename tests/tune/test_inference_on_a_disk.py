"""`tunetool bench inference` with DeepSpeed on a real disk: the same tokens from everywhere, and nothing left behind."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from tunetool.advise.qwen2_5_vl import published_name
from tunetool.bench.inference import preflight, run
from tunetool.bench.inference.model import describe
from tunetool.bench.inference.request import Request
from tunetool.loading import random_weights
from tunetool.measure.aio import Probe
from tunetool.measure.session import Result
from tunetool.record import Record, parse
from tunetool.report.progress import PlainProgress

pytest_plugins = ["disks"]

SMALL = {"batch": 3, "prompt": 12, "new_tokens": 4, "rounds": 2}
CONFIG = {
    "model_type": "qwen2",
    **{"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"intermediate_size": 1536, "vocab_size": 1100, "tie_word_embeddings": True},
}
SWAPPED = 2 * 512 * (2 * 3 * 1536 + 1100)
"""Bytes of the tensors of 1 MiB or more: gate, up and down of two layers, and the embedding, in two bytes each."""
UNIT = 1024 * 8
"""DeepSpeed moves multiples of this at most."""
REAL_CHILD = Path(run.__file__).with_name("child.py")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    return path


def command(target: Path, runs: Path, model: object, *arguments: object) -> list[str]:
    small = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    common = ["--target", str(target), "--runs-dir", str(runs), "--allow-busy", "--device", "cpu"]
    return [*TUNETOOL, "bench", "inference", *common, "--model", str(model), *small, *map(str, arguments)]


def test_tokens_are_the_same_wherever_the_weights_lie(ready: Probe, disk: Path, model: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    done = call(*command(disk, tmp_path / "runs", model, "--json", "-"))
    record = parse(done.stdout, "stdout")
    undisturbed(done.returncode, record)
    answers = {check.id.removeprefix("inference."): (check.status, check.found) for check in record.checks}
    assert answers["device.tokens"] == ("pass", "all 6 sequences are those of the first round")
    assert answers["nvme.tokens"] == answers["dram.tokens"] == ("pass", "all 6 sequences are those of device memory")
    for mode in ("aio", "gds"):
        status, why = answers[f"sglang-{mode}"]
        assert status == "skip"
        assert "sglang is not installed" in why
    by_name = {each.name.removeprefix("inference."): each for each in record.measurements}
    tokens = by_name["nvme.tokens"]
    proven(tokens)
    assert tokens.evidence is not None
    # The embedding is the output layer too, and is read for each.
    a_pass = SWAPPED + 2 * 512 * 1100
    assert tokens.evidence.claimed_bytes == pytest.approx(2 * 4 * a_pass, abs=8 * 8 * UNIT)
    assert by_name["nvme.bytes_per_token"].parameters["expected"] == pytest.approx(a_pass / 3, abs=3 * UNIT)
    proven(by_name["deepspeed.cpu.read"])
    assert by_name["nvme.predicted"].parameters["floor"] == "device"
    assert by_name["nvme.predicted"].value > 0
    for place in ("dram", "device"):
        assert by_name[f"{place}.tokens"].evidence is None
        assert by_name[f"{place}.versus_nvme"].parameters["pairs"] == 2
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "4 x Gen5" in (kept / "report.html").read_text()
    assert json.loads((kept / "sglang-gds.json").read_text())["aio"]["use_gds"] is True
    shown = " ".join(call(*TUNETOOL, "report", "show", kept).stdout.split())
    assert "whatever the batch is, so take the largest that fits" in shown


@pytest.mark.parametrize("name", ["tiny", "llama-tiny"])
def test_weights_are_those_that_files_would_hold(ready: Probe, disk: Path, name: str) -> None:
    torch, child = import_module("torch"), import_module("tunetool.bench.inference.child")
    described = describe(name)
    random_weights.write(disk, described.model.tensors, 3, 10**9, lambda _: None)
    stored = import_module("safetensors.torch").load_file(str(disk / "model.safetensors"))
    model = child.empty_model(described.config)
    assert all(each.is_meta for each in model.parameters())
    for _ in child.made(model, 3, torch.device("cpu")):
        pass
    drawn = {published_name(name): each for name, each in model.named_parameters()}
    assert drawn.keys() == stored.keys()
    assert all(torch.equal(drawn[name], each) for name, each in stored.items())


def test_tokens_that_score_the_same_but_for_rounding_are_noted() -> None:
    torch, child = import_module("torch"), import_module("tunetool.bench.inference.child")
    rivals = child._Rivals()
    # Near 5 the numbers of bf16 are 2^-5 apart, near -0.3 they are 2^-9.
    scores = torch.tensor([[5.0, 5 - 4 / 32, 5 - 5 / 32, 0, 0], [-0.3 - 5 / 512, -0.3 - 3 / 512, -9, -0.3, -9]])
    assert rivals(None, scores) is scores
    rivals(None, scores.flip(0))
    assert rivals.lists() == [[[0, 1], [3, 1]], [[3, 1], [0, 1]]]


def bench_with(
    program: str, target: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *weights: str
) -> Result:
    """The benchmark, whose processes run ``program`` before and after what the real one does."""
    child = tmp_path / "child.py"
    child.write_text(f"import runpy\nreal = runpy.run_path({str(REAL_CHILD)!r})['answer']\n{program}")
    monkeypatch.setattr(run, "_CHILD", child)
    monkeypatch.setattr(preflight, "RUNG_SECONDS", 0.05)
    given: dict[str, Any] = {**SMALL, "runs_dir": tmp_path / "runs", "allow_busy": True}
    request = Request(target=target, model=str(model), weights=weights, device="cpu", **given)
    return run.bench(request, PlainProgress())


WRONG = """
import os, pathlib, signal
calls = 0
def answer(order):
    global calls
    calls += 1
    config = order.get("ds_config")
    if config and config["zero_optimization"]["offload_param"]["device"] == "cpu":
        globals()["dies"] = True
    if calls == 3 and globals().get("dies"):
        os.kill(os.getpid(), signal.SIGKILL)
    answered = real(order)
    if config and "nvme_path" in config["zero_optimization"]["offload_param"]:
        for path in pathlib.Path(config["zero_optimization"]["offload_param"]["nvme_path"]).rglob("*.swp"):
            data = bytearray(path.read_bytes())
            data[: len(data) // 2] = bytes(len(data) // 2)
            path.write_bytes(data)
    return answered
"""


def test_weights_that_come_back_wrong_fail(
    ready: Probe, disk: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench_with(WRONG, disk, model, tmp_path, monkeypatch, "*")
    assert result.code == 1
    record = checked(result.record)
    statuses = {check.id.removeprefix("inference."): (check.status, check.found) for check in record.checks}
    assert statuses["nvme.tokens"][0] == "fail"
    assert "6 sequences are not those of device memory" in statuses["nvme.tokens"][1]
    assert statuses["device.tokens"][0] == "pass"
    assert statuses["dram.tokens"][0] == "unknown"
    assert "was ended by SIGKILL" in statuses["dram.tokens"][1]
    assert list(disk.iterdir()) == []


FULL = """
import resource
def answer(order):
    # As on a disk that fills up: writes beyond end with an error, which DeepSpeed's handle keeps for itself.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    return real(order)
"""


def test_swap_files_that_cannot_be_written_whole_stop_the_run(
    ready: Probe, disk: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = bench_with(FULL, disk, model, tmp_path, monkeypatch, "nvme")
    assert result.code == 3
    record = checked(result.record)
    assert record.verdict is not None
    assert "the swap files hold" in record.verdict.reasons[0]
    assert "DeepSpeed reports no error" in record.verdict.reasons[0]
    assert list(disk.iterdir()) == []


def checked(record: Record | None) -> Record:
    assert record is not None
    return record
