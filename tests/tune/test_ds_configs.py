"""Complete ds_configs: DeepSpeed reads them as intended, none is written otherwise, and they train."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pythons import bare_python
from trained import train, train_without_offload
from tunetool.advise import zero
from tunetool.advise.ds_config import KINDS, plan
from tunetool.advise.ds_config_plan import Job, Node
from tunetool.advise.shapes import preset
from tunetool.bench.offload.samples import NEAR
from tunetool.errors import CannotJudge
from tunetool.launch.local import RankFailed
from tunetool.measure.aio import Probe
from tunetool.origin import install_hint
from tunetool.tune import configs
from tunetool.tune.check import Classes, check_config, differences
from tunetool.tune.configs import render
from tunetool.tune.settings import DEFAULTS
from waiting import PATIENCE

pytest_plugins = ["disks"]

TUNETOOL = [sys.executable, "-m", "tunetool"]
BLOCK = {**DEFAULTS.block(), "queue_depth": 16, "intra_op_parallelism": 2}
H100 = Node(memory_bytes=2**41)


def ds_config(disk: Path, *arguments: str, measured: bool = True) -> subprocess.CompletedProcess[str]:
    aio = disk.parent / "aio.json"
    aio.write_text(json.dumps({"aio": BLOCK}))
    given = ["--aio", str(aio)] if measured else []
    written = str(disk.parent / "ds_config.json")
    command = [*TUNETOOL, "ds-config", *arguments, "--target", str(disk), *given, "-o", written]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


def test_deepspeed_understands_every_kind_as_it_is_written(ready: Probe, tmp_path: Path) -> None:
    with Classes(Path(sys.executable), os.environ) as classes:
        for kind in KINDS:
            planned = plan(Job(kind, preset("70b"), BLOCK, "/mnt/nvme_raid0", micro_batch=2, batch=2048), H100)
            document = render(planned)
            path = tmp_path / f"{kind}.json"
            path.write_text(json.dumps(document))
            assert differences(document, classes.parse(path, 8)) == [], kind
        # Keys that DeepSpeed's classes refuse or leave out must not count as understood.
        document["aio"]["thread_count"] = 8
        document["zero_optimization"]["offload_param"]["buffer_count"] = "5"
        path.write_text(json.dumps(document))
        assert len(differences(document, classes.parse(path, 8))) == 2
        document["zero_optimization"]["aio"] = BLOCK
        path.write_text(json.dumps(document))
        with pytest.raises(CannotJudge, match="DeepSpeed refuses the configuration"):
            classes.parse(path, 8)
        path.write_text(json.dumps(render(planned)))
        with pytest.raises(CannotJudge, match="Check batch related parameters"):
            classes.parse(path, 7)


def test_what_deepspeed_does_not_understand_is_not_written(
    ready: Probe, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = disk.parent / "templates"
    shutil.copytree(configs.TEMPLATES, templates)
    template = templates / "zero3-nvme.json.j2"
    template.write_text(template.read_text().replace('"aio":', '"aio_":'))
    monkeypatch.setattr(configs, "TEMPLATES", templates)
    document = render(plan(Job("zero3-nvme", preset("llama-tiny"), BLOCK, str(disk), world=2), H100))
    with Classes(Path(sys.executable), os.environ) as classes, pytest.raises(CannotJudge, match="`aio_` is ignored"):
        check_config(document, 2, classes, ready, disk, os.environ)
    assert list(disk.iterdir()) == []


def test_a_call_that_cannot_be_done_writes_nothing(ready: Probe, disk: Path, tmp_path: Path) -> None:
    done = ds_config(disk, "zero3-nvme", "--model", "llama-tiny", "--python", str(bare_python(tmp_path)))
    assert done.returncode == 3
    assert "torch is not installed" in done.stderr
    assert install_hint("deepspeed") in done.stderr
    done = ds_config(disk, "zero3-nvme", "--model", "70b", "--memory", "64GiB", "--nvme-space", "8TB")
    assert done.returncode == 3
    assert "in each node's memory" in done.stderr
    done = ds_config(disk, "zero3", "--model", "huge")
    assert done.returncode == 2
    assert "neither a known model nor a path" in done.stderr
    done = ds_config(disk, "zero9", "--model", "llama-tiny")
    assert done.returncode == 2
    assert not (disk.parent / "ds_config.json").exists()
    assert not (disk.parent / "ds_config.md").exists()
    assert list(disk.iterdir()) == []


def test_what_is_written_trains_with_everything_on_disk(ready: Probe, disk: Path) -> None:
    done = ds_config(disk, "zero3-nvme", "--model", "llama-tiny", "--world-size", "2", "--nvme-space", "2GB")
    assert done.returncode == 0, done.stderr
    assert "settings as written; 16 MiB written and read by its handle, equal" in done.stdout
    assert list(disk.iterdir()) == [], "the check leaves nothing"
    config = disk.parent / "ds_config.json"
    explained = config.with_suffix(".md").read_text()
    document = json.loads(config.read_text())
    assert document["aio"] == BLOCK
    assert f"`{document['zero_optimization']['offload_param']['buffer_size']}` | elements" in explained

    build_adam()
    result = train(config, ready)
    losses = result.losses
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.3
    # Nothing may have come back wrong from the disk.
    assert losses == pytest.approx(train_without_offload(config, ready).losses, rel=0.002)
    parts = zero.partitions(preset("llama-tiny"), 2)
    swapped = sum(result.swapped.values())
    assert swapped == pytest.approx(2 * zero.nvme_bytes(parts, states=True, parameters=True), rel=0.01)
    folders = set(result.swapped)
    assert folders == {f"zero_stage_3/{part}/rank{rank}" for part in ("optimizer", "bfloat16params") for rank in (0, 1)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zero2", "zero3", "zero3-cpu"])
def test_the_other_kinds_train(ready: Probe, disk: Path, kind: str) -> None:
    options = (kind, "--model", "llama-tiny", "--world-size", "2", "--batch", "4")
    done = ds_config(disk, *options, measured=False)
    assert done.returncode == 0, done.stderr
    assert "settings, mix" not in done.stderr, "there is no block to measure for"
    build_adam()
    losses = train(disk.parent / "ds_config.json", ready).losses
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.slow
def test_inference_reads_its_parameters_from_disk(ready: Probe, disk: Path) -> None:
    done = ds_config(disk, "zero-inference", "--model", "llama-tiny", "--world-size", "2")
    assert done.returncode == 0, done.stderr
    build_adam()
    config = disk.parent / "ds_config.json"
    result = train(config, ready)
    assert result.losses == pytest.approx(train_without_offload(config, ready).losses, rel=0.002)
    assert {Path(folder).name for folder in result.swapped} == {"rank0", "rank1"}


@pytest.mark.slow
@pytest.mark.parametrize("change", ["reuse", "odd"])
def test_deepspeed_still_has_the_faults_that_are_planned_around(ready: Probe, disk: Path, change: str) -> None:
    # Why stage3_max_reuse_distance is 0 and the odd shapes are refused: when DeepSpeed mends these, so may we.
    document = render(plan(Job("zero3-nvme", preset("llama-tiny"), BLOCK, str(disk), world=2), Node(2**34, gpu=False)))
    zero_block = document["zero_optimization"]
    zero_block["stage3_max_reuse_distance"] = 10**9 if change == "reuse" else 0
    zero_block["offload_param"]["buffer_count"] = 5 if change == "reuse" else 14
    # Two misaligned tensors and more in a tile.
    zero_block["sub_group_size"] = 8 * 10**6
    zero_block["offload_param"]["buffer_size"] = 3 * 10**6
    document["optimizer"]["params"]["torch_adam"] = True
    config = disk.parent / "ds_config.json"
    config.write_text(json.dumps(document))
    sizes = {"hidden_size": 1032, "num_hidden_layers": 2, "num_attention_heads": 8, "head_dim": 129}
    odd = disk.parent / "config.json"
    odd.write_text(json.dumps({"model_type": "llama", **sizes, "intermediate_size": 2817, "vocab_size": 4097}))
    build_adam()
    if change == "reuse":
        with pytest.raises(RankFailed) as error:
            train(config, ready)
        assert "Not enough buffers" in error.value.message + error.value.raw
        return
    losses = train(config, ready, str(odd)).losses
    assert losses != pytest.approx(train_without_offload(config, ready, str(odd)).losses, rel=NEAR)


def build_adam() -> None:
    """CPUAdam, which every offload uses: seconds if it is built, otherwise a minute."""
    subprocess.run([*TUNETOOL, "build-ops", "--op", "cpu_adam"], check=True, capture_output=True, timeout=PATIENCE)
