"""The benchmarks: the one list, from which commands, views and the needs that `doctor` names are made.

A benchmark is the folder ``bench/FOLDER``. Its ``request.py`` has ``Request``, a dataclass whose fields are the options
and whose docstring is the help text, ``FIGURES``, those of its records by unit, and ``NEEDS``, the packages of the
Python that it runs under; ``REQUIRED`` there is False where it goes on without such a Python. A request whose needs
depend on the call has them as its property ``needs``: None where the call goes on under any Python. ``PREREQUISITES``
and ``USED_IN_PART`` name the things of ``doctor`` that it does nothing without, and those that it uses for a part of
its work. One that is ``OnHosts`` takes words for Ansible. ``run.py`` has ``bench(request, progress)``, ``view.py`` has
``view(record, directory)``, and ``preflight.py`` may have ``check_call(request)``, which refuses a wrong call before
anything is started.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType


@dataclass(frozen=True)
class Benchmark:
    """One entry. ``name``: its word on the command line."""

    name: str

    @property
    def folder(self) -> str:
        """Its package below ``tunetool.bench``."""
        return self.name.replace("-", "_")

    @property
    def kind(self) -> str:
        """Of its records."""
        return f"bench.{self.name}"

    def module(self, name: str) -> ModuleType:
        """One of its modules; loaded where it is needed, since most of them need more than a help text does."""
        return importlib.import_module(f"tunetool.bench.{self.folder}.{name}")


BENCHMARKS = tuple(
    map(
        Benchmark,
        (
            "checkpoint",
            "loading",
            "offload",
            "dataset",
            "finetune",
            "staging",
            "reference",
            "strategies",
            "ds-io",
            "experts",
            "inference",
            "api",
            "drives",
        ),
    )
)
