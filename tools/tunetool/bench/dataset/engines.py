"""The ways to read tokens and images, by name. Imports none of the libraries that they need."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tunetool.node.machine.container import device_nodes

Order = Literal["sequential", "shuffled"]
Kind = Literal["tokens", "images"]
Files = Literal["files", "tar"]

Device = Literal["auto", "cpu", "cuda"]

GPU_DIRECT, KVIKIO, FIO, TF_DATA, DALI = "gpu-direct", "kvikio", "fio", "tf-data", "dali"
NUMBER_BYTES = 8
"""Of a sample's number, before it in a TFRecord."""
HUGE_POOL = "nr-hugepages"
"""The end of the name of the engine beside a pool of huge pages."""


@dataclass(frozen=True)
class TokenEngine:
    """A way to read samples of tokens from Megatron's .bin."""

    name: str
    order: Order
    advice: str = ""
    """Of madvise(2), in small letters; none by default."""
    direct: bool = False
    """Past the page cache, with threads."""
    opened: bool = False
    """By opening the file for each sample, as Megatron does with ``mmap_bin_files=False``."""
    pool: bool = False
    """With huge pages in the kernel's pool (``vm.nr_hugepages``)."""
    kind: Kind = "tokens"

    @property
    def base(self) -> str:
        """The engine that it is compared with: the same order without what is special about this one."""
        return f"mmap-{self.order}"

    @property
    def states(self) -> Sequence[str]:
        """Direct reads go past the page cache, whatever it holds."""
        return ("cold",) if self.direct else ("cold", "warm")


@dataclass(frozen=True)
class ImageEngine:
    """A torch DataLoader over images in files of their own or in tar shards."""

    files: Files
    workers: int
    fewest: int
    """Of all workers that are compared."""
    kind: Kind = "images"
    states: Sequence[str] = ("cold", "warm")

    @property
    def name(self) -> str:
        """Such as ``tar-2-workers``."""
        return f"{self.files}-{self.workers}-workers"

    @property
    def base(self) -> str:
        """The engine that it is compared with: for shards, as many workers; for files, the fewest."""
        return f"files-{self.workers if self.files == 'tar' else self.fewest}-workers"


@dataclass(frozen=True)
class BatchEngine:
    """Batches of shuffled samples of tokens into the memory of a GPU: ``tunetool.loading.GpuDirectDataset``, or kvikio
    alone."""

    name: str
    kind: Kind = "tokens"
    base: str = "mmap-shuffled"
    states: Sequence[str] = ("cold", "warm")

    def missing(self, device: Device) -> str | None:
        """Why it cannot run here, with what to do; None if it can."""
        if not _is_there("torch"):
            return f"not installed: {sys.executable} -m pip install torch"
        if self.name == KVIKIO and (line := LIBRARIES[KVIKIO].not_installed()):
            return line
        if self.name == KVIKIO and device == "cpu":
            return "it reads into a GPU, not to `--device cpu`"
        if device != "cpu" and not device_nodes("nvidia[0-9]*"):
            return "it needs a GPU" + ("" if self.name == KVIKIO else "; `--device cpu` reads into the host's memory")
        return None


@dataclass(frozen=True)
class FioEngine:
    """fio's random reads of the same file, in blocks of a sample: what a reader can reach. It hands no bytes out."""

    name: str = FIO
    kind: Kind = "tokens"
    base: str = "mmap-shuffled"
    states: Sequence[str] = ("cold", "warm")


@dataclass(frozen=True)
class RecordEngine:
    """tf.data over the same samples in TFRecord shards, in files' order or in that of the shuffled files."""

    name: str
    base: str
    kind: Kind = "tokens"
    states: Sequence[str] = ("cold", "warm")

    def missing(self, device: Device = "cpu") -> str | None:
        """Why it cannot run here, with the line that installs what is missing; None if it can, on any ``device``."""
        del device
        return LIBRARIES[TF_DATA].not_installed()


@dataclass(frozen=True)
class DaliEngine:
    """NVIDIA DALI's reader of files over the same images, in a shuffled order; a GPU decodes them if there is one."""

    base: str
    name: str = DALI
    kind: Kind = "images"
    states: Sequence[str] = ("cold", "warm")

    def missing(self, device: Device) -> str | None:
        """Why it cannot run here, with the line that installs what is missing; None if it can."""
        if line := LIBRARIES[DALI].not_installed():
            return line
        return "it needs a GPU" if device == "cuda" and not device_nodes("nvidia[0-9]*") else None


Engine = TokenEngine | ImageEngine | BatchEngine | FioEngine | RecordEngine | DaliEngine

_ADVICE: Mapping[Order, Sequence[str]] = {
    "sequential": ("sequential", "willneed", "hugepage"),
    "shuffled": ("random", "willneed", "hugepage"),
}


def engines(workers: Sequence[int], huge_pool: bool) -> dict[str, Engine]:
    """All of them, by name. ``huge_pool``: with the rows beside a pool of huge pages."""
    every: list[Engine] = []
    for order, advices in _ADVICE.items():
        plain = TokenEngine(f"mmap-{order}", order)
        every.append(plain)
        every += [TokenEngine(f"{plain.name}-{advice}", order, advice) for advice in advices]
        if huge_pool:
            every.append(TokenEngine(f"{plain.name}-{HUGE_POOL}", order, pool=True))
    every.append(TokenEngine("file-shuffled", "shuffled", opened=True))
    every.append(TokenEngine("direct-shuffled", "shuffled", direct=True))
    every += [BatchEngine(GPU_DIRECT), BatchEngine(KVIKIO), FioEngine()]
    every += [RecordEngine(TF_DATA, "mmap-sequential"), RecordEngine(f"{TF_DATA}-interleaved", TF_DATA)]
    for count in workers:
        every += [ImageEngine("files", count, min(workers)), ImageEngine("tar", count, min(workers))]
    every.append(DaliEngine(f"files-{max(workers)}-workers"))
    return {each.name: each for each in every}


def missing_for_images() -> str | None:
    """Why no image can be read here, with the line that installs what is missing; None if it can."""
    modules = {"torch": "torch", "PIL": "pillow", "numpy": "numpy"}
    absent = [package for module, package in modules.items() if not _is_there(module)]
    return f"not installed: {sys.executable} -m pip install {' '.join(absent)}" if absent else None


@dataclass(frozen=True)
class Library:
    """A framework, and the package of the index that installs it."""

    module: str
    package: str

    def not_installed(self) -> str | None:
        """The line that installs it; None where it is there."""
        return None if _is_there(self.module) else f"not installed: {sys.executable} -m pip install {self.package}"


LIBRARIES: Mapping[str, Library] = {
    TF_DATA: Library("tensorflow", "tensorflow"),
    KVIKIO: Library("kvikio", "kvikio-cu12"),
    DALI: Library("nvidia.dali", "nvidia-dali-cuda120"),
}
"""kvikio and DALI have a package for each CUDA: kvikio-cu13 and nvidia-dali-cuda130 for CUDA 13."""


def is_of_images(name: str) -> bool:
    """Whether the engine of this name reads images."""
    return name.endswith("-workers") or name == DALI


def rows_with_workers(workers: Sequence[int]) -> dict[str, str]:
    """By name, why what reads into a GPU has no figures with each number of workers above 0."""
    return {
        f"{name}-{count}-workers": (
            f"GPUDirect Storage with num_workers={count}: each worker is another process, whose GPU memory is not the "
            "trainer's, so batches are copied through host memory; use num_workers=0"
        )
        for name in (GPU_DIRECT, KVIKIO)
        for count in filter(None, workers)
    }


def _is_there(module: str) -> bool:
    """Whether it can be imported, without importing more than the package around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
