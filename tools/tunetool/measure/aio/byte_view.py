"""A tensor as bytes without a copy. Self-contained: any Python from 3.8 with torch can run it."""

from __future__ import annotations

from typing import Any


def byte_view(tensor: Any) -> Any:
    """The memory of ``tensor`` as one dimension of ``torch.uint8``; both share it. On any device, of any dtype.

    Raises ``ValueError`` where the bytes of its values are not one piece of memory in their order: a strided or sparse
    tensor, or one whose values torch negates or conjugates only when they are used. ``tensor.view(torch.uint8)`` alone
    takes some of these, with other bytes than the tensor's copy has.
    """
    import torch

    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError("a tensor with layout `%s` has no bytes of its own" % tensor.layout)
    if not tensor.is_contiguous():
        raise ValueError("a tensor with strides %s is not contiguous" % (tuple(tensor.stride()),))
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("its memory holds other values: torch conjugates or negates them when they are used")
    return tensor.detach().reshape(-1).view(torch.uint8)
