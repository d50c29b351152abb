"""Does `tunetool tune` choose as well as trying everything, in a tenth of `ds_nvme_tune`'s time?

    .venv/bin/python perf/tune.py --target DIR [--rounds 15] [--budget 60s] [--space FILE] [--device cuda]

Before the rounds, each timed as a user would see it: `tune` with its default budget, over the same space
`ds_nvme_tune` in an empty log directory (it trusts logs that it finds), once its op is compiled (TORCH_EXTENSIONS_DIR
says where), and `tunetool tune --exhaustive`. Then, round after round, what each of these chose for reads and for
writes, tune's choice for the mix of both, and the default, by `tunetool bench ds-io`, all with ds_nvme_tune's own
default transfer. The time is a single sample, which decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from against_ds_io import WAYS, bench_ds_io, ds_io, of_deepspeed
from rounds import Arms, Call, Samples, program, sample, timed, tunetool
from tunetool.tune.settings import DEFAULTS, SWEEP, AioSettings, from_block, read_space

THEIRS = "400M"


def sweep(folder: Path, space: Mapping[str, Any], gpu: bool) -> tuple[AioSettings, float]:
    """What ds_nvme_tune chose from that space, which has other names there, and its seconds."""
    config = {
        "block_size": [f"{size // 2**10}K" if size % 2**20 else f"{size // 2**20}M" for size in space["block_size"]],
        "queue_depth": list(space["queue_depth"]),
        "sequential_requests": [not value for value in space["overlap_events"]],
        "single_submit": list(space["single_submit"]),
        "io_parallel": list(space["intra_op_parallelism"]),
    }
    (path := folder / "sweep.json").write_text(json.dumps(config))
    # DeepSpeed's loader compiles anew where the op was built by another checkout: minutes that are not the sweep's.
    ds_io(folder, "--io_size", "16M")
    words = ["--nvme_dir", folder / "data", "--log_dir", folder / "logs", "--sweep_config", path, *["--gpu"] * gpu]
    printed, seconds, _ = timed(partial(of_deepspeed, "ds_nvme_tune", r"^\{.*^\}", *words))
    best = json.loads(printed[0])["aio"]
    single, overlap = (best[name] == "true" for name in ("single_submit", "overlap_events"))
    return AioSettings(best["block_size"], best["queue_depth"], best["num_threads"], single, overlap), seconds


def block(measurement: dict[str, Any]) -> AioSettings:
    return from_block({name: measurement["parameters"][name] for name in DEFAULTS.block()})


def prepare(call: Call) -> Arms:
    asked, folder, gpu = call.asked, call.folder, call.asked.device == "cuda"
    (folder / "data").mkdir()
    space: dict[str, Any] = {name: [value] for name, value in DEFAULTS.block().items()}
    space |= read_space(Path(asked.space)) if asked.space else SWEEP
    tune = ["tune", "--target", asked.target, "--runs-dir", folder / "runs", "-o", folder / "aio.json", "--allow-busy"]
    tune += ["--device", asked.device, "--mix", "read=1,write=1", *(["--space", asked.space] if asked.space else [])]
    found, ours, _ = timed(partial(tunetool, *tune, "--budget", asked.budget))
    chosen = {
        f"tune, {each['labels']['goal']}": block(each) for each in found["measurements"] if each["figure"] == "gain"
    }
    chosen["ds_nvme_tune"], theirs = sweep(folder, space, gpu)
    tried = tunetool(*tune, "--exhaustive", "--io-size", THEIRS)["measurements"]
    for way in WAYS:
        blocks = [each for each in tried if each["labels"].get("block") and each["labels"]["direction"] == way]
        chosen[f"exhaustive, {way}"] = block(max(blocks, key=lambda each: float(each["value"])))
    chosen["default"] = DEFAULTS
    print("\n".join(f"{name}: {settings}" for name, settings in chosen.items()), flush=True)

    def turn(settings: AioSettings, way: str) -> Samples:
        shape: list[object] = ["--io_size", THEIRS, "--block_size", settings.block_size, *WAYS[way]]
        shape += ["--queue_depth", settings.queue_depth, "--io_parallel", settings.intra_op_parallelism]
        shape += ["--single_submit"] * settings.single_submit + ["--gpu"] * gpu
        speed = bench_ds_io(folder, *shape, *["--sequential_requests"] * (not settings.overlap_events))
        # The same settings are measured once, whoever chose them.
        for name in [name for name, each in chosen.items() if each == settings]:
            yield sample("bandwidth", speed, engine=name, direction=way)

    once = iter([sample("share", ours / theirs, part="seconds, of ds_nvme_tune's")])
    different = dict.fromkeys(chosen.values())
    arms = {f"{each}, {way}": partial(turn, each, way) for each in different for way in WAYS}
    return {"time": lambda: list(once), **arms}


if __name__ == "__main__":
    program(prepare, budget="60s", space="", device="cpu")
