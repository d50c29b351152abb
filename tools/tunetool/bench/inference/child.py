"""Generates with transformers, weights under ZeRO-Inference or on the device: a program of ``measure/child_server.py``.

``answer`` takes an order: ``build`` makes the model, the same bytes for every place of its weights; ``generate`` runs
``model.generate`` greedily. Seconds are from before the call until the last token is known.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor  # noqa: TID251  (in a session of its own, where no Ctrl-C comes)
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tunetool.advise.qwen2_5_vl import MODEL_TYPE, published_name
from tunetool.advise.shapes import Tensor
from tunetool.loading.parallel import parameters_on_meta
from tunetool.loading.random_weights import PIECE, draw, layers_of, spread
from tunetool.measure.aio.child import load

DTYPE = torch.bfloat16
UNREAD = "visual."
"""The vision tower of a model that gets text alone."""
_ROUNDING = 4
"""Scores that lie this close, in units in the last place of ``DTYPE``, are not told apart: kernels that add in another
order move each of the two by about one, and as much again in the layers before."""
_RIVALS = 4
"""Tokens that are compared for each new one: those of the best scores."""


class _Clock:
    """A stopping criterion of transformers that stops nothing: it notes when each token is known."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.moments: list[float] = []

    def __call__(self, tokens: Any, scores: Any, **_: Any) -> Any:
        _settle(self._device)
        self.moments.append(time.perf_counter())
        return torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)


class _Rivals:
    """A processor of scores that changes none: it notes, for each token, the others that scored as well but for
    rounding."""

    def __init__(self) -> None:
        self._noted: list[tuple[Any, Any]] = []

    def __call__(self, tokens: Any, scores: Any) -> Any:
        best, ids = scores.topk(min(_RIVALS, scores.shape[-1]), dim=-1)
        # Of a number in [2^(e-1), 2^e), as frexp has it, the last of its bits is 2^(e-1) times the type's epsilon.
        unit = torch.ldexp(torch.full_like(best[:, :1], torch.finfo(DTYPE).eps), torch.frexp(best[:, :1])[1] - 1)
        self._noted.append((ids, best[:, :1] - best <= _ROUNDING * unit))
        return scores

    def lists(self) -> list[list[list[int]]]:
        """By sequence and token, the best among them."""
        places = [(ids.tolist(), close.tolist()) for ids, close in self._noted]
        return [
            [[token for token, near in zip(ids[row], close[row], strict=True) if near] for ids, close in places]
            for row in range(len(places[0][0]))
        ]


class _Weights(torch.nn.Module):  # type: ignore[misc]  # mypy sees no types of torch
    """The parameters of a model on `meta`, each made when it is asked for.

    DeepSpeed takes each one over, to a file perhaps, before it asks for the next: the whole model is never in memory.
    """

    def __init__(self, model: Any, seed: int, device: torch.device) -> None:
        super().__init__()
        # Not as a submodule, which would be listed beside what this lists.
        self.__dict__["made"] = made(model, seed, device)

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        yield from self.__dict__["made"]


def made(model: Any, seed: int, device: torch.device) -> Iterator[Any]:
    """Put random weights in the place of each parameter on `meta`, one after the other; a tied one once."""
    replaced: dict[Any, Any] = {}
    layers = layers_of([Tensor(published_name(name), tuple(each.shape)) for name, each in model.named_parameters()])
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:
        for path, module in model.named_modules():
            for name, empty in list(module._parameters.items()):
                if empty is None:
                    continue
                if empty not in replaced:
                    tensor = Tensor(published_name(f"{path}.{name}"), tuple(empty.shape))
                    data = _values(tensor, seed, spread(tensor, layers), threads).to(device)
                    replaced[empty] = torch.nn.Parameter(data, requires_grad=False)
                    module._parameters[name] = replaced[empty]
                    yield replaced[empty]
                module._parameters[name] = replaced[empty]


def _values(tensor: Tensor, seed: int, std: float | None, threads: ThreadPoolExecutor) -> Any:
    """The tensor as ``random_weights`` writes it into files, of ``DTYPE`` in host memory."""
    starts = range(0, tensor.numel, PIECE)
    pieces = list(threads.map(lambda first: draw(tensor, seed, std, first, min(PIECE, tensor.numel - first)), starts))
    return torch.from_numpy(np.concatenate(pieces).view(np.int16)).view(DTYPE).view(tensor.shape)


class _Generator:
    """A model, ready to generate."""

    def __init__(self, order: Mapping[str, Any]) -> None:
        self._device = torch.device(order["device"])
        config = order.get("ds_config")
        model = empty_model(order["config"])
        for module in model.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    module._buffers[name] = buffer.to(self._device)
        if config is None:
            for _ in made(model, order["seed"], self._device):
                pass
        else:
            model = _offloaded(model, order["seed"], config, order["ops"], self._device)
        self.model = model.eval()
        self.facts = _facts(self.model, config)

    def generate(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Greedily, from the same random prompt each time."""
        source = np.random.Generator(np.random.PCG64(order["seed"]))
        prompt = source.integers(0, order["vocabulary"], (order["batch"], order["prompt"]))
        tokens = torch.from_numpy(prompt).to(self._device)
        settings = transformers.GenerationConfig(
            max_new_tokens=order["new"], min_new_tokens=order["new"], do_sample=False, num_beams=1, pad_token_id=0
        )
        clock, rivals = _Clock(self._device), _Rivals()
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _settle(self._device)
        started = time.perf_counter()
        with torch.no_grad():
            whole = self.model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                generation_config=settings,
                logits_processor=transformers.LogitsProcessorList([rivals]),
                stopping_criteria=transformers.StoppingCriteriaList([clock]),
            )
        _settle(self._device)
        seconds = time.perf_counter() - started
        ids = whole[:, order["prompt"] :].tolist()
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
        close = rivals.lists()
        del whole, tokens, rivals
        gc.collect()
        if self._device.type == "cuda":
            # The other processes of this run use the same GPU.
            torch.cuda.empty_cache()
        moments = [started, *clock.moments]
        passes = [after - before for before, after in pairwise(moments)]
        return {"seconds": seconds, "passes": passes, "tokens": ids, "close": close, "peak_bytes": peak}


def empty_model(config: Mapping[str, Any]) -> Any:
    """The model with parameters on `meta`, and buffers as they are computed."""
    document = dict(config)
    kind = document.pop("model_type")
    made = transformers.AutoConfig.for_model(kind, **document)
    with parameters_on_meta():
        if kind == MODEL_TYPE:
            model = transformers.Qwen2_5_VLForConditionalGeneration._from_config(made, dtype=DTYPE)
        else:
            model = transformers.AutoModelForCausalLM.from_config(made, dtype=DTYPE)
    model.tie_weights()
    # What a config.json says of sampling and of the end would change what is compared.
    model.generation_config = transformers.GenerationConfig()
    return model


def _offloaded(model: Any, seed: int, config: Mapping[str, Any], ops: list[str], device: torch.device) -> Any:
    """The model under ZeRO-Inference, its weights where ``config`` says."""
    deepspeed = import_module("deepspeed")
    _preload(ops)
    # One process has nobody to meet, and needs no port.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    backend = "nccl" if device.type == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(dist_backend=backend)
    deepspeed.zero.Init(module=_Weights(model, seed, device), config_dict_or_path=dict(config))
    engine, *_ = deepspeed.initialize(model=model, config=dict(config))
    return engine.module


def _preload(paths: list[str]) -> None:
    """Give DeepSpeed the compiled ops, so that nothing compiles meanwhile."""
    builder = import_module("deepspeed.ops.op_builder.builder").OpBuilder
    for path in paths:
        builder._loaded_ops[Path(path).name.partition(".")[0].removesuffix("_op")] = load(path)
        # An op finds the one manager of locked memory by its symbol.
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    # Where there is no GPU, DeepSpeed would compile collectives of its own; gloo has them.
    import_module("deepspeed.ops").__compatible_ops__["deepspeed_shm_comm"] = False


def _facts(model: Any, config: Mapping[str, Any] | None) -> dict[str, Any]:
    """How many bytes of weights there are, lie on drives, and are read from there by each pass."""
    sizes: dict[int, int] = {}
    swapped: dict[int, int] = {}
    read = 0
    # A tied tensor comes once for each module that uses it: it is given up and read again in between.
    for name, parameter in model.named_parameters(remove_duplicate=False):
        sizes[id(parameter)] = getattr(parameter, "ds_numel", parameter.numel()) * DTYPE.itemsize
        if config is None or "nvme" not in str(getattr(parameter.ds_tensor, "final_location", None)):
            continue
        count = parameter.nvme_swapper._io_aligned_numel(parameter.ds_tensor.ds_numel) * DTYPE.itemsize
        swapped[id(parameter)] = count
        if not published_name(name).startswith(UNREAD):
            read += count
    facts = {"weight_bytes": sum(sizes.values()), "swapped_bytes": sum(swapped.values()), "read_bytes": read}
    versions = {"torch_version": torch.__version__, "transformers_version": transformers.__version__}
    if config is not None:
        versions["deepspeed_version"] = sys.modules["deepspeed"].__version__
    return {**facts, **versions}


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


_built: list[_Generator] = []


def answer(order: Mapping[str, Any]) -> dict[str, Any]:
    """See the module."""
    if order["do"] == "build":
        _built.append(_Generator(order))
        return _built[0].facts
    (generator,) = _built
    return generator.generate(order)
