"""Whether NVLink connects the GPUs of ranks, asked of a stand-in for NVML: there is no GPU here."""

# ruff: noqa: N802  the names are those of NVML
from __future__ import annotations

import ctypes
from typing import Any

import pytest

from tunetool.loading import peers

GPUS = ((1, 2), (-3, 4), (5, -6))
UUIDS = (
    "GPU-00000000-0000-0001-0000-000000000002",
    "GPU-ffffffff-ffff-fffd-0000-000000000004",
    "GPU-00000000-0000-0005-ffff-fffffffffffa",
)


class Nvml:
    """Functions of NVML for a node where ``linked`` pairs of ``uuids`` reach each other by NVLink."""

    def __init__(self, uuids: tuple[str, ...], linked: set[tuple[int, int]]) -> None:
        self._uuids, self._linked = uuids, linked
        self.is_open = False

    def nvmlInit_v2(self) -> int:
        self.is_open = True
        return 0

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        if uuid.decode() not in self._uuids:
            return 6
        handle._obj.value = self._uuids.index(uuid.decode()) + 1
        return 0

    def nvmlDeviceGetP2PStatus(self, one: Any, other: Any, capability: int, status: Any) -> int:
        pair = (one.value - 1, other.value - 1)
        status._obj.value = 0 if capability == 2 and {pair, pair[::-1]} & self._linked else 1
        return 0


@pytest.mark.parametrize(
    ("uuids", "pairs", "linked"),
    [
        (UUIDS, {(0, 1), (0, 2), (1, 2)}, True),
        (UUIDS, {(0, 1)}, False),  # a bridge between two of three
        (UUIDS, set(), False),  # PCIe alone
        (UUIDS[:2], {(0, 1)}, False),  # this container does not see the third
    ],
)
def test_gpus_are_linked_if_nvlink_connects_each_pair(
    uuids: tuple[str, ...], pairs: set[tuple[int, int]], linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = Nvml(uuids, pairs)
    monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
    peers.linked.cache_clear()
    assert peers.linked(GPUS) is linked
    assert not nvml.is_open
    peers.linked.cache_clear()


def test_without_nvml_nothing_is_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    peers.linked.cache_clear()
    assert not peers.linked(GPUS[:2])
    peers.linked.cache_clear()
