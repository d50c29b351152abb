"""`tunetool bench kv-cache` on the disk under the temporary directory: figures with proof, and nothing left behind."""

from __future__ import annotations

import json
import resource
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from tunetool.bench.kv_cache import run
from tunetool.bench.kv_cache.request import Request
from tunetool.bench.kv_cache.store import SLAB
from tunetool.measure.worker import Worker
from tunetool.record import Record, parse
from tunetool.report.progress import PlainProgress

pytest_plugins = ["disks"]

SMALL = ("--model", "llama-tiny", "--size", "160MB", "--longest", "2048", "--prefix-tokens", "512", "--requests", "6")


def bench(target: Path, runs: Path, *arguments: object, **more: Any) -> tuple[subprocess.CompletedProcess[str], Record]:
    common = ["--target", str(target), "--runs-dir", str(runs), "--allow-busy", "--device", "cpu", "--rounds", "1"]
    done = call(*TUNETOOL, "bench", "kv-cache", *common, *SMALL, *map(str, arguments), "--json", "-", **more)
    return done, parse(done.stdout, "stdout")


def test_prefixes_come_from_the_disk_with_proof(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * n, "input_length": 1100, "output_length": 9, "hash_ids": [n % 5, 100 + n % 7, 1000 + n]}
        for n in range(60)
    ]
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    arguments = ["--trace", trace, "--prefill-rate", 10_000, "--dwpd", 1, "--engines", "*"]
    done, record = bench(disk, tmp_path / "runs", *arguments)
    undisturbed(done.returncode, record)
    statuses = {check.labels["engine"]: check.status for check in record.checks}
    assert {name: statuses[name] for name in ("direct", "files-direct", "page-cache", "gds")} == {
        "direct": "pass", "files-direct": "pass", "page-cache": "pass", "gds": "skip"
    }  # fmt: skip
    by_name = {each.name.removeprefix("kv_cache."): each for each in record.measurements}
    for engine in ("direct", "files-direct"):
        proven(by_name[f"{engine}.restore"])
    first = by_name["direct.restore"]
    assert first.parameters["block_bytes"] == 512 * 8192
    # Each prompt has two whole blocks, one of which is written at most.
    assert 0 < by_name["hit_rate"].value <= 1
    assert by_name["direct.prefix-512.p50"].value > 0
    assert by_name["direct.writes_a_day"].value > 0
    assert by_name["page-cache.restore"].evidence is None
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "restoring" in (kept / "report.html").read_text()


def test_a_store_that_cannot_be_written_whole_is_removed(disk: Path, tmp_path: Path) -> None:
    # As on a disk that fills up after the look at its free space.
    limit = (1 << 20, resource.getrlimit(resource.RLIMIT_FSIZE)[1])
    done, record = bench(
        disk,
        tmp_path / "runs",
        *("--engines", "direct,page-cache"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit),
    )
    assert done.returncode == 3
    assert record.verdict is not None
    assert "`direct` could not be measured" in record.verdict.reasons[0]
    assert "File too large" in record.verdict.reasons[0]
    assert list(disk.iterdir()) == []


def test_a_block_that_the_storage_damages_fails_the_run(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take: Callable[..., Any] = run._KvCache._take

    def damage_and_take(self: Any, opened: Any, *rest: Any) -> Any:
        path = opened.directory / SLAB
        with path.open("r+b") as file:
            for start in range(0, path.stat().st_size, self.plan.block):
                file.seek(start + self.plan.block // 2)
                file.write(b"damaged")
        return take(self, opened, *rest)

    monkeypatch.setattr(run._KvCache, "_take", damage_and_take)
    request = Request(
        target=disk, model="llama-tiny", size=160_000_000, longest=2048, prefix_tokens=(512,), requests=6, rounds=1,
        device="cpu", engines=("direct",), runs_dir=tmp_path / "runs", allow_busy=True,
    )  # fmt: skip
    result = run.bench(request, PlainProgress())
    assert result.code == 1
    assert result.record is not None
    assert result.record.verdict is not None
    assert "`direct` gives other bytes than were written" in result.record.verdict.reasons[0]
    assert list(disk.iterdir()) == []


def test_a_disturbed_round_is_repeated_from_the_same_store(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    ask = Worker.ask

    def noted(self: Worker, order: Any, timeout: float) -> dict[str, Any]:
        asked.append(order["do"])
        return ask(self, order, timeout)

    judged: list[Sequence[str]] = [("other-io",), ("proven",)]
    monkeypatch.setattr(Worker, "ask", noted)
    monkeypatch.setattr(run, "judgement", lambda _: judged.pop(0))
    request = Request(
        target=disk, model="llama-tiny", size=160_000_000, longest=2048, prefix_tokens=(512,), requests=40, rounds=1,
        device="cpu", engines=("page-cache",), runs_dir=tmp_path / "runs", allow_busy=True,
    )  # fmt: skip
    result = run.bench(request, PlainProgress())
    assert result.record is not None
    (passed,) = [check.status for check in result.record.checks if check.labels["engine"] == "page-cache"]
    assert passed == "pass"
    # Its store is filled; the round; its writes are taken back; the round.
    assert [*dict.fromkeys(asked[:4])] == ["open", "write", "steps", "read"]
    assert asked[4:-2] == ["write"] * len(asked[4:-2])
    assert asked[-2:] == ["steps", "read"]
