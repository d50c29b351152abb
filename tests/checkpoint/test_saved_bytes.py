"""A whole data file is held against the sums of its save, by what receives replicas."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the checkpoints are torch's own")

import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st

from tunetool.checkpoint import DirectReader, DirectWriter, metadata
from tunetool.checkpoint.metadata_pickle import SUMS
from tunetool.checkpoint.saved_bytes import check_file, items_in
from tunetool.checkpoint.transfer import CopiedFile, digest_of
from tunetool.errors import CannotJudge

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def state(value: int = 1) -> dict[str, Any]:
    source = torch.Generator().manual_seed(value)
    return {
        "long": torch.randn(200_000, generator=source),
        "short": torch.full((7, 3), float(value), dtype=torch.bfloat16),
        "none": torch.zeros(0),
        "scalar": torch.tensor(value),
        "not plain": torch.ones(9, dtype=torch.complex64).conj(),
        "settings": {"lr": value, "name": "a" * 300},
    }


def save(directory: Path, value: int = 1) -> Path:
    dcp.save(state(value), storage_writer=DirectWriter(directory, threads=1), no_dist=True)
    return directory


def check(step: Path) -> dict[str, CopiedFile]:
    described = metadata.read(step)
    token = getattr(described.storage_meta, "save_id", None)
    items = items_in(described, getattr(described, SUMS), dict.fromkeys(metadata.files_of(described)))
    return {name: check_file(step, name, some, token) for name, some in items.items()}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("saved") / "step_1")


def data_of(step: Path) -> Path:
    (data,) = step.glob("*.distcp")
    return data


def test_a_sound_file_is_read_once_and_its_digest_is_told(step: Path) -> None:
    assert check(step) == {data_of(step).name: digest_of(data_of(step))}


@given(st.data())
def test_any_flipped_bit_is_found_where_a_reader_looks(step: Path, data: st.DataObject) -> None:
    path = data_of(step)
    content = path.read_bytes()
    at, bit = data.draw(st.integers(0, len(content) - 1)), data.draw(st.integers(0, 7))
    try:
        path.write_bytes(content[:at] + bytes([content[at] ^ 1 << bit]) + content[at + 1 :])
        with contextlib.suppress(CannotJudge):
            check(step)
            loaded = state(0)
            dcp.load(loaded, storage_reader=DirectReader(step), no_dist=True)
            assert as_torch_saves(loaded) == as_torch_saves(state()), "no item has this byte"
    finally:
        path.write_bytes(content)


def as_torch_saves(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def test_a_file_of_another_save_or_cut_short_is_refused(step: Path, tmp_path: Path) -> None:
    path, other = data_of(step), data_of(save(tmp_path / "step_1", 2))
    content = path.read_bytes()
    try:
        path.write_bytes(other.read_bytes())
        with pytest.raises(CannotJudge, match="one of another save"):
            check(step)
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(CannotJudge, match=f"`{path}` is damaged: the checksums at its end"):
            check(step)
    finally:
        path.write_bytes(content)
