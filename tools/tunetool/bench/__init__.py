"""The benchmarks, timed with proof: checkpoint, experts, finetune, inference, offload, staging, strategies, reference,
ds-io, api. It may import ``training``, ``launch``, ``fleet`` and what lies under them, but no page and no command."""
