"""Ranks on an existing engine: this machine, ssh, DeepSpeed's launcher, Slurm; their guards, verdicts and sign of life.
It may import ``fleet``, which reads inventories and plays playbooks, and ``measure``; it does not know what ranks
compute."""
