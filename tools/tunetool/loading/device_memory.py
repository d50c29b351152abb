"""Memory for weights on a device: checked before it is taken, then taken for all tensors at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.units import format_size

_ROUNDING = 512
"""Bytes to which torch's allocator rounds the size of a tensor on a GPU."""
_HINTS = {
    "cuda": "see `nvidia-smi` for the processes that use the rest, or load a smaller model",
    "cpu": "see `free` and the limits of the control group, or load a smaller model",
}


def device_of(device: str | torch.device) -> torch.device:
    """``cpu``, or a GPU with its number. Raises ``UsageProblem`` for a device that is not there or not supported."""
    try:
        target = torch.device(device)
    except (RuntimeError, TypeError):
        raise UsageProblem(f"`{device}` is not a device", "use `cpu`, `cuda` or `cuda:N`") from None
    if target.type == "cuda":
        if not torch.cuda.is_available():
            raise UsageProblem(f"`{device}`: torch sees no GPU", "use `--device cpu`, or see `nvidia-smi`")
        number = torch.cuda.current_device() if target.index is None else target.index
        if number >= torch.cuda.device_count():
            raise UsageProblem(f"`{device}`: torch sees {torch.cuda.device_count()} GPUs", "see `nvidia-smi`")
        return torch.device("cuda", number)
    if target.type != "cpu":
        raise UsageProblem(f"`{device}` is neither the CPU nor a GPU of CUDA", "use `cpu`, `cuda` or `cuda:N`")
    return target


def need_memory(device: torch.device, count: int, what: str = "the model") -> None:
    """Raises ``CannotJudge`` if ``count`` more bytes do not fit on ``device``."""
    free = free_memory(device)
    if free is not None and count > free:
        raise _too_little(what, count, device, f"`{device}` has {format_size(free)} free")


def free_memory(device: torch.device) -> int | None:
    """Bytes that tensors can still take on ``device``; None if nothing says."""
    if device.type == "cuda":
        # What torch keeps for its next tensors is used by them.
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)
    from tunetool.node.machine.memory import memory_left  # noqa: PLC0415  a load into a GPU needs none of it

    left = memory_left()
    return left[0] if left else None


@contextlib.contextmanager
def taking(device: torch.device, count: int, what: str) -> Iterator[None]:
    """Within this context, ``count`` bytes of tensors are made on ``device``. Raises ``CannotJudge`` where they do not
    fit, also if the system refuses them."""
    need_memory(device, count, what)
    with named_refusal(device, count, what):
        _reserve(device, count)
        yield


@contextlib.contextmanager
def named_refusal(device: torch.device, count: int, what: str) -> Iterator[None]:
    """Within this context, ``count`` bytes of tensors are made on ``device``. Raises ``CannotJudge`` where the system
    refuses them."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _too_little(what, count, device, f"`{device}` refused them") from error
    except RuntimeError as error:
        # torch has no class of its own for this error of its allocator of host memory.
        if "can't allocate memory" not in str(error):
            raise
        raise _too_little(what, count, device, f"`{device}` refused them") from error


def _reserve(device: torch.device, count: int) -> None:
    """One block that torch's allocator keeps and cuts up: asking the driver for each tensor takes longer."""
    if device.type == "cuda" and count:
        torch.empty(count, dtype=torch.uint8, device=device)


def rounded(count: int) -> int:
    """Bytes that a tensor of ``count`` bytes takes on a GPU."""
    return count + -count % _ROUNDING


def _too_little(what: str, count: int, device: torch.device, then: str) -> CannotJudge:
    return CannotJudge(f"{what} takes {format_size(count)}, and {then}", _HINTS[device.type])


def give_memory(module: Any, device: torch.device, what: str) -> None:
    """New memory on ``device`` for every parameter of ``module`` (once for tied ones); the buffers move there."""
    parameters = list(module.parameters())
    with taking(device, sum(rounded(each.numel() * each.element_size()) for each in parameters), what):
        replaced: dict[Any, Any] = {}
        for part in module.modules():
            for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
                replacement = replaced.get(parameter)
                if replacement is None:
                    empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    replacement = replaced[parameter] = torch.nn.Parameter(empty, requires_grad=parameter.requires_grad)
                part._parameters[name] = replacement
            for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
                moved = replaced.get(buffer)
                if moved is None:
                    moved = replaced[buffer] = (
                        torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
                    )
                part._buffers[name] = moved
