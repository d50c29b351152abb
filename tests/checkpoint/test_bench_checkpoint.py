"""`tunetool bench checkpoint` end to end on a real disk and in memory, with a model of a few MB."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

if not find_spec("torch"):
    pytest.skip("torch is not installed", allow_module_level=True)

from calls import TUNETOOL, call
from judged import undisturbed
from tunetool.bench.checkpoint.figures import case, checks
from tunetool.bench.checkpoint.rank_processes import RankProcesses
from tunetool.bench.checkpoint.request import Request
from tunetool.bench.checkpoint.samples import Matrix
from tunetool.bench.checkpoint.site import Site
from tunetool.launch.local import RankFailed
from tunetool.measure.rounds import drawn_order
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Record, parse
from tunetool.verdict import judge

pytest_plugins = ["disks"]
SMALL = {
    "model_type": "llama",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 688,
    "vocab_size": 1025,
}
SHM = Path("/dev/shm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """29 MB of state; its embedding has an odd number of rows."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


def command(model: str, runs: Path, *arguments: str) -> list[str]:
    common = ["--model", model, "--device", "cpu", "--runs-dir", str(runs), "--allow-busy"]
    return [*TUNETOOL, "bench", "checkpoint", *common, *arguments]


def bench(model: str, runs: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return call(*command(model, runs, *arguments), env=os.environ)


def passed(done: subprocess.CompletedProcess[str]) -> Record:
    """The record of a run that nothing but other programs on the disk may have disturbed."""
    record = parse(done.stdout, "stdout")
    undisturbed(done.returncode, record)
    return record


def test_engines_in_turns_on_disk_and_in_memory(model: str, disk: Path, memory: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    names = ["torch-save-zip", "safetensors", "dcp-async-thread"]
    done = bench(
        model,
        tmp_path / "runs",
        *("--target", str(disk), "--memory-target", str(memory), "--engines", ",".join(names)),
        *("--rounds", "2", "--against-fio", "--json", "-"),
    )
    record = passed(done)
    by_name = {each.name: each for each in record.measurements}
    assert {check.id: check.status for check in record.checks} == {
        f"checkpoint.{prefix}{name}": "pass" for prefix in ("", "memory.") for name in names
    }
    for name in names:
        durable = by_name[f"checkpoint.{name}.durable"]
        assert durable.evidence is not None
        assert durable.evidence.kind == "block"
        assert durable.evidence.ratio is not None
        assert durable.evidence.ratio >= 0.98, f"{name} calls durable what the drive never got"
        restore = by_name[f"checkpoint.{name}.restore"]
        assert restore.evidence is not None
        assert restore.evidence.ratio is not None
        assert restore.evidence.ratio >= 0.98, f"{name} was restored from the page cache"
        state_bytes = float(durable.parameters["state_bytes"])
        assert 28e6 < state_bytes < 31e6
        assert len(durable.samples or []) == 2
        assert by_name[f"checkpoint.{name}.stall"].value <= 1.001 * state_bytes / min(durable.samples or [0])
        assert by_name[f"checkpoint.{name}.cpu"].value > 0
        in_memory = by_name[f"checkpoint.memory.{name}.durable"]
        assert in_memory.medium == "tmpfs"
        assert in_memory.evidence is not None
        assert in_memory.evidence.kind == "memory"
    assert by_name["checkpoint.dcp-async-thread.first_stall"].value > 0
    copies = [by_name[f"checkpoint.{name}.peak_memory"].value for name in ("dcp-async-thread", "torch-save-zip")]
    assert copies[0] > 0.9 * state_bytes, "it keeps a copy of the state between saves"
    assert copies[1] < state_bytes / 2
    assert "checkpoint.torch-save-zip.first_stall" not in by_name
    versus = by_name["checkpoint.safetensors.versus_torch_save"]
    assert versus.parameters["pairs"] == 2
    assert by_name["checkpoint.fio.write"].evidence is not None
    assert by_name["checkpoint.fio.write"].evidence.ratio >= 0.98  # type: ignore[operator]
    assert by_name["checkpoint.safetensors.of_fio_write"].value > 0
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    assert list(memory.iterdir()) == []
    (kept,) = (tmp_path / "runs").iterdir()
    assert "<svg" in (kept / "report.html").read_text()
    shown = call(*TUNETOOL, "report", "show", str(kept), check=True).stdout
    assert "memory, a stand-in" in shown


def test_two_ranks_save_their_shards_and_get_them_back(model: str, disk: Path, tmp_path: Path) -> None:
    names = ["torch-save-zip", "dcp-t4-multi", "fsdp-consolidated"]
    where = ("--target", str(disk), "--engines", ",".join(names), "--ranks", "2", "--rounds", "1", "--json", "-")
    train = ("--train", "--steps", "3", "--sharded-every", "1", "--consolidated-every", "2")
    record = passed(bench(model, tmp_path / "runs", *where, *train))
    by_name = {each.name: each for each in record.measurements}
    for name in names:
        durable = by_name[f"checkpoint.{name}.durable"]
        assert 28e6 < float(durable.parameters["state_bytes"]) < 31e6, "the whole state, not each rank's"
        assert float(durable.parameters["file_bytes"]) >= float(durable.parameters["state_bytes"])
        saves = 1 if name == "fsdp-consolidated" else 2
        assert len(by_name[f"checkpoint.{name}.held"].samples or []) == saves, "after every step or two of three"
        assert len(by_name[f"checkpoint.{name}.lost_time"].samples or []) == 1
    loops = by_name["checkpoint.training.baseline"].samples or []
    assert len(loops) == 2 * len(names), "a loop without a save before and after each with"
    assert min(loops) > 3 * 0.05, "a step does work"
    # A rank that gathers the whole state needs its 29 MB.
    assert by_name["checkpoint.fsdp-consolidated.peak_memory"].value > 25e6
    assert list(disk.iterdir()) == []


@pytest.fixture(scope="module")
def session(model: str) -> Iterator[RankProcesses]:
    """Two ranks that hold their state."""
    request = Request(model=model, device="cpu", ranks=2)
    with RankProcesses(request, 30 * 10**6, os.environ) as ranks:
        ranks.start()
        yield ranks


def prepared(session: RankProcesses, folder: Path, engine: str) -> None:
    answers = session.ask({"do": "place", "directory": str(folder), "bytes": 0, "engines": [engine]})
    assert all(each["engines"][engine]["unavailable"] is None for each in answers)


def test_an_order_may_take_longer_after_a_long_start(session: RankProcesses) -> None:
    # An engine that starts a process of its own imports torch once more.
    assert session.start_seconds > 0
    slower = replace(session, start_seconds=session.start_seconds + 100)
    assert slower.patience >= session.patience + 100


def test_a_byte_that_changes_on_the_medium_names_its_tensor(session: RankProcesses, tmp_path: Path) -> None:
    prepared(session, tmp_path, "safetensors")
    directory = tmp_path / "saved"
    session.ask({"do": "save", "engine": "safetensors", "directory": str(directory)})
    load = {"do": "load", "engine": "safetensors", "directory": str(directory)}
    assert [each["different"] for each in session.ask(load)] == [None, None]
    (file,) = directory.glob("*1*.safetensors")
    with file.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        (last,) = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last ^ 1]))
    first, second = (each["different"] for each in session.ask(load))
    assert first is None
    assert second is not None
    assert "differs from byte" in second
    assert "`optimizer." in second or "`model." in second


def test_the_state_may_change_once_an_async_save_returned(session: RankProcesses, tmp_path: Path) -> None:
    prepared(session, tmp_path, "dcp-async-thread")
    directory = tmp_path / "saved"
    save = {"do": "save", "engine": "dcp-async-thread", "directory": str(directory), "overwrite": True}
    answers = session.ask(save)
    assert all(each["began"] <= each["returned"] <= each["ended"] for each in answers)
    load = {"do": "load", "engine": "dcp-async-thread", "directory": str(directory)}
    assert [each["different"] for each in session.ask(load)] == [None, None]


class TimeIsUp:
    """Let the time limit pass when the first save begins."""

    site: Site

    def say(self, line: str) -> None:
        pass

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        self.site.deadline = time.monotonic()
        yield lambda: None


def test_a_first_round_that_is_cut_keeps_what_it_has(session: RankProcesses, disk: Path) -> None:
    engines, watch = ["torch-save-zip", "safetensors", "direct"], TimeIsUp()
    matrix = Matrix(read_stack(str(disk)), False, 30 * 10**6)
    request = replace(session.request, train=True, budget=60.0, rounds=1)
    watch.site = Site(request, session, disk, engines, matrix, watch)
    watch.site.run()
    first, *others = drawn_order(engines, 0, 1)
    assert list(matrix.rows[first].samples) == [1]
    assert [matrix.rows[name].samples for name in others] == [{}, {}]
    assert judge(case([matrix], {})).status == "error"
    assert all("the time was up" in str(check.found) for check in checks(matrix) if check.status == "unknown")
    assert sum(check.status == "unknown" for check in checks(matrix)) == 2
    assert [check.found for check in checks(matrix) if "no training loop" in str(check.found)] == [
        "equal in 1 restores; no training loop with it: the time was up"
    ]


def test_the_first_round_of_a_short_call_is_whole(session: RankProcesses, disk: Path) -> None:
    engines, watch = ["torch-save-zip", "direct"], TimeIsUp()
    matrix = Matrix(read_stack(str(disk)), False, 30 * 10**6)
    watch.site = Site(replace(session.request, rounds=1), session, disk, engines, matrix, watch)
    watch.site.run()
    assert [list(matrix.rows[name].samples) for name in engines] == [[1], [1]]


def test_a_rank_that_dies_in_a_save_is_named_and_replaced(session: RankProcesses, tmp_path: Path) -> None:
    # Last of those that share the ranks. The directory cannot be made, on one rank alone: the other waits for it.
    prepared(session, tmp_path, "torch-save-zip")
    with pytest.raises(RankFailed) as caught:
        session.ask({"do": "save", "engine": "torch-save-zip", "directory": "/proc/nowhere/at-all"})
    assert "nowhere" in caught.value.message
    assert not session.usable_after(caught.value)
    session.start()
    directory = tmp_path / "again"
    prepared(session, tmp_path, "torch-save-zip")
    session.ask({"do": "save", "engine": "torch-save-zip", "directory": str(directory)})
    load = {"do": "load", "engine": "torch-save-zip", "directory": str(directory)}
    assert [each["different"] for each in session.ask(load)] == [None, None]


def test_calls_that_cannot_be_done_do_nothing(model: str, disk: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    for arguments, said, hint in (
        (("--target", str(SHM)), "in memory", "--memory-target"),
        (("--memory-target", str(disk)), "not in memory", "--target"),
        (("--target", str(disk), "--engines", "no-such-*"), "`no-such-*` is not an engine", "torch-save-zip"),
        (("--target", str(disk), "--model", "70b"), "too little space", "--state-bytes"),
        (("--target", str(disk), "--state-bytes", "1MB"), "`--state-bytes 1000000` is too little", "or more"),
    ):
        done = bench(model, runs, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        error, _, hinted = done.stderr.partition("hint: ")
        assert said in error
        assert hint in hinted
    assert list(disk.iterdir()) == []
    assert not runs.exists()


@pytest.mark.parametrize(
    ("capability", "expected"), [((7, 0), "float16"), ((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")]
)
def test_the_training_load_computes_in_what_the_gpu_has(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: str
) -> None:
    import torch

    from tunetool.bench.checkpoint.training import dtype_of

    assert dtype_of("cpu") is torch.float32
    # torch itself says of all of them that bf16 is supported.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert dtype_of("cuda") is getattr(torch, expected)
