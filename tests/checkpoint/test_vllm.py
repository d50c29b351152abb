"""`--load-format tunetool` with vLLM itself, on CPUs: what each of its ranks holds at the end has the same bits."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dist
import environments

pytestmark = pytest.mark.slow

CHILD = Path(__file__).with_name("vllm_child.py")
SHM = Path("/dev/shm")
SECONDS = 900
"""Of one start of vLLM; with two ranks it took 310 beside a load of 8."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """vLLM's interpreter, and where tunetool's wheel is installed for it, whose entry point it finds."""
    wheels, packages = tmp_path_factory.mktemp("wheel"), tmp_path_factory.mktemp("packages")
    with environments.vllm() as directory:
        interpreter = directory / "bin/python"
        dist.build(wheels, ["wheel"])
        environments.pip(interpreter, "--no-deps", "--target", str(packages), *map(str, wheels.iterdir()))
        yield interpreter, packages


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Random weights of an architecture, in several files."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    def make(name: str) -> Path:
        torch.manual_seed(5)
        common = {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }
        experts = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}
        made = {
            "llama": lambda: LlamaForCausalLM(LlamaConfig(**common)),
            "qwen3-moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**common, **experts, tie_word_embeddings=True)),
        }[name]()
        directory = tmp_path_factory.mktemp(name)
        made.to(torch.bfloat16).save_pretrained(directory, max_shard_size="900KB")
        assert len(list(directory.glob("*.safetensors"))) > 2
        return directory

    return make


def started(
    python: tuple[Path, Path], model: Path, load_format: str, extra: object, ranks: int, directory: Path
) -> subprocess.CompletedProcess[str]:
    """One run of vLLM; each rank's tensors are in ``directory`` then."""
    interpreter, packages = python
    directory.mkdir()
    before = set(SHM.iterdir())
    with tempfile.TemporaryDirectory(prefix="tunetool-") as temporary:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "LOCAL_"))},
            "PATH": os.pathsep.join([str(interpreter.parent), os.environ.get("PATH", os.defpath)]),
            "PYTHONPATH": str(packages),
            "TMPDIR": temporary,
            "HF_HOME": temporary,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # a function of the child is sent to the ranks
            "VLLM_CACHE_ROOT": str(packages.with_name("cache")),  # what it found out of the models, for all tests
            "VLLM_CONFIG_ROOT": temporary,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if ranks == 1 else "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [str(interpreter), str(CHILD), str(model), load_format, json.dumps(extra), str(ranks), str(directory)]
        done = subprocess.run(
            command, cwd=temporary, env=environment, capture_output=True, text=True, check=False, timeout=SECONDS
        )
    for left in set(SHM.iterdir()) - before:
        if left.name.startswith(("psm_", "sem.mp-")):  # vLLM's own, which it says it leaves
            left.unlink()
    return done


@pytest.mark.parametrize(("name", "ranks"), [("llama", 1), ("llama", 2), ("qwen3-moe", 1)])
def test_every_rank_holds_the_same_bits(
    python: tuple[Path, Path], model: Callable[[str], Path], name: str, ranks: int, tmp_path: Path
) -> None:
    weights = model(name)
    tokens = {}
    for load_format, extra in (("auto", {}), ("tunetool", {"threads": 3, "ahead_bytes": 300_000})):
        done = started(python, weights, load_format, extra, ranks, tmp_path / load_format)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        (tokens[load_format],) = [line for line in done.stdout.splitlines() if line.startswith("tokens:")]
        said = done.stdout + done.stderr
        # It was tunetool that read, in each rank.
        assert said.count(f"`{weights}`: ") == (ranks if load_format == "tunetool" else 0)
    assert tokens["auto"].count(",") == 7
    assert tokens["tunetool"] == tokens["auto"]
    for rank in range(ranks):
        ours, theirs = (tmp_path / each / f"{rank}.safetensors" for each in ("tunetool", "auto"))
        assert ours.read_bytes() == theirs.read_bytes()
    shutil.rmtree(weights)


def test_a_wrong_option_ends_vllm_by_its_name(
    python: tuple[Path, Path], model: Callable[[str], Path], tmp_path: Path
) -> None:
    done = started(python, model("llama"), "tunetool", {"thread": 4}, 1, tmp_path / "out")
    assert done.returncode != 0
    assert "`thread` is no option of the load format tunetool; did you mean `threads`?" in done.stdout + done.stderr
