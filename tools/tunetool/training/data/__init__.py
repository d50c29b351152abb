"""What the fine-tune is fed: synthetic pictures, datasets in LLaMA-Factory's form, batches."""
