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
from calls import call
from tunetool.errors import UsageProblem

run = partial(advised.run, "io")
NAMED = {"MEGATRON": "/m", "TOKENIZER": "/tok", "DATA": "/data/text", "CHECKPOINTS": "/c k"}
NODE = {"NODE_RANK": "1", "MASTER_ADDR": "node1"}


def started(script: str, tmp_path: Path, **environment: str) -> tuple[list[str], subprocess.CompletedProcess[str]]:
    """What the script gives to torchrun."""
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    torchrun.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = call("bash", "-s", input=script, env={"PATH": path, **environment})
    return done.stdout.splitlines(), done


def launched(tmp_path: Path, config: dict[str, object], *arguments: str) -> list[str]:
    """What the script of the model with this config.json gives to torchrun."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    words, done = started(run("--model", str(path), *arguments, "--megatron", "-"), tmp_path, **NAMED)
    assert done.returncode == 0, done.stderr
    return words


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_the_job_of_eight_ranks_a_copy_has_the_models_shape(tmp_path: Path) -> None:
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
        "--rope-scaling-factor": "8.0",
        "--norm-epsilon": "1e-05",
        "--max-position-embeddings": "131072",
        "--padded-vocab-size": "128256",
        "--save": "/c k",
        "--ckpt-format": "torch_dist",
    }
    assert {flag: value(words, flag) for flag in expected} == expected
    # Without the second, Megatron-LM saves synchronously.
    assert {"--async-save", "--use-persistent-ckpt-worker", "--sequence-parallel", "--use-rope-scaling"} < set(words)
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


LLAMA = {
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_hidden_layers": 4,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
}
LLAMA_3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    ("config", "said", "unsaid"),
    [
        (
            {},
            "--rotary-base 500000;--norm-epsilon 1e-06;--rotary-percent 1.0;--disable-bias-linear",
            "--use-rope-scaling",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 32.0, **LLAMA_3}},
            "--use-rope-scaling;--rope-scaling-factor 32.0;--rotary-base 500000",
            "--add-qkv-bias",
        ),
        # As transformers 5 writes it.
        (
            {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1000000}},
            "--rotary-base 1000000",
            "--use-rope-scaling",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "--rotary-seq-len-interpolation-factor 4",
            "--use-rope-scaling",
        ),
        ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "--rotary-percent 0.75", "--window-size"),
        ({"model_type": "phi3", "rms_norm_eps": None}, "--norm-epsilon 1e-05", "--window-size"),
        ({"model_type": "mistral", "sliding_window": 1024}, "--window-size 1023,0", "--add-qkv-bias"),
        # A window that is wider than the sequence hides nothing.
        ({"model_type": "mistral", "sliding_window": 4096}, "--seq-length 4096", "--window-size"),
        (
            {"model_type": "qwen2", "sliding_window": 1024, "use_sliding_window": False},
            "--add-qkv-bias",
            "--window-size",
        ),
        ({"model_type": "qwen3", "head_dim": 128}, "--kv-channels 128;--qk-layernorm", "--add-qkv-bias"),
        ({"attention_bias": True, "mlp_bias": True}, "--swiglu", "--disable-bias-linear"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1", "--init-method-std"),
        ({"initializer_range": 0.01}, "--init-method-std 0.01;--attention-dropout 0.0", "--window-size"),
        (
            {"tie_word_embeddings": True},
            "--max-position-embeddings 131072",
            "--untie-embeddings-and-output-weights",
        ),
    ],
)
def test_what_the_config_says_beside_sizes_is_said_by_flags(
    config: dict[str, object], said: str, unsaid: str, tmp_path: Path
) -> None:
    words = launched(tmp_path, {**LLAMA, **config})
    line = " ".join(words) + " "
    assert [flag for flag in said.split(";") if f" {flag} " not in line] == []
    assert unsaid not in words


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (
            {"model_type": "phi3", "rope_scaling": {"type": "longrope", "short_factor": [1.0]}},
            "`rope_type` is `longrope`",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "`rope_type` is `yarn`"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, **LLAMA_3, "low_freq_factor": 2}},
            "`low_freq_factor`",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 1.5}}, "`factor` is `1.5`"),
        ({"rope_scaling": "llama3"}, "`rope_scaling` is `llama3`"),
        ({"rope_theta": 10000.5}, "`rope_theta` is `10000.5`"),
        ({"rope_theta": "many"}, "rope_theta"),
        ({"partial_rotary_factor": 1.5}, "`partial_rotary_factor` is `1.5`"),
        ({"hidden_act": "gelu"}, "`hidden_act` is `gelu`"),
        ({"attention_bias": True}, "`attention_bias` is `True`"),
        ({"mlp_bias": True}, "`mlp_bias` is `True`"),
        ({"model_type": "phi3", "lm_head_bias": True}, "`lm_head_bias` is `True`"),
        ({"model_type": "phi3", "resid_pdrop": 0.1}, "`resid_pdrop` is `0.1`"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
            "max_window",
        ),
        (
            {"model_type": "mistral", "sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
            "layer_types",
        ),
        ({"max_position_embeddings": 2048}, "give `--sample 8192B` or less"),
    ],
)
def test_what_no_flag_says_is_refused(config: dict[str, object], named: str, tmp_path: Path) -> None:
    with pytest.raises(UsageProblem) as caught:
        launched(tmp_path, {**LLAMA, **config})
    assert named in caught.value.message + str(caught.value.hint)


def test_the_vocabulary_is_the_models_own_and_not_the_tokenizers(tmp_path: Path) -> None:
    assert value(launched(tmp_path, LLAMA), "--padded-vocab-size") == "1000"
    # The ranks of --tp share its rows evenly.
    assert value(launched(tmp_path, {**LLAMA, "vocab_size": 1001}, "--tp", "4"), "--padded-vocab-size") == "1004"


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


def test_gpt_3_has_a_launch_of_its_own_shape(tmp_path: Path) -> None:
    job = ("--model", "175b", "--tp", "8", "--pp", "16", "--batch", "1536")
    script = run(*job, "--sample", "8KiB", "--megatron", "-")
    words, done = started(script, tmp_path, **NAMED, **NODE)
    assert done.returncode == 0, done.stderr
    expected = {
        "--num-layers": "96",
        "--hidden-size": "12288",
        "--ffn-hidden-size": "49152",
        "--num-attention-heads": "96",
        "--kv-channels": "128",
        "--seq-length": "2048",
        "--max-position-embeddings": "2048",
        "--position-embedding-type": "learned_absolute",
        "--normalization": "LayerNorm",
        "--padded-vocab-size": "50264",
    }
    assert {flag: value(words, flag) for flag in expected} == expected
    # Its biases, its one embedding and its GELU are what Megatron-LM takes without a flag.
    others = {"--disable-bias-linear", "--untie-embeddings-and-output-weights", "--swiglu", "--group-query-attention"}
    assert not others & set(words)
    # It has half as many positions as a sample has tokens by itself, and the hint is what works.
    with refused("4096 tokens, and `175b` has 2048 positions"):
        run(*job, "--megatron", "-")
