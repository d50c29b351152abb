"""Measuring with proof: locks, run directories, samples, statistics, evidence, and the drivers fio, aio, gds and
ladder. It may import ``verdict``, ``node``, ``record`` and ``errors``; it does not know why something is measured."""
