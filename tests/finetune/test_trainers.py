"""The fine-tune with other trainers: results where they can run, messages where they cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tunetool.training.data import pictures
from tunetool.training.model import reference_model
from tunetool.training.rank.curve_files import gather
from tunetool.training.trainers import llamafactory
from tunetool.training.workload import RankResult, Workload, as_environment, read_result

if not find_spec("deepspeed") or not find_spec("peft"):
    pytest.skip("DeepSpeed or peft is not installed", allow_module_level=True)

from calls import call
from tunetool.launch.local import RankFailed, run_ranks
from waiting import PATIENCE

WORKER = ("-m", "tunetool.training.rank.worker", "--workload")


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("material")
    reference_model.build("tiny", folder / "model", seed=0)
    pictures.make(folder / "data", images=12, width=56, height=56, seed=0)
    return folder


def workload(material: Path, **more: object) -> Workload:
    fields = {"model": str(material / "model"), "dataset": str(material / "data"), "device": "cpu", "workers": 0}
    return Workload(**{**fields, **more})  # type: ignore[arg-type]


def results(out: Path) -> list[RankResult]:
    return [read_result(out, rank) for rank in range(2)]


def one_rank(workload: Workload, out: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "TUNETOOL_OUT": str(out)}
    return call(sys.executable, *WORKER, workload.to_json(), env={**os.environ, **alone, **environment})


WATCHED = """
import contextlib, sys
from tunetool.training.rank import recorder, worker
reading = recorder.Recorder.reading
@contextlib.contextmanager
def watched(self, what):
    before = set(sys.modules)
    with reading(self, what):
        yield
    print("imported:", *(name for name in set(sys.modules) - before if name.startswith("transformers.models")))
recorder.Recorder.reading = watched
sys.exit(worker.main(sys.argv[1:]))
"""


@pytest.mark.slow  # a whole fine-tune of one step
def test_what_makes_a_model_is_imported_before_bytes_are_counted(material: Path, tmp_path: Path) -> None:
    program = tmp_path / "watched.py"
    program.write_text(WATCHED)
    asked = workload(material, steps=1)
    environment = {**as_environment(asked, os.environ), "TUNETOOL_OUT": str(tmp_path)}
    run_ranks([str(program), "--workload", asked.to_json()], 1, environment, tmp_path / "logs", PATIENCE)
    (said,) = [path.read_text() for path in tmp_path.glob("logs/*/attempt_0/*/stdout.log")]
    assert [line for line in said.splitlines() if line.startswith("imported:")] == ["imported:"]


def test_lightning_stops_on_a_machine_without_a_gpu(material: Path, tmp_path: Path) -> None:
    done = one_rank(workload(material, trainer="lightning"), tmp_path)
    assert done.returncode == 3, done.stderr
    assert done.stderr.splitlines()[-2:] == [
        "error: Lightning's DeepSpeed strategy runs on CUDA only, but this rank has no GPU",
        "hint: `--trainer deepspeed` needs neither Lightning nor a GPU",
    ]


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("lightning"), reason="Lightning is not installed")
@pytest.mark.parametrize("stage", [2, 3])
def test_lightning_with_deepspeed_makes_the_same_steps_as_ours(material: Path, tmp_path: Path, stage: int) -> None:
    theirs = workload(material, zero_stage=stage, steps=3, learning_rate=0.01, trainer="lightning")
    environment = as_environment(theirs, os.environ)
    program = [str(Path(__file__).with_name("lightning_on_cpu.py"))]
    saved = Workload(**{**vars(theirs), "checkpoint": str(tmp_path / "saved")})
    run_ranks([*program, saved.to_json(), str(tmp_path / "theirs")], 2, environment, tmp_path / "logs", PATIENCE)
    ours = Workload(**{**vars(theirs), "trainer": "deepspeed"})
    told_ours = {**environment, "TUNETOOL_OUT": str(tmp_path / "ours")}
    run_ranks([*WORKER, ours.to_json()], 2, told_ours, tmp_path / "logs-ours", PATIENCE)
    for their_rank, our_rank in zip(results(tmp_path / "theirs"), results(tmp_path / "ours"), strict=True):
        # The same model, samples, optimizer and schedule: the same numbers.
        assert their_rank.losses == pytest.approx(our_rank.losses, rel=1e-4)
        assert their_rank.learning_rates == pytest.approx(our_rank.learning_rates)
        assert (their_rank.tokens, their_rank.images, their_rank.trainable) == (
            our_rank.tokens,
            our_rank.images,
            our_rank.trainable,
        )
        assert {"communicator", "model_load", "engine", "first_batch", "checkpoint"} <= set(their_rank.seconds)
        assert len(their_rank.step_seconds) == len(their_rank.data_seconds) == 3
        assert all(seconds > 0 for seconds in (*their_rank.step_seconds, *their_rank.data_seconds))
        assert {"lightning", "deepspeed"} <= set(their_rank.versions)
        assert their_rank.read_bytes["model"]["logical"] > 0
    assert list((tmp_path / "saved").rglob("*optim_states.pt"))


def test_without_llamafactory_its_files_are_left_for_the_user(material: Path, tmp_path: Path) -> None:
    asked = workload(material, trainer="llamafactory", epochs=10)
    done = one_rank(asked, tmp_path, XDG_CACHE_HOME=str(tmp_path / "cache"), PATH="/usr/bin:/bin")
    assert done.returncode == 3, done.stderr
    (script,) = (tmp_path / "cache/tunetool/llamafactory").glob("*/llamafactory.sh")
    assert done.stderr.splitlines()[-2:] == [
        "error: `llamafactory-cli` is not installed",
        "hint: `pip install llamafactory` into its own virtual environment, and set "
        f"TUNETOOL_LLAMAFACTORY to that; its configuration is in `{script.parent}`",
    ]
    settings = yaml.safe_load((script.parent / "llamafactory.yaml").read_text())
    assert (settings["num_train_epochs"], settings["dataset"]) == (10, "tunetool_colours")
    assert Path(settings["deepspeed"]).is_file()
    assert settings["image_max_pixels"] == 112 * 112


# Stands for LLaMA-Factory, which itself runs in test_llamafactory.py: takes what it is told, and leaves the files that
# version 0.9.5 leaves.
STAND_IN = textwrap.dedent("""
    #!{python}
    import json, os, sys, time
    from pathlib import Path
    import yaml
    from tunetool.training.rank.curve_files import Events
    assert "RANK" not in os.environ and not [name for name in os.environ if name.startswith("TORCHELASTIC")]
    told = yaml.safe_load(Path(sys.argv[2]).read_text())
    print("trainable params: 10 || all params: 1,000 || trainable%: 1.0", flush=True)
    if told["max_steps"] == 13:
        sys.exit("[rank0]: ValueError: what it does not like")
    events, history = Events(Path(os.environ["TENSORBOARD_LOGGING_DIR"])), []
    for step in range(1, told["max_steps"] + 1):
        time.sleep(0.2)
        events.scalar("train/loss", 1 / step, step, time.time())
        history.append(dict(step=step, loss=1 / step, learning_rate=told["learning_rate"] * step))
    output = Path(told["output_dir"])
    output.mkdir()
    (output / "adapter_model.safetensors").write_text("what it trained")
    rate = 2 * int(os.environ["NPROC_PER_NODE"]) / 0.2
    (output / "trainer_state.json").write_text(json.dumps(dict(log_history=history, num_input_tokens_seen=600)))
    whole = dict(train_runtime=0.2 * len(history), train_samples_per_second=rate)
    (output / "all_results.json").write_text(json.dumps(whole))
""").lstrip()


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("venv")
    (directory / "bin").mkdir()
    for name, text in (
        ("python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'),
        ("llamafactory-cli", STAND_IN.format(python=sys.executable)),
    ):
        (directory / "bin" / name).write_text(text)
        (directory / "bin" / name).chmod(0o755)
    return directory


@pytest.mark.slow
def test_two_ranks_wait_for_llamafactory_and_have_its_figures(material: Path, tmp_path: Path, stand_in: Path) -> None:
    asked = workload(material, trainer="llamafactory", steps=4, curves=0.5)
    environment = {**os.environ, "TUNETOOL_LLAMAFACTORY": str(stand_in), "TUNETOOL_OUT": str(tmp_path)}
    run_ranks([*WORKER, asked.to_json()], 2, environment, tmp_path / "logs", PATIENCE)
    for each in results(tmp_path):
        assert each.losses == [1.0, 1 / 2, 1 / 3, 1 / 4]
        assert each.learning_rates == pytest.approx([1e-4, 2e-4, 3e-4, 4e-4])
        assert all(took > 0.19 for took in each.step_seconds), each.step_seconds
        # LLaMA-Factory does not report its waits for data, so the record must not claim that there were none.
        assert (each.data_seconds, each.load_seconds) == ([], [])
        assert (each.tokens, each.images) == (300, 8)
        assert (each.parameters, each.trainable) == (1000, 10)
        assert each.seconds["llamafactory"] > 0.8
        assert each.versions.items() >= {"torch": __import__("torch").__version__}.items()
    # Its settings and results are copied to the control machine; the trained weights are not.
    left = {path.name for path in (tmp_path / "rank-0/llamafactory").rglob("*") if path.is_file()}
    assert {"llamafactory.yaml", "llamafactory.sh", "all_results.json"} <= left
    assert "adapter_model.safetensors" not in left
    series = {(each.name, each.rank) for each in gather(tmp_path).series}
    assert {("loss", 0), ("loss", 1), ("node.cpu", 0)} <= series
    assert ("data_time", 0) not in series


def test_a_lock_of_a_dead_build_goes_and_a_running_ones_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = tmp_path / "named/deepspeed_shm_comm/lock"
    built, other = (
        tmp_path / "cache/torch_extensions" / name / "lock"
        for name in ("py311_cpu/deepspeed_shm_comm", "py311_cpu/async_io")
    )
    for lock in (named, built, other):
        lock.parent.mkdir(parents=True)
        lock.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with built.open():
        llamafactory.clear_dead_locks({})
    assert built.exists(), "who builds keeps it open"
    llamafactory.clear_dead_locks({})
    llamafactory.clear_dead_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "named")})
    assert [lock.exists() for lock in (named, built, other)] == [False, False, True], "no other op is loaded"


@pytest.mark.slow
def test_llamafactory_s_own_error_is_what_is_said(material: Path, tmp_path: Path, stand_in: Path) -> None:
    asked = workload(material, trainer="llamafactory", steps=13)
    environment = {**os.environ, "TUNETOOL_LLAMAFACTORY": str(stand_in), "TUNETOOL_OUT": str(tmp_path)}
    with pytest.raises(RankFailed):
        run_ranks([*WORKER, asked.to_json()], 2, environment, tmp_path / "logs", PATIENCE)
    said = [json.loads(path.read_text())["message"] for path in sorted(tmp_path.glob("rank-*/error.json"))]
    # Whichever rank died first, the message has the reason and not that another rank is gone.
    assert said == ["LLaMA-Factory ended with status 1: ValueError: what it does not like"] * 2
