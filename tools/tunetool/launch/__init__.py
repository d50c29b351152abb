"""Runs ranks on this machine, over ssh, with DeepSpeed's launcher or with Slurm, and watches them by a guard per node.

It may import ``fleet``, which reads inventories and runs playbooks, and ``measure``; it does not know what ranks
compute."""
