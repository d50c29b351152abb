"""Qwen2.5-VL: its tensors, its tokenizer, and a whole model built at random in its true sizes."""
