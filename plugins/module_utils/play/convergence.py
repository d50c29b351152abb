"""The frame of every module.

``AnsibleModule``: Ansible's class, for modules that show what they read on a node.
``in_one_line``: what is refused or fails ends the module with one line and its hint, never with a traceback.
``change``: the same under the node's lock, for work that changes the node.
``converge``: the same for work that notes each change in a ledger, which gives it check mode and diff.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, Callable, Iterator, Mapping, TypeVar

from ansible.module_utils import basic

from ..common.drift import Drifted, Ledger, as_results, built_manifest, message, settle
from ..common.file_lock import only_one
from ..common.files import UMASK, printable
from ..common.manifest import damage, refuse_newer
from ..common.refusal import Expected
from ..machine.writable import failed_write
from ..units import UnitError

Result = TypeVar("Result")
Words = Mapping[type[Exception], Callable[[Any], str]]
"""What a module says of an error where the error's own words do not suffice: the first class that fits counts."""


class AnsibleModule(basic.AnsibleModule):  # type: ignore[misc]  # ansible-core comes without types
    """A module whose results are always UTF-8.

    A file or a name on a node may hold any bytes, and ansible-core 2.19 takes no result with one that is not: the task
    would fail after its work is done, and again at every later run.

    A failure after ``change_begins`` says that the node was changed.

    What a module and the programs that it starts make on a node is for every user to read, though root's umask may be
    077. ``keep_umask``: for a module that works for the user who called it.
    """

    _changing = False

    def __init__(self, *arguments: Any, keep_umask: bool = False, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        # The variables of a role, which come as one dictionary, are parameters like all others.
        self.params.update(self.params.get("settings") or {})
        if not keep_umask:
            os.umask(UMASK)

    def change_begins(self) -> None:
        """Called before each write to the node."""
        self._changing = True

    def exit_json(self, **kwargs: Any) -> None:
        """End the module, without error."""
        super().exit_json(**printable(kwargs))

    def fail_json(self, msg: str, **kwargs: Any) -> None:
        """End the module, with an error."""
        if self._changing:
            kwargs["changed"] = True
        super().fail_json(printable(msg), **printable(kwargs))

    def warn(self, warning: str, **kwargs: Any) -> None:
        """Add a warning to the result."""
        super().warn(printable(warning), **kwargs)


def line_of(error: Exception) -> str:
    """An error in its own words, with its hint."""
    if isinstance(error, OSError):
        return failed_write(error)
    hint = getattr(error, "hint", None)
    return "%s. hint: %s" % (getattr(error, "message", error), hint) if hint else str(error)


def unreadable(error: OSError) -> str:
    """A file that could not be read."""
    what = "`%s`: %s" % (error.filename, error.strerror) if error.filename else str(error)
    return "%s. hint: nothing was changed; see in `dmesg` what stops reading" % what


READING: Words = {OSError: unreadable}
"""Of a module that only reads."""


@contextlib.contextmanager
def in_one_line(module: Any, words: Words | None = None, **results: Any) -> Iterator[None]:
    """End the module with an error, in one line, if something inside is refused or fails; with ``results`` too.

    An error that is none of ours, and not in ``words``, is a fault of the program: its traceback is wanted.
    """
    words = words or {}
    kinds: tuple[type[Exception], ...] = (Expected, UnitError, OSError, *words)
    try:
        yield
    except kinds as error:
        if isinstance(error, Drifted):
            results = {"differences": as_results(error.differences), **results}
        say = next((say for kind, say in words.items() if isinstance(error, kind)), line_of)
        # After ``change_begins`` the module itself says that the node was changed.
        module.fail_json(msg=say(error), **{"changed": False, **results})
        raise


def change(module: Any, work: Callable[[], Result], words: Words | None = None, **results: Any) -> Result:
    """Do ``work`` under the node's lock: it reads there, since the node may have changed while it was waited for."""
    with in_one_line(module, words, **results), only_one():
        return work()


def converge(
    module: Any,
    work: Callable[[Ledger], Result],
    manifest: Callable[[], Mapping[str, Any] | None] = built_manifest,
    words: Words | None = None,
) -> tuple[Result, dict[str, Any]]:
    """Settle ``work`` under the node's lock. Return its result, and ``changed``, ``diff`` and ``differences``.

    Ends the module with an error if something is refused, fails, or remains different.
    """
    result, ledger = change(module, lambda: settle(work, manifest(), module.check_mode, module.change_begins), words)
    for warning in ledger.warnings:
        module.warn(warning)
    answer = outcome(ledger)
    if ledger.left:
        module.fail_json(msg=message(ledger.left), **answer)
    return result, answer


def outcome(ledger: Ledger) -> dict[str, Any]:
    """The results that every such module returns."""
    return {"changed": bool(ledger.diff), "diff": ledger.diff, "differences": as_results(ledger.differences)}


def look_at_earlier_manifest(module: Any, if_damaged: str) -> None:
    """End the module where a newer tunetool wrote it; warn where it is damaged, with what becomes of it."""
    with in_one_line(module, READING):
        refuse_newer()
    damaged = damage()
    if damaged:
        module.warn("%s: %s" % (damaged, if_damaged))
