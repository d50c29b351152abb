"""``GpuDirectDataset``: the bytes of the files, batches that nobody overwrites, bounded memory, and every fault named.

On a machine with a GPU the same tests read into it, too.
"""

from __future__ import annotations

import errno
import gc
import os
import pickle
import re
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cufile_stand_in import DEFAULTS, StandIn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tunetool.checkpoint import source
from tunetool.checkpoint.source import Files
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import GpuDirectDataset, cufile_reads, standing_reads
from tunetool.loading.cufile_reads import CuFileReads
from tunetool.loading.gpu_direct import BouncingBytes, by_kvikio, refuse_worker
from tunetool.loading.sample_files import SampleFiles
from waiting import until

pytest_plugins = ["disks"]
pytestmark = pytest.mark.filterwarnings("ignore::tunetool.loading.gpu_direct.BouncingBytes")
SMALL = 1 << 16
"""Bytes of the smallest buffer."""
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
LARGE = (256 << 10) + 3 * 4096
"""Bytes of a sample that is read to its place in the host's memory, without a buffer."""


def made(directory: Path, counts: Sequence[int], size: int, seed: int = 0) -> tuple[list[Path], list[bytes]]:
    """Files with so many samples each, and the samples."""
    generator = torch.Generator().manual_seed(seed)
    paths, samples = [], []
    for number, count in enumerate(counts):
        content = torch.randint(0, 256, (count * size,), dtype=torch.uint8, generator=generator).numpy().tobytes()
        paths.append(directory / f"{number}.bin")
        paths[-1].write_bytes(content)
        samples += [content[start : start + size] for start in range(0, len(content), size)]
    return paths, samples


def content(tensor: Any) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@settings(max_examples=20, deadline=None)
@given(
    size=st.integers(1, 9000) | st.sampled_from([4096, 8192, 70_001, LARGE, LARGE + 1]),
    counts=st.lists(st.integers(0, 6), min_size=1, max_size=4).filter(any),
    order=st.lists(st.lists(st.integers(0, 10**6), min_size=1, max_size=12), min_size=1, max_size=4),
    threads=st.integers(1, 3),
    ahead=st.integers(0, 3),
)
@pytest.mark.parametrize("device", DEVICES)
def test_batches_have_the_bytes_of_the_files(
    device: str,
    size: int,
    counts: list[int],
    order: list[list[int]],
    threads: int,
    ahead: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    paths, samples = made(tmp_path_factory.mktemp("drawn"), counts, size)
    order = [[number % len(samples) for number in batch] for batch in order]
    with GpuDirectDataset(paths, size, device=device, threads=threads, buffer_bytes=SMALL) as dataset:
        assert len(dataset) == len(samples)
        for numbers, batch in zip(order, dataset.batches(order, ahead), strict=True):
            assert batch.shape == (len(numbers), size)
            assert [content(row) for row in batch] == [samples[number] for number in numbers]
        assert content(dataset[order[0][0]]) == samples[order[0][0]]
        assert content(dataset[-1]) == samples[-1]


def whole_tensor(batch: Any) -> Any:
    return batch


def one_row(batch: Any) -> Any:
    return batch[len(batch) // 2]


def view_of_a_view(batch: Any) -> Any:
    return batch.view(-1)[3:].as_strided((2,), (1,))


def capsule(batch: Any) -> Any:
    return torch.utils.dlpack.to_dlpack(batch[:1])


def numpy_array(batch: Any) -> Any:
    return batch.numpy() if batch.device.type == "cpu" else batch.untyped_storage()


def storage(batch: Any) -> Any:
    return batch.untyped_storage()


WAYS: list[Callable[[Any], Any]] = [whole_tensor, one_row, view_of_a_view, capsule, numpy_array, storage]


def bytes_behind(way: Callable[[Any], Any], kept: Any) -> tuple[bytes, Any]:
    """What is there now, and what keeps it; a capsule can be looked into once."""
    if way is capsule:
        kept = torch.utils.dlpack.from_dlpack(kept)
        return content(kept), torch.utils.dlpack.to_dlpack(kept)
    if isinstance(kept, torch.UntypedStorage):
        shown = torch.empty(0, dtype=torch.uint8, device=kept.device).set_(kept)
        return content(shown), kept
    return content(torch.as_tensor(kept)), kept


@settings(max_examples=15, deadline=None)
@given(
    steps=st.lists(
        st.tuples(
            st.lists(st.integers(0, 39), min_size=1, max_size=5),
            st.none() | st.sampled_from(WAYS),
            st.integers(0, 5),
        ),
        min_size=4,
        max_size=14,
    ),
    ahead=st.integers(0, 2),
)
@pytest.mark.parametrize("device", DEVICES)
def test_what_somebody_holds_never_changes(
    device: str, steps: list[Any], ahead: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Some batches are kept, each in another way, and let go of later; room is scarce, so memory is used again."""
    size = 5000
    paths, samples = made(tmp_path_factory.mktemp("held"), [20, 20], size)
    held: list[tuple[Callable[[Any], Any], Any, bytes]] = []
    with GpuDirectDataset(
        paths, size, device=device, threads=2, buffer_bytes=SMALL, most_bytes=9 * 5 * (size + 4096), patience=60
    ) as dataset:
        order = [numbers for numbers, _, _ in steps]
        for (numbers, way, letting_go), batch in zip(steps, dataset.batches(order, ahead), strict=True):
            assert content(batch) == b"".join(samples[number] for number in numbers)
            if way is not None:
                was, kept = bytes_behind(way, way(batch))
                held.append((way, kept, was))
            del batch
            if len(held) > 5 or (held and letting_go == 0):
                held.pop(letting_go % len(held))
            for position, (how, keeps, was) in enumerate(held):
                now, kept = bytes_behind(how, keeps)
                held[position] = (how, kept, was)
                assert now == was, f"{how.__name__} of an earlier batch has changed"


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_bounded_and_what_holds_it_is_named(tmp_path: Path, device: str, way: Callable[[Any], Any]) -> None:
    paths, samples = made(tmp_path, [8], 4096)
    room = 2 * (2 * 4096 + (4096 if device == "cpu" else 0))
    with GpuDirectDataset(paths, 4096, device=device, threads=1, most_bytes=room, patience=0.0) as dataset:
        kept = [way(dataset.read([0, 1])), way(dataset.read([2, 3]))]
        with pytest.raises(CannotJudge, match=r"batches that something still refers to take .* \(2 of them\)"):
            dataset.read([4, 5])
        assert dataset.transfers.waited_seconds > 0
        kept.clear()
        assert content(dataset.read([4, 5])) == samples[4] + samples[5]
        with pytest.raises(UsageProblem, match="is larger than `most_bytes`"):
            dataset.read(list(range(8)))


def test_reading_waits_until_another_thread_lets_go(tmp_path: Path) -> None:
    paths, samples = made(tmp_path, [4], 4096)
    with GpuDirectDataset(paths, 4096, device="cpu", threads=1, most_bytes=2 * 4096, patience=600) as dataset:
        held = [dataset.read([0])]
        came: list[bytes] = []
        reader = threading.Thread(target=lambda: came.append(content(dataset.read([1]))))
        reader.start()
        until(lambda: dataset._held._batches[0][1] > 0, "the batch")
        held.clear()
        reader.join()
        assert came == [samples[1]]


def test_a_circle_of_references_is_no_reason_to_wait(tmp_path: Path) -> None:
    paths, _ = made(tmp_path, [4], 4096)
    with GpuDirectDataset(paths, 4096, device="cpu", threads=1, most_bytes=2 * 4096, patience=0.0) as dataset:
        circle: list[Any] = [dataset.read([0])]
        circle.append(circle)
        gc.disable()
        try:
            del circle
            dataset.read([1])
        finally:
            gc.enable()


def test_fewer_batches_are_read_ahead_where_memory_is_scarce(tmp_path: Path, device: str) -> None:
    paths, samples = made(tmp_path, [6], 4096)
    with GpuDirectDataset(paths, 4096, device=device, threads=1, most_bytes=2 * 8192, patience=0.0) as dataset:
        seen = []
        for batch in dataset.batches([[number] for number in range(6)], ahead=4):
            seen.append(content(batch))
            del batch
        assert seen == samples


def test_an_order_that_is_left_early_leaves_nothing_behind(tmp_path: Path, device: str) -> None:
    paths, samples = made(tmp_path, [6], 4096)
    with GpuDirectDataset(paths, 4096, device=device, threads=1) as dataset:
        batches = dataset.batches([[number] for number in range(6)], ahead=3)
        next(batches)
        batches.close()
        del batches
        gc.collect()
        until(lambda: dataset._held.has_room(dataset._held.most_bytes), "no batch is counted any more")
        assert content(dataset.read([5])) == samples[5]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataloader_hands_out_every_sample(tmp_path: Path, workers: int) -> None:
    paths, samples = made(tmp_path, [7, 4], 3000)
    with GpuDirectDataset(paths, 3000, device="cpu", threads=2) as dataset:
        dataset.read([0])
        for collate in (dataset.collate, None):
            loader = DataLoader(
                dataset,
                batch_size=4,
                shuffle=True,
                num_workers=workers,
                collate_fn=collate,
                multiprocessing_context="fork" if workers else None,
            )
            assert sorted(content(row) for batch in loader for row in batch) == sorted(samples)


def test_workers_and_forks_are_refused_for_a_gpu() -> None:
    refuse_worker("cuda", lambda: None)
    refuse_worker("cpu", lambda: SimpleNamespace(num_workers=3))
    with pytest.raises(UsageProblem, match="`cuda` in a DataLoader with num_workers=3") as caught:
        refuse_worker("cuda", lambda: SimpleNamespace(num_workers=3))
    assert "num_workers=0" in str(caught.value.hint)


@pytest.mark.skipif("cuda" not in DEVICES, reason="it is for samples in a GPU")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_a_worker_that_reads_into_a_gpu_fails_by_name(tmp_path: Path, start: str) -> None:
    paths, _ = made(tmp_path, [4], 4096)
    with GpuDirectDataset(paths, 4096, device="cuda") as dataset:
        dataset.read([0])
        loader = DataLoader(dataset, batch_size=2, num_workers=1, multiprocessing_context=start)
        with pytest.raises((UsageProblem, RuntimeError), match="num_workers=1"):
            list(loader)


def test_a_type_is_a_view_of_the_same_bytes(tmp_path: Path, device: str) -> None:
    paths, samples = made(tmp_path, [3], 4096)
    with GpuDirectDataset(paths[0], 4096, dtype=torch.int16, device=device) as dataset:
        batch = dataset.collate(dataset.__getitems__([2, 1]))
        assert (batch.dtype, batch.shape) == (torch.int16, (2, 2048))
        assert content(batch) == samples[2] + samples[1]


def test_a_file_that_becomes_shorter_is_named(tmp_path: Path, device: str) -> None:
    paths, samples = made(tmp_path, [6, 6], 5000)
    with GpuDirectDataset(paths, 5000, device=device, threads=2, buffer_bytes=SMALL) as dataset:
        assert content(dataset.read([5])) == samples[5]
        os.truncate(paths[0], 5000 * 4 + 17)
        with pytest.raises(CannotJudge, match=re.escape(f"`{paths[0]}` is ")) as caught:
            list(dataset.batches([[0, 6], [5, 7], [1, 8]], ahead=2))
        assert "ends at 30000: it is cut short" in caught.value.message
        assert content(dataset.read([3, 11])) == samples[3] + samples[11]


def test_a_file_that_is_gone_is_named(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_reads, "_MOST_OPEN", 0)
    paths, _ = made(tmp_path, [2, 2], 4096)
    with GpuDirectDataset(paths, 4096, device=device) as dataset:
        paths[1].unlink()
        with pytest.raises(CannotJudge, match="No such file or directory") as caught:
            dataset.read([0, 3])
        assert str(paths[1]) in caught.value.message


def test_a_file_that_is_replaced_is_named_and_not_mixed(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_reads, "_MOST_OPEN", 1)
    paths, samples = made(tmp_path, [2, 2], 4096)
    with GpuDirectDataset(paths, 4096, device=device) as dataset:
        # The first file is closed when the second is read.
        assert content(dataset.read([0, 2])) == samples[0] + samples[2]
        (tmp_path / "new").write_bytes(bytes(2 * 4096))
        (tmp_path / "new").replace(paths[0])
        with pytest.raises(CannotJudge, match="was replaced by another file meanwhile") as caught:
            dataset.read([1])
        assert "make the dataset again" in str(caught.value.hint)
        assert content(dataset.read([3])) == samples[3]


def test_few_files_stay_open(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standing_reads, "_MOST_OPEN", 3)
    paths, samples = made(tmp_path, [1] * 12, 4096)

    def opened() -> int:
        return sum(tmp_path in link.resolve().parents for link in Path("/proc/self/fd").iterdir())

    with GpuDirectDataset(paths, 4096, device=device, threads=2) as dataset:
        for _ in range(2):
            assert [content(row) for row in dataset.read(list(range(12)))] == samples
        assert opened() <= 2 * 3
    assert opened() == 0


@pytest.mark.parametrize("size", [4096, 1000])
def test_a_batch_from_hundreds_of_files_needs_few_open_ones(
    tmp_path: Path, device: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_reads, "_MOST_OPEN", 3)
    paths, samples = made(tmp_path, [1] * 200, size)
    opened: list[int] = []
    read = Files.read

    def counted(files: Files, name: str, *rest: Any) -> int:
        came = read(files, name, *rest)
        opened.append(sum(tmp_path in link.resolve().parents for link in Path("/proc/self/fd").iterdir()))
        return came

    monkeypatch.setattr(Files, "read", counted)
    with GpuDirectDataset(paths, size, device=device, threads=1) as dataset:
        assert content(dataset.read(range(200))) == b"".join(samples)
    # Two descriptors for each: those that stay open, and the one that is read.
    assert max(opened) <= 2 * (3 + 1)


def test_too_few_open_files_are_named_with_their_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, _ = made(tmp_path, [1], 4096)

    def refused(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(source, "open_regular", refused)
    monkeypatch.setattr(source, "open_regular", refused)
    with (
        GpuDirectDataset(paths, 4096, device="cpu") as dataset,
        pytest.raises(CannotJudge, match="Too many open files") as caught,
    ):
        dataset.read([0])
    assert "`ulimit -n`" in str(caught.value.hint)


FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"sample_bytes": 0}, "`sample_bytes=0`: a sample has at least one byte"),
    ({"sample_bytes": float("nan")}, "`sample_bytes=nan` is no whole number"),
    ({"sample_bytes": 1000.0}, "`sample_bytes=1000.0` is no whole number"),
    ({"dtype": "int16"}, "`dtype='int16'` is not a dtype of torch"),
    ({"threads": 1.5}, "`threads=1.5` is no whole number"),
    ({"most_bytes": float("inf")}, "`most_bytes=inf` is no whole number"),
    ({"buffer_bytes": "64k"}, "`buffer_bytes='64k'` is no whole number"),
    ({"patience": float("nan")}, "`patience=nan`: at least 0 seconds"),
    ({"patience": -1}, "`patience=-1`: at least 0 seconds"),
    ({"sample_bytes": 3000}, "is 10000 bytes long: 3 samples of 3000 bytes and 1000 more"),
    ({"sample_bytes": 20_000, "ignore_rest": True}, "1 files have no sample of 20000 bytes"),
    ({"sample_bytes": 5, "dtype": torch.int16}, "`sample_bytes=5` is no multiple of the 2 bytes of `torch.int16`"),
    ({"engine": "magic"}, "`engine='magic'` is not an engine"),
    ({"engine": "kvikio"}, "`engine='kvikio'` reads into a GPU"),
    ({"device": "tpu:1"}, "`tpu:1` is not a device"),
    ({"device": "meta"}, "is neither the CPU nor a GPU of CUDA"),
    ({"threads": 0}, "`threads=0`"),
    ({"buffer_bytes": 5000}, "`buffer_bytes=5000`"),
    ({"most_bytes": 0}, "`most_bytes=0`"),
    ({"files": "none.bin"}, "none.bin` cannot be read: No such file or directory"),
    ({"files": "."}, "is not a regular file"),
    ({"files": "fifo"}, "fifo` is not a regular file"),
    ({"files": []}, "0 files have no sample"),
]


@pytest.mark.parametrize(("change", "said"), FAULTS)
def test_a_wrong_call_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.bin").write_bytes(bytes(10_000))
    os.mkfifo("fifo")
    call: dict[str, Any] = {"files": "a.bin", "sample_bytes": 1000, "device": "cpu", **change}
    with pytest.raises(UsageProblem, match=re.escape(said)) as caught:
        GpuDirectDataset(call.pop("files"), call.pop("sample_bytes"), **call)
    assert caught.value.hint


def test_wrong_numbers_and_a_closed_dataset_are_refused(tmp_path: Path) -> None:
    paths, samples = made(tmp_path, [2], 4096)
    dataset = GpuDirectDataset(paths, 4096, device="cpu")
    assert [content(row) for row in dataset] == samples, "a loop over it ends"
    for number in (2, -3):
        with pytest.raises(IndexError):
            dataset[number]
    assert content(dataset.read(torch.tensor([1, 0]))) == samples[1] + samples[0]
    odd: list[Any] = [0.5, "0", slice(0, 1), None, float("nan")]
    for wrong in odd:
        with pytest.raises(UsageProblem, match=re.escape(f"`number={wrong!r}` is no whole number")):
            dataset[wrong]
    with pytest.raises(UsageProblem, match="`ahead=nan`"):
        next(dataset.batches([[0]], ahead=odd[-1]))
    with pytest.raises(UsageProblem, match="a batch of no samples"):
        dataset.read([])
    with pytest.raises(UsageProblem, match="`ahead=-1`"):
        next(dataset.batches([[0]], ahead=-1))
    kept = dataset.read([1])
    dataset.close()
    dataset.close()
    assert content(kept) == samples[1]
    with pytest.raises(UsageProblem, match="the dataset is closed"):
        dataset.read([0])


def test_another_process_gets_a_dataset_of_its_own(tmp_path: Path) -> None:
    paths, samples = made(tmp_path, [2], 4096)
    with GpuDirectDataset(paths, 4096, device="cpu") as dataset:
        dataset.read([0])
        with pickle.loads(pickle.dumps(dataset)) as other:
            assert content(other.read([1])) == samples[1]
            assert other.transfers.samples == 1


def test_threads_end_with_the_dataset(tmp_path: Path) -> None:
    paths, _ = made(tmp_path, [2], 4096)

    def running() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("tunetool-samples")]

    dataset = GpuDirectDataset(paths, 4096, device="cpu", threads=3)
    assert len(running()) == 3
    del dataset
    gc.collect()
    until(lambda: not running(), "threads of a dataset that nothing refers to")


@pytest.mark.skipif("cuda" not in DEVICES, reason="it is for samples in a GPU")
@pytest.mark.filterwarnings("default")
def test_the_way_of_the_bytes_on_this_machine_is_proven_or_said(tmp_path: Path) -> None:
    paths, samples = made(tmp_path, [4], 4096)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dataset = GpuDirectDataset(paths, 4096, device="cuda")
        assert content(dataset.read([3, 0])) == samples[3] + samples[0]
        dataset.close()
    said = [str(each.message) for each in caught if each.category is BouncingBytes]
    moved = dataset.transfers.cufile
    if said:
        assert moved is None
        assert len(said) == 1
        assert "go through the host's memory" in said[0]
    else:
        assert moved is not None
        assert moved.counts.posix == 0


def test_the_example_of_the_documents_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (paths, _) = made(tmp_path, [70], 8192)
    page = (Path(__file__).parents[2] / "docs/concepts/loading.md").read_text()
    (example,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "GpuDirectDataset(" in each]
    assert '"/mnt/nvme_raid0/tokens.bin"' in example
    example = example.replace('"/mnt/nvme_raid0/tokens.bin"', repr(str(paths[0])))
    exec(compile(example.replace("ignore_rest", "device='cpu', ignore_rest"), "loading.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("torch.Size([32, 4096]) cpu") == 2
    assert "Transfers(samples=64, " in printed


# kvikio and cuFile, by a stand-in.


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    made = StandIn()
    made.put_in_place(monkeypatch)
    yield made
    assert made.settings == DEFAULTS, "kvikio's settings are put back"


def of(directory: Path, counts: Sequence[int], size: int) -> tuple[SampleFiles, list[bytes]]:
    paths, samples = made(directory, counts, size)
    return SampleFiles(paths, size, ignore_rest=False), samples


CPU = torch.device("cpu")


def test_cufile_reads_directly_and_its_counters_prove_it(tmp_path: Path, stand_in: StandIn) -> None:
    files, samples = of(tmp_path, [5, 5], 4096)
    reads, why = by_kvikio(files, CPU, 4, is_needed=False)
    assert (why, stand_in.settings["num_threads"], stand_in.settings["compat_mode"]) == (None, 4, "OFF")
    assert reads is not None
    stand_in.requests.clear()
    numbers = [7, 1, 2, 3, 0, 9]
    memory = torch.zeros(len(numbers) * 4096, dtype=torch.uint8)
    reads.submit(memory, [files.where(number) for number in numbers]).wait()
    assert content(memory) == b"".join(samples[number] for number in numbers)
    assert [size // 4096 for _, size, _ in stand_in.requests] == [1, 3, 1, 1], "neighbours are asked for together"
    moved = reads.moved()
    assert moved is not None
    assert moved.claimed_bytes == moved.counts.bytes == 7 * 4096, "with the one that was tried"
    assert reads.bounced() is None
    reads.close()


@pytest.mark.parametrize(
    ("fault", "said", "mode"),
    [
        ("takes_files", "file descriptor is not registered", "ON"),
        ("goes_directly", "of it through bounce buffers in the host's memory (0 requests by nvidia-fs", "ON"),
        (
            "counts",
            "cuFile's counters, which prove the way of the bytes, cannot be read: No module named 'cuda'",
            "OFF",
        ),
    ],
)
def test_bytes_that_bounce_are_said(tmp_path: Path, stand_in: StandIn, fault: str, said: str, mode: str) -> None:
    files, samples = of(tmp_path, [2], 4096)
    setattr(stand_in, fault, False)
    reads, why = by_kvikio(files, CPU, 2, is_needed=True)
    assert said in str(why)
    assert "\n" not in str(why)
    assert reads is not None
    assert stand_in.settings["compat_mode"] == mode, "cuFile's own bounce buffers are one more copy"
    memory = torch.zeros(4096, dtype=torch.uint8)
    reads.submit(memory, [files.where(1)]).wait()
    assert content(memory) == samples[1]
    reads.close()


def test_an_absent_kvikio_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, _ = of(tmp_path, [2], 4096)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    reads, why = by_kvikio(files, CPU, 2, is_needed=False)
    assert reads is None
    assert re.search("`kvikio` does not load: .*, which `.*` installs", str(why))
    with pytest.raises(UsageProblem, match="`engine='kvikio'`: `kvikio` does not load") as caught:
        by_kvikio(files, CPU, 2, is_needed=True)
    assert "install" in str(caught.value.hint)


def test_a_short_file_is_named_when_cufile_reads(tmp_path: Path, stand_in: StandIn) -> None:
    files, _ = of(tmp_path, [3], 4096)
    reads = CuFileReads(files, CPU, 2)
    os.truncate(files.paths[0], 2 * 4096 + 5)
    memory = torch.zeros(2 * 4096, dtype=torch.uint8)
    with pytest.raises(CannotJudge, match="reading 4096 bytes at 8192 by kvikio: 5 bytes came: the file is cut short"):
        reads.submit(memory, [files.where(2), files.where(0)]).wait()
    reads.close()


def test_a_batch_that_nobody_waits_for_keeps_its_memory(tmp_path: Path, stand_in: StandIn) -> None:
    files, samples = of(tmp_path, [3], 4096)
    reads = CuFileReads(files, CPU, 2)
    stand_in.delay = threading.Event()
    memory = torch.zeros(4096, dtype=torch.uint8)
    reads.submit(memory, [files.where(1)])
    assert [job.memory is memory for job in reads._unfinished] == [True]
    stand_in.delay.set()
    reads.close()
    assert not reads._unfinished
    assert content(memory) == samples[1]


def test_a_batch_from_very_many_files_keeps_all_of_them(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cufile_reads, "_MOST_OPEN", 2)
    files, samples = of(tmp_path, [1] * 9, 4096)
    reads = CuFileReads(files, CPU, 2)
    stand_in.delay = threading.Event()
    memory = torch.zeros(9 * 4096, dtype=torch.uint8)
    job = reads.submit(memory, [files.where(number) for number in range(9)])
    # Only now the reads begin.
    stand_in.delay.set()
    job.wait()
    assert content(memory) == b"".join(samples)
    reads.close()


def test_the_warning_has_one_line(tmp_path: Path) -> None:
    paths, _ = made(tmp_path, [1], 4096)
    with GpuDirectDataset(paths, 4096, device="cpu") as dataset:
        assert dataset.bounce is None
        with pytest.warns(
            BouncingBytes, match="^bytes for `cpu` go through the host's memory: why; see `tunetool"
        ) as said:
            dataset._warn("why")
    assert "\n" not in str(said[0].message)
