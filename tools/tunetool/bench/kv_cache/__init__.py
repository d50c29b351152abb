"""``tunetool bench kv-cache``: what drives do for the KV cache of an inference engine."""
