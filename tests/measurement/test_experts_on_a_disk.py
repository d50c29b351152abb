"""`tunetool bench experts` on the disk under the temporary directory: figures with proof, and nothing left behind."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import leaves_nothing, proven, undisturbed
from tunetool.bench.experts.blocks import write
from tunetool.bench.experts.child import Reader
from tunetool.bench.experts.request import Request
from tunetool.bench.experts.run import bench as bench_experts
from tunetool.node.machine.block_stack import read_stack
from tunetool.record import Record, parse
from tunetool.report.progress import PlainProgress
from waiting import until

pytest_plugins = ["disks"]

BLOCK = 4 << 20
SMALL = ("--expert-bytes", "4MiB", "--experts", "8", "--top-k", "2", "--threads", "3")
CONFIG = {
    "model_type": "mixtral",
    **{"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "vocab_size": 1000, "num_local_experts": 8, "num_experts_per_tok": 2},
    "torch_dtype": "bfloat16",
}


def command(target: Path, runs: Path, *arguments: object) -> list[str]:
    common = ["--target", str(target), "--runs-dir", str(runs), "--allow-busy"]
    return [*TUNETOOL, "bench", "experts", *common, *SMALL, *map(str, arguments)]


def bench(target: Path, runs: Path, *arguments: object, **more: Any) -> tuple[subprocess.CompletedProcess[str], Record]:
    done = call(*command(target, runs, *arguments, "--json", "-"), **more)
    return done, parse(done.stdout, "stdout")


def test_experts_come_from_the_disk_and_from_the_cache(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    other = tmp_path / "other"
    other.mkdir()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    # Where the temporary directory lies on several drives, it is refused as that of one.
    places = ("target", "drive-1") if len(read_stack(str(other)).leaves) <= 1 else ("target",)
    arguments = ["--cached", "2,6", "--steps", 12, "--rounds", 1, "--config", config]
    arguments += ["--drive-target", other] if "drive-1" in places else []
    done, record = bench(disk, tmp_path / "runs", *arguments)
    undisturbed(done.returncode, record)
    # Two passes, and on the target six traces of 24 experts.
    counts = {"target": 160, "drive-1": 16}
    assert {check.id: (check.status, check.found) for check in record.checks} == {
        f"experts.{place}.bytes": ("pass", f"all {counts[place]}") for place in places
    }
    by_name = {each.name.removeprefix("experts."): each for each in record.measurements}
    for row in (f"{place}.{mode}" for place in places for mode in ("direct", "buffered")):
        figure = by_name[f"{row}.bandwidth"]
        proven(figure)
        assert figure.evidence is not None
        assert figure.evidence.claimed_bytes == 8 * BLOCK
        assert 0 < by_name[f"{row}.p50"].value <= by_name[f"{row}.p99"].value
        cached = float(figure.parameters["page_cache_after_bytes"])
        assert cached > 0 if row.endswith("buffered") else cached < BLOCK
        assert float(figure.parameters["page_cache_before_bytes"]) < BLOCK
    for pattern in ("uniform", "zipf"):
        hits = []
        for slots in (0, 2, 6):
            row = f"{pattern}.cached-{slots}"
            hits.append(by_name[f"{row}.hit_rate"].value)
            evidence = by_name[f"{row}.bandwidth"].evidence
            assert evidence is not None
            assert evidence.claimed_bytes == round((1 - hits[-1]) * 24) * BLOCK
            proven(by_name[f"{row}.bandwidth"])
            # 4 layers x 2 experts, of the size that the call names.
            tokens = by_name[f"{row}.bandwidth"].value / (8 * BLOCK)
            assert by_name[f"{row}.tokens"].value == pytest.approx(tokens)
        assert hits[0] == 0
        assert hits == sorted(hits)
    assert by_name["uniform.cached-6.hit_rate"].parameters["expected"] == 0.75
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    assert list(other.iterdir()) == []
    (kept,) = (tmp_path / "runs").iterdir()
    assert "<svg" in (kept / "report.html").read_text()
    assert "these rounds do not decide which is faster" in " ".join(
        call(*TUNETOOL, "report", "show", kept).stdout.split()
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_run_leaves_nothing(disk: Path, tmp_path: Path, number: int) -> None:
    runs = tmp_path / "runs"
    with leaves_nothing(command(disk, runs, "--rounds", 1000), number, disk, runs) as (process, processes):
        until(lambda: list(disk.glob(".tunetool-*/experts.data")), "the file", process)
        # The program, its janitor, and the process that reads.
        until(lambda: len(processes()) > 2, "a read", process)


def test_a_file_that_cannot_be_written_whole_is_removed(disk: Path, tmp_path: Path) -> None:
    # As on a disk that fills up after the look at its free space.
    limit = (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done, record = bench(disk, tmp_path / "runs", preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    assert done.returncode == 3
    assert record.verdict is not None
    assert f"`{disk}`: File too large" in record.verdict.reasons[0]
    assert list(disk.iterdir()) == []


def test_storage_that_gives_other_bytes_than_were_written_fails(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_and_damage(path: Path, experts: int, block: int, seed: int, tick: Callable[[], None]) -> None:
        write(path, experts, block, seed, tick)
        with path.open("r+b") as file:
            # In the middle of expert 2, where no round would look.
            file.seek(2 * BLOCK + BLOCK // 2)
            file.write(bytes(4096))

    monkeypatch.setattr("tunetool.bench.experts.blocks.write", write_and_damage)
    runs = tmp_path / "runs"
    request = Request(
        target=disk, expert_bytes=BLOCK, experts=8, top_k=2, threads=3, rounds=1, runs_dir=runs, allow_busy=True
    )
    result = bench_experts(request, PlainProgress())
    assert result.code == 1
    assert result.record is not None
    assert result.record.verdict is not None
    (check,) = result.record.checks
    assert (check.id, check.status) == ("experts.target.bytes", "fail")
    assert check.found == "1 of 8 hold other bytes"
    assert result.record.verdict.status == "fail"
    assert "do not trust this storage" in result.record.verdict.reasons[0]
    assert list(disk.iterdir()) == []


def test_another_expert_than_the_wanted_is_seen(disk: Path) -> None:
    path = disk / "experts"
    write(path, 3, BLOCK, 0, lambda: None)
    reader = Reader({"path": path, "block": BLOCK, "threads": 2, "slots": 3})
    with path.open("r+b") as file:
        # Expert 1 has the last page of another, and expert 2 a wrong one in its middle.
        file.seek(2 * BLOCK - 4096)
        file.write(bytes(4096))
        file.seek(2 * BLOCK + BLOCK // 2)
        file.write(bytes(4096))
    for mode in ("direct", "buffered"):
        assert reader.random(mode, [2, 0, 1], whole=False)["wrong"] == 1
        assert reader.random(mode, [2, 0, 1], whole=True)["wrong"] == 2
    held = [(0, 0), (1, 1), (2, 2)]
    reader.fill(held)
    assert reader.check(held) == {"wrong": 2}
    replayed = reader.replay([[(0, 0, True)], [(1, 2, False)], [(0, 1, False), (2, 2, False)]])
    assert replayed["wrong"] == 1
    assert len(replayed["latencies"]) == 3
    assert reader.replay([[(1, 0, True)]])["wrong"] == 1, "the cache holds another expert there"
    path.write_bytes(b"")
    with pytest.raises(OSError, match="the file ends within expert 0"):
        reader.fill(held[:1])
