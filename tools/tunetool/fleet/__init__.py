"""One command on every host of an inventory: playbook runs, their progress, and the records that come back. It may
import ``stage``, ``verify``, ``measure`` and what lies under them, but nothing that trains or benchmarks."""
