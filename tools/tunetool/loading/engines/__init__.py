"""Weights for inference engines: `--load-format tunetool` of vLLM and of SGLang.

Each engine finds its entry point (pyproject.toml) and calls it in every one of its processes, whether its user wants
this load format or not. So they import little, and never raise: an engine that lacks what is needed here starts as
ever. ``doors`` holds them; ``vllm_loader`` and ``sglang_loader`` are imported where weights are loaded.
"""
