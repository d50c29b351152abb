"""Training in fp16 with loss scaling, forced on a GPU that has bf16; loss scaling when gradients overflow."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from calls import TUNETOOL, call
from skips import a_gpu
from tunetool.errors import CannotJudge
from tunetool.record import Record, parse
from tunetool.training.trainers.deepspeed import lowest_scale_named

on_a_gpu = pytest.mark.skipif(not a_gpu(), reason="a GPU computes in fp16")


def test_gradients_that_overflow_at_every_scale_are_named() -> None:
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    lowest = DynamicLossScaler(1, 1000, min_scale=1, delayed_shift=1, consecutive_hysteresis=False)
    with pytest.raises(CannotJudge, match="overflow even at the smallest loss scale"), lowest_scale_named():
        lowest.update_scale(True)
    with pytest.raises(ValueError, match="other"), lowest_scale_named():
        raise ValueError("other")


def trained(directory: Path, *options: str) -> Record:
    common = ["--model", "tiny", "--images", "48", "--device", "cuda", "--ranks-per-node", "1", "--allow-busy"]
    done = call(
        *TUNETOOL,
        "bench",
        "finetune",
        *common,
        *options,
        "--json",
        "-",
        *("--target", str(directory / "bulk"), "--runs-dir", str(directory / "runs"), "--steps", "20"),
    )
    assert done.returncode in (0, 3), done.stderr + done.stdout
    record = parse(done.stdout, "stdout")
    checks = {check.id: check for check in record.checks}
    # 3 if the loss does not fall in 20 steps: this test only needs a training.
    assert checks["finetune.steps"].status == "pass", record.verdict
    assert checks["finetune.loss"].status in ("pass", "unknown"), checks["finetune.loss"].found
    return record


@on_a_gpu
@pytest.mark.parametrize("stage", ["1", "2", "3"])
def test_fp16_trains_with_loss_scaling(tmp_path: Path, stage: str) -> None:
    record = trained(tmp_path, "--precision", "fp16", "--zero", stage)
    _said(record)


@on_a_gpu
@pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_lightning_trains_in_both(tmp_path: Path, precision: str) -> None:
    record = trained(tmp_path, "--precision", precision, "--trainer", "lightning")
    assert record.measurements[0].parameters["precision"] == precision
    if precision == "fp16":
        _said(record)


@on_a_gpu
def test_auto_is_what_the_gpu_has(tmp_path: Path) -> None:
    import torch

    record = trained(tmp_path)
    wanted = "bf16" if torch.cuda.get_device_capability() >= (8, 0) else "fp16"
    assert record.measurements[0].parameters["precision"] == wanted


def _said(record: Record) -> None:
    parameters = record.measurements[0].parameters
    assert parameters["precision"] == "fp16"
    notes = [
        check.found for check in record.checks if check.id == "finetune.note" and "loss scaling skipped" in check.found
    ]
    skipped = parameters.get("skipped_steps", 0)
    # Whether gradients overflow depends on the GPU; the report must say it.
    assert len(notes) == (1 if skipped else 0)
    assert all(note.startswith(f"loss scaling skipped the update of {skipped} of 20 steps") for note in notes)
