"""The manifest that an earlier run left, before this one writes its own."""

from __future__ import annotations

from typing import Any

from ..common.manifest import ManifestError, damage, refuse_newer


def look_at_earlier_manifest(module: Any, if_damaged: str) -> None:
    """End the module where a newer tunetool wrote it; warn where it is damaged, with what becomes of it."""
    try:
        refuse_newer()
    except ManifestError as error:
        module.fail_json(msg="%s. hint: %s" % (error.message, error.hint), changed=False)
    damaged = damage()
    if damaged:
        module.warn("%s: %s" % (damaged, if_damaged))
