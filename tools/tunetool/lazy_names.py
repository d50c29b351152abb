"""Names of a package that come from its modules when they are first used: whoever needs none of them loads no torch."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from tunetool.errors import UsageProblem


def first_use(package: str, modules: Mapping[str, str], name: str) -> Any:
    """The object ``name`` of ``package``, whose module ``modules`` gives; for the package's ``__getattr__``.

    Raises ``AttributeError`` for another name, ``UsageProblem`` where a library that the module needs is missing.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing == "tunetool":
            raise
        from tunetool.origin import install_hint  # noqa: PLC0415  few need the hint

        raise UsageProblem(
            f"`{name}` needs `{missing}`, which this Python does not have", install_hint("checkpoint")
        ) from error
