"""The reference fine-tune: what one run does and costs, on every rank."""
