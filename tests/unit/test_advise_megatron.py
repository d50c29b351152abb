"""`tunetool advise io --megatron`: a launch of Megatron-LM that has the job's shape, and starts as bash."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

import advised
from advised import refused

run = partial(advised.run, "io")
NAMED = {"MEGATRON": "/m", "TOKENIZER": "/tok", "DATA": "/data/text", "CHECKPOINTS": "/c k"}
NODE = {"NODE_RANK": "1", "MASTER_ADDR": "node1"}


def started(script: str, tmp_path: Path, **environment: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What the script gives to torchrun."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    torchrun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-s"], input=script, env={"PATH": path, **environment}, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines(), done


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_job_of_eight_ranks_for_each_copy_has_the_models_own_shape(tmp_path: Path) -> None:
    script = run("--model", "70b", "--tp", "4", "--pp", "2", "--dp", "4", "--batch", "128", "--megatron", "-")
    words, done = started(script, tmp_path, **NAMED, **NODE)
    assert done.returncode == 0, done.stderr
    expected = {
        "--nnodes": "4",
        "--nproc-per-node": "8",
        "--node-rank": "1",
        "--tensor-model-parallel-size": "4",
        "--pipeline-model-parallel-size": "2",
        "--num-layers": "80",
        "--hidden-size": "8192",
        "--ffn-hidden-size": "28672",
        "--num-attention-heads": "64",
        "--num-query-groups": "8",
        "--seq-length": "4096",
        "--global-batch-size": "128",
        "--rotary-base": "500000",
        "--save": "/c k",
        "--ckpt-format": "torch_dist",
    }
    assert {flag: value(words, flag) for flag in expected} == expected
    # Without the second, Megatron-LM saves synchronously.
    assert {"--async-save", "--use-persistent-ckpt-worker", "--sequence-parallel"} < set(words)
    assert "/m/pretrain_gpt.py" in words


def test_the_script_names_what_is_not_set_and_is_clean_shell(tmp_path: Path) -> None:
    script = run("--model", "llama-tiny", "--pp", "2", "--megatron", "-")
    _, done = started(script, tmp_path, **{**NAMED, "TOKENIZER": ""})
    assert done.returncode != 0
    assert "TOKENIZER: a tokenizer of the model" in done.stderr
    words, done = started(script, tmp_path, **NAMED)
    assert done.returncode == 0, done.stderr
    assert value(words, "--nnodes") == "1"
    assert "--sequence-parallel" not in words
    assert "--group-query-attention" not in words


def test_the_script_goes_into_a_file_beside_the_table(tmp_path: Path) -> None:
    path = tmp_path / "pretrain.sh"
    assert "a checkpoint" in run("--model", "70b", "--tp", "8", "--megatron", str(path))
    assert path.read_text().startswith("#!/bin/bash\n# Pretraining of 70b by Megatron-LM: TP 8, PP 1, DP 1")


def test_a_models_name_cannot_become_a_command(tmp_path: Path) -> None:
    folder = tmp_path / "a\nb $(id)"
    folder.mkdir()
    config = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 128, "vocab_size": 500}))
    script = run("--model", str(folder / "config.json"), "--megatron", "-")
    assert script.splitlines()[1].startswith(f"# Pretraining of {shlex.quote('a b $(id)')} by Megatron-LM")
    words, done = started(script, tmp_path, **NAMED)
    assert (done.returncode, "--add-qkv-bias" in words) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tp", "16"), "`--tp 16` does not divide the 8 key-value heads of `70b`"),
        (("--pp", "3"), "`--pp 3` does not divide the 80 layers of `70b`"),
        (("--fsdp", "8"), "has no `--fsdp` and no `--ep`"),
        (("--dp", "9"), "9 ranks do not fill nodes of 8 GPUs"),
        (("--sample", "1001B"), "is no whole number of tokens"),
        (("--json", "-"), "both want standard output"),
    ],
)
def test_what_megatron_would_refuse_is_refused_before(arguments: tuple[str, ...], words: str) -> None:
    with refused(words):
        run("--model", "70b", *arguments, "--megatron", "-")


def test_a_model_of_another_family_is_refused() -> None:
    with refused("mixtral-8x7b"):
        run("--model", "mixtral-8x7b", "--megatron", "-")
