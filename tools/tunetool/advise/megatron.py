"""A launch of Megatron-LM for a model of the Llama family under TP, PP and DP. Pure.

Its flags, in templates/launch/megatron.sh.j2 too, are those that the parser in Megatron-LM's
`megatron/training/arguments.py` took at ``CHECKED``.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from tunetool.advise import megatron_model
from tunetool.advise.layout import Layout
from tunetool.advise.shapes import Decoder
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
        positions = megatron_model.positions(self.config, self.path)
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
    settings = megatron_model.settings(job.config, job.path, job.tokens)
    positions = megatron_model.positions(job.config, job.path) or job.tokens
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
