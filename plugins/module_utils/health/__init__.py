"""The node's health check: its settings and its systemd units. What runs every few minutes is the package's room
``tunetool.health``. It may import ``volume``, ``common`` and ``units``."""
