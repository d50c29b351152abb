"""What was published of this experiment, and whether its bandwidth explains its tokens per second. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tunetool.advise import zero
from tunetool.advise.shapes import preset
from tunetool.bench.inference.model import BYTES
from tunetool.bench.inference.predict import Work

SOURCE = "DeepSpeed blog, `DeepNVMe: Affordable I/O scaling for Deep Learning Applications`, 2025"
MODEL = "LLAMA-3-70B"
BATCH, PROMPT, NEW_TOKENS = 96, 512, 32
HARDWARE = "one GPU; Gen4 on an Azure NC_A100_v4, Gen5 on an ND-H200-v5; with GDS"


@dataclass(frozen=True)
class Result:
    """One configuration of drives, as one RAID0."""

    drives: str
    tokens: float
    """Tokens per second."""
    read: float
    """Bytes per second of its ds_io, 1 GB from the drives to HBM."""

    @property
    def predicted(self) -> float:
        """Tokens per second by the bytes of the weights and ``read``, without a floor by compute."""
        return work().rate(self.read)


RESULTS: Sequence[Result] = (
    Result("4 x Gen4", 7, 10e9),
    Result("4 x Gen5", 17, 27e9),
    Result("8 x Gen5", 26, 48e9),
)


def work() -> Work:
    """The generation that was measured: weights in 2 bytes, all tensors that DeepSpeed swaps read by each pass."""
    swapped = zero.swapped_tensors(preset("70b"), 1, zero.MIN_AIO_BYTES)
    return Work(BATCH, NEW_TOKENS, sum(tensor.numel for tensor in swapped) * BYTES)


def remarks() -> list[str]:
    """Where the numbers are from, and what follows from them."""
    first, last = RESULTS[0], RESULTS[-1]
    return [
        f"published: {SOURCE}; {MODEL}, prompt {PROMPT}, {NEW_TOKENS} new tokens, batch {BATCH}; {HARDWARE}",
        f"published: a pass of 70b reads {work().read_bytes / 1e9:.0f} GB, so its own ds_io figures predict "
        + ", ".join(f"{each.predicted:.1f}" for each in RESULTS)
        + f" tokens/s: {first.drives} reaches all of it, {last.drives} {last.tokens / last.predicted:.0%}",
    ]
