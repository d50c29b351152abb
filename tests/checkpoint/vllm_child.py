"""Starts vLLM as its users do, and says what it got: by the Python of vLLM's environment, which has nothing of the tests.

vllm_child.py MODEL FORMAT EXTRA TENSOR_PARALLEL DIRECTORY

Each rank writes its parameters and buffers into DIRECTORY, as they are once vLLM is ready to answer; the tokens that it
answers are its last line, after `tokens:`.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

TOKENS = "tokens:"
PROMPT = [1, 5, 9, 33]


def write(model: Any, directory: str) -> str:
    """In each rank. What shares memory is written under each of its names."""
    import torch
    from safetensors.torch import save_file
    from vllm.distributed import get_tensor_model_parallel_rank

    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in model.state_dict().items()}
    assert tensors
    assert not any(tensor.is_meta for tensor in tensors.values())
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    save_file(tensors, f"{directory}/{get_tensor_model_parallel_rank()}.safetensors")
    return type(model).__name__


def main() -> None:
    model, load_format, extra, ranks, directory = sys.argv[1:]
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model,
        load_format=load_format,
        model_loader_extra_config=json.loads(extra),
        tensor_parallel_size=int(ranks),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=64,
        max_num_batched_tokens=64,
        max_num_seqs=2,
    )
    engine.apply_model(partial(write, directory=directory))
    sampling = SamplingParams(max_tokens=8, temperature=0, detokenize=False)
    answers = engine.generate([TokensPrompt(prompt_token_ids=PROMPT)], sampling, use_tqdm=False)
    print(TOKENS, json.dumps(list(answers[0].outputs[0].token_ids)))


if __name__ == "__main__":
    main()
