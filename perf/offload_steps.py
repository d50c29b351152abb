"""Does a ds_config train, and what is its `aio` block worth per step?

    .venv/bin/python perf/offload_steps.py --config ds_config.json --model llama-tiny --processes 2
    .venv/bin/python perf/offload_steps.py --config ds_config.json --model config.json --against default --steps 4

Trains a randomly initialised decoder on one made-up batch: no downloads, and the loss must fall. With `--against` (a
JSON file with an `aio` block, or `default`: DeepSpeed's own) the steps go in turns through handles with the config's
block and with the other one, in the same processes on the same swap files: A B, B A, A B ... Starting anew for each
block would write all states again. With `--reference` the same is also trained from the same seed with nothing
offloaded, and the losses must agree: DeepSpeed does not notice when what it swapped comes back wrong. A config without
an optimizer (ZeRO-Inference) makes forward passes only.

Exit status: 0 if it trains, 1 if the loss did not fall or differs from the reference.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tunetool.measure.aio import need, probe
from tunetool.measure.worker import die_with_parent

PATIENCE = 3600.0
OPS = ("async_io", "cpu_adam")
NEAR = 0.005
"""How far from the reference a loss may lie, as a part of it: the CPU's Adam rounds otherwise than torch's."""
OFFLOADS = ("offload_optimizer", "offload_param")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--model", default="llama-tiny", help="llama-tiny, llama2-7b, 70b or a config.json")
    parser.add_argument("--steps", type=int, default=4, help="that are timed, for each block")
    parser.add_argument(
        "--warm-ups", type=int, default=2, help="before them: DeepSpeed learns the order of the modules"
    )
    parser.add_argument("--tokens", type=int, default=128, help="in a sequence")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--against", help="default, or a JSON file with an aio block")
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    result = launch(options, options.config, options.against)
    losses = result["losses"]
    falls = losses[-1] < losses[0] if result["trains"] else max(losses) - min(losses) <= NEAR * losses[0]
    agrees = True
    if options.reference:
        result["reference"] = reference(options)
        pairs = zip(result["losses"], result["reference"], strict=False)
        agrees = all(abs(ours - theirs) <= NEAR * theirs for ours, theirs in pairs)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    print_result(result)
    if not falls:
        print("the loss does not fall" if result["trains"] else "passes over the same tokens differ")
    if not agrees:
        print("the losses are not those of the run without offload")
    return 0 if falls and agrees else 1


def launch(options: argparse.Namespace, config: Path, against: str | None) -> dict[str, Any]:
    """Train in new processes; returns the result that rank 0 wrote."""
    installed = probe(Path(sys.executable), os.environ)
    for op in OPS:
        need(installed, op)
    ops = [*OPS, *(["utils"] if installed.has("utils") else [])]
    files = {op: [str(installed.find(part)) for part in installed.parts(op)] for op in ops}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(options.processes), str(Path(__file__).with_name("offload_worker.py"))]
        command += ["--config", str(config), "--json", str(answer), *(["--against", against] if against else [])]
        for name in ("model", "steps", "warm_ups", "tokens"):
            command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
        threads = max(1, len(os.sched_getaffinity(0)) // options.processes)
        environment = {
            "OMP_NUM_THREADS": str(threads),
            # On some virtual machines the processor reports AMX, but its instructions crash.
            "ONEDNN_MAX_CPU_ISA": "AVX512_CORE",
            "PYTHONWARNINGS": "ignore",
            **os.environ,
            # DeepSpeed looks for ninja on PATH even when nothing is to be compiled.
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "TUNETOOL_OPS": json.dumps(files),
        }
        began = time.monotonic()
        done = subprocess.run(
            command, env=environment, check=False, timeout=PATIENCE, stdout=sys.stderr, preexec_fn=die_with_parent
        )
        if done.returncode != 0 or not answer.exists():
            raise SystemExit(f"error: training by `{config}` ended with exit status {done.returncode}")
        result: dict[str, Any] = json.loads(answer.read_text())
        result["seconds_in_all"] = round(time.monotonic() - began, 1)
        return result


def reference(options: argparse.Namespace) -> list[float]:
    """Losses of the same run with nothing offloaded."""
    document = json.loads(options.config.read_text())
    for name in OFFLOADS:
        document["zero_optimization"].pop(name, None)
    if "optimizer" in document:
        document["optimizer"]["params"]["torch_adam"] = True
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "reference.json"
        config.write_text(json.dumps(document))
        losses: list[float] = launch(options, config, None)["losses"]
        return losses


def print_result(result: dict[str, Any]) -> None:
    print(f"{result['model']}: {result['parameters'] / 1e9:.3g} billion parameters, {result['world']} process(es)")
    swapped = sum(result["swap_files"].values())
    print(f"swap files: {swapped / 1e9:.3g} GB in {len(result['swap_files'])} folder(s)")
    print("loss: " + " ".join(f"{loss:.4f}" for loss in result["losses"]))
    if "reference" in result:
        print("without offload: " + " ".join(f"{loss:.4f}" for loss in result["reference"]))
    for name, block in result["blocks"].items():
        seconds = result["seconds"][name]
        shown = " ".join(f"{value:.2f}" for value in seconds)
        print(f"{name}: median step {statistics.median(seconds):.2f} s of {shown}; {json.dumps(block)}")
    if len(result["blocks"]) == 2:
        ours, theirs = (statistics.median(result["seconds"][name]) for name in result["blocks"])
        print(f"a step under the config's block takes {ours / theirs:.3f} of one under the other")


if __name__ == "__main__":
    sys.exit(main())
