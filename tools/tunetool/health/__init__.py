"""A node's health, every few minutes: what systemd, Slurm and ft_launcher call. It imports no more than it needs, since
its start is most of its cost. It may import every room but ``cli``."""
