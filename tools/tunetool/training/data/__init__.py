"""The data of the fine-tune: synthetic pictures, datasets in LLaMA-Factory's format, batches."""
