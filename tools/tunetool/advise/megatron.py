"""A launch of Megatron-LM for a model of the Llama family under TP, PP and DP. Pure.

Its flags, in templates/launch/megatron.sh.j2 too, are those that the parser in Megatron-LM's
`megatron/training/arguments.py` took at ``CHECKED``. A launch that leaves out what a model's config.json says beside
its sizes starts without a word, and trains another model. So what has no flag is refused.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tunetool.advise.gpt2 import MODEL_TYPE as GPT
from tunetool.advise.gpt2 import PRESETS as GPT_PRESETS
from tunetool.advise.layout import Layout
from tunetool.advise.shapes import Decoder, reading
from tunetool.errors import UsageProblem

CHECKED = "d98e8a64 (2026-08-22, megatron-core 0.20.0)"
"""The commit of Megatron-LM whose parser took every flag."""
TEMPLATES = Path(__file__).resolve().parents[1] / "templates/launch"
SCRIPT = "megatron.sh"
_TOKEN = 4
"""Bytes of a token in Megatron's .bin, for vocabularies above 65,500 (`IndexedDataset.optimal_dtype`)."""


@dataclass(frozen=True)
class Job:
    """The job to launch."""

    name: str
    decoder: Decoder
    config: Mapping[str, Any]
    """The model's config.json, or what is known of it."""
    path: str
    """Of that file, for what is refused."""
    layout: Layout
    sample: int
    """Bytes of a sample, of 4-byte tokens."""
    batch: int
    """Samples of one step of the whole job."""

    def check(self) -> None:
        """Raises ``UsageProblem`` for what Megatron-LM refuses, or would not run as asked."""
        layout, decoder = self.layout, self.decoder
        if layout.fsdp > 1 or layout.experts > 1:
            raise UsageProblem("a launch of Megatron-LM has no `--fsdp` and no `--ep` here", "give --tp, --pp and --dp")
        for count, what, by, option in (
            (decoder.layers, "layers", layout.pipeline, "--pp"),
            (decoder.heads, "heads", layout.tensor, "--tp"),
            (decoder.kv_heads, "key-value heads", layout.tensor, "--tp"),
        ):
            if count % by:
                raise UsageProblem(
                    f"`{option} {by}` does not divide the {count} {what} of `{self.name}`",
                    f"give a divisor of {count}: Megatron-LM refuses another",
                )
        if layout.nodes > 1 and layout.world % layout.of_node:
            raise UsageProblem(
                f"{layout.world} ranks do not fill nodes of {layout.of_node} GPUs",
                "torchrun starts equally many ranks on every node: give other degrees or `--gpus-per-node`",
            )
        if self.sample % _TOKEN:
            raise UsageProblem(f"`--sample {self.sample}` is no whole number of tokens of {_TOKEN} bytes", "try 16KiB")
        positions = positions_of(self.config, self.path)
        if positions is not None and self.tokens > positions:
            raise UsageProblem(
                f"`--sample` has {self.tokens} tokens, and `{self.name}` has {positions} positions",
                f"give `--sample {_TOKEN * positions}B` or less",
            )

    @property
    def tokens(self) -> int:
        """Tokens of a sample."""
        return self.sample // _TOKEN


def script(job: Job) -> str:
    """The script's text. Raises ``UsageProblem``."""
    job.check()
    environment = jinja2.Environment(  # noqa: S701  (a shell script: what a user names has a filter of its own)
        loader=jinja2.FileSystemLoader(TEMPLATES),
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
        trim_blocks=True,
    )
    environment.filters["line"] = lambda text: " ".join(shlex.quote(text).split())
    layout = job.layout
    return environment.get_template(f"{SCRIPT}.j2").render(
        name=job.name,
        checked=CHECKED,
        tensor=layout.tensor,
        pipeline=layout.pipeline,
        data=layout.data,
        nodes=layout.nodes,
        ranks=min(layout.world, layout.of_node),
        model=list(_model(job)),
        sequence_parallel=layout.tensor > 1,
        batch=job.batch,
    )


def _model(job: Job) -> Iterator[str]:
    """The flags of the model, which give exactly its parameters and what it computes of them."""
    decoder, tensor = job.decoder, job.layout.tensor
    settings = settings_of(job.config, job.path, job.tokens)
    positions = positions_of(job.config, job.path) or job.tokens
    yield f"--num-layers {decoder.layers} --hidden-size {decoder.hidden} --ffn-hidden-size {decoder.intermediate}"
    yield f"--num-attention-heads {decoder.heads} --kv-channels {decoder.head_dim}"
    if decoder.kv_heads != decoder.heads:
        yield f"--group-query-attention --num-query-groups {decoder.kv_heads}"
    yield f"--seq-length {job.tokens} --max-position-embeddings {positions}"
    if decoder.qk_norm:
        yield "--qk-layernorm"
    if not decoder.tied:
        yield "--untie-embeddings-and-output-weights"
    # By itself Megatron-LM takes the tokenizer's size, which is often another, rounded up to 128 for each rank.
    yield f"--padded-vocab-size {-(-decoder.vocabulary // tensor) * tensor}"
    yield from settings.flags()


_LLAMA_3 = {"low_freq_factor": 1, "high_freq_factor": 4, "original_max_position_embeddings": 8192}
"""The scaling of Llama 3.1 that `--use-rope-scaling` has built in; only its factor is an option."""
_GPT_3_HEADS = 96
"""arXiv 2005.14165, table 2.1."""
_SILU = ("silu", "swish")
_EPSILON: Mapping[str, float] = {"phi3": 1e-5}
"""transformers' `rms_norm_eps` where a config.json has none, by ``model_type``."""
_OTHER_EPSILON = 1e-6
_WINDOWS: Mapping[str, Mapping[str, int]] = {"mistral": {"sliding_window": 4096}}
"""transformers' `sliding_window` where a config.json lacks the key, by ``model_type``."""
_WINDOW_ON_REQUEST = ("qwen2", "qwen3")
"""Types whose `sliding_window` counts with `use_sliding_window` only, from layer `max_window_layers` on."""
_DROPOUTS = ("resid_pdrop", "embd_pdrop")
_HINT = "the launch would train another model: start this one by another framework, or write its launch by hand"

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "llama2-7b": {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "13b": {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "33b": {"model_type": "llama", "rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "65b": {"model_type": "llama", "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "phi3-mini": {
        "model_type": "phi3",
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
    },
    "70b": {
        "model_type": "llama",
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, **_LLAMA_3},
    },
    "llama-tiny": {"model_type": "llama", "rms_norm_eps": 1e-5},
    "175b": {"model_type": GPT, "layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048},
}
"""The same of the known models, from the sources that ``shapes.PRESETS`` names."""


def gpt_3(name: str) -> Decoder | None:
    """The sizes of GPT-3, whose tensors are others than a Decoder's; None for another model.

    Its attention is dense here, as in Megatron-LM's own example: the paper's alternates with a banded one.
    """
    if name != "175b":
        return None
    sizes = GPT_PRESETS[name][1]
    return Decoder(
        sizes.hidden,
        sizes.layers,
        _GPT_3_HEADS,
        _GPT_3_HEADS,
        sizes.inner,
        sizes.vocabulary,
        sizes.hidden // _GPT_3_HEADS,
        tied=True,
    )


@dataclass(frozen=True)
class GptSettings:
    """Those of GPT-2 and GPT-3: learned positions, LayerNorm, biases everywhere, GELU."""

    epsilon: float

    def flags(self) -> Iterator[str]:
        """Megatron-LM's flags, some of them on each line; a GELU and biases are what it takes by itself."""
        yield f"--normalization LayerNorm --norm-epsilon {self.epsilon!r}"
        yield "--position-embedding-type learned_absolute"
        yield "--attention-dropout 0 --hidden-dropout 0"


@dataclass(frozen=True)
class Settings:
    """What changes the model, and no size of it."""

    rotary_base: int
    rotary_percent: float
    llama3_factor: float | None
    """Factor of Llama 3.1's scaling of the rotary embedding."""
    interpolation: int | None
    """Factor of the linear scaling."""
    epsilon: float
    window: int | None
    """Tokens that a token sees, itself among them; None where it sees all before it."""
    qkv_bias: bool
    bias: bool
    """Each linear layer but the output has a bias."""
    dropout: float
    """Of attention."""
    spread: float | None
    """Standard deviation of the first weights."""

    def flags(self) -> Iterator[str]:
        """Megatron-LM's flags, some of them on each line."""
        yield f"--swiglu --normalization RMSNorm --norm-epsilon {self.epsilon!r}"
        if not self.bias:
            yield "--disable-bias-linear"
        if self.qkv_bias:
            yield "--add-qkv-bias"
        yield f"--position-embedding-type rope --rotary-base {self.rotary_base}"
        yield f"--rotary-percent {self.rotary_percent!r}"
        if self.llama3_factor is not None:
            yield f"--use-rope-scaling --rope-scaling-factor {self.llama3_factor!r}"
        if self.interpolation is not None:
            yield f"--rotary-seq-len-interpolation-factor {self.interpolation}"
        if self.window is not None:
            # Megatron-LM counts the tokens before a token, transformers the token itself too.
            yield f"--window-size {self.window - 1},0"
        yield f"--attention-dropout {self.dropout!r} --hidden-dropout 0"
        if self.spread is not None:
            yield f"--init-method-std {self.spread!r}"


def positions_of(document: Mapping[str, Any], path: str) -> int | None:
    """The longest sequence of the model; None where its config.json does not say."""
    return _whole(document, path, "max_position_embeddings")


def settings_of(document: Mapping[str, Any], path: str, tokens: int) -> Settings | GptSettings:
    """For sequences of that many tokens, from the config.json of a Llama-like model, or what is known of GPT-3.

    Raises ``UsageProblem`` for what the launch cannot say.
    """
    family = str(document.get("model_type"))
    if family == GPT:
        return GptSettings(_number(document, path, "layer_norm_epsilon"))
    rotary = _rotary(document, path)
    qkv, every = _biases(document, family, path)
    activation = document.get("hidden_act") or _SILU[0]
    if activation not in _SILU:
        raise _no_flag(path, "hidden_act", activation)
    for name in _DROPOUTS:
        if _number(document, path, name, default=0.0):
            raise _no_flag(path, name, document[name])
    spread = _number(document, path, "initializer_range", default=0.0)
    return Settings(
        rotary_base=_base(document, rotary, path),
        rotary_percent=_share(document, rotary, path),
        llama3_factor=_llama3(rotary, path),
        interpolation=_linear(rotary, path),
        epsilon=_number(document, path, "rms_norm_eps", default=_EPSILON.get(family, _OTHER_EPSILON)),
        window=_window(document, family, path, tokens),
        qkv_bias=qkv,
        bias=every,
        dropout=_number(document, path, "attention_dropout", default=0.0),
        spread=spread or None,
    )


def _rotary(document: Mapping[str, Any], path: str) -> dict[str, Any]:
    """How the rotary embedding is scaled: `rope_scaling`, or `rope_parameters` of newer files."""
    found: dict[str, Any] = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = document.get(name)
        if value is None:
            continue
        if not isinstance(value, dict) or any(isinstance(each, dict) for each in value.values()):
            raise _no_flag(path, name, value)
        found.update(value)
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ("default", "llama3", "linear"):
        raise _no_flag(path, "rope_type", kind)
    return {**found, "rope_type": kind}


def _base(document: Mapping[str, Any], rotary: Mapping[str, Any], path: str) -> int:
    base = _number({"rope_theta": document.get("rope_theta"), **rotary}, path, "rope_theta", default=10000.0)
    if base != int(base) or base < 1:
        raise _no_flag(path, "rope_theta", base)
    return int(base)


def _share(document: Mapping[str, Any], rotary: Mapping[str, Any], path: str) -> float:
    name = "partial_rotary_factor"
    share = _number({name: document.get(name), **rotary}, path, name, default=1.0)
    if not 0 < share <= 1:
        raise _no_flag(path, name, share)
    return share


def _llama3(rotary: Mapping[str, Any], path: str) -> float | None:
    if rotary["rope_type"] != "llama3":
        return None
    for name, built_in in _LLAMA_3.items():
        if _number(rotary, path, name) != built_in:
            raise _no_flag(path, name, rotary[name])
    return _number(rotary, path, "factor")


def _linear(rotary: Mapping[str, Any], path: str) -> int | None:
    if rotary["rope_type"] != "linear":
        return None
    factor = _number(rotary, path, "factor")
    if factor != int(factor) or factor < 1:
        raise _no_flag(path, "factor", factor)
    return int(factor)


def _window(document: Mapping[str, Any], family: str, path: str, tokens: int) -> int | None:
    """Tokens that each token sees, where that is less than all. Raises ``UsageProblem`` where layers differ in it."""
    if family == "llama" or (family in _WINDOW_ON_REQUEST and document.get("use_sliding_window") is not True):
        return None
    window = _whole({**_WINDOWS.get(family, {}), **document}, path, "sliding_window")
    if window is None or window >= tokens:
        return None
    kinds = document.get("layer_types")
    if isinstance(kinds, list) and kinds:
        if "sliding_attention" not in kinds:
            return None
        if set(kinds) != {"sliding_attention"}:
            raise _no_flag(path, "layer_types", ", ".join(sorted(set(map(str, kinds)))))
    elif family in _WINDOW_ON_REQUEST and document.get("max_window_layers") != 0:
        raise _no_flag(path, "max_window_layers", document.get("max_window_layers"))
    return window


def _biases(document: Mapping[str, Any], family: str, path: str) -> tuple[bool, bool]:
    """Whether query, key and value alone have a bias, and whether all linear layers have one."""
    if document.get("lm_head_bias"):
        raise _no_flag(path, "lm_head_bias", True)
    if family == "qwen2":
        return True, False
    attention, feed_forward = bool(document.get("attention_bias")), bool(document.get("mlp_bias"))
    if attention and feed_forward and family == "llama":
        return False, True
    for name, wanted in (("attention_bias", attention), ("mlp_bias", feed_forward)):
        if wanted:
            raise _no_flag(path, name, True)
    return False, False


def _whole(document: Mapping[str, Any], path: str, name: str) -> int | None:
    if document.get(name) is None:
        return None
    value = _number(document, path, name)
    if value != int(value) or value < 1:
        raise _no_flag(path, name, value)
    return int(value)


def _number(document: Mapping[str, Any], path: str, name: str, default: float | None = None) -> float:
    value = document.get(name)
    if value is None and default is not None:
        return default
    with reading(path):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise KeyError(name)
    return float(value)


def _no_flag(path: str, name: str, value: object) -> UsageProblem:
    return UsageProblem(f"`{path}`: `{name}` is `{value}`, which the launch of Megatron-LM cannot say", _HINT)
