"""`tunetool bench dataset` end to end on a real disk: files are made, read in both states with proof, and gone."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from calls import TUNETOOL, call
from judged import proven, undisturbed
from programs import need_program
from tunetool.bench.dataset.engines import DaliEngine, missing_for_images
from tunetool.measure.process_reads import counted_reads
from tunetool.record import Record, parse

pytest_plugins = ["disks"]
ENGINES = ("mmap-shuffled", "direct-shuffled", "tar-2-workers")


def bench(target: Path, tmp_path: Path, *arguments: object) -> Record:
    """One round, as long as it may take. Where the kernel counts, its figures are proven."""
    places = ("--target", target, "--runs-dir", tmp_path / "runs", "--allow-busy", "--rounds", 1, "--duration", "1m")
    done = call(*TUNETOOL, "bench", "dataset", *places, *arguments, "--json", "-", env=os.environ)
    record = parse(done.stdout, done.stderr[-2000:])
    if counted_reads() is not None:
        undisturbed(done.returncode, record)
    return record


def test_tokens_and_images_from_a_disk_and_from_the_page_cache(disk: Path, tmp_path: Path) -> None:
    (disk / "theirs").write_text("keep")
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"{number} " * 40}) + "\n" for number in range(20_000)))
    few = ("--images", 40, "--image-side", 64, "--num-workers", "2", "--threads", 2)
    record = bench(disk, tmp_path, "--jsonl", corpus, *few, "--engines", ",".join(ENGINES))
    images = "pass" if missing_for_images() is None else "skip"
    assert {check.id: check.status for check in record.checks} == {
        "dataset.cold.mmap-shuffled": "pass",
        "dataset.cold.direct-shuffled": "pass",
        "dataset.cold.tar-2-workers": images,
        "dataset.warm.mmap-shuffled": "pass",
        "dataset.warm.tar-2-workers": images,
    }
    by_name = {each.name: each for each in record.measurements}
    for engine in ENGINES if images == "pass" else ENGINES[:2]:
        proven(by_name[f"dataset.cold.{engine}.read"])
        if counted_reads() is not None:
            assert by_name[f"dataset.cold.{engine}.fetched"].value >= 0.98, "workers that ended are counted too"
    if counted_reads() is not None:
        assert by_name["dataset.warm.mmap-shuffled.fetched"].value < 0.5
    assert [entry.name for entry in disk.iterdir()] == ["theirs"]
    (kept,) = (tmp_path / "runs").iterdir()
    assert "<svg" in (kept / "report.html").read_text()
    assert "advice: " in call(*TUNETOOL, "report", "show", kept).stdout


def test_a_made_corpus_with_few_documents_is_read_to_its_end(disk: Path, tmp_path: Path) -> None:
    record = bench(
        disk, tmp_path, *("--size", "400kB", "--seed", 1, "--sequence-length", 16), *("--engines", "mmap-sequential")
    )
    assert {check.status for check in record.checks} == {"pass"}
    # The number of documents of a made corpus is random: 66 are expected, which have one sample more than these 62.
    assert {each.parameters["documents"] for each in record.measurements} == {62}


@pytest.mark.skipif(counted_reads() is None, reason="this kernel does not count what a process reads")
def test_shuffled_samples_do_not_come_from_read_ahead(disk: Path, tmp_path: Path) -> None:
    # However long a pass may take: else the whole file would be in the page cache soon, and its rate be the figure.
    record = bench(
        disk, tmp_path, *("--size", "60MB"), *("--engines", "mmap-sequential,mmap-shuffled,mmap-shuffled-random")
    )
    found = {each.name.removeprefix("dataset."): each for each in record.measurements}
    cut = {name for name, each in found.items() if each.parameters["passes_ended_by_read_ahead"]}
    assert cut == {f"cold.mmap-shuffled.{figure}" for figure in ("samples", "read", "fetched")}
    samples = {name: each.parameters["samples_of_a_pass"] for name, each in found.items() if name.endswith(".read")}
    whole = samples["cold.mmap-sequential.read"]
    assert 0 < samples["cold.mmap-shuffled.read"] < whole / 10
    assert samples["cold.mmap-shuffled-random.read"] == samples["warm.mmap-shuffled.read"] == whole
    assert found["cold.mmap-shuffled.fetched"].value > 2
    assert found["cold.mmap-shuffled-random.fetched"].value < 1.1


def test_samples_that_were_announced_do_not_end_a_pass(disk: Path, tmp_path: Path) -> None:
    # The 64 samples that are announced first are more than a tenth of so small a corpus.
    engines = ("--engines", "mmap-shuffled-willneed,direct-shuffled")
    figures = bench(disk, tmp_path, "--size", "4MB", "--states", "cold", *engines).measurements
    passes = {each.parameters["samples_of_a_pass"] for each in figures if each.name.endswith(".read")}
    assert passes == {4_000_000 // 8192}


def test_a_tensorflow_that_cannot_be_imported_fails_alone(disk: Path, tmp_path: Path) -> None:
    (tmp_path / "broken/tensorflow").mkdir(parents=True)
    (tmp_path / "broken/tensorflow/__init__.py").write_text("raise ImportError('libtensorflow.so: no such symbol')\n")
    paths = [str(tmp_path / "broken"), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = call(
        *(*TUNETOOL, "bench", "dataset", "--target", disk, "--runs-dir", tmp_path / "runs", "--allow-busy"),
        *("--size", "2MB", "--rounds", 1, "--states", "warm", "--engines", "mmap-sequential,tf-data*", "--json", "-"),
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert done.returncode == 3, done.stderr
    statuses = {check.id.removeprefix("dataset.warm."): check for check in parse(done.stdout, "stdout").checks}
    assert statuses["mmap-sequential"].status == "pass"
    for name in ("tf-data", "tf-data-interleaved"):
        assert statuses[name].status == "unknown"
        assert "libtensorflow.so: no such symbol" in statuses[name].found
    assert list(disk.iterdir()) == []


def test_tensorflow_reads_samples_of_disk_and_page_cache(disk: Path, tmp_path: Path) -> None:
    if not find_spec("tensorflow"):
        pytest.skip("TensorFlow is not installed")
    record = bench(disk, tmp_path, *("--size", "20MB", "--sequence-length", 500), *("--engines", "tf-data*"))
    assert {check.id: check.status for check in record.checks} == {
        f"dataset.{state}.{name}": "pass" for state in ("cold", "warm") for name in ("tf-data", "tf-data-interleaved")
    }
    by_name = {each.name: each for each in record.measurements}
    proven(by_name["dataset.cold.tf-data.read"])
    assert by_name["dataset.cold.tf-data.read"].parameters["tensorflow"]
    assert by_name["dataset.warm.tf-data-interleaved.versus_base"].parameters["against"] == "tf-data"
    assert list(disk.iterdir()) == []


def test_dali_reads_the_images_of_a_disk_and_of_the_page_cache(disk: Path, tmp_path: Path) -> None:
    if DaliEngine("").missing("cpu"):
        pytest.skip("NVIDIA DALI is not installed")
    record = bench(
        disk,
        tmp_path,
        *("--size", "2MB", "--images", 70, "--image-side", 64, "--device", "cpu"),
        *("--engines", "dali"),
    )
    assert {check.id: check.status for check in record.checks} == {
        f"dataset.{state}.dali": "pass" for state in ("cold", "warm")
    }
    figures = {each.name: each for each in record.measurements}
    assert figures["dataset.cold.dali.samples"].parameters["device"] == "cpu"
    proven(figures["dataset.cold.dali.read"])
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize("medium", ["disk", "memory"])
def test_batches_come_from_a_disk_and_from_memory(medium: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    need_program("fio")
    target: Path = request.getfixturevalue(medium)
    record = bench(
        target,
        tmp_path,
        *("--size", "2MB", "--sequence-length", 512, "--threads", 2),
        *("--device", "cpu", "--engines", "gpu-direct,kvikio,fio"),
    )
    states = ("cold", "warm") if medium == "disk" else ("warm",)
    checks = {check.id: check for check in record.checks if not check.id.endswith("-workers")}
    assert {name: check.status for name, check in checks.items()} == {
        f"dataset.{state}.{engine}": "pass" if engine == "gpu-direct" else "skip"
        for state in states
        for engine in ("gpu-direct", "kvikio", "fio")
    }
    by_name = {each.name: each for each in record.measurements}
    for state in states:
        figure = by_name[f"dataset.{state}.gpu-direct.read"]
        assert (figure.parameters["device"], figure.parameters["way"]) == ("cpu", "host memory")
        assert by_name[f"dataset.{state}.fio.read"].value > 0
    if medium == "disk":
        proven(by_name["dataset.cold.gpu-direct.read"])
        proven(by_name["dataset.cold.fio.read"])
    else:
        assert {each.medium for each in record.measurements} == {"tmpfs"}
    assert list(target.iterdir()) == []


def test_start_and_end_of_workers_are_no_part_of_the_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from tunetool.bench.dataset import loader_child

    now = [0.0]

    def batches(dataset: Any) -> Iterator[Any]:
        now[0] += 100.0  # workers start
        for _ in range(1000):
            now[0] += 0.1
            yield None, [0] * 32, None

    monkeypatch.setattr(loader_child, "loader", batches)
    monkeypatch.setattr(loader_child, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(loader_child._Here, "workers", 2)
    assert loader_child.images_without_storage([b""]) == pytest.approx(320)


@pytest.mark.parametrize("files", ["files", "tar"])
def test_a_dataloader_hands_out_each_image_once_with_its_bytes(files: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tunetool.bench.dataset import loader_child
    from tunetool.bench.dataset.files import make_images, write_shards
    from tunetool.bench.dataset.request import Request
    from tunetool.report.progress import PlainProgress

    images = make_images(Request(target=tmp_path, images=20, image_side=28), tmp_path, PlainProgress())
    order: dict[str, Any] = {"files": files, "workers": 0, "seed": 1}
    order |= {"images": str(images.directory), "shards": str(images.shards)}
    loader_child.answer({"do": "start", **order})
    done = loader_child.answer({"do": "pass", "seconds": 600})
    assert done["samples"] == 20
    assert done["bytes"] == sum(path.stat().st_size for path in images.directory.iterdir())
    assert loader_child.answer({"do": "check"}) == {"equal": True}
    # Other bytes where the engine reads, behind the sums that plain reads made.
    changed, other = sorted(images.directory.iterdir())[:2]
    changed.write_bytes(other.read_bytes())
    write_shards(images)
    loader_child.answer({"do": "pass", "seconds": 600})
    assert loader_child.answer({"do": "check"}) == {"equal": False}


def test_a_target_may_be_named_from_where_the_call_is_made(tmp_path: Path) -> None:
    need_program("fio")
    (tmp_path / "here").mkdir()
    done = call(
        *(*TUNETOOL, "bench", "dataset", "--target", "here", "--size", "1MiB", "--engines", "fio", "--rounds", 1),
        *("--duration", "1s", "--allow-busy", "--runs-dir", tmp_path / "runs", "--json", "-"),
        cwd=tmp_path,
    )
    record = parse(done.stdout, "stdout")
    # fio is started in another directory. Without another engine beside it, its figures prove nothing.
    assert {each.labels["engine"] for each in record.measurements} == {"fio"}, record.verdict
    assert record.target == str(tmp_path / "here")
    assert list((tmp_path / "here").iterdir()) == []
