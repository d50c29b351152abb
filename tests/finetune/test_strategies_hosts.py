"""ZeRO-2 against ZeRO-3 over two nodes and a network of 1 Gbit/s: predicted, then measured."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

import wide_model
from cluster import NODES, Cluster
from tunetool.record import parse
from waiting import PATIENCE

pytestmark = pytest.mark.slow  # Ansible starts ranks seven times in it: two minutes
MATRIX = "1x1:z2,1x1:z3,2x1:z2,2x1:z3"


def test_over_one_gigabit_zero_3_is_predicted_to_wait(cluster: Cluster, tmp_path: Path) -> None:
    model = wide_model.write(cluster.shared / "wide")
    cluster.limit_network("1gbit")
    command = [sys.executable, "-m", "tunetool", "bench", "strategies", "--model", str(model), "--images", "16"]
    command += ["--target", str(cluster.shared / "bulk"), "-i", str(cluster.inventory), "--device", "cpu"]
    command += ["--matrix", MATRIX, "--rounds", "1", "--steps", "6", "--network-time", "6s", "--allow-busy"]
    command += ["--json", "-", "--runs-dir", str(tmp_path / "runs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    cluster.limit_network(None)
    assert done.returncode == 0, done.stderr + done.stdout
    measurements = {each.name: each for each in parse(done.stdout, "stdout").measurements}
    second, third = (measurements[f"strategies.step.2x1.z{stage}"] for stage in (2, 3))
    # Not which of them is slower: what each computes depends on what else runs. No computation hides the first gather.
    step, compute, waiting = (
        float(third.parameters[f"predicted_{name}seconds"]) for name in ("", "compute_", "waiting_")
    )
    assert waiting > 0
    assert step == pytest.approx(compute + waiting)
    # Two ranks send each other half of what they gather, and 1 Gbit/s carries at most 125 MB per second.
    bus = measurements["strategies.network.2x1.all_gather.bus_bandwidth"].value
    assert 0 < bus < 130e6
    # The least duration of a step.
    assert third.value >= 0.9 * float(third.parameters["sent_bytes"]) / 125e6
    assert float(third.parameters["sent_bytes"]) > 20 * float(second.parameters["sent_bytes"])
    for name in NODES:
        assert cluster.processes(name, "tunetool.bench") == []
