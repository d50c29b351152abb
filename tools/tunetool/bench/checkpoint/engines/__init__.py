"""Every engine of the benchmark by its name. Importing this imports neither torch nor any engine's library.

An engine is one file here with a class of the interface ``base.Engine``, a line of ``ENGINES``, and a row of the table
in docs/concepts/checkpoint-engines.md. What the line says, nothing else asks an engine's name for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, cast

from tunetool.bench.checkpoint.engines.base import Engine
from tunetool.origin import install_hint

DCP_THREADS = (1, 2, 4, 8, 16)
REFERENCE = "torch-save-zip"
"""``torch.save`` with its defaults; the other engines are compared with it."""
DIRECT = "direct"
"""tunetool's own with its defaults, for which advice says what it reaches."""


@dataclass(frozen=True)
class Library:
    """What an engine needs beside torch: its title, the modules that must be there, and the line that installs it."""

    title: str
    modules: tuple[str, ...]
    line: str = ""
    extra: str = ""
    """The extra of tunetool that brings it: the line is that of this tunetool then."""

    @property
    def install(self) -> str:
        """The line that installs it."""
        return install_hint(self.extra) if self.extra else self.line

    def missing(self) -> str | None:
        """Why it is not there, with that line; None if it is."""
        # A package before its parts: the search for a part imports the package.
        present = all(find_spec(module) for module in self.modules)
        return None if present else f"{self.title} is not installed: {self.install}"


_SAFETENSORS = Library("safetensors", ("safetensors",), extra="engines")
NVIDIA = Library("nvidia-resiliency-ext", ("nvidia_resiliency_ext",), "pip install -U nvidia-resiliency-ext")
_MEGATRON = Library("Megatron-core", ("megatron", "megatron.core"), "pip install megatron-core")
_ORBAX = Library("Orbax", ("orbax", "jax"), "pip install orbax-checkpoint")
_ZSTD = "zstd, level 1, of each array's chunks"
"""Orbax asks TensorStore for zarr with zstd 1 (`_build_zarr2_metadata` of orbax-checkpoint 0.12), and keeps the chunks
in OCDBT."""


@dataclass(frozen=True)
class Entry:
    """One engine: ``FILE.CLASS`` in this package, the family that records name, and what is known without its file."""

    path: str
    family: str
    arguments: tuple[Any, ...] = ()
    library: Library | None = None
    """None: it needs none, or says itself what is wrong with it."""
    asynchronous: bool = False
    """Whether the training loop continues during a save, from a copy of the state that it keeps in host memory."""
    own: bool = False
    """Whether tunetool's writer is at work, and is compared with the best of the others."""
    compression: str = "none"
    """How it compresses; ``none``: it writes every byte as it is."""

    def missing(self) -> str | None:
        """Why its library is not there, with the line that installs it; None if it is."""
        return self.library.missing() if self.library else None

    def __call__(self) -> Engine:
        """Make it. Imports its file, and so torch."""
        file, _, kind = self.path.partition(".")
        return cast(Engine, getattr(importlib.import_module(f"{__name__}.{file}"), kind)(*self.arguments))


_DCP = {
    f"dcp-t{threads}-{'single' if single else 'multi'}": Entry("dcp.Dcp", "dcp", (threads, single))
    for threads in DCP_THREADS
    for single in (True, False)
}
ENGINES: Mapping[str, Entry] = {
    REFERENCE: Entry("torch_save.TorchSave", "torch.save", (True,)),
    "torch-save-legacy": Entry("torch_save.TorchSave", "torch.save", (False,)),
    "safetensors": Entry("safe.Safetensors", "safetensors", library=_SAFETENSORS),
    **_DCP,
    "dcp-async-thread": Entry("dcp_async.DcpAsync", "dcp-async", ("thread",), asynchronous=True),
    "dcp-async-process": Entry("dcp_async.DcpAsync", "dcp-async", ("process",), asynchronous=True),
    "nvidia-resiliency-ext": Entry(
        "nvidia_resiliency.NvidiaResiliency", "nvidia-async", library=NVIDIA, asynchronous=True
    ),
    "fsdp-sharded": Entry("fsdp.FsdpSharded", "consolidated"),
    "fsdp-consolidated": Entry("fsdp.FsdpConsolidated", "consolidated"),
    "fsdp2-dcp": Entry("fsdp2.Fsdp2Dcp", "fsdp2"),
    "fsdp2-direct": Entry("fsdp2.Fsdp2Direct", "direct-fsdp2", own=True),
    "fsdp2-consolidated": Entry("fsdp2.Fsdp2Consolidated", "fsdp2"),
    "deepspeed-torch": Entry("deepspeed_engine.DeepSpeedTorch", "deepspeed"),
    "deepspeed-fast-zip": Entry("deepspeed_fast.FastFile", "deepspeed", (True,)),
    "deepspeed-fast-legacy": Entry("deepspeed_fast.FastFile", "deepspeed", (False,)),
    "megatron-dist": Entry("megatron_dist.MegatronDist", "megatron", library=_MEGATRON),
    "orbax": Entry("orbax_engine.Orbax", "orbax", library=_ORBAX, compression=_ZSTD),
    "orbax-async": Entry(
        "orbax_engine.OrbaxAsync", "orbax-async", library=_ORBAX, asynchronous=True, compression=_ZSTD
    ),
    DIRECT: Entry("direct.Direct", "direct", own=True),
    "direct-async": Entry("direct.DirectAsync", "direct-async", asynchronous=True, own=True),
    "direct-gds": Entry("direct.DirectGds", "direct-gds", own=True),
}
