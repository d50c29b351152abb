"""The compute capability of the ranks' GPUs, by which they choose a number format (``advise.precision``)."""

from __future__ import annotations

from tunetool.advise.precision import Capability


def of_gpu(index: int) -> Capability:
    """Of one GPU of this machine."""
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
