"""The files that a save leaves after success, interruption or refusal, and the objects that its metadata may hold."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from tunetool.checkpoint import metadata, saver_lock
from tunetool.checkpoint.commit import HeldDirectory, Saving
from tunetool.errors import CannotJudge, UsageProblem

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def describing(*names: str, planner_data: Any = None) -> Metadata:
    """Metadata of one tensor of 4 bytes in each of these files."""
    size = torch.Size([1])
    tensor = TensorStorageMetadata(TensorProperties(), size, [ChunkStorageMetadata(torch.Size([0]), size)])
    stored = {MetadataIndex(name, torch.Size([0])): _StorageInfo(name, 0, 4) for name in names}
    return Metadata(dict.fromkeys(names, tensor), planner_data, stored)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def save(directory: Path) -> str:
    """Save one file completely. Returns its name."""
    saving = Saving.open(directory)
    name = saving.data_name(0, 0)
    (directory / name).write_bytes(b"data")
    saving.commit(describing(name))
    return name


OTHER = ("notes.txt", "__0_0.distcp.bak", "model.safetensors", "__0_0.0123.distcp", ".metadata.tmp")
"""A file of somebody else."""


def test_a_save_replaces_a_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    first = save(tmp_path)
    for name in (*OTHER, "__0_3.distcp"):
        (tmp_path / name).touch()
    second = save(tmp_path)
    assert first != second
    # The file of an older checkpoint by torch's writer is removed as well.
    assert names(tmp_path) == sorted([".metadata", second, *OTHER])


def killed(directory: Path) -> list[str]:
    """Let a save write some files and then die. Returns everything that it leaves behind."""
    saving = Saving.open(directory)
    left = [saving.data_name(0, 0), saving.data_name(1, 0), f".metadata.{saving.token}.tmp"]
    for name in left:
        (directory / name).touch()
    held = (directory / saver_lock.NAME).read_text()
    del saving
    # A killed process does not remove it.
    (directory / saver_lock.NAME).write_text(held)
    return [*left, saver_lock.NAME]


def test_what_killed_saves_left_is_swept_before_the_next_write(tmp_path: Path) -> None:
    kept = save(tmp_path)
    # Data of torch's writer without metadata may be a checkpoint that was interrupted before its rename.
    for name in (*OTHER, "__1_0.distcp"):
        (tmp_path / name).touch()
    before = names(tmp_path)
    left = killed(tmp_path)
    assert names(tmp_path) == sorted([*before, *left])
    saving = Saving.open(tmp_path)
    assert names(tmp_path) == sorted([*before, saver_lock.NAME])
    assert kept in before
    saving.abandon()
    assert names(tmp_path) == before


def test_the_first_save_was_killed(tmp_path: Path) -> None:
    killed(tmp_path)
    killed(tmp_path)
    saving = Saving.open(tmp_path)
    assert names(tmp_path) == [saver_lock.NAME]
    saving.abandon()
    assert names(tmp_path) == []


def test_files_of_another_nodes_metadata_stay_until_the_new_save(tmp_path: Path) -> None:
    """Node A's scratch has the metadata, and node B's a part of the data. Then B's rank becomes the coordinator."""
    old = "__7_0.0123456789abcdef.distcp"
    (tmp_path / old).touch()
    Saving.open(tmp_path).abandon()
    saving = Saving.open(tmp_path)
    assert names(tmp_path) == sorted([saver_lock.NAME, old])
    name = saving.data_name(0, 0)
    (tmp_path / name).touch()
    saving.commit(describing(name))
    assert names(tmp_path) == sorted([".metadata", name])


def test_what_the_metadata_of_one_rank_names_is_kept(tmp_path: Path) -> None:
    (tmp_path / "__0_0.distcp").touch()
    (tmp_path / "__0.metadata").write_bytes(pickle.dumps(describing("__0_0.distcp")))
    saved = save(tmp_path)
    assert names(tmp_path) == sorted([".metadata", "__0.metadata", "__0_0.distcp", saved])


def test_nothing_is_swept_while_metadata_cannot_be_read(tmp_path: Path) -> None:
    kept = save(tmp_path)
    (tmp_path / ".metadata").write_bytes(b"damaged")
    saving = Saving.open(tmp_path)
    saving.abandon()
    assert kept in names(tmp_path)


def test_an_abandoned_save_leaves_no_trace(tmp_path: Path) -> None:
    kept = save(tmp_path)
    before = (tmp_path / ".metadata").read_bytes()
    saving = Saving.open(tmp_path)
    (tmp_path / saving.data_name(0, 0)).touch()
    saving.abandon()
    assert names(tmp_path) == [".metadata", kept]
    assert (tmp_path / ".metadata").read_bytes() == before


def test_there_is_a_complete_checkpoint_at_every_moment(tmp_path: Path) -> None:
    save(tmp_path)
    stop, missing = threading.Event(), []

    def watch() -> None:
        while not stop.is_set():
            # The file it names may go a moment after the metadata that named it was replaced.
            files = metadata.files_of(metadata.read(tmp_path))
            if not all((tmp_path / name).exists() for name in files) and files == metadata.files_of(
                metadata.read(tmp_path)
            ):
                missing.append(files)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(30):
        save(tmp_path)
    stop.set()
    watcher.join()
    assert not missing


def test_a_sync_that_fails_after_the_rename_leaves_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = save(tmp_path)
    saving = Saving.open(tmp_path)
    new = saving.data_name(0, 0)
    (tmp_path / new).touch()

    def fail(_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patched:
        patched.setattr(HeldDirectory, "sync", fail)
        with pytest.raises(CannotJudge) as failed:
            saving.commit(describing(new))
    saving.abandon()
    assert f"`{tmp_path}` holds the new checkpoint, and cannot be synced: Input/output error" in failed.value.message
    assert metadata.files_of(metadata.read(tmp_path)) == {new}
    # A power cut may bring the old metadata back: its file is still there.
    assert names(tmp_path) == sorted([".metadata", old, new])
    newest = save(tmp_path)
    assert names(tmp_path) == [".metadata", newest]


def test_a_save_whose_metadata_no_reader_would_take_is_refused(tmp_path: Path) -> None:
    kept = save(tmp_path)
    saving = Saving.open(tmp_path)
    name = saving.data_name(0, 0)
    (tmp_path / name).touch()
    with pytest.raises(UsageProblem, match=r"names `builtins\.print`"):
        saving.commit(describing(name, planner_data=Call(print)))
    saving.abandon()
    assert names(tmp_path) == [".metadata", kept]


def test_a_second_saver_gets_the_first_ones_name(tmp_path: Path) -> None:
    first = Saving.open(tmp_path)
    with pytest.raises(CannotJudge, match=f"process {os.getpid()} on"):
        Saving.open(tmp_path)
    first.abandon()
    Saving.open(tmp_path).abandon()


def test_a_file_where_the_directory_should_be(tmp_path: Path) -> None:
    (tmp_path / "step-1").touch()
    with pytest.raises(CannotJudge, match=r"`.*step-1` cannot be written: File exists"):
        Saving.open(tmp_path / "step-1")


class Call:
    """Pickled as a call of ``function``."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> Any:
        return self.function, self.arguments


STRANGERS = {
    "a call of the system": (Call(os.system, "touch planted"), "posix.system"),
    "eval": (Call(eval, "open('planted', 'w')"), "builtins.eval"),
    "in the planner's data": (describing("a", planner_data=Call(os.mkdir, "planted")), "posix.mkdir"),
    "in a tensor's place": (
        describing("a", planner_data=[{"x": Call(os.rename, ".metadata", "planted")}]),
        "posix.rename",
    ),
    "something else of torch": (Call(torch.load, "planted"), "torch.serialization.load"),
    "memory for nothing": (Call(bytearray, 10**15), "builtins.bytearray"),
}


@pytest.mark.parametrize(("planted", "named"), STRANGERS.values(), ids=STRANGERS)
def test_nothing_in_metadata_is_run(planted: Any, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(planted))
    with pytest.raises(UsageProblem) as caught:
        metadata.read(tmp_path)
    assert f"`{named}`" in caught.value.message
    assert names(tmp_path) == [".metadata"]


def test_no_way_around_by_dots(tmp_path: Path) -> None:
    """Protocol 4 follows attributes: a name that begins with an admitted class can lead to other objects."""
    for module, name in (
        ("torch.distributed.checkpoint.metadata", "Metadata.__init__.__globals__"),
        ("torch", "float32.__class__"),
        ("torch", "os.system"),
        ("torch", "load"),
    ):
        content = (
            b"\x80\x04" + b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name)) + b"\x93."
        )
        with pytest.raises(UsageProblem, match="nothing was run"):
            metadata.loads(content, tmp_path / ".metadata")


@pytest.mark.parametrize("name", ["../other/__0_0.distcp", "/etc/passwd", "a/../../b", "", "."])
def test_no_file_outside_the_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(describing(name)))
    with pytest.raises(UsageProblem, match="lies outside the checkpoint"):
        metadata.read(tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content[:-20], "cannot be read as a checkpoint's metadata"),
        (lambda content: b"", "cannot be read as a checkpoint's metadata"),
        (lambda content: pickle.dumps({"a": 1}), "it holds a `dict`"),
        (lambda content: pickle.dumps(Metadata({}, None, {"a": 1})), "is stored in no way"),
        (lambda content: pickle.dumps(Metadata([], None, {})), "it has no table of tensors"),
        (lambda content: pickle.dumps(replace(pickle.loads(content), storage_data=None)), "it has no table of files"),
    ],
    ids=["cut short", "empty", "a dict", "another store", "no table", "no files"],
)
def test_damaged_metadata(change: Any, message: str, tmp_path: Path) -> None:
    content = pickle.dumps(describing("a"))
    (tmp_path / ".metadata").write_bytes(change(content))
    with pytest.raises(UsageProblem) as caught:
        metadata.read(tmp_path)
    assert message in caught.value.message
    assert "\n" not in caught.value.message


def test_what_torch_writes_is_read_as_it_was(tmp_path: Path) -> None:
    state = {
        "model": {"weight": torch.zeros(3, 4, dtype=torch.bfloat16), "scale": torch.zeros((), dtype=torch.float8_e5m2)},
        "optimizer": {"state": [{"step": torch.tensor(1.0)}], "groups": ({"lr": 0.1},)},
        "step": 7,
    }
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path))
    free = pickle.loads((tmp_path / ".metadata").read_bytes())
    loaded = metadata.read(tmp_path)
    assert loaded == free
    assert loaded.planner_data["optimizer.state.0.step"] == ("optimizer", "state", 0, "step")
    assert metadata.named_in(tmp_path) == {"__0_0.distcp"}
