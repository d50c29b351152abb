"""Which build of torch a node takes: by its GPUs, by its NVIDIA driver, and by what the lock names. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from ..common.refusal import Refusal

AUTO, CPU, CUDA = "auto", "cpu", "cuda"

DRIVERS = ((13, "580.65.06"), (12, "525.60.13"), (11, "450.80.02"))
"""CUDA's major versions, each with the oldest driver that runs all of its toolkits.

Source: NVIDIA, CUDA Toolkit Release Notes, table "CUDA Toolkit and Minimum Required Driver Version for CUDA Minor
Version Compatibility".
"""

TORCH_BUILDS = {
    "2.13": ("12.6", "13.0", "13.2"),
    "2.12": ("12.6", "13.0", "13.2"),
    "2.11": ("12.6", "12.8", "13.0"),
    "2.10": ("12.6", "12.8", "13.0"),
    "2.9": ("12.6", "12.8", "13.0"),
    "2.8": ("12.6", "12.8", "12.9"),
    "2.7": ("11.8", "12.6", "12.8"),
    "2.6": ("11.8", "12.4", "12.6"),
    "2.5": ("11.8", "12.1", "12.4"),
}
"""By version of torch, the newest first: the CUDA versions for which it was published.

Source: PyTorch's RELEASE.md, "Release Compatibility Matrix", and the index of its builds.
"""


@dataclass(frozen=True)
class Build:
    """A build of torch. ``cuda`` is None for the build for CPUs."""

    cuda: Optional[str]
    default: bool
    """The one that torch's plain version names in the lock; another has to be asked for as ``+cu126`` or ``+cpu``."""

    @property
    def accelerator(self) -> str:
        """``cuda`` or ``cpu``."""
        return CPU if self.cuda is None else CUDA

    @property
    def tag(self) -> str:
        """The suffix of torch's versions: ``cu126``, ``cpu``."""
        return CPU if self.cuda is None else "cu" + self.cuda.replace(".", "")


def choose(wish: str, gpus: int, driver: Optional[str], torch: str, lock_cuda: Optional[str]) -> Build:
    """The build for a node with that number of GPUs and that driver. ``torch`` and ``lock_cuda``: versions in the lock.

    Raises ``Refusal`` if the node has GPUs but no build of this torch runs on their driver.
    """
    if wish == CPU or (wish == AUTO and gpus == 0):
        return Build(None, default=lock_cuda is None)
    if gpus == 0:
        raise Refusal(
            "`training_environment_accelerator` is `cuda` and no NVIDIA GPU is on the PCI bus. hint: set it to `auto`"
        )
    if driver is None:
        raise Refusal(
            "no NVIDIA driver is loaded, and %d GPUs are on the PCI bus. hint: install the driver, run "
            "`tunetool provision` "
            "again, or set `training_environment_accelerator: cpu`" % gpus
        )
    newest = newest_cuda(driver)
    if lock_cuda is not None and major(lock_cuda) <= newest:
        return Build(lock_cuda, default=True)
    others = [cuda for cuda in builds_of(torch) if major(cuda) <= newest]
    if others:
        return Build(others[-1], default=False)
    needed = [lock_cuda] if lock_cuda else []
    needed += list(builds_of(torch))
    oldest = min(needed, key=version, default="13.0")
    raise Refusal(
        "NVIDIA driver `%s` is too old for torch %s of the lock, which needs driver %s or newer (CUDA %s). hint: %s"
        % (driver, torch, dict(DRIVERS)[major(oldest)], oldest, _older(newest))
    )


def newest_cuda(driver: str) -> int:
    """The newest major version of CUDA that this driver runs; 0 for none."""
    return next((cuda for cuda, oldest in DRIVERS if version(driver) >= version(oldest)), 0)


def builds_of(torch: str) -> tuple[str, ...]:
    """CUDA versions of this torch's builds, the oldest first; empty for a torch that is not in the table."""
    return TORCH_BUILDS.get(".".join(torch.partition("+")[0].split(".")[:2]), ())


def _older(newest: int) -> str:
    for torch, builds in TORCH_BUILDS.items():
        fitting = [cuda for cuda in builds if major(cuda) <= newest]
        if fitting:
            return (
                "update the driver; the newest torch that fits it is %s (CUDA %s): make an environment with that and "
                "name it in `training_environment_python`" % (torch, fitting[-1])
            )
    return "update the driver; no torch from %s on fits it" % list(TORCH_BUILDS)[-1]


def major(text: str) -> int:
    """The first number of a version."""
    return version(text)[0]


def version(text: str) -> tuple[int, ...]:
    """A version as numbers, for comparisons."""
    return tuple(int(number) for number in re.findall(r"\d+", text)) or (0,)
