"""The parameters that the tensors of .safetensors files stand for, where those are packed (quantized). Pure.

A packed weight is a tensor of integers or of fp8 with others beside it: scales, zero points, tables. It is taken for
one parameter of the shape that the names, dtypes and shapes of these tensors prove; what lies beside it is none. The
forms are those in which AutoAWQ, GPTQModel, Marlin, bitsandbytes, EETQ, compressed-tensors, ModelOpt, MLX and OpenAI's
gpt-oss write. A form that proves nothing is refused by name: the caller counts by the model's sizes instead.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tunetool.advise.shapes import Tensor
from tunetool.safetensors_header import Entry

Content = Callable[[Entry], bytes]
"""The bytes of a small tensor; empty where they cannot be had."""
_FLOATS = frozenset({"F16", "BF16", "F32", "F64", "C64"})
_EIGHT_BITS = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
_SCALES = frozenset({*_EIGHT_BITS, *_FLOATS, "F8_E8M0", "U8"})
_BUFFERS = ("position_ids", "token_type_ids", "num_batches_tracked", "relative_position_index")
"""Endings of the names of tensors of integers that modules keep beside their parameters."""
_LARGEST_BUFFER = 1 << 20
"""Elements of a buffer of 64-bit integers with another name. Packings of 64 bits (QuIP#) have more."""
_OF_THE_CACHE = (".k_scale", ".v_scale", ".q_scale", ".kv_scale")
"""Endings of the names of scales of keys and values."""
_WORD = 32


class Unproven(ValueError):
    """What a packed tensor unpacks to is not known; says so in few words, with the tensor's name in front."""


class Parameters(NamedTuple):
    """``packed``: whether some of them are packed."""

    tensors: tuple[Tensor, ...]
    packed: bool


@dataclass(frozen=True)
class _Files:
    entries: Mapping[str, Entry]
    settings: Mapping[str, Any]
    """How config.json says that the weights are packed."""
    content: Content

    def beside(self, base: str, *endings: str) -> list[str]:
        return [f"{base}{ending}" for ending in endings if f"{base}{ending}" in self.entries]

    def __call__(self, name: str, *dtypes: str) -> Entry | None:
        """The tensor of that name, if it has one of these dtypes."""
        entry = self.entries.get(name)
        return entry if entry is not None and (not dtypes or entry.dtype in dtypes) else None


class _Found(NamedTuple):
    tensor: Tensor
    used: Iterable[str]
    """The tensors that it is made of, by name, and those beside it that are no parameters."""


def parameters(entries: Iterable[Entry], config: Mapping[str, Any], content: Content) -> Parameters:
    """The parameters in ``entries``, each once, in their order. ``config``: the config.json beside them; may be empty.

    Raises ``Unproven``.
    """
    files = _Files({entry.name: entry for entry in entries}, _settings(config), content)
    found: dict[str, _Found] = {}
    for entry in files.entries.values():
        made = next(filter(None, (form(entry, files) for form in _FORMS)), None)
        if made is not None:
            found[entry.name] = made
    beside = {name for each in found.values() for name in each.used}
    tensors = []
    for entry in files.entries.values():
        if entry.name in beside:
            continue
        if entry.name in found:
            tensors.append(found[entry.name].tensor)
        elif _is_parameter(entry, packed=bool(found)):
            tensors.append(Tensor(entry.name, entry.shape))
    return Parameters(tuple(tensors), bool(found))


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in ("quantization_config", "quantization"):  # MLX has its own, or both
        settings = config.get(name)
        if isinstance(settings, dict):
            return settings
    return {}


def _is_parameter(entry: Entry, *, packed: bool) -> bool:
    """Whether a tensor that belongs to no packed weight is a parameter. Raises ``Unproven``."""
    if packed and entry.name.endswith(_OF_THE_CACHE) and math.prod(entry.shape) == 1:
        return False  # of the cache of keys and values
    if entry.dtype in _FLOATS or entry.dtype in _EIGHT_BITS or entry.dtype.startswith(("F4", "F6")):
        return True
    if entry.dtype == "BOOL" or entry.name.endswith(_BUFFERS):
        return False
    if entry.dtype in ("I64", "U64") and math.prod(entry.shape) <= _LARGEST_BUFFER:
        return False
    raise _unproven(entry)


def _unproven(entry: Entry) -> Unproven:
    name = ascii(entry.name[:200])[1:-1]
    return Unproven(f"`{name}` is packed: its dtype is {entry.dtype}, and nothing says how many parameters it holds")


def _whole(count: int, by: int) -> int:
    """The quotient; 0 where it is no whole number."""
    return count // by if by > 0 and count % by == 0 else 0


def _groups(entry: Entry, files: _Files) -> _Found | None:
    """AWQ, GPTQ and Marlin: words of 32 bits, and scales by groups of inputs, which lie along the second-last axis."""
    base = entry.name.removesuffix(".qweight")
    if base == entry.name or entry.dtype != "I32":
        return None
    scales, zeros = files(f"{base}.scales", *_FLOATS), files(f"{base}.qzeros", "I32")
    if scales is None or len(scales.shape) != len(entry.shape) or len(scales.shape) < 2 or not math.prod(scales.shape):
        raise _unproven(entry)
    said = (files.settings.get("bits"), files.settings.get("w_bit"))
    known: set[int] = {value for value in said if isinstance(value, int)}
    if zeros is not None:
        known.add(_whole(_WORD * math.prod(zeros.shape), math.prod(scales.shape)))
    (bits,) = known if len(known) == 1 else (0,)
    lead, rows = scales.shape[:-2], scales.shape[-1]
    count = _whole(_WORD * math.prod(entry.shape), bits)
    columns = _whole(count, math.prod(lead) * rows)
    if not 1 < bits <= 8 or not columns or columns < scales.shape[-2] or entry.shape[:-2] != lead:
        raise _unproven(entry)
    used = files.beside(base, ".scales", ".qzeros", ".g_idx", ".workspace", ".perm")
    return _Found(Tensor(f"{base}.weight", (*lead, rows, columns)), used)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _half_bytes(entry: Entry, files: _Files) -> _Found | None:
    """bitsandbytes of 4 bits: two elements a byte, and the shape in a text beside them."""
    kinds = files.beside(entry.name, *(f".quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4")))
    if not kinds or entry.dtype not in ("U8", "I8"):
        return None
    used = [*kinds, *files.beside(entry.name, ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")]
    most = 2 * math.prod(entry.shape)
    said = _shape_in(files.content(files.entries[kinds[0]]))
    # Without that text the number is right, of an odd number by one too many; the shape is not known.
    shape = said if said is not None and math.prod(said) in (most, most - 1) else (most, 1)
    return _Found(Tensor(entry.name, shape), used)


def _shape_in(text: bytes) -> tuple[int, ...] | None:
    try:
        shape = json.loads(text)["shape"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(shape, list) or not all(_is_count(size) and size >= 0 for size in shape):
        return None
    return tuple(shape)


def _compressed(entry: Entry, files: _Files) -> _Found | None:
    """compressed-tensors: several elements in a word of 32 bits or in a byte, along the last axis."""
    base = entry.name.removesuffix("_packed")
    if base == entry.name or not entry.shape:
        return None
    names = ("_scale", "_shape", "_zero_point", "_g_idx", "_global_scale")
    used = [*files.beside(base, *names), *files.beside(base.removesuffix("weight"), *_INPUTS)]
    if entry.dtype == "U8":
        return _Found(Tensor(base, _of_halves(entry, files(f"{base}_scale", *_SCALES))), used)
    bits = {group["weights"]["num_bits"] for group in _weight_groups(files.settings)}
    (each,) = bits if len(bits) == 1 else (0,)
    if entry.dtype != "I32" or not _is_count(each) or not 1 < each <= 8:
        raise _unproven(entry)
    columns = entry.shape[-1] * (_WORD // each)
    said = _sizes_in(files.content(files.entries[f"{base}_shape"])) if f"{base}_shape" in files.entries else None
    if said and said[:-1] == entry.shape[:-1] and -(-said[-1] // (_WORD // each)) == entry.shape[-1]:
        columns = said[-1]
    return _Found(Tensor(base, (*entry.shape[:-1], columns)), used)


_INPUTS = ("input_scale", "input_zero_point", "input_global_scale", "input_g_idx", "output_scale", "output_zero_point")
_OF_EIGHT_BITS = (
    *("scale", "scale_weight", "scale_input", "activation_scale", "input_scale_ub", "input_amax"),
    *("SCB", "weight_format", "azp_adj"),
)


def _weight_groups(settings: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict) and _is_count(weights.get("num_bits")):
            yield group


def _sizes_in(content: bytes) -> tuple[int, ...] | None:
    width = len(content) // 2
    return struct.unpack("<2q" if width == 8 else "<2i", content) if width in (4, 8) else None


def _of_halves(entry: Entry, scales: Entry | None) -> tuple[int, ...]:
    """The shape of two elements a byte, with a scale for each 16 or 32 of them. Raises ``Unproven``."""
    if scales is None or scales.shape[:-1] != entry.shape[:-1] or not scales.shape or not scales.shape[-1]:
        raise _unproven(entry)
    columns = 2 * entry.shape[-1]
    if -(-columns // scales.shape[-1]) not in (16, 32):
        raise _unproven(entry)
    return (*entry.shape[:-1], columns)


def _whole_bytes(entry: Entry, files: _Files) -> _Found | None:
    """fp8 and int8, an element a byte; and NVFP4 or MXFP4 under the name of a weight, two a byte."""
    base, name = entry.name.rpartition(".")[::2]
    prefix = f"{base}." if base else ""
    scales = files.beside(entry.name, "_scale", "_scale_inv", "_scale_2", "_scales", "_zero_point", "_input_scale")
    used = [*scales, *files.beside(prefix, *_INPUTS, *_OF_EIGHT_BITS)]
    if entry.dtype in _EIGHT_BITS:
        return _Found(Tensor(entry.name, entry.shape), used)
    if entry.dtype == "I8":
        if name == "qweight" and (scale := files(f"{prefix}weight_scales", *_FLOATS)) is not None:
            return _Found(Tensor(f"{prefix}weight", entry.shape), [*used, scale.name])
        if name == "weight" and (f"{prefix}SCB" in files.entries or scales):
            return _Found(Tensor(entry.name, entry.shape), used)
    if entry.dtype == "U8" and name == "weight" and files(f"{entry.name}_scale", *_SCALES) is not None and entry.shape:
        return _Found(Tensor(entry.name, _of_halves(entry, files(f"{entry.name}_scale"))), used)
    return None


def _blocks(entry: Entry, files: _Files) -> _Found | None:
    """gpt-oss in MXFP4: blocks of 16 bytes with 32 elements, and a scale for each."""
    for mark in ("_", "."):
        base = entry.name.removesuffix(f"{mark}blocks")
        scales = files(f"{base}{mark}scales", "U8", "F8_E8M0")
        if base == entry.name or entry.dtype != "U8" or scales is None:
            continue
        if len(entry.shape) < 2 or entry.shape != (*scales.shape, 16):
            raise _unproven(entry)
        return _Found(Tensor(base, (*scales.shape[:-1], scales.shape[-1] * 32)), [scales.name])
    return None


def _mlx(entry: Entry, files: _Files) -> _Found | None:
    """MLX: words of 32 bits along the last axis, with a scale and a bias for each group."""
    base = entry.name.removesuffix(".weight")
    scales = files(f"{base}.scales", *_FLOATS, "U8")
    if base == entry.name or entry.dtype != "U32" or scales is None:
        return None
    own = files.settings.get(base)
    settings = own if isinstance(own, dict) else files.settings
    bits, group = settings.get("bits"), settings.get("group_size")
    if not isinstance(bits, int) or not isinstance(group, int) or not scales.shape or not entry.shape:
        raise _unproven(entry)
    columns = group * scales.shape[-1]
    if scales.shape[:-1] != entry.shape[:-1] or _WORD * entry.shape[-1] != columns * bits or columns < 1:
        raise _unproven(entry)
    return _Found(Tensor(entry.name, (*entry.shape[:-1], columns)), files.beside(base, ".scales", ".biases"))


_FORMS = (_groups, _half_bytes, _compressed, _blocks, _mlx, _whole_bytes)
