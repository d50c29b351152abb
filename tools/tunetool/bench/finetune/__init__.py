"""The reference fine-tune: LoRA on Qwen2.5-VL over pictures, to see what storage and strategy are worth."""
