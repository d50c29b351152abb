"""``tunetool bench reference``: all benchmarks in order, from the storage's verdict to the advice on staging."""
