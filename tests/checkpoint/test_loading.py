"""``tunetool.loading``: the same tensors as the safetensors library gives, and every fault of the files by its name."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.loading import DoesNotFit, Progress, load, load_into, release_buffers
from waiting import PATIENCE

pytest_plugins = ["disks"]
Ask = Callable[..., Any]
Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"
SMALL = 1 << 16
"""Bytes of the smallest buffer: tensors of the tests need several."""
DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random bits; of bools, 0 and 1."""
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    bits = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return (bits & 1 if dtype == torch.bool else bits).view(dtype).reshape(shape)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist()) if tensor.numel() else b""


def same(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert bits(ours[name]) == bits(tensor), name


def write_index(directory: Path, files: Mapping[str, Mapping[str, Any]]) -> None:
    entries = {name: file for file, tensors in files.items() for name in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": entries}))


def sharded(directory: Path) -> dict[str, Tensors]:
    """Two files with an index: tensors larger than a buffer, empty and without dimensions."""
    files = {
        "model-1.safetensors": {"a": made((100, 700), torch.float32, 1), "b": made((), torch.int64, 2)},
        "model-2.safetensors": {"c": made((3, 0, 2), torch.bfloat16, 3), "d": made((70_001,), torch.int8, 4)},
    }
    for file, tensors in files.items():
        save_file(tensors, directory / file)
    write_index(directory, files)
    return files


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    sharded(directory)
    return directory


SHAPES = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 17]), max_size=4).map(tuple) | st.sampled_from(
    [(70_001,), (300, 257), (2, 3, 20_000)]
)
STATES = st.dictionaries(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(SHAPES, st.sampled_from(DTYPES), st.integers(0, 2)),
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(state=STATES, threads=st.integers(1, 3), seed=st.integers(0, 9))
def test_the_tensors_are_those_of_the_library(
    state: dict[str, Any], threads: int, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("drawn")
    files: dict[str, Tensors] = {}
    for number, (name, (shape, dtype, file)) in enumerate(state.items()):
        files.setdefault(f"model-{file}.safetensors", {})[name] = made(shape, dtype, seed + number)
    theirs: Tensors = {}
    for file, tensors in files.items():
        save_file(tensors, directory / file, metadata={"format": "pt"})
        theirs.update(load_file(directory / file))
        same(load(directory / file, threads=threads, buffer_bytes=SMALL), load_file(directory / file))
    if files:
        write_index(directory, files)
        same(load(directory, threads=threads, buffer_bytes=SMALL), theirs)
        same(load(str(directory / INDEX), threads=threads), theirs)


def test_tensors_at_odd_offsets_are_loaded(tmp_path: Path) -> None:
    """A file that the library takes and does not write: a tensor of 8-byte elements that begins at an odd byte."""
    content = bytes(range(1, 1 + 3 + 16))
    header = json.dumps(
        {
            "odd": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
            "wide": {"dtype": "I64", "shape": [2], "data_offsets": [3, 19]},
        }
    ).encode()
    path = tmp_path / "odd.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + content)
    loaded = load(path)
    assert bits(loaded["odd"]) + bits(loaded["wide"]) == content
    assert loaded["wide"].add(1).tolist() == [value + 1 for value in struct.unpack("<2q", content[3:])]


def _change(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def _shift(path: Path) -> None:
    content = path.read_bytes()
    (length,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + length])
    header["d"]["data_offsets"][0] += 1
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])


def _empty(path: Path, shape: list[int], dtype: str = "F32", name: str = "c") -> None:
    """A tensor without elements."""
    header = json.dumps({name: {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'a' * 64}\nsize 4976698672\n"
KINDS: dict[str, Callable[[Path], object]] = {
    "is no file but a FIFO": os.mkfifo,
    "is no file but a directory": Path.mkdir,
    "is no file but a socket": _socket,
    "is no file but a device": lambda path: path.symlink_to("/dev/zero"),
    "leads to `gone`, which is not there": lambda path: path.symlink_to("gone"),
}


@pytest.mark.parametrize("words", KINDS)
@pytest.mark.parametrize("name", ["model.safetensors", INDEX, "model-1.safetensors", "named.safetensors"])
def test_what_is_no_file_is_called_what_it_is_and_not_waited_for(name: str, words: str, model: Path) -> None:
    if name == "model.safetensors":
        (model / INDEX).unlink()
    (model / name).unlink(missing_ok=True)
    KINDS[words](model / name)
    path = model / name if name == "named.safetensors" else model
    if path.is_dir() and path != model:
        return  # a directory may be named, and then has no weights
    with pytest.raises(UsageProblem) as caught:
        load(path)
    assert f"`{model / name}` {words}" in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda d: _change(d / INDEX, lambda m: m.update(x="model-1.safetensors")),
            f"{INDEX}` lists `x` in `model-1.saf",
        ),
        (lambda d: _change(d / INDEX, lambda m: m.update(a="model-2.safetensors")), "`model-1.safetensors` holds it"),
        (lambda d: _change(d / INDEX, lambda m: m.pop("a")), "`model-1.safetensors` holds `a`, which `"),
        (lambda d: _change(d / INDEX, lambda m: m.update(a="model-3.safetensors")), "/model-3.safetensors` is missing"),
        (lambda d: _change(d / INDEX, lambda m: m.update(a="../x")), f"{INDEX}` names no files of this directory"),
        (lambda d: _change(d / INDEX, lambda m: m.update(a=3)), f"{INDEX}` names no files of this directory"),
        (lambda d: _change(d / INDEX, lambda m: m.update(a="x\0y")), f"{INDEX}` names no files of this directory"),
        (lambda d: _change(d / INDEX, lambda m: m.update(a="x" * 300)), f"{INDEX}` names no files of this directory"),
        (lambda d: (d / INDEX).write_text('{"weight_map": []}'), f"{INDEX}` is not an index"),
        (lambda d: (d / INDEX).unlink(), "holds no weights"),
        (
            lambda d: save_file(
                {"a": torch.ones(1), "c": torch.ones(1), "d": torch.ones(1)}, d / "model-2.safetensors"
            ),
            "`a` is in `model-1.safetensors` and in `model-2.safetensors`",
        ),
        (lambda d: os.truncate(d / "model-2.safetensors", 70_000), "/model-2.safetensors` is cut short"),
        (lambda d: os.truncate(d / "model-2.safetensors", 5), "/model-2.safetensors` is not a safetensors file"),
        (
            lambda d: (d / "model-2.safetensors").write_bytes(b"\xff" * 100),
            "/model-2.safetensors` is not a safetensors",
        ),
        (lambda d: _shift(d / "model-2.safetensors"), "/model-2.safetensors` is not a safetensors file: 'd' lies at"),
        (lambda d: _empty(d / "model-2.safetensors", [0, 2**63]), "`c` has the shape [0, 9223372036854775808], which"),
        (lambda d: _empty(d / "model-2.safetensors", [2**40, 0, 2**40]), "`c` has the shape [1099511627776, 0, 1"),
        (lambda d: _empty(d / "model-2.safetensors", [2**31] * 3 + [0]), "'c' has more elements than can be"),
        (lambda d: _empty(d / "model-2.safetensors", [0], "F4", "\n"), r"`\n` has dtype F4, which is not supported"),
        (lambda d: (d / "model-2.safetensors").write_text(POINTER), "/model-2.safetensors` is a Git LFS pointer"),
        (lambda d: (d / INDEX).write_text(POINTER), f"{INDEX}` is a Git LFS pointer"),
    ],
)
def test_what_is_wrong_with_files_or_index_is_named(model: Path, spoil: Callable[[Path], Any], words: str) -> None:
    load(model)
    spoil(model)
    with pytest.raises(UsageProblem) as caught:
        load(model)
    assert words in caught.value.message
    assert caught.value.hint
    assert "\n" not in caught.value.line


def test_a_path_or_device_that_is_not_there_is_named(model: Path) -> None:
    for path, words in ((model / "none.safetensors", "none.safetensors"), (model.parent / "none", "/none`")):
        with pytest.raises(UsageProblem) as caught:
            load(path)
        assert words in caught.value.message
    for device in ("meta", "nothing", "cuda:99"):
        with pytest.raises(UsageProblem, match=f"`{device}`"):
            load(model, device)
    for wrong in ({"threads": 0}, {"buffer_bytes": 1000}):
        with pytest.raises(UsageProblem, match="at least one thread"):
            load(model, **wrong)


Change = Callable[[Path], object]


@pytest.fixture
def during(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Does something once, before the first read of tensors' bytes."""

    def arrange(act: Callable[[], object]) -> None:
        really_read, left = os.preadv, [act]

        def read(handle: int, buffers: Any, offset: int, *flags: int) -> int:
            # The bytes of a whole buffer: not a probe of the storage.
            if len(buffers[0]) > 2 * 4096 and left:
                left.pop()()
            return really_read(handle, buffers, offset, *flags)

        monkeypatch.setattr(os, "preadv", read)

    return arrange


def _replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    # As `cp --preserve` does: only the inode differs.
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def _overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda path: os.truncate(path, 5000), "is cut short"),
        (_overwrite, "changed while it was loaded"),
        (_replace, "changed while it was loaded"),
        (Path.unlink, "model-1.safetensors"),
    ],
    ids=["truncated", "overwritten", "replaced", "removed"],
)
def test_a_file_that_changes_during_a_load_is_refused(
    model: Path, during: Callable[..., None], change: Change, words: str
) -> None:
    during(lambda: change(model / "model-1.safetensors"))
    with pytest.raises(CannotJudge) as caught:
        load(model, threads=1, buffer_bytes=SMALL)
    assert "/model-1.safetensors`" in caught.value.message
    assert words in caught.value.message
    assert "checkpoint" not in caught.value.line


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_interrupted_load_leaves_no_thread_and_no_open_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load(model)
    before, threads = _open_files(), threading.active_count()
    really_read, go_on = os.preadv, threading.Event()

    def held(handle: int, buffers: Any, offset: int, *flags: int) -> int:
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(PATIENCE)
        return really_read(handle, buffers, offset, *flags)

    def interrupt(progress: Progress) -> None:
        assert progress.bytes < progress.total
        go_on.set()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "preadv", held)
    with pytest.raises(KeyboardInterrupt):
        load(model, progress=interrupt, buffer_bytes=SMALL)
    assert (_open_files(), threading.active_count()) == (before, threads)


def test_more_than_fits_is_refused_before_it_is_read(tmp_path: Path) -> None:
    size = 1 << 42
    header = json.dumps({"huge": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    with pytest.raises(CannotJudge, match=r"`.*model.safetensors` takes 4.398 TB, and `cpu` has .* free"):
        load(path)


@pytest.fixture
def little_address_space() -> Iterator[None]:
    release_buffers()
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.usefixtures("little_address_space")
def test_host_buffers_that_the_system_refuses_are_named(model: Path) -> None:
    with pytest.raises(CannotJudge, match="a host buffer of 1099511627776 bytes") as caught:
        load(model, buffer_bytes=1 << 40)
    assert "buffer_bytes" in (caught.value.hint or "")


def test_memory_of_a_load_is_that_of_its_buffers(forks: Ask, tmp_path: Path) -> None:
    state = {f"t{number}": made((4 << 20,), torch.int32, number) for number in range(4)}
    save_file(state, tmp_path / "model.safetensors")
    (answer,) = forks(
        do="memory_of_loading", world=1, **{"with": {"path": str(tmp_path), "threads": 2, "buffer_bytes": 1 << 20}}
    )
    # 64 MiB go through two buffers of 1 MiB, and what a new thread and a converted block take.
    assert answer["value"] < 16 << 20, answer


def test_the_garbage_collector_runs_after_a_load_as_before(model: Path, tmp_path: Path) -> None:
    during: list[bool] = []
    load(model, progress=lambda _: during.append(gc.isenabled()))
    assert set(during) == {False}
    assert gc.isenabled()
    with pytest.raises(UsageProblem):
        load(tmp_path / "nothing")
    assert gc.isenabled()
    gc.disable()
    try:
        load(model)
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_child_that_is_forked_during_a_load_collects_garbage(model: Path) -> None:
    """The load that would turn it on again goes on in the parent alone."""
    collects: list[int] = []

    def fork(_: Progress) -> None:
        if not collects:
            pid = os.fork()
            if not pid:
                os._exit(gc.isenabled())
            collects.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    load(model, progress=fork)
    assert collects == [True]
    assert gc.isenabled()


def test_progress_ends_with_everything(model: Path) -> None:
    seen: list[Progress] = []
    tensors = load(model, progress=seen.append)
    last = seen[-1]
    assert last.bytes == last.total == last.read == sum(tensor.nbytes for tensor in tensors.values())
    assert last.seconds > 0
    assert "GB/s" in str(last)
    assert [each.bytes for each in seen] == sorted(each.bytes for each in seen)


def test_progress_says_whether_the_drives_were_read(disk: Path) -> None:
    """What the page cache holds is not read again, and what the drives give does not enter it."""
    save_file({"t": made((8 << 20,), torch.uint8, 1)}, disk / "model.safetensors")
    seen: list[Progress] = []

    def source() -> str:
        load(disk, progress=seen.append, buffer_bytes=1 << 20)
        return seen[-1].source

    assert source() == "from memory"
    with (disk / "model.safetensors").open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    assert [source(), source()] == ["from drives"] * 2
    (disk / "model.safetensors").read_bytes()
    assert source() == "from memory"


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(40, 300)
        self.head = torch.nn.Linear(40, 300, bias=False)
        self.head.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(300)
        self.register_buffer("frequencies", torch.arange(5.0), persistent=False)


def stored(net: torch.nn.Module, without: str = "head.weight") -> Tensors:
    return {name: tensor.clone() for name, tensor in net.state_dict().items() if name != without}


@pytest.fixture
def net(tmp_path: Path) -> Path:
    path = tmp_path / "net.safetensors"
    torch.manual_seed(3)
    source = Net()
    source.norm.running_mean.uniform_()
    source.norm.num_batches_tracked += 41
    save_file(stored(source), path)
    return path


@pytest.mark.parametrize("kept", ["first.weight", "head.weight"])
@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_module_is_filled(net: Path, kept: str, device: str | None) -> None:
    saved = load_file(net)
    saved[kept] = saved.pop("first.weight")
    save_file(saved, net)
    module = Net()
    came = load_into(module, net, device)
    assert module.head.weight is module.first.weight
    assert came.bytes == sum(tensor.nbytes for tensor in saved.values())
    filled = stored(module, without="head.weight" if kept == "first.weight" else "first.weight")
    same(filled, saved)
    assert module.frequencies.tolist() == [0, 1, 2, 3, 4]


def test_parameters_get_memory_or_are_converted_in_place(net: Path) -> None:
    saved = load_file(net)
    module = Net()
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            part._parameters[name] = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
    module.head.weight = module.first.weight
    with pytest.raises(UsageProblem, match=r"`first.weight` is no plain tensor .* on `meta`"):
        load_into(module, net)
    load_into(module, net, "cpu")
    same(stored(module), saved)
    assert module.head.weight is module.first.weight
    assert not any(parameter.requires_grad for parameter in module.parameters())

    converted = Net().double()
    reordered = torch.zeros(40, 300, dtype=torch.bfloat16).t()
    converted.first.weight = converted.head.weight = torch.nn.Parameter(reordered)
    load_into(converted, net)
    assert converted.first.weight.data_ptr() == reordered.data_ptr()
    assert torch.equal(converted.first.weight, saved["first.weight"].bfloat16())
    assert torch.equal(converted.first.bias, saved["first.bias"].double())


def test_what_does_not_fit_a_module_is_named_before_it_changes(net: Path) -> None:
    saved = load_file(net)
    module = Net()
    before = stored(module)
    for change, words in (
        ({"first.bias": None}, "the model has `first.bias` of shape [300], and no file holds it"),
        ({"first.bias": torch.ones(301)}, "has `first.bias` of shape [300], and `net.safetensors` holds it with [301]"),
        ({"more": torch.ones(1)}, "`more`, which the model does not have (1 such)"),
    ):
        save_file({name: tensor for name, tensor in {**saved, **change}.items() if tensor is not None}, net)
        with pytest.raises(DoesNotFit) as caught:
            load_into(module, net)
        assert words in caught.value.message
        same(stored(module), before)
    load_into(module, net, ignore_unused=True)
    same(stored(module), saved)
    save_file({name.replace("first.", "1st."): tensor for name, tensor in saved.items()}, net)
    other = Net()
    load_into(other, net, rename=lambda name: name.replace("1st.", "first."))
    same(stored(other), saved)
    other.frequencies = other.frequencies.to("meta")
    with pytest.raises(UsageProblem, match="`frequencies` is on `meta`"):
        load_into(other, net, "cpu", rename=lambda name: name.replace("1st.", "first."))


def _shared(forks: Ask, path: Path, tmp_path: Path, **more: Any) -> Any:
    meet = str(tmp_path / f"meet{len(list(tmp_path.iterdir()))}")
    return forks(do="load_shared", world=2, **{"with": {"path": str(path), "meet": meet, "piece": 100_000, **more}})


def test_ranks_of_a_group_read_each_byte_once(forks: Ask, disk: Path, tmp_path: Path) -> None:
    path = disk / "model"
    path.mkdir()
    state = {f"t{number}": made((size,), torch.int32, number) for number, size in enumerate((300_000, 5, 0, 1, 90_000))}
    save_file(state, path / "model.safetensors")
    answers = _shared(forks, path, tmp_path)
    assert not any(answer.get("trace") for answer in answers), answers
    expected = {name: tensor.double().sum().item() for name, tensor in state.items()}
    total = sum(tensor.nbytes for tensor in state.values())
    for answer in (answer["value"] for answer in answers):
        assert answer["loaded"] == answer["filled"] == expected
        assert answer["bytes"] == answer["total"] == answer["came"] == total
        assert answer["read"] > total / 4
        assert answer["shared by"] == 2
    assert sum(answer["value"]["read"] for answer in answers) == total


def test_without_a_fast_link_each_rank_reads_what_is_in_memory(forks: Ask, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        save_file({"t": made((300_000,), torch.int32, 1)}, Path(path) / "model.safetensors")
        answers = [answer["value"] for answer in _shared(forks, Path(path), tmp_path)]
    assert [(answer["read"], answer["shared by"]) for answer in answers] == [(1_200_000, 1)] * 2


def test_a_rank_that_fails_ends_the_load_of_all(forks: Ask, disk: Path, tmp_path: Path) -> None:
    path = disk / "model"
    path.mkdir()
    save_file({"t": made((500_000,), torch.int32, 1)}, path / "model.safetensors")
    save_file({"u": made((500_000,), torch.int32, 1)}, path / "other.safetensors")
    first, last = _shared(forks, path, tmp_path, fault="reading")
    assert "another rank of `group` could not load" in first["error"]
    assert "Input/output error" in last["error"]
    first, last = _shared(forks, path, tmp_path, fault="memory")
    assert "another rank of `group` could not load" in first["error"]
    assert "has 10 B free" in last["error"]
    for fault, words in (("progress", "no progress"), ("threads", "can't start new thread")):
        first, last = _shared(forks, path, tmp_path, fault=fault)
        assert "another rank of `group` could not load" in first["error"]
        assert words in last["error"]
    first, last = _shared(forks, path, tmp_path, fault="killed")
    assert "rank 1 of `group` ended while it loaded" in first["error"]
    assert last["status"] == -signal.SIGKILL
    for answer in _shared(forks, path, tmp_path, fault="other files"):
        assert "its ranks were given different files" in answer["error"]
    os.truncate(path / "other.safetensors", 100)
    first, last = _shared(forks, path, tmp_path, fault="other files")
    assert "another rank of `group` could not load" in first["error"]
    assert "other.safetensors` is cut short" in last["error"]


def _in_one_memory(module: Net) -> None:
    module.head.weight = torch.nn.Parameter(module.first.weight.data)


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("tie", [lambda module: None, _in_one_memory], ids=["one object", "one memory"])
def test_two_different_tensors_for_a_tied_one_are_refused(
    net: Path, tie: Callable[[Net], None], device: str | None
) -> None:
    saved = load_file(net)
    both = {**saved, "head.weight": saved["first.weight"].clone()}
    module = Net()
    tie(module)
    save_file(both, net)
    load_into(module, net, device)
    assert torch.equal(module.first.weight, both["head.weight"])
    assert torch.equal(module.head.weight, both["head.weight"])

    module = Net()
    tie(module)
    if device is not None and module.head.weight is not module.first.weight:
        return  # each gets memory, and a tensor, of its own
    before = stored(module)
    for other in (both["head.weight"].nextafter(torch.tensor(9.0)), both["head.weight"].double()):
        other[:-1, :-1] = both["head.weight"][:-1, :-1]
        save_file({**both, "head.weight": other}, net)
        for ignore_unused in (False, True):
            with pytest.raises(DoesNotFit) as caught:
                load_into(module, net, device, ignore_unused=ignore_unused)
            assert "`first.weight` and `head.weight` are one tensor of the model" in caught.value.message
            same(stored(module), before)


def test_tensors_that_rename_calls_alike_must_not_differ(net: Path) -> None:
    saved = load_file(net)
    for other, fits in ((saved["first.bias"].clone(), True), (saved["first.bias"] + 1, False)):
        tensors = {f"old.{name}": tensor for name, tensor in saved.items()}
        save_file({**tensors, "new.first.bias": other}, net)
        module = Net()
        if fits:
            load_into(module, net, rename=lambda name: name.replace("old.", "").replace("new.", ""))
            assert torch.equal(module.first.bias, saved["first.bias"])
        else:
            with pytest.raises(DoesNotFit, match=r"`new.first.bias` and `old.first.bias` are one tensor of the model"):
                load_into(module, net, rename=lambda name: name.replace("old.", "").replace("new.", ""))


def test_an_expanded_parameter_is_named_before_anything_changes(net: Path) -> None:
    module = Net()
    module.first.bias = torch.nn.Parameter(torch.zeros(1).expand(300))
    before = stored(module)
    with pytest.raises(UsageProblem) as caught:
        load_into(module, net)
    assert "`first.bias` has elements that share their place in memory: it is expanded" in caught.value.message
    assert caught.value.hint
    same(stored(module), before)
    load_into(module, net, "cpu")
    assert torch.equal(module.first.bias, load_file(net)["first.bias"])
