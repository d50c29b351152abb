"""The proof that an environment works: its Python runs checks, each in a process of its own with a time limit."""

from __future__ import annotations

import hashlib
import json
import os
import socket
from typing import Any, Mapping, Optional, Sequence

from ..common.commands import in_c_locale
from . import proof_child
from .children import Ended, call, call_all

PACKAGES = (
    "torch",
    "deepspeed",
    "tunetool",
    "transformers",
    "peft",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "lightning",
)
"""Packages whose versions are in the manifest."""
MODULES = ("torch", "deepspeed", "transformers", "peft", "accelerate", "tokenizers", "safetensors", "numpy", "PIL")
OWN_MODULES = ("tunetool.checkpoint", "tunetool.training")
BEFORE: Mapping[str, Sequence[str]] = {"async_io": ("pin_memory",), "gds": ("pin_memory",)}
"""Libraries that newer versions of DeepSpeed load before an op."""
_ANSWER_SECONDS = 60.0


def source() -> str:
    """The source of the program of checks, from the loader: Ansible runs modules out of a zip file."""
    loader: Any = proof_child.__loader__
    text: str = loader.get_source(proof_child.__name__)
    return text


def fingerprint() -> str:
    """Hash of everything that the proof checks."""
    return hashlib.sha256(repr((source(), PACKAGES, MODULES, OWN_MODULES)).encode()).hexdigest()


def clean_environment(python: str, given: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for its programs: without the caller's Python, and its own programs first on PATH."""
    dropped = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_PRELOAD")
    kept = {name: value for name, value in given.items() if name not in dropped}
    kept["PATH"] = os.path.dirname(python) + ":" + given.get("PATH", os.defpath) + ":/usr/sbin:/sbin"
    return in_c_locale(kept)


def ask_versions(python: str) -> dict[str, Any]:
    """The versions of Python and of the packages, quickly. Raises ``Ended``."""
    return _ask(
        python, "versions", {"packages": list(PACKAGES)}, {}, _ANSWER_SECONDS, "`%s` does not answer" % python, ""
    )


def prove(
    python: str,
    trainers: Sequence[str],
    with_tunetool: bool,
    ops: Mapping[str, str],
    ops_directory: str,
    accelerator: str,
    seconds: float,
    registered: bool = False,
) -> dict[str, Any]:
    """Import everything, load each op that is ready, train one step over ranks. Returns what torch sees.

    ``with_tunetool``: tunetool is part of the environment. ``registered``: DeepSpeed takes the ops as installed ones.
    Raises ``Ended`` with what failed.
    """
    hint = "it is not used; %s" % (
        "remove `%s` to have it built anew" % os.path.dirname(os.path.dirname(python))
        if with_tunetool
        else "mend `%s`" % python
    )
    variables = {"TORCH_EXTENSIONS_DIR": ops_directory}
    modules = [*MODULES, *(OWN_MODULES if with_tunetool else ()), *(name for name in trainers if name != "deepspeed")]
    facts = _ask(
        python, "imports", {"modules": modules}, variables, seconds, "the environment cannot be imported", hint
    )
    if accelerator == "cuda" and not facts["gpus"]:
        raise Ended(
            "torch in `%s` sees no GPU" % python,
            "it was built for %s. hint: see `nvidia-smi`, or set `training_environment_accelerator: cpu`"
            % ("CUDA " + facts["cuda"] if facts["cuda"] else "a CPU"),
        )
    for op, status in ops.items():
        if status == "ready":
            files = op_files(op, ops_directory)
            what = "DeepSpeed's op `%s` cannot be loaded" % op
            _ask(
                python,
                "load",
                {"files": files},
                variables,
                seconds,
                what,
                "remove `%s`, it is built anew" % ops_directory,
            )
    ready = [op for op, status in ops.items() if status == "ready"]
    if ready and registered:
        _ask(python, "loader", {"ops": ready}, variables, seconds, "DeepSpeed does not take its compiled ops", hint)
    gpus = int(facts["gpus"]) if accelerator == "cuda" else 0
    if gpus:
        _ranks(python, "nccl", gpus, variables, seconds, hint)
    if gpus < 2:
        _ranks(python, "gloo", 2, variables, seconds, hint)
    return facts


def op_files(op: str, ops_directory: str) -> list[str]:
    """The compiled files of an op, in the order in which they must be loaded."""
    names = [*BEFORE.get(op, ()), op]
    files = [os.path.join(ops_directory, name, name + ".so") for name in names]
    return [path for path in files if os.path.exists(path) or path == files[-1]]


def _ranks(python: str, backend: str, ranks: int, variables: Mapping[str, str], seconds: float, hint: str) -> None:
    """Run a training step and an all-reduce over ``ranks`` processes."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    commands = []
    for rank in range(ranks):
        environment = {
            **clean_environment(python),
            **variables,
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks)},
        }
        if backend == "gloo":
            environment.update({"DS_ACCELERATOR": "cpu", "GLOO_SOCKET_IFNAME": "lo"})
        commands.append(([python, "-c", source(), "step", json.dumps({"backend": backend})], environment))
    call_all(commands, seconds, "DeepSpeed cannot train over %d ranks (%s)" % (ranks, backend), hint)


def _ask(
    python: str, work: str, order: Mapping[str, Any], variables: Mapping[str, str], seconds: float, what: str, hint: str
) -> dict[str, Any]:
    argv = [python, "-c", source(), work, json.dumps(order)]
    said = call(argv, {**clean_environment(python), **variables}, seconds, what, hint)
    answer: Optional[dict[str, Any]] = json.loads(said.strip().splitlines()[-1])
    return answer or {}
