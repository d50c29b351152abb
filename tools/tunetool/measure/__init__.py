"""Measuring: sampling, evidence, and the drivers of the programs that move the bytes."""
