"""The frame of a module that changes a node to what is asked for: lock, comparison, action, and Ansible's result."""

from __future__ import annotations

from typing import Any, Callable, Mapping, TypeVar

from ..common.change_lock import Locked, only_one
from ..common.commands import CommandError
from ..common.drift import Drifted, Ledger, as_results, built_manifest, message, settle
from ..common.manifest import ManifestError, damage, refuse_newer
from ..common.refusal import Refusal
from ..machine.writable import failed_write
from ..units import UnitError

Result = TypeVar("Result")


def converge(
    module: Any,
    work: Callable[[Ledger], Result],
    manifest: Callable[[], Mapping[str, Any] | None] = built_manifest,
    errors: tuple[type[Exception], ...] = (),
) -> tuple[Result, dict[str, Any]]:
    """Settle ``work`` under the node's lock. Return its result, and ``changed``, ``diff`` and ``differences``.

    Ends the module with an error if something is refused, fails (``errors`` too), or remains different.
    """
    refused: tuple[type[Exception], ...] = (Refusal, CommandError, Locked, *errors)
    try:
        with only_one():
            result, ledger = settle(work, manifest(), module.check_mode, module.change_begins)
    except UnitError as error:
        module.fail_json(msg="%s. hint: %s" % (error.message, error.hint))
    except Drifted as error:
        module.fail_json(msg=str(error), changed=False, differences=as_results(error.differences))
    except refused as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=failed_write(error))
    else:
        for warning in ledger.warnings:
            module.warn(warning)
        answer = outcome(ledger)
        if ledger.left:
            module.fail_json(msg=message(ledger.left), **answer)
        return result, answer
    raise AssertionError  # fail_json does not return


def outcome(ledger: Ledger) -> dict[str, Any]:
    """The results that every such module returns."""
    return {"changed": bool(ledger.diff), "diff": ledger.diff, "differences": as_results(ledger.differences)}


def look_at_earlier_manifest(module: Any, if_damaged: str) -> None:
    """End the module where a newer tunetool wrote it; warn where it is damaged, with what becomes of it."""
    try:
        refuse_newer()
    except ManifestError as error:
        module.fail_json(msg="%s. hint: %s" % (error.message, error.hint), changed=False)
    damaged = damage()
    if damaged:
        module.warn("%s: %s" % (damaged, if_damaged))
