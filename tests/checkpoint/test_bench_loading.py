"""`tunetool bench loading` end to end: the model is made, loaded by several engines, and gone; calls that go wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from calls import TUNETOOL, call
from judged import leaves_nothing, proven, undisturbed
from tunetool.bench.loading.request import Request
from tunetool.bench.loading.run import bench as run_bench
from tunetool.record import Record, parse
from waiting import until

pytest_plugins = ["disks"]


def command(runs: Path, *arguments: object) -> list[str]:
    common = ["--device", "cpu", "--runs-dir", str(runs), "--allow-busy"]
    return [*TUNETOOL, "bench", "loading", *common, *map(str, arguments)]


def bench(runs: Path, *arguments: object, **more: Any) -> subprocess.CompletedProcess[str]:
    return call(*command(runs, *arguments), **{"env": os.environ, **more})


def statuses(record: Record) -> dict[str, str]:
    return {check.id: check.status for check in record.checks}


def test_engines_from_a_disk(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    engines = ("--engines", "direct,safetensors,instanttensor", "--rounds", 1, "--seed", 4, "--json", "-")
    done = bench(tmp_path / "runs", "--model", "tiny", "--target", disk, *engines)
    record = parse(done.stdout, "stdout")
    alone = undisturbed(done.returncode, record)
    assert {name: status for name, status in statuses(record).items() if alone or "cold" not in name} == {
        f"loading.{state}.{engine}": "skip" if engine == "instanttensor" else "pass"
        for state in (("cold", "cached") if alone else ("cached",))
        for engine in ("direct", "safetensors", "instanttensor")
    }
    by_name = {each.name: each for each in record.measurements}
    for engine in ("direct", "safetensors"):
        if alone:
            proven(by_name[f"loading.cold.{engine}.first"])
        assert f"loading.cold.{engine}.warm" not in by_name, "the first load may leave bytes in the page cache"
        assert by_name[f"loading.cold.{engine}.first_of_fio"].value > 0
        assert by_name[f"loading.cached.{engine}.warm"].value > 0
    assert by_name["loading.cold.fio"].value > 0
    # fio has its turn as the engines have, in an order of this seed. A load that others disturb is repeated at once.
    turns = dict.fromkeys(re.findall(r"^cold (\w+)-1", done.stderr, re.MULTILINE))
    assert list(turns) == ["safetensors", "direct", "fio"]
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "<svg" in (kept / "report.html").read_text()
    shown = " ".join(call(*TUNETOOL, "report", "show", kept).stdout.split())
    assert "from the page cache" in shown
    assert "instanttensor: left out, " in shown
    assert "no difference was decided between" in shown


def test_several_processes_load_from_memory_at_the_same_time(memory: Path, tmp_path: Path) -> None:
    done = bench(
        tmp_path / "runs",
        *("--model", "tiny", "--memory-target", memory, "--engines", "direct", "--rounds", 1),
        *("--gpus", "2", "--json", "-"),
    )
    record = parse(done.stdout, "stdout")
    assert done.returncode == 0, record.verdict
    (state,) = {check.id.split(".")[1] for check in record.checks}
    assert state in ("tmpfs-2-gpus", "huge-2-gpus")
    assert statuses(record) == {f"loading.{state}.direct": "pass"}
    assert {each.parameters["gpus"] for each in record.measurements} == {2}
    assert list(memory.iterdir()) == []


def files(directory: Path) -> Path:
    directory.mkdir()
    tensors = {"a": torch.arange(1000), "b": torch.ones(3, 5), "z": torch.zeros(3, 5)}
    save_file(tensors, directory / "model.safetensors")
    return directory


class Watch:
    """Counts the janitors of this process when a step begins."""

    def __init__(self) -> None:
        self.janitors: dict[str, int] = {}

    def say(self, line: str) -> None:
        """Nobody reads it."""

    @contextlib.contextmanager
    def step(self, name: str, seconds: float) -> Iterator[Callable[[], None]]:
        # Whole lines (-ww), however narrow the terminal.
        children = subprocess.check_output(["ps", "-ww", "--ppid", str(os.getpid()), "-o", "args="], text=True)
        self.janitors[name] = children.count("/janitor.py ")
        yield lambda: None


def test_files_of_ones_own_are_read_in_place_and_loads_end(memory: Path, tmp_path: Path) -> None:
    model, watch = files(memory / "model"), Watch()
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    runs = tmp_path / "runs"
    request = Request(model=str(model), device="cpu", engines=("direct",), rounds=2, runs_dir=runs, allow_busy=True)
    result = run_bench(request, watch)
    assert result.record is not None
    assert {check.status for check in result.record.checks} == {"pass"}
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    shutil.rmtree(model)
    assert sum("direct" in name for name in watch.janitors) == 2
    assert set(watch.janitors.values()) == {0}, watch.janitors


@pytest.mark.parametrize(
    "given",
    [
        "'a': torch.arange(1000).flip(0), 'b': torch.ones(3, 5), 'z': torch.zeros(3, 5)",
        # All the bytes of the files, under each other's names.
        "'a': torch.arange(1000), 'b': torch.zeros(3, 5), 'z': torch.ones(3, 5)",
    ],
)
def test_a_loader_that_gives_other_bytes_fails(memory: Path, tmp_path: Path, given: str) -> None:
    model = files(memory / "model")
    library = tmp_path / "library" / "safetensors"
    library.mkdir(parents=True)
    (library / "__init__.py").write_text("")
    wrong = f"return {{{given}}}"
    (library / "torch.py").write_text(f"import torch\n\n\ndef load_file(file, device):\n    {wrong}\n")
    path = os.pathsep.join([str(library.parent), os.environ.get("PYTHONPATH", "")])
    done = bench(
        tmp_path / "runs",
        *("--model", model, "--engines", "direct,safetensors", "--rounds", 1, "--json", "-"),
        env={**os.environ, "PYTHONPATH": path},
    )
    shutil.rmtree(model)
    record = parse(done.stdout, "stdout")
    assert done.returncode == 1
    assert record.verdict is not None
    assert "`safetensors` from a tmpfs" in record.verdict.reasons[0]
    assert "gives other bytes than the files hold" in record.verdict.reasons[0]
    assert sorted(statuses(record).values()) == ["fail", "pass"]


def cut_short(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.truncate(1000)


def other_header(model: Path) -> None:
    with (model / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)


def index_of_others(model: Path) -> None:
    entries = {"weight_map": {"a": "model.safetensors", "c": "model.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(entries))


def index_of_elsewhere(model: Path) -> None:
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../a.safetensors"}}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_short, "model.safetensors` is cut short"),
        (other_header, "model.safetensors` is not a safetensors file"),
        (index_of_others, "lists `c` in `model.safetensors`, and no file holds it"),
        (index_of_elsewhere, "names no files of this directory"),
    ],
)
def test_a_bad_model_is_refused_by_name(damage: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    model = files(tmp_path / "model")
    damage(model)
    done = bench(tmp_path / "runs", "--model", model)
    assert done.returncode == 2, done.stderr
    assert words in done.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(memory: Path, tmp_path: Path, number: int) -> None:
    arguments = ("--model", "tiny", "--memory-target", memory, "--engines", "direct", "--rounds", 1000)
    runs = tmp_path / "runs"
    with leaves_nothing(command(runs, *arguments), number, memory, runs) as (process, processes):
        until(lambda: list(memory.glob(".tunetool-*/model/*.safetensors")), "the model", process)
        # The program, its janitor, and a process that loads.
        until(lambda: len(processes()) > 2, "a load", process)


def test_a_model_that_cannot_be_written_whole_is_removed(memory: Path, tmp_path: Path) -> None:
    # As on a disk that fills up: the first file takes more.
    limit = (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done = bench(
        tmp_path / "runs",
        *("--model", "tiny", "--memory-target", memory, "--json", "-"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    record = parse(done.stdout, "stdout")
    assert done.returncode == 3
    assert record.verdict is not None
    assert "File too large" in record.verdict.reasons[0]
    assert str(memory) in record.verdict.reasons[0]
    assert list(memory.iterdir()) == []
