"""The number format that a training computes in: bf16 where the GPU has it, else fp16 with loss scaling. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from tunetool.errors import UsageProblem

if TYPE_CHECKING:
    from tunetool.record import Scalar

Format = Literal["bf16", "fp16", "fp32"]
Asked = Literal["auto", "bf16", "fp16"]
Capability = tuple[int, int]
"""CUDA's compute capability: (7, 0) of a V100, (9, 0) of an H100."""
BF16_SINCE: Capability = (8, 0)
"""The first that computes in bf16. torch's ``is_bf16_supported`` says yes below it too, where bf16 is emulated."""
FP16: Mapping[str, Any] = {
    "enabled": True,
    "loss_scale": 0,
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
"""DeepSpeed's ``fp16`` block. A loss scale of 0 is dynamic: halved where gradients overflow, doubled after 1000 steps
without an overflow. The values are DeepSpeed's defaults, written out so that a file says what is used."""
_DTYPES: Mapping[Format, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Precision:
    """A format, and why it is used. ``asked``: the caller named it."""

    format: Format
    why: str
    asked: bool = False

    @property
    def dtype(self) -> str:
        """torch's name of the type."""
        return _DTYPES[self.format]

    def __str__(self) -> str:
        return describe(self.format)


BF16 = Precision("bf16", "compute capability 8.0 or more")


def describe(name: str) -> str:
    """A format for people."""
    return f"{name} with loss scaling" if name == "fp16" else name


def computed(parameters: Mapping[str, Scalar], device: str) -> str:
    """A figure's device, and a GPU's number format, which old records do not have. CPUs compute in fp32."""
    precision = str(parameters.get("precision", "fp32"))
    return f"{parameters[device]}{f' in {describe(precision)}' if precision != 'fp32' else ''}"


def choose(asked: Asked, capabilities: Sequence[Capability]) -> Precision:
    """The format for GPUs with these capabilities: one for all of them. Without a GPU, ``auto`` is fp32."""
    if asked != "auto":
        return Precision(asked, f"`--precision {asked}`", asked=True)
    if not capabilities:
        return Precision("fp32", "there is no GPU")
    least = min(capabilities)
    if least >= BF16_SINCE:
        return Precision("bf16", f"compute capability {_dotted(least)}")
    why = f"the GPU's compute capability is {_dotted(least)}, and bf16 needs {_dotted(BF16_SINCE)}"
    return Precision("fp16", why)


def refuse_on_cpu(asked: Asked, device: str) -> None:
    """Raise ``UsageProblem`` where both name something and cannot both be."""
    if device == "cpu" and asked != "auto":
        raise UsageProblem(f"`--precision {asked}` and `--device cpu` contradict each other", "a CPU computes in fp32")


def need(precision: Precision, capabilities: Sequence[Capability]) -> Precision:
    """``precision``, where GPUs with these capabilities compute in it. Raises ``UsageProblem``."""
    if precision.format == "fp32":
        return precision
    if not capabilities:
        raise UsageProblem(
            f"`--precision {precision.format}` needs a GPU, and there is none",
            "a CPU computes in fp32: `--precision auto`",
        )
    if precision.format == "bf16" and min(capabilities) < BF16_SINCE:
        raise UsageProblem(
            f"`--precision bf16`: the GPU's compute capability is {_dotted(min(capabilities))}, and bf16 needs "
            f"{_dotted(BF16_SINCE)}",
            "`--precision auto` takes fp16 with loss scaling there",
        )
    return precision


def _dotted(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"
