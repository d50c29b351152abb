"""Qwen2.5-VL: its tensors, its tokenizer, and a whole model of the published sizes with random weights."""
