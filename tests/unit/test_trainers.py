"""Settings for other trainers, and results from their files. Without torch, Lightning and LLaMA-Factory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tunetool.errors import CannotJudge
from tunetool.training.trainers.deepspeed_config import ds_config
from tunetool.training.trainers.lightning import configuration
from tunetool.training.trainers.llamafactory_files import (
    DEEPSPEED,
    SETTINGS,
    RunFiles,
    cure,
    last_error,
    outcome,
    real,
    render,
    write,
)
from tunetool.training.workload import Workload

ODD = '/data/a model\'s "name": #1 \\ äöü'


def workload(**more: Any) -> Workload:
    return Workload(**{"model": "/models/7b", "dataset": "/data/qa", **more})


def run_files(**more: Any) -> RunFiles:
    fields = {
        "directory": Path("/run/lf"),
        "nodes": 1,
        "ranks": 8,
        "cuda": True,
        "dataset_name": "qa",
        "pixels": 589824,
    }
    return RunFiles(**{**fields, **more})


@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_trains_by_our_own_configuration(stage: int) -> None:
    asked = workload(zero_stage=stage, batch_size=3)
    made = configuration(asked, world=16, local_world=8, steps=40)
    ours = ds_config(asked, 16, cuda=True)
    # Lightning refuses this key, and sets it from its Trainer's arguments.
    assert made.strategy["config"] == {
        key: value for key, value in ours.items() if key != "gradient_accumulation_steps"
    }
    assert made.trainer["accumulate_grad_batches"] == ours["gradient_accumulation_steps"]
    assert made.strategy["config"]["zero_optimization"]["stage"] == stage
    assert (made.trainer["devices"], made.trainer["num_nodes"]) == (8, 2)
    assert (made.trainer["accelerator"], made.trainer["precision"]) == ("cuda", "bf16-mixed")
    # The plan has all batches of this rank already.
    assert (made.trainer["max_steps"], made.trainer["use_distributed_sampler"]) == (40, False)


@pytest.mark.parametrize("full", [False, True])
def test_lightning_saves_what_was_trained(full: bool) -> None:
    assert configuration(workload(full=full), 1, 1, 1).strategy["exclude_frozen_parameters"] is not full


def settings(asked: Workload, where: RunFiles) -> Mapping[str, Any]:
    document = yaml.safe_load(render(asked, where)[SETTINGS])
    assert isinstance(document, dict)
    return document


def test_llamafactory_is_told_the_seed_s_fine_tune() -> None:
    document = settings(workload(epochs=10, batch_size=2), run_files())
    expected = {
        "model_name_or_path": "/models/7b",
        "stage": "sft",
        "finetuning_type": "lora",
        "lora_rank": 8,
        "lora_alpha": 16,
        "lora_target": "all",
        "template": "qwen2_vl",
        "dataset": "qa",
        "dataset_dir": "/data/qa",
        "deepspeed": f"/run/lf/{DEEPSPEED}",
        "output_dir": "/run/lf/output",
        "report_to": "tensorboard",
        "num_train_epochs": 10,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-4,
        "bf16": True,
        "image_max_pixels": 589824,
    }
    assert {key: document.get(key) for key in expected} == expected
    assert "max_steps" not in document
    assert "use_cpu" not in document


def test_llamafactory_without_lora_trains_the_vision_tower_too() -> None:
    document = settings(workload(full=True, steps=7), run_files(cuda=False))
    assert (document["finetuning_type"], document["max_steps"], document["use_cpu"]) == ("full", 7, True)
    assert (document["freeze_vision_tower"], document["freeze_multi_modal_projector"]) == (False, False)
    assert not {"lora_rank", "num_train_epochs", "bf16"} & set(document)


@pytest.mark.parametrize("rate", [1e-4, 1e-5, 3.0, 1e-05 / 3, 2e16])
def test_a_learning_rate_is_a_number_to_yaml(rate: float) -> None:
    assert yaml.safe_load(real(rate)) == rate
    assert settings(workload(learning_rate=rate), run_files())["learning_rate"] == rate


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_partitions_as_in_our_own_loop(stage: int) -> None:
    asked = workload(zero_stage=stage)
    document = json.loads(render(asked, run_files())[DEEPSPEED])
    ours = ds_config(asked, 8, cuda=True)
    assert document["zero_optimization"] == ours["zero_optimization"]
    # Values that are in the YAML too are left to it: transformers refuses contradictions.
    assert {key for key in ours if document[key] == "auto" or document[key] == {"enabled": "auto"}} == {
        "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping", "bf16",
    }  # fmt: skip


def test_paths_with_odd_characters_reach_the_program(tmp_path: Path) -> None:
    directory = tmp_path / "a b's $HOME"
    programs = tmp_path / "its bin"
    programs.mkdir()
    cli = programs / "llamafactory-cli"
    # The real one divides its arguments at spaces.
    cli.write_text(
        '#!/bin/sh\nprintf "%s\\n" $@ "$PWD" "$NNODES $NODE_RANK $NPROC_PER_NODE $MASTER_ADDR $MASTER_PORT"\n'
    )
    cli.chmod(0o755)
    script = write(workload(model=ODD, dataset=ODD), run_files(directory=directory, programs=programs, ranks=4))
    environment = {"PATH": os.environ["PATH"], "MASTER_PORT": "4321"}
    done = subprocess.run([str(script)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["train", SETTINGS, str(directory), "1 0 4 127.0.0.1 4321"]
    document = yaml.safe_load((directory / SETTINGS).read_text())
    assert (document["model_name_or_path"], document["dataset_dir"]) == (ODD, ODD)
    assert (document["deepspeed"], document["output_dir"]) == (str(directory / DEEPSPEED), str(directory / "output"))


def test_a_script_for_several_nodes_asks_which_it_is(tmp_path: Path) -> None:
    script = write(workload(), run_files(directory=tmp_path, nodes=2))
    done = subprocess.run([str(script)], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "NODE_RANK: the number of this node, from 0" in done.stderr


# In the form that the source of LLaMA-Factory 0.9.5 gives them, for 3 steps of 2 ranks with 2 samples each: no run of it
# has ended here yet (its image library has no build without CUDA).
STATE: dict[str, Any] = {
    "global_step": 3,
    "num_input_tokens_seen": 1200,
    "log_history": [
        {"epoch": 0.5, "grad_norm": 1.0, "learning_rate": 0.0, "loss": 6.21, "num_input_tokens_seen": 400, "step": 1},
        {"epoch": 1.0, "grad_norm": 1.1, "learning_rate": 1e-4, "loss": 6.11, "num_input_tokens_seen": 800, "step": 2},
        {"epoch": 1.5, "grad_norm": 1.2, "learning_rate": 5e-5, "loss": 6.04, "num_input_tokens_seen": 1200, "step": 3},
        {"epoch": 1.5, "step": 3, "total_flos": 1.0, "train_loss": 6.12, "train_runtime": 4.0},
    ],
}
RESULTS = {"train_loss": 6.12, "train_runtime": 4.0, "train_samples_per_second": 3.0, "train_steps_per_second": 0.75}
POINTS = [(1, 1002.0, 6.21), (2, 1003.0, 6.11), (3, 1003.5, 6.04)]
LOG = "[INFO] trainable params: 20,185,088 || all params: 8,312,351,744 || trainable%: 0.2428\n"


def test_what_llamafactory_says_of_a_run() -> None:
    results = outcome(STATE, RESULTS, 1000.5, POINTS, LOG)
    assert (results.seconds, results.samples, results.tokens) == (4.0, 12, 1200)
    assert (results.losses, results.learning_rates) == ([6.21, 6.11, 6.04], [0.0, 1e-4, 5e-5])
    # The first from when its event file was opened, as training began.
    assert (results.step_seconds, results.ends) == ([1.5, 1.0, 0.5], [1002.0, 1003.0, 1003.5])
    assert (results.trainable, results.parameters) == (20_185_088, 8_312_351_744)


@pytest.mark.parametrize(
    ("state", "results", "points", "said"),
    [
        ({}, RESULTS, POINTS, "LLaMA-Factory's results lack 'log_history'"),
        (STATE, {}, POINTS, "LLaMA-Factory's results lack 'train_runtime'"),
        (STATE, RESULTS, POINTS[:1], "LLaMA-Factory logged 3 steps and wrote 1 of them to TensorBoard"),
        ({**STATE, "log_history": []}, RESULTS, [], "LLaMA-Factory logged 0 steps"),
    ],
)
def test_results_with_something_missing(state: Any, results: Any, points: Any, said: str) -> None:
    with pytest.raises(CannotJudge, match=said):
        outcome(state, results, 1000.5, points, LOG)


FAILED = """\
[INFO|2026-11-22 04:05:40] llamafactory.launcher:144 >> Initializing 2 distributed tasks at: localhost:52087
[rank0]: Traceback (most recent call last):
[rank0]:     raise ValueError("Video processor was not found, please check and update your model file.")
[rank0]: ValueError: Video processor was not found, please check and update your model file.
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n\
============================================================
  exitcode  : 1 (pid: 21899)
subprocess.CalledProcessError: Command '['torchrun', '--nnodes', '1']' returned non-zero exit status 1.
"""


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (FAILED, "ValueError: Video processor was not found, please check and update your model file."),
        ("a\nFileNotFoundError: [Errno 2] No such file or directory: 'torchrun'\n", "FileNotFoundError: [Errno 2] No such file or directory: 'torchrun'"),
        ("llamafactory-cli: not found\n\n", "llamafactory-cli: not found"),
        ("", "the log is empty"),
    ],
)  # fmt: skip
def test_the_error_is_the_rank_s_and_not_that_of_who_started_it(log: str, message: str) -> None:
    # As version 0.9.5 under torchrun prints it: the reason is followed by two reports that a process failed.
    assert last_error(log) == message


def test_a_temporary_directory_with_too_long_a_path_has_its_cure() -> None:
    assert "set TMPDIR to a short path" in cure(FAILED + "OSError: AF_UNIX path too long\n")
    assert "TMPDIR" not in cure(FAILED)
