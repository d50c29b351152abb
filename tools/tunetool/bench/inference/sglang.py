"""SGLang's offline benchmark with ZeRO-Inference: its launch lines, and their runs where it is installed.

A branch of SGLang by DeepSpeed's authors has ZeRO-Inference; the released SGLang does not know its option.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from tunetool.bench.defaults import SGLANG_BATCH
from tunetool.bench.inference.preflight import Plan
from tunetool.bench.inference.request import Request
from tunetool.bench.inference.samples import SCRIPTS, Absent, Mode
from tunetool.measure import worker
from tunetool.measure.aio import Probe
from tunetool.measure.worker import STUCK_HINT, Failed, describe_end
from tunetool.node.common.commands import captured
from tunetool.tune.configs import render as render_config

TEMPLATES = Path(__file__).resolve().parents[2] / "templates/launch"
OPTION = "--zero-inference-config"
SOURCE = "git+https://github.com/tjruwase/sglang@zero-inference#subdirectory=python"
PROMPTS = "sglang-prompts.json"
_BY: Mapping[Mode, str] = {"aio": "libaio (AIO)", "gds": "GPUDirect Storage (GDS)"}
_PARTS: Mapping[Mode, str] = {"aio": "async_io", "gds": "gds"}
_HELP_SECONDS = 180.0
_ANY_MODEL = '"${MODEL:?the directory of a model}"'
"""Where the call names no directory."""


def names(mode: Mode) -> tuple[str, str, str]:
    """Script, DeepSpeed's configuration and result."""
    return SCRIPTS[mode], f"sglang-{mode}.json", f"sglang-{mode}.result.jsonl"


def files(request: Request, planned: Plan, mode: Mode, swap: Path) -> dict[str, str]:
    """The texts of script, configuration and prompts, by name; swap files go to ``swap``."""
    script, config, result = names(mode)
    environment = jinja2.Environment(  # noqa: S701  (a shell script: each value has its own filter)
        loader=jinja2.FileSystemLoader(TEMPLATES), undefined=jinja2.StrictUndefined, keep_trailing_newline=True
    )
    environment.filters["sh"] = lambda value: shlex.quote(str(value))
    text = environment.get_template("sglang.sh.j2").render(
        by=_BY[mode],
        install=install_line(),
        python=sys.executable,
        model=shlex.quote(str(Path(request.model).resolve())) if Path(request.model).is_dir() else _ANY_MODEL,
        prompts=PROMPTS,
        prompt=request.prompt,
        new_tokens=request.new_tokens,
        batch=SGLANG_BATCH,
        seed=request.seed,
        config=config,
        result=result,
    )
    return {script: text, config: json.dumps(configuration(planned, mode, swap), indent=2) + "\n", PROMPTS: prompts()}


def configuration(planned: Plan, mode: Mode, swap: Path) -> dict[str, Any]:
    """DeepSpeed's configuration for SGLang, whose layers have fused tensors: query, key and value, and gate and up."""
    document = render_config(planned.config)
    decoder = planned.described.decoder
    offload = document["zero_optimization"]["offload_param"]
    fused = max(2 * decoder.intermediate, (decoder.heads + 2 * decoder.kv_heads) * decoder.head_dim) * decoder.hidden
    offload |= {"nvme_path": str(swap), "buffer_size": max(offload["buffer_size"], fused), "pin_memory": True}
    document["train_batch_size"] = document["train_micro_batch_size_per_gpu"] = 1
    document["aio"] = {**document["aio"], "use_gds": mode == "gds"}
    return document


def prompts() -> str:
    """Conversations for its random data set, which cuts them to length; without a file it downloads some."""
    words = " ".join(f"word{number}" for number in range(40))
    turn = [{"from": "human", "value": words}, {"from": "gpt", "value": words}]
    return json.dumps([{"conversations": turn} for _ in range(2 * SGLANG_BATCH)])


def install_line() -> str:
    """What installs it."""
    return shlex.join([sys.executable, "-m", "pip", "install", f"sglang[all] @ {SOURCE}"])


def absent(request: Request, planned: Plan, mode: Mode, installed: Probe) -> Absent | None:
    """Why it cannot run here; None where it can."""
    if importlib.util.find_spec("sglang") is None:
        return Absent(f"sglang is not installed in `{sys.executable}`", f"`{install_line()}`")
    if not planned.gpu:
        return Absent("SGLang's ZeRO-Inference needs a GPU", "run it on a node that has one")
    if not installed.has(_PARTS[mode]):
        return Absent(f"DeepSpeed's op `{_PARTS[mode]}` is not built", f"`tunetool build-ops --op {_PARTS[mode]}`")
    if not any(Path(request.model).glob("*.safetensors")):
        return Absent("SGLang reads the weights and the tokenizer of a model", "`--model DIR` with a whole model")
    if not knows_option():
        return Absent(f"the SGLang that is installed does not know `{OPTION}`", f"`{install_line()}`")
    return None


def knows_option() -> bool:
    """Whether the installed SGLang is the branch with ZeRO-Inference."""
    command = [sys.executable, "-m", "sglang.bench_offline_throughput", "--help"]
    try:
        return OPTION in captured(command, _HELP_SECONDS).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False


def run(directory: Path, mode: Mode, environment: Mapping[str, str], seconds: float, tick: Any) -> dict[str, Any]:
    """Its result, by the script in ``directory``. Raises ``Failed``."""
    script, _, result = names(mode)
    what = f"SGLang's benchmark ({mode})"
    process = worker.start(["/bin/sh", str(directory / script)], environment, directory)
    try:
        done = worker.finish(process, seconds, tick)
    except worker.Overdue as left:
        raise Failed(f"{what} did not end within {seconds:.0f} s{left}", STUCK_HINT) from None
    if done.code != 0:
        raise Failed(*describe_end(what, done.code, done.stderr), raw=done.stderr)
    try:
        answer: dict[str, Any] = json.loads((directory / result).read_text().splitlines()[-1])
        if not float(answer["output_throughput"]) > 0:
            raise ValueError(answer["output_throughput"])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise Failed(f"{what} left no result: {error}", raw=done.stdout[-4000:]) from None
    return answer
