"""Sizes of published models with experts, as their config.json has them, and what their authors say of them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model: the sizes, and the number of parameters."""

    config: dict[str, Any]
    total: int
    """Of its published weights, without buffers: DeepSeek-V3 has 58 x 256 elements of these, Kimi K2 60 x 384."""
    active: float
    """Billions that a token uses, as its authors round them."""


def _sizes(kind: str, hidden: int, layers: int, heads: int, intermediate: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": kind, "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "intermediate_size": intermediate, "vocab_size": vocabulary,
    }  # fmt: skip


_LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
MODELS = {
    "Mixtral 8x7B": Published(
        {**_sizes("mixtral", 4096, 32, 32, 14336, 32000), "num_key_value_heads": 8, "num_local_experts": 8,
         "num_experts_per_tok": 2},
        46_702_792_704, 12.9,
    ),
    "OLMoE 1B-7B": Published(
        {**_sizes("olmoe", 2048, 16, 16, 1024, 50304), "num_experts": 64, "num_experts_per_tok": 8},
        6_919_161_856, 1.3,
    ),
    "Qwen1.5 MoE A2.7B": Published(
        {**_sizes("qwen2_moe", 2048, 24, 16, 5632, 151936), "num_experts": 60, "num_experts_per_tok": 4,
         "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1},
        14_315_784_192, 2.7,
    ),
    "Qwen3 30B-A3B": Published(
        {**_sizes("qwen3_moe", 2048, 48, 32, 6144, 151936), "num_key_value_heads": 4, "head_dim": 128,
         "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": []},
        30_532_122_624, 3.3,
    ),
    "DeepSeek-V2-Lite": Published(
        {**_sizes("deepseek_v2", 2048, 27, 16, 10944, 102400), **_LATENT, "q_lora_rank": None,
         "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1408,
         "first_k_dense_replace": 1},
        15_706_484_224, 2.4,
    ),
    "DeepSeek-V3": Published(
        {**_sizes("deepseek_v3", 7168, 61, 128, 18432, 129280), **_LATENT, "q_lora_rank": 1536,
         "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
         "first_k_dense_replace": 3},
        671_026_404_352, 37,
    ),
    "Kimi K2": Published(
        {**_sizes("kimi_k2", 7168, 61, 64, 18432, 163840), **_LATENT, "q_lora_rank": 1536,
         "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
         "first_k_dense_replace": 1},
        1_026_408_209_408, 32,
    ),
    "GLM-4.5-Air": Published(
        {**_sizes("glm4_moe", 4096, 46, 96, 10944, 151552), "num_key_value_heads": 8, "head_dim": 128,
         "attention_bias": True, "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
         "moe_intermediate_size": 1408, "first_k_dense_replace": 1},
        106_852_245_504, 12,
    ),
}  # fmt: skip
