"""What a rank reads of its GPU: utilisation, memory and clocks, with NVML instead of nvidia-smi; with torch the compute
capability, by which the ranks choose a number format (``advise.precision``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from tunetool.advise.precision import Capability

UNITS = {"gpu.utilisation": "%", "gpu.memory": "B", "gpu.sm_clock": "MHz", "gpu.memory_clock": "MHz"}


class NoGpu(Exception):
    """There is no GPU to read; the text has the reason."""


class Gpu:
    """An open GPU. Figures that it does not support (MIG: utilisation) are missing from every reading."""

    def __init__(self, library: Any, handle: Any) -> None:
        self._library, self._handle = library, handle
        nvml = library
        self._readers: dict[str, Callable[[], float]] = {
            "gpu.utilisation": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "gpu.memory": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "gpu.sm_clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "gpu.memory_clock": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        }

    def read(self) -> dict[str, float]:
        """The current figures by the names of ``UNITS``; utilisation is NVML's mean over 1/6 to 1 s."""
        figures = {}
        for name, reader in self._readers.items():
            with contextlib.suppress(self._library.NVMLError):
                figures[name] = float(reader())
        return figures

    def name(self) -> str:
        """The model of the GPU, without a CUDA context. Raises ``NoGpu``."""
        try:
            said = self._library.nvmlDeviceGetName(self._handle)
        except self._library.NVMLError as error:
            raise NoGpu(f"NVML does not know the GPU's name: {error}") from None
        return said.decode() if isinstance(said, bytes) else str(said)

    def capability(self) -> tuple[int, int]:
        """CUDA's compute capability, without a CUDA context. Raises ``NoGpu``."""
        try:
            major, minor = self._library.nvmlDeviceGetCudaComputeCapability(self._handle)
        except self._library.NVMLError as error:
            raise NoGpu(f"NVML does not know the GPU's compute capability: {error}") from None
        return int(major), int(minor)

    def close(self) -> None:
        """Shut NVML down."""
        with contextlib.suppress(self._library.NVMLError):
            self._library.nvmlShutdown()


def open_gpu(device: str, local_rank: int, environment: Mapping[str, str]) -> Gpu:
    """The GPU on which this rank computes. Raises ``NoGpu`` where there is none, or NVML cannot read it."""
    if not device.startswith("cuda"):
        raise NoGpu(f"this rank computes on `{device}`")
    try:
        import pynvml
    except ImportError:
        raise NoGpu("NVML's Python binding is not installed (`pip install nvidia-ml-py`)") from None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoGpu(f"NVML does not start: {error}") from None
    _, _, number = device.partition(":")
    name = choose(environment.get("CUDA_VISIBLE_DEVICES"), int(number) if number.isdigit() else local_rank)
    try:
        if isinstance(name, int):
            return Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(name))
        return Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(name))
    except pynvml.NVMLError as error:
        pynvml.nvmlShutdown()
        raise NoGpu(f"NVML knows no GPU `{name}`: {error}") from None


def choose(visible: str | None, index: int) -> int | str:
    """NVML's index or the UUID of CUDA's device ``index``: CUDA numbers the visible GPUs, NVML numbers all GPUs.

    ``visible``: CUDA_VISIBLE_DEVICES. Both use the same order where all GPUs of a node are of one model. Raises
    ``NoGpu`` where fewer are visible.
    """
    if visible is None:
        return index
    shown = [name.strip() for name in visible.split(",") if name.strip()]
    if index >= len(shown):
        raise NoGpu(f"CUDA_VISIBLE_DEVICES is `{visible}`, which shows no GPU {index}")
    return int(shown[index]) if shown[index].isdigit() else shown[index]


def of_gpu(index: int) -> Capability:
    """The compute capability of one GPU of this machine."""
    import torch

    major, minor = torch.cuda.get_device_capability(index)
    return major, minor


def least_of_ranks(index: int) -> Capability:
    """The least of all ranks' GPUs, since all must compute in one format. A collective; ``index``: this rank's GPU."""
    import torch

    mine = of_gpu(index)
    least = torch.tensor([100 * mine[0] + mine[1]], device=f"cuda:{index}")
    torch.distributed.all_reduce(least, torch.distributed.ReduceOp.MIN)
    major, minor = divmod(int(least.item()), 100)
    return major, minor
