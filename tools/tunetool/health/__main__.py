"""``python -m tunetool.health check|measure|slurm|answer``, for units of systemd and for Slurm; and ``repaired``.

No click: its import alone would take nearly as long as a check.
"""

from __future__ import annotations

import sys
from importlib import import_module

from tunetool.node.common.settings_file import SettingsError

ACTS = ("check", "measure", "slurm", "answer", "repaired")


def main(arguments: list[str]) -> int:
    """Do one of the acts. Exit codes: 0 done, whatever the health is; 2 wrong call or settings; 3 it failed."""
    if len(arguments) != 1 or arguments[0] not in ACTS:
        print(f"usage: python -m tunetool.health {'|'.join(ACTS)}", file=sys.stderr)
        return 2
    try:
        code: int = import_module(f"tunetool.health.{arguments[0]}").main()
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: `{error.filename or 'system call'}`: {error.strerror or error}", file=sys.stderr)
        return 3
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
