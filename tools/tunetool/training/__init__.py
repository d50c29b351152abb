"""The reference fine-tune as a library: model, data, ranks, trainers, and the cluster it runs on. Benchmarks train with
it; it knows no benchmark. It may import ``launch``, ``loading``, ``checkpoint``, ``stage`` and what lies under them.
"""
