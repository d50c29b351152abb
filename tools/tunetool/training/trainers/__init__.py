"""The trainers that run the same fine-tune: DeepSpeed, PyTorch Lightning and LLaMA-Factory."""
