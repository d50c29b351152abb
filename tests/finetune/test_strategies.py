"""`tunetool bench strategies` on this machine, and predicted against real traffic of DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from tunetool.advise.qwen2_5_vl import CONFIGURATIONS
from tunetool.training.workload import Workload

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from tunetool import record as records
from tunetool.advise.zero_steps import traffic
from tunetool.bench.strategies.job import job
from tunetool.launch.local import run_ranks
from tunetool.record import Record
from waiting import PATIENCE

CASES = (
    "2:lora:0:0:0",
    "2:full:0:0:0",
    "3:lora:50000000:1000000000:1000000000",
    # So few parameters are kept that the backward pass must gather again.
    "3:lora:300000:600000:0",
    "3:full:100000:1000000:500000",
)


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[str, int]]]:
    """The collectives of one step on two ranks, by case."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "config.json").write_text(json.dumps(CONFIGURATIONS["tiny"]))
    file = folder / "counted.jsonl"
    environment = {**os.environ, "TUNETOOL_COUNTED": str(file), "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    program = [str(Path(__file__).with_name("zero_collectives.py")), str(folder), *CASES]
    run_ranks(program, 2, environment, folder / "logs", PATIENCE)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {line["case"]: [(str(kind), int(size)) for kind, size in line["calls"]] for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_deepspeed_sends_exactly_what_is_predicted(case: str, counted: dict[str, list[tuple[str, int]]]) -> None:
    stage, tuning, prefetch, live, reuse = case.split(":")
    made = job(Workload(model="m", dataset="d", full=tuning == "full"), CONFIGURATIONS["tiny"], cuda=False)
    settings = made.settings[int(stage)]
    if stage == "3":
        settings = replace(settings, prefetch_bucket=int(prefetch), live=int(live), reuse=int(reuse))
    predicted = traffic(made.modules, settings, 2, made.element_bytes, "gloo")
    assert Counter(kind for kind, _ in counted[case]) == Counter(call.kind for call in predicted.calls)
    sizes: Counter[str] = Counter()
    for kind, size in counted[case]:
        sizes[kind] += size
    assert dict(sizes) == {kind: size for kind, size in predicted.sizes.items() if size}


def bench(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tunetool", "bench", "strategies", "--model", "tiny", "--images", "8"]
    command += ["--target", str(folder / "made"), "--runs-dir", str(folder / "runs"), "--device", "cpu", "--allow-busy"]
    return subprocess.run([*command, *more], capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("strategies")
    matrix = ["--matrix", "1x1:z2,1x8:z2,1x8:z3,2x8:z3", "--ranks-per-node", "2"]
    done = bench(folder, *matrix, "--rounds", "1", "--steps", "4", "--network-time", "2s")
    assert done.returncode == 0, done.stderr
    return records.read(next((folder / "runs").glob("*-bench.strategies-*"))), done


@pytest.mark.slow  # ranks are started five times
def test_every_cell_that_fits_is_predicted_run_and_told(
    ran: tuple[Record, subprocess.CompletedProcess[str]],
) -> None:
    record, done = ran
    by_name = {each.name: each for each in record.measurements}
    assert [each.removeprefix("strategies.step.") for each in by_name if each.startswith("strategies.step.")] == [
        "1x1.z2",
        "1x2.z2",
        "1x2.z3",
    ]
    # The prediction was printed before the cell ran.
    log = done.stderr
    assert log.index("1x2:z3: predicted") < log.index("1x2:z3: a step takes")
    third = by_name["strategies.step.1x2.z3"].parameters
    assert float(third["sent_bytes"]) > 2 * float(by_name["strategies.step.1x2.z2"].parameters["sent_bytes"])
    assert float(third["predicted_seconds"]) > 0
    assert by_name["strategies.network.1x2.all_gather.bus_bandwidth"].value > 0
    assert by_name["strategies.start.imports.1x2.z3"].value > 0
    # The cost of stage 3's hooks was probed in the same layout, and is part of its first prediction.
    assert by_name["strategies.network.1x2.hooks_per_use"].value >= 0
    assert "strategies.network.1x1.hooks_per_use" not in by_name
    assert "hooks by a probe" in str(third["prediction_basis"])
    assert "1x8:z3" in done.stdout, "the published epoch beside ours"
    checks = {check.id: check for check in record.checks}
    assert checks["strategies.2x8.z3"].status == "skip"
    assert checks["strategies.model"].status == "pass", "what was trained is what was predicted"
    assert checks["strategies.1x2.z3.losses"].status == "pass"
    assert "2x8.z3: left out, it needs 2 nodes, and there is one" in done.stdout
    assert "1x2:z3" in done.stdout
