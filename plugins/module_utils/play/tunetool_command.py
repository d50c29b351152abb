"""Runs ``tunetool`` on a node and returns its record. Only this module builds the command line."""

from __future__ import annotations

import json
import os
import tempfile
from typing import Any, Mapping, Sequence

from ..common.refusal import Expected
from . import connection

INSPECT = "inspect"
"""The command that prints an inspection."""
COMMANDS = ("verify", "accept", "stage", "bench", "tune", INSPECT)
"""Commands that may be run: those that make a record, or an inspection. Others build, destroy, or print neither."""
CHECK_MODE = "verify"
"""The command that supports check mode: it then makes only its checks."""
HAVE_CHECK_MODE = ([CHECK_MODE], [INSPECT])
_NEED_MEASURING = ("level", "require", "gds")
"""Options of that command that ask for measurements."""
TAIL_LINES = 20
MARK = "TUNETOOL_PLAY"
"""Environment variable by which tunetool knows Ansible's processes on its own machine, and kills them when the play is
interrupted."""


class Refused(Expected):
    """The command line cannot be run on a node; the message says why, with a hint."""


def command_line(
    command: Sequence[str], options: Mapping[str, Any], arguments: Sequence[str], check_mode: bool = False
) -> list[str]:
    """The arguments for the program, which prints its record on standard output.

    An option in ``arguments`` wins over ``options``. Raises ``Refused``.
    """
    if not command or command[0] not in COMMANDS:
        raise Refused("`tunetool %s` is not run on nodes. hint: one of %s" % (" ".join(command), ", ".join(COMMANDS)))
    given = list(arguments)
    if "json" in option_names(given) or "json" in options:
        raise Refused("the module sets `--json` itself. hint: leave it out; the result has the record")
    if check_mode and list(command) == [CHECK_MODE]:
        given = without_options(given, _NEED_MEASURING)
        options = {name: value for name, value in options.items() if name not in _NEED_MEASURING}
        given = ["--level", "config"] + given
    named = option_names(given)
    argv = list(command) + ["--json", "-"]
    for name, value in options.items():
        if name.replace("_", "-") not in named:
            argv += as_option(name, value)
    return argv + given


def as_option(name: str, value: Any) -> list[str]:
    """One option with its value: a list repeats it, true is a flag, and what is empty or false leaves it out."""
    option = "--" + name.replace("_", "-")
    if isinstance(value, bool):
        return [option] if value else []
    values = value if isinstance(value, (list, tuple)) else [value]
    return [part for each in values if each is not None and each != "" for part in (option, str(each))]


def option_names(arguments: Sequence[str]) -> set[str]:
    """The names of the options among ``arguments``, up to a lone ``--``."""
    end = list(arguments).index("--") if "--" in arguments else len(arguments)
    return {each[2:].partition("=")[0] for each in arguments[:end] if each.startswith("--")}


def without_options(arguments: Sequence[str], names: Sequence[str]) -> list[str]:
    """``arguments`` without the options of these names and their values."""
    kept: list[str] = []
    skip = False
    for each in arguments:
        name, separator, _ = each[2:].partition("=") if each.startswith("--") else ("", "", "")
        if skip:
            skip = False
        elif name in names:
            skip = not separator
        else:
            kept.append(each)
    return kept


def run(module: Any, argv: Sequence[str]) -> dict[str, Any]:
    """Run the installed program with ``argv``. Returns the module's result, with the record or the inspection.

    Ends the module with an error if the program is missing or prints neither.
    """
    program = find_program(module)
    # On a host that is the control machine itself the program would be killed with the play, and the process that
    # removes its files too. Without the mark it is ended in order, by the end of this module.
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = connection.start([program, *argv], environment, stdout, stderr)
        rc = connection.wait(process, process.terminate)
        texts = []
        for stream in (stdout, stderr):
            stream.seek(0)
            texts.append(stream.read().decode("utf-8", "replace"))
    tail = texts[1].strip().splitlines()[-TAIL_LINES:]
    if argv[0] == INSPECT:
        inspection = read_inspection(texts[0])
        if inspection is None:
            module.fail_json(msg=last_words(tail), rc=rc, stderr_tail=tail)
            return {}
        return {"changed": False, "inspection": inspection, "rc": rc, "stderr_tail": tail}
    record = read_record(texts[0])
    if record is None:
        module.fail_json(msg=last_words(tail), rc=rc, stderr_tail=tail)
        return {}
    return {"changed": changed(record), "record": record, "rc": rc, "stderr_tail": tail, "msg": summary(record)}


def find_program(module: Any) -> str:
    """The program at ``executable``, else the one on PATH. Ends the module if there is none."""
    program = str(module.params["executable"])
    if os.access(program, os.X_OK):
        return program
    on_path = module.get_bin_path("tunetool")
    if on_path is None:
        module.fail_json(
            msg="`%s` is not installed. hint: run `tunetool provision`, whose role tunetool installs it" % program,
            rc=3,
            stderr_tail=[],
        )
    return str(on_path)


def read_record(stdout: str) -> dict[str, Any] | None:
    """The record on standard output, or None."""
    return _document_with("verdict", stdout)


def read_inspection(stdout: str) -> dict[str, Any] | None:
    """The inspection on standard output, or None."""
    return _document_with("ceilings", stdout)


def _document_with(key: str, stdout: str) -> dict[str, Any] | None:
    try:
        document = json.loads(stdout)
    except ValueError:
        return None
    return document if isinstance(document, dict) and key in document else None


def changed(record: Mapping[str, Any]) -> bool:
    """Whether the command changed the node: it copied a tree to it, or removed a copy."""
    copied = any(figure["name"] == "stage.copy" for figure in record.get("measurements", []))
    return copied or any(check["id"] == "stage.evicted" for check in record.get("checks", []))


def summary(record: Mapping[str, Any]) -> str:
    """One line: the verdict and its first reason."""
    verdict = record["verdict"]
    return ": ".join([verdict["status"].upper()] + verdict["reasons"][:1])


def last_words(tail: Sequence[str]) -> str:
    """Why there is no record, from the last lines of standard error."""
    errors = [line for line in tail if line.startswith(("error: ", "hint: "))]
    return "; ".join(errors or list(tail[-1:]) or ["it printed nothing"])
