"""The reference fine-tune as a library: model, data, ranks, trainers, and the cluster that it runs on.

Benchmarks use it; it does not depend on any benchmark. It may import ``launch``, ``loading``, ``checkpoint``, ``stage``
and the layers below them.
"""
