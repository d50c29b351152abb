"""bf16 or fp16: the choice by the GPUs, and the settings of each trainer and file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tunetool.advise.precision import FP16, Asked, Capability, choose, need
from tunetool.bench.strategies.hooks import CASES, with_case
from tunetool.cli.main import cli
from tunetool.errors import UsageProblem
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.trainers.lightning import configuration
from tunetool.training.trainers.llamafactory_files import DEEPSPEED, SETTINGS, RunFiles, outcome, render
from tunetool.training.workload import Settings, Workload, workload_from_json
from tunetool.tune.check import Facts
from tunetool.tune.configs import precision_of

# As torch.cuda.get_device_capability and NVML give them. torch 2.13 says of all of them that bf16 is supported.
P100, V100, T4, A100, L4, H100 = (6, 0), (7, 0), (7, 5), (8, 0), (8, 9), (9, 0)
WORKLOAD = Workload("/mnt/model", "/mnt/data")
FILES = RunFiles(Path("/run"), nodes=1, ranks=8, cuda=True, dataset_name="qa", pixels=1, precision="fp16")


@pytest.mark.parametrize(
    ("gpus", "format_"),
    [
        ([P100], "fp16"),
        ([V100] * 8, "fp16"),
        ([T4], "fp16"),
        ([A100], "bf16"),
        ([L4], "bf16"),
        ([H100] * 8, "bf16"),
        ([H100, V100], "fp16"),
        ([], "fp32"),
    ],
)
def test_bf16_where_every_gpu_has_it(gpus: Sequence[Capability], format_: str) -> None:
    chosen = choose("auto", gpus)
    assert chosen.format == format_
    assert need(chosen, gpus) is chosen
    if gpus and format_ == "fp16":
        least = min(gpus)
        assert chosen.why == f"the GPU's compute capability is {least[0]}.{least[1]}, and bf16 needs 8.0"


@pytest.mark.parametrize(
    ("asked", "gpus", "said"),
    [
        ("bf16", [V100], "`--precision bf16`: the GPU's compute capability is 7.0, and bf16 needs 8.0"),
        ("bf16", [], "`--precision bf16` needs a GPU, and there is none"),
        ("fp16", [], "`--precision fp16` needs a GPU, and there is none"),
    ],
)
def test_what_the_gpus_lack_is_refused(asked: Asked, gpus: Sequence[Capability], said: str) -> None:
    with pytest.raises(UsageProblem, match=said):
        need(choose(asked, gpus), gpus)
    assert need(choose("fp16", [H100]), [H100]).format == "fp16"


def test_deepspeed_is_told_to_scale_the_loss() -> None:
    scaled = ds_config(WORKLOAD, 8, cuda=True, fp16=True)
    assert scaled["bf16"] == {"enabled": False}
    assert scaled["fp16"] == {**FP16, "enabled": True, "loss_scale": 0}
    plain = ds_config(WORKLOAD, 8, cuda=True)
    assert (plain["bf16"], "fp16" in plain) == ({"enabled": True}, False)
    # Nothing else differs: traffic and partitioning are those of bf16.
    assert {key for key in scaled if scaled[key] != plain.get(key)} == {"bf16", "fp16"}


def test_lightning_and_llamafactory_are_told_the_same() -> None:
    lightning = configuration(WORKLOAD, 8, 8, 10, "fp16")
    assert lightning.trainer["precision"] == "16-mixed"
    assert lightning.strategy["config"]["fp16"] == FP16
    texts = render(WORKLOAD, FILES)
    settings = yaml.safe_load(texts[SETTINGS])
    assert (settings["fp16"], "bf16" in settings) == (True, False)
    # transformers fills in the values of the YAML, and leaves the loss scaling unchanged.
    assert json.loads(texts[DEEPSPEED])["fp16"] == {**FP16, "enabled": "auto"}
    plain = render(WORKLOAD, replace(FILES, precision="bf16"))
    assert yaml.safe_load(plain[SETTINGS])["bf16"] is True
    assert "fp16" not in json.loads(plain[DEEPSPEED])


def test_updates_that_llamafactory_skipped_are_counted() -> None:
    line = "[INFO] [loss_scaler.py:183:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: "
    state = {"num_input_tokens_seen": 1, "log_history": [{"loss": 1.0, "learning_rate": 0.1}]}
    results = {"train_runtime": 1.0, "train_samples_per_second": 1.0}
    counted = outcome(state, results, 0.0, [(1, 1.0, 1.0)], f"{line}65536, but hysteresis is 2\n{line}65536\nother\n")
    assert counted.overflows == 2


def test_the_asked_format_reaches_the_ranks() -> None:
    workload = Settings(precision="fp16").workload("/m", "/d", "auto", 0)
    assert workload_from_json(workload.to_json()).precision == "fp16"
    with pytest.raises(UsageProblem, match="`--precision fp16` and `--device cpu` contradict"):
        Workload("/m", "/d", device="cpu", precision="fp16")


@pytest.mark.parametrize("command", ["finetune", "staging", "strategies", "reference"])
def test_every_command_that_trains_takes_it(command: str, tmp_path: Path) -> None:
    options = ["--model", "tiny", "--target", str(tmp_path), "--device", "cpu", "--dry-run", "--allow-busy"]
    for precision, said in (("fp16", "contradict each other"), ("int8", "'int8' is not one of 'auto', 'bf16', 'fp16'")):
        done = CliRunner().invoke(cli, ["bench", command, *options, "--precision", precision], standalone_mode=False)
        assert said in str(getattr(done.exception, "message", ""))
        assert getattr(done.exception, "exit_code", 0) == 2


@pytest.mark.parametrize(
    ("asked", "facts", "format_", "why"),
    [
        ("auto", Facts("cuda", bf16=True, capabilities=[V100]), "fp16", "compute capability is 7.0"),
        ("auto", Facts("cuda", bf16=True, capabilities=[H100]), "bf16", "compute capability 9.0"),
        ("auto", Facts("cpu", bf16=True), "bf16", "DeepSpeed's accelerator `cpu` has bf16"),
        ("auto", Facts("npu", bf16=False), "fp16", "DeepSpeed's accelerator `npu` lacks bf16"),
        ("fp16", Facts("cpu", bf16=True), "fp16", "`--precision fp16`"),
        ("bf16", Facts("cuda", bf16=True, capabilities=[V100]), "bf16", "`--precision bf16`"),
    ],
)
def test_a_ds_config_is_for_these_gpus_or_as_asked(asked: Asked, facts: Facts, format_: str, why: str) -> None:
    chosen = precision_of(asked, facts)
    assert chosen.format == format_
    assert why in chosen.why


@pytest.mark.parametrize("case", CASES)
def test_the_probe_of_hooks_computes_as_the_cells_do(case: str) -> None:
    workload = replace(WORKLOAD, zero_stage=CASES[case]["stage"])
    config = with_case(ds_config(workload, 2, cuda=True, fp16=True), case)
    # Overflows at a scale that still adapts would be another engine's time in each case.
    assert config["fp16"] == {**FP16, "loss_scale": 1.0}
    assert not config["bf16"]["enabled"]
    config = with_case(ds_config(workload, 2, cuda=True), case)
    assert config["bf16"]["enabled"]
    assert "fp16" not in config
