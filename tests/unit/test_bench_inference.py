"""`bench inference` without torch: models, predictions, published figures, what fits, verdicts, tables, SGLang's lines."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

import builders
from calls import benchmark
from shown_records import on_screen
from tunetool.bench.inference import figures, preflight, sglang
from tunetool.bench.inference.figures import Measured, Rung
from tunetool.bench.inference.model import describe
from tunetool.bench.inference.predict import Work
from tunetool.bench.inference.request import KIND, Request
from tunetool.bench.inference.samples import Absent, Generation, Mode, Place, Row, Served
from tunetool.bench.inference.view import RESULTS, view
from tunetool.bench.offload.architecture import architecture
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.measure.aio import Probe
from tunetool.measure.evidence import Counted
from tunetool.measure.worker import Failed
from tunetool.node.machine.block_stack import BlockStack, Leaf, read_stack
from tunetool.record import Record, chosen
from tunetool.report.kinds import page_text
from tunetool.verdict import code_of, judge

DISK = BlockStack(
    "/mnt/data", None, "ext4", "sda", "8:0", "disk", (Leaf("sda", "disk", None, True, ("sda",)),), False, False
)
TOKENS = [[1, 2, 3, 4], [5, 6, 7, 8]]
CONDITIONS = {"model": "7b", "weight_bytes": 10**9, "batch": 2, "prompt": 16, "new_tokens": 4, "device": "cuda"}
MOMENTS = itertools.count()
WORK = Work(batch=2, passes=4, read_bytes=10**9)


def generation(seconds: float, tokens: Sequence[Sequence[int]] = TOKENS, claimed: int = 0) -> Generation:
    counted = Counted(claimed, claimed, {}) if claimed else None
    return Generation(seconds, [seconds / 2, *[seconds / 6] * 3], tokens, claimed, counted, float(next(MOMENTS)))


def row(place: Place, *readings: Generation, **more: Any) -> Row:
    medium = "disk" if place == "nvme" else "HBM" if place == "device" else "DRAM"
    return replace(Row(place, DISK, medium, **more), readings=dict(enumerate(readings, 1)))


def rung(value: float = 2e9) -> Rung:
    return Rung([builders.measurement("deepspeed.cpu.read", value)], {})


def run_of(*rows: Row, served: Sequence[Served] = ()) -> Measured:
    return Measured(rows, served, rung(), WORK)


def record_of(run: Measured, conditions: Mapping[str, Any] = CONDITIONS) -> Record:
    case = figures.case(run, conditions, [])
    fields = {"kind": KIND, "checks": case.checks, "verdict": judge(case), "target": "/mnt/data"}
    made: Record = builders.record(*case.measurements, **fields)
    return made


def shown(record: Record) -> str:
    return " ".join(on_screen(record, None, 100).split())


# The model.


def test_a_name_is_the_model_of_that_name() -> None:
    large = describe("70b")
    assert large.weight_bytes == 2 * 70_553_706_496
    assert large.config["num_key_value_heads"] == 8
    # 80 layers x 8 heads x 128 x (key, value) x 2 bytes = 320 KiB a token.
    assert large.cache_bytes(96, 544) == 96 * 544 * 327_680
    vision = describe("7b")
    assert vision.config["vision_config"]["depth"] == 32
    assert vision.decoder.layers == 28
    assert vision.vocabulary == 151643, "an image's token would be looked up in a picture"
    assert describe("phi3-mini").config["model_type"] == "phi3"


@pytest.mark.parametrize(("bench", "make"), [("inference", describe), ("offload", architecture)])
def test_every_model_that_the_help_names_can_be_built(bench: str, make: Callable[[str], Any]) -> None:
    params = benchmark(bench).params
    text = next(option.help for option in params if isinstance(option, click.Option) and option.name == "model")
    names = re.findall(r"[a-z0-9-]+", re.sub(r"\([^)]*\)|\band\b", "", (text or "").partition("Names: ")[2]))
    assert len(names) > 8
    assert [make(name).model.numel > 0 for name in names] == [True] * len(names)


def test_a_model_that_no_decoder_is_made_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageProblem, match="neither a decoder that is known by name nor a path"):
        describe("mixtral-8x7b")
    path = tmp_path / "config.json"
    changed = {**describe("tiny").config, "eos_token_id": [257, 258], "image_token_id": None, "hidden_size": "256"}
    path.write_text(json.dumps(changed))
    with pytest.raises(UsageProblem, match="hidden_size"):
        describe(str(path))
    path.write_text(json.dumps({**changed, "hidden_size": 256}))
    assert describe(str(tmp_path)).vocabulary == 256
    path.write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(UsageProblem, match="of type `t5`"):
        describe(str(path))


# The prediction.


@given(
    batch=st.integers(1, 512),
    passes=st.integers(1, 64),
    read=st.integers(1, 2 * 10**11),
    bandwidth=st.floats(1e8, 1e11),
    first=st.floats(0, 100),
    after=st.floats(0, 10),
)
def test_no_pass_is_faster_than_its_bytes_nor_than_computing(
    batch: int, passes: int, read: int, bandwidth: float, first: float, after: float
) -> None:
    work = Work(batch, passes, read, first, after)
    seconds = batch * passes / work.rate(bandwidth)
    assert seconds >= 0.999 * passes * read / bandwidth
    assert seconds >= 0.999 * (first + (passes - 1) * after)
    assert seconds <= 1.001 * (passes * read / bandwidth + first + (passes - 1) * after)
    larger = replace(work, batch=2 * batch)
    assert larger.rate(bandwidth) == pytest.approx(2 * work.rate(bandwidth)), "the batch changes no pass"
    assert larger.bytes_per_token == work.bytes_per_token / 2


def test_the_batch_from_which_computing_takes_longer() -> None:
    work = Work(96, 32, 10**10, next_floor=1.0)
    assert work.balanced_batch(2e9) == 480, "5 s of reads, 1 s of computing"
    assert work.balanced_batch(1e12) == 96, "it computes for longer already"
    assert replace(work, next_floor=0.0).balanced_batch(2e9) is None


def test_the_published_stands_beside_what_its_bandwidth_predicts() -> None:
    assert [(each.tokens, each.read) for each in RESULTS] == [(7, 10e9), (17, 27e9), (26, 48e9)]
    # 141.1 GB for each of 32 passes, and 96 x 32 tokens.
    assert [each.predicted for each in RESULTS] == pytest.approx([6.80, 18.37, 32.66], abs=0.01)
    text = shown(record_of(run_of(row("nvme", generation(4.0, claimed=4 * 10**9)))))
    for words in ("LLAMA-3-70B, 8 x Gen5 26 48.00 32.66 80%", "DeepSpeed blog", "batch 96"):
        assert words in text


# What fits.


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, int]:
    """A machine with these sizes in bytes, whose /var/tmp is a disk."""
    sizes = {"memory": 10**12, "disk": 10**12, "gpu": 0}
    monkeypatch.setattr(preflight, "memory_left", lambda: (sizes["memory"], "RAM"))
    monkeypatch.setattr(preflight, "free_bytes", lambda _: sizes["disk"])
    monkeypatch.setattr(preflight, "memlock", lambda: None)
    monkeypatch.setattr(preflight, "read_stack", lambda _: DISK)
    monkeypatch.setattr(preflight, "device_nodes", lambda _: ["/dev/nvidia0"] if sizes["gpu"] else [])

    class Answer:
        @property
        def gpu_bytes(self) -> int:
            return sizes["gpu"]

    monkeypatch.setattr(preflight, "read_capacity", lambda _: Answer())
    return sizes


def test_a_model_that_does_not_fit_is_said_before(machine: dict[str, int], tmp_path: Path) -> None:
    request = Request(target=tmp_path, model="70b")
    machine["disk"] = 10**11
    with pytest.raises(CannotJudge, match=r"100.* free, but the swap files of `70b` take 141"):
        preflight.plan(request)
    machine["disk"], machine["memory"] = 10**12, 10**10
    with pytest.raises(CannotJudge, match="the batch takes about"):
        preflight.plan(request)
    machine["memory"], machine["gpu"] = 10**12, 10**10
    with pytest.raises(CannotJudge, match=r"the batch takes about .* of the GPU's memory, which has 10"):
        preflight.plan(request)


def test_places_that_are_too_small_are_left_out_with_a_reason(machine: dict[str, int], tmp_path: Path) -> None:
    machine["gpu"], machine["memory"] = 150 * 10**9, 137 * 10**9
    planned = preflight.plan(Request(target=tmp_path, model="70b"))
    assert set(planned.left_out) == {"dram", "device"}
    assert any(
        "host memory: left out, the weights take" in line
        for line in preflight.announcement(Request(target=tmp_path), planned)
    )
    with pytest.raises(CannotJudge, match="the weights take"):
        preflight.plan(Request(target=tmp_path, model="70b", weights=("device",)))
    planned = preflight.plan(Request(target=tmp_path, model="llama2-7b"))
    assert planned.left_out == {}
    assert planned.places == ("nvme", "dram", "device")
    # What DeepSpeed swaps is all but the norms.
    assert 0.999 < planned.swapped_bytes / planned.described.weight_bytes < 1
    assert planned.read_bytes == planned.swapped_bytes
    vision = preflight.plan(Request(target=tmp_path, model="7b"))
    assert vision.swapped_bytes - vision.read_bytes > 10**9, "text does not read the vision tower"
    tied = preflight.plan(Request(target=tmp_path, model="3b"))
    embedding = 2 * 151936 * 2048
    tower = tied.swapped_bytes + embedding - tied.read_bytes
    assert 1.2e9 < tower < 1.4e9, "the embedding is read as the output layer too"


def test_a_model_without_a_large_tensor_never_leaves_memory(machine: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(CannotJudge, match="DeepSpeed keeps all of them in memory"):
        preflight.plan(Request(target=tmp_path, model="tiny"))
    assert preflight.plan(Request(target=tmp_path, model="tiny", weights=("d*",))).places == ("dram", "device")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weights": ("hbm",)}, "`--weights hbm` is no place for weights"),
        ({"weights": ()}, "`--weights` names no place for weights"),
        ({"new_tokens": 10**6}, "`--new-tokens 1000000` is too many"),
        ({"model": "huge"}, "neither a decoder"),
    ],
)
def test_a_wrong_call(machine: dict[str, int], tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageProblem, match=words):
        preflight.plan(replace(Request(target=tmp_path, model="llama-tiny"), **change))


def test_a_directory_in_memory_is_refused(tmp_path: Path) -> None:
    assert read_stack("/dev/shm").in_memory
    with pytest.raises(UsageProblem, match="in memory"):
        preflight.plan(Request(target=Path("/dev/shm"), model="llama-tiny", device="cpu"))


def test_the_configurations_differ_in_where_parameters_lie_alone(machine: dict[str, int], tmp_path: Path) -> None:
    planned = preflight.plan(Request(target=tmp_path, model="llama-tiny"))
    drives, host = (planned.document(place, tmp_path / "run") for place in ("nvme", "dram"))
    assert drives is not None
    assert host is not None
    assert drives["zero_optimization"].pop("offload_param")["nvme_path"] == str(tmp_path / "run")
    assert host["zero_optimization"].pop("offload_param")["device"] == "cpu"
    assert drives == host
    assert "optimizer" not in drives
    assert planned.document("device", tmp_path) is None


# The verdict, the figures and the tables.


def test_equal_tokens_pass_and_the_advice_follows() -> None:
    readings = [generation(4.0 + number / 10, claimed=4 * 10**9) for number in range(6)]
    near = [generation(1.0 + number / 100) for number in range(6)]
    record = record_of(run_of(row("nvme", *readings), row("device", *near)))
    assert code_of(record.verdict) == 0, record.verdict
    by_name = {each.name: each for each in record.measurements}
    assert by_name["inference.nvme.tokens"].value == pytest.approx(8 / 4.25, rel=0.01)
    assert by_name["inference.nvme.bytes_per_token"].value == 5e8
    # 0.5 s for each of 4 passes at 2 GB/s; the first takes 0.51 s to compute.
    assert by_name["inference.nvme.predicted"].value == pytest.approx(8 / (0.5125 + 3 * 0.5), rel=0.01)
    assert by_name["inference.nvme.read_share"].value == pytest.approx(0.47, abs=0.01)
    assert by_name["inference.device.versus_nvme"].parameters["decided"] is True
    (text,) = view(record).advice
    assert text.startswith("keep the weights in device memory (4.")
    assert "each pass reads 1 GB whatever the batch is, so take the largest that fits: up to about" in text


def test_one_other_token_fails() -> None:
    wrong = [[1, 2, 3, 4], [5, 6, 7, 9]]
    run = run_of(row("nvme", generation(4.0, wrong, 4 * 10**9)), row("device", generation(1.0)))
    record = record_of(run)
    assert code_of(record.verdict) == 1
    assert record.verdict is not None
    assert "1 of 2 sequences are not those of device memory" in record.verdict.reasons[0]
    assert " NO " in shown(record)
    changed = record_of(run_of(row("nvme", generation(4.0, claimed=1), generation(4.0, wrong, 1))))
    assert code_of(changed.verdict) == 1, "the same prompt gives the same tokens in every round"


CLOSE = [[[1], [2], [3], [4]], [[5], [6], [7, 11], [8]]]
"""The third token of the second sequence is one of two that score the same but for rounding."""


def test_a_tie_between_two_tokens_is_rounding() -> None:
    def judged(*sequences: Sequence[int]) -> tuple[str, str]:
        trusted = replace(generation(1.0), close=CLOSE)
        record = record_of(
            run_of(row("nvme", generation(4.0, list(sequences), 4 * 10**9)), row("device", trusted, trusted))
        )
        (check,) = (each for each in record.checks if each.id == "inference.nvme.tokens")
        return check.status, check.found

    status, found = judged([1, 2, 3, 4], [5, 6, 11, 99])
    assert status == "pass"
    assert found == (
        "all 2 sequences are those of device memory, but for 1 that go another way where two tokens score the same "
        "but for rounding"
    )
    # Another token than the rival, the rival at another place, and one that is missing.
    assert judged([1, 2, 3, 4], [5, 6, 12, 8])[0] == "fail"
    assert judged([1, 2, 3, 4], [5, 11, 7, 8])[0] == "fail"
    assert judged([1, 2, 3, 4], [5, 6, 11])[0] == "fail"
    assert judged([9, 2, 3, 4], [5, 6, 11, 8]) == ("fail", "1 of 2 sequences are not those of device memory")


def test_one_generation_alone_proves_nothing() -> None:
    record = record_of(run_of(row("nvme", generation(4.0, claimed=4 * 10**9))))
    assert code_of(record.verdict) == 3
    assert [check.status for check in record.checks] == ["skip"]


def test_a_place_that_failed_is_an_error_beside_what_holds() -> None:
    failed = row("dram", failed="the process was ended by SIGKILL")
    rows = (row("nvme", generation(4.0, claimed=4 * 10**9)), failed, row("device", generation(1.0)))
    record = record_of(run_of(*rows))
    assert code_of(record.verdict) == 3
    assert record.verdict is not None
    assert record.verdict.reasons == ["dram: the process was ended by SIGKILL"]
    assert "left out: dram: the process was ended by SIGKILL" in shown(record)


def test_bytes_that_the_drives_did_not_count_prove_nothing() -> None:
    lied = replace(generation(4.0, claimed=4 * 10**9), counted=Counted(4 * 10**9, 10**9, {}))
    record = record_of(run_of(row("nvme", lied), row("device", generation(1.0))))
    assert code_of(record.verdict) == 3
    assert record.verdict is not None
    assert record.verdict.status == "unproven"


def test_the_page_has_what_was_measured_and_what_was_published() -> None:
    absent = [Served("aio", Absent("sglang is not installed", "`pip <b>`")), Served("gds", Absent("no GPU", ""))]
    run = run_of(row("nvme", generation(4.0, claimed=4 * 10**9)), row("device", generation(1.0)), served=absent)
    text = page_text(record_of(run), None)
    for words in (
        "<svg",
        "LLAMA-3-70B, 4 x Gen4",
        "sglang is not installed; <code>pip &lt;b&gt;</code>",
        "whatever the batch is",
    ):
        assert words in text
    assert page_text(record_of(run_of(row("nvme"))), None) == ""


def test_sglang_tokens_are_a_row_of_their_own() -> None:
    served = [Served("aio", result={"output_throughput": 31.5, "total_output_tokens": 4096})]
    run = run_of(row("nvme", generation(4.0, claimed=1)), row("device", generation(1.0)), served=served)
    record = record_of(run)
    (tokens,) = chosen(record.measurements, "tokens", place="sglang-aio")
    assert (tokens.value, tokens.parameters["batch"]) == (31.5, 128)
    assert "sglang-aio 31.50 " in shown(record)
    assert code_of(record.verdict) == 0


# SGLang's launch lines.

STAND_IN = """
import argparse, json, os
parser = argparse.ArgumentParser()
for name in ("model-path", "dataset-name", "dataset-path", "random-input-len", "random-output-len",
             "random-range-ratio", "num-prompts", "seed", "zero-inference-config", "result-filename"):
    parser.add_argument("--" + name, required=True)
parser.add_argument("--disable-cuda-graph", action="store_true")
asked = parser.parse_args()
config = json.load(open(asked.zero_inference_config))
assert config["zero_optimization"]["stage"] == 3 and os.environ["LOCAL_RANK"] == "0"
assert len(json.load(open(asked.dataset_path))) >= int(asked.num_prompts)
result = {"output_throughput": 7.5, "asked": vars(asked), "aio": config["aio"]}
open(asked.result_filename, "a").write(json.dumps(result) + "\\n")
"""
"""Takes the options that the branch of SGLang takes, which needs a GPU."""


def sglang_files(machine: dict[str, int], tmp_path: Path, mode: Mode) -> Path:
    folder = tmp_path / "it's here"
    folder.mkdir()
    request = Request(target=tmp_path, model="llama-tiny", prompt=512, new_tokens=32)
    for name, text in sglang.files(request, preflight.plan(request), mode, tmp_path / "swap").items():
        (folder / name).write_text(text)
    return folder


def stand_in(tmp_path: Path, program: str) -> dict[str, str]:
    package = tmp_path / "packages/sglang"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "bench_offline_throughput.py").write_text(program)
    return {"PATH": "/usr/bin:/bin", "MODEL": "/models/it's mine", "PYTHONPATH": str(package.parent)}


@pytest.mark.parametrize("mode", ["aio", "gds"])
def test_the_launch_lines_run(machine: dict[str, int], tmp_path: Path, mode: Mode) -> None:
    folder = sglang_files(machine, tmp_path, mode)
    result = sglang.run(folder, mode, stand_in(tmp_path, STAND_IN), 120, lambda: None)
    assert result["output_throughput"] == 7.5
    assert result["aio"]["use_gds"] is (mode == "gds")
    asked = result["asked"]
    assert (asked["num_prompts"], asked["random_input_len"], asked["random_output_len"]) == ("128", "512", "32")
    assert asked["model_path"] == "/models/it's mine"
    assert (asked["random_range_ratio"], asked["disable_cuda_graph"]) == ("1.0", True)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('CUDA out of memory: error')", "exit status 1: CUDA out of memory"),
        ("", "left no result"),
    ],
)
def test_sglang_that_fails_is_said_so(machine: dict[str, int], tmp_path: Path, program: str, words: str) -> None:
    folder = sglang_files(machine, tmp_path, "aio")
    with pytest.raises(Failed, match=words):
        sglang.run(folder, "aio", stand_in(tmp_path, program), 120, lambda: None)


def test_fused_tensors_fit_the_buffers(machine: dict[str, int], tmp_path: Path) -> None:
    planned = preflight.plan(Request(target=tmp_path, model="llama-tiny"))
    offload = sglang.configuration(planned, "aio", tmp_path)["zero_optimization"]["offload_param"]
    assert offload["buffer_size"] >= 2 * 2816 * 1024, "gate and up are one tensor there"
    assert offload["nvme_path"] == str(tmp_path)


def test_without_sglang_the_line_that_installs_it_is_said(machine: dict[str, int], tmp_path: Path) -> None:
    request = Request(target=tmp_path, model="llama-tiny")
    why = sglang.absent(request, preflight.plan(request), "aio", Probe(sys.executable, "3.11"))
    assert why is not None
    assert why.why.startswith("sglang is not installed")
    assert "zero-inference" in why.remedy
    assert sglang.knows_option() is False
