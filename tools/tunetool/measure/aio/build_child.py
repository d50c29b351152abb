"""Compiles one of DeepSpeed's ops by DeepSpeed's own builder.

Self-contained: ``build_child.py OP`` runs under the user's Python.
Exit status: 0 built, 4 this machine cannot build it.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

CANNOT = 4
BUILDERS = {
    # The accelerator's own, as DeepSpeed takes them: without a GPU these are other classes of the same names.
    "async_io": ("", "AsyncIOBuilder"),
    "gds": ("", "GDSBuilder"),
    "cpu_adam": ("", "CPUAdamBuilder"),
    # Asked for by way of the accelerator, the CPU's refuses what the plain one builds.
    "utils": ("utils", "UtilsBuilder"),
}


def builder_of(op: str) -> Any:
    """DeepSpeed's builder of ``op``."""
    module, name = BUILDERS[op]
    return getattr(importlib.import_module("deepspeed.ops.op_builder" + ("." + module if module else "")), name)()


def main() -> int:
    """Build ``sys.argv[1]``."""
    builder = builder_of(sys.argv[1])
    if not builder.is_compatible(verbose=True):
        print("cannot: %s" % (builder.error_log or "DeepSpeed's builder says that it does not fit this machine"))
        return CANNOT
    builder.load(verbose=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
