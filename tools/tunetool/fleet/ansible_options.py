"""Options for Ansible that follow ``--`` on a command line: which are not passed on, and passwords asked for once.

Ansible runs where nobody can answer it, and for one command of ours several times. Passwords are therefore asked for
here, before anything runs, and handed over in files in memory that only this user can read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from tunetool.errors import UsageProblem
from tunetool.measure.marked_processes import swept_away

Ask = Callable[[str], str]
"""Asks the user for a password by this prompt."""
_MARK = "TUNETOOL_PASSWORDS"
_HINT = "what follows `--` are options of `ansible-playbook`"
_BEFORE = "give tunetool's own `{}`, before `--`"
_RUNS_NOTHING = "it runs nothing: call `ansible-playbook` itself"
_NOT_PASSED = {
    "inventory": ("-i", _BEFORE.format("-i")),
    "limit": ("--limit", _BEFORE.format("--limit")),
    "forks": ("--forks", _BEFORE.format("--forks")),
    "check": ("--check", _BEFORE.format("--dry-run")),
    "step": ("--step", "nobody can answer its questions here"),
    "list_hosts": ("--list-hosts", _RUNS_NOTHING),
    "list_tasks": ("--list-tasks", _RUNS_NOTHING),
    "list_tags": ("--list-tags", _RUNS_NOTHING),
    "syntax_check": ("--syntax-check", _RUNS_NOTHING),
    "help": ("--help", _RUNS_NOTHING),
    "version": ("--version", _RUNS_NOTHING),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageProblem(f"what follows `--`: {message}", _HINT)


def _parser() -> _Parser:
    """Those of ansible-playbook's options that mean something here. All short ones, since `-bK` is two of them."""
    parser = _Parser(add_help=False)
    for short, name in (("-C", "check"), ("-h", "help")):
        parser.add_argument(short, f"--{name}", action="store_true")
    for name in ("step", "list-hosts", "list-tasks", "list-tags", "syntax-check", "version"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("-i", "--inventory", "--inventory-file", action="append")
    parser.add_argument("-l", "--limit")
    parser.add_argument("-f", "--forks")
    parser.add_argument("-K", "--ask-become-pass", action="store_true")
    parser.add_argument("-k", "--ask-pass", action="store_true")
    parser.add_argument("-J", "--ask-vault-password", "--ask-vault-pass", action="store_true")
    parser.add_argument("--vault-id", action="append", default=[])
    parser.add_argument("--vault-password-file", "--vault-pass-file", action="append", default=[])
    parser.add_argument("-u", "--user")
    parser.add_argument("--private-key", "--key-file")
    parser.add_argument("-e", "--extra-vars", action="append", default=[])
    for short, name in (("-c", "connection"), ("-T", "timeout"), ("-t", "tags"), ("-M", "module-path")):
        parser.add_argument(short, f"--{name}", action="append", default=[])
    parser.add_argument("-b", "--become", action="store_true")
    parser.add_argument("-D", "--diff", action="store_true")
    parser.add_argument("-v", "--verbose", action="count", default=0)
    return parser


def _read(words: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options that mean something here, and the others. Raises ``UsageProblem``."""
    return _parser().parse_known_args(list(words))


def check(words: Sequence[str]) -> None:
    """Raise ``UsageProblem`` for an option that tunetool does not pass on. Ansible itself knows what else is wrong."""
    given, _ = _read(words)
    for name, (option, hint) in _NOT_PASSED.items():
        if getattr(given, name):
            raise UsageProblem(f"`{option}` is not passed to Ansible", hint)


def for_vault(words: Sequence[str]) -> list[str]:
    """Those that reading an inventory needs."""
    given, _ = _read(words)
    options = [word for value in given.vault_id for word in ("--vault-id", value)]
    return options + [word for value in given.vault_password_file for word in ("--vault-password-file", value)]


def vault_hint(error: str) -> str | None:
    """The cure where Ansible's ``error`` says that it has no password of the vault, or a wrong one."""
    asked = "`-- --ask-vault-password` at the end of the command, or `-- --vault-password-file FILE`"
    if "no vault secrets found" in error:
        return f"Ansible Vault encrypted values of this inventory, and no password was given: {asked}"
    if "ecryption failed" in error:
        return f"Ansible Vault encrypted values of this inventory with another password: {asked}"
    return None


def for_ssh(words: Sequence[str]) -> dict[str, str]:
    """The variables of a host that the options stand for where it has none of its own."""
    given, _ = _read(words)
    named = {"ansible_user": given.user, "ansible_ssh_private_key_file": given.private_key}
    return {name: value for name, value in named.items() if value is not None}


@contextlib.contextmanager
def answered(words: Sequence[str], ask: Ask) -> Iterator[tuple[str, ...]]:
    """The options with files in the place of questions; the files are gone afterwards, even after a SIGKILL.

    Raises ``UsageProblem``.
    """
    check(words)
    given, others = _read(words)
    asks_vault = [value for value in given.vault_id if value.rpartition("@")[2] == "prompt"]
    if not (given.ask_pass or given.ask_become_pass or given.ask_vault_password or asks_vault):
        yield tuple(words)
        return
    directory = Path(tempfile.mkdtemp(prefix="tunetool-passwords-", dir=_memory()))
    with swept_away(_MARK, secrets.token_hex(16), directory):
        yield (*_known(given), *others, *_asked(given, directory, ask))


def _memory() -> str | None:
    """A directory in memory: the user's own, or everyone's; None where there is neither."""
    directories = (os.environ.get("XDG_RUNTIME_DIR"), "/dev/shm")
    return next((directory for directory in directories if directory and os.access(directory, os.W_OK | os.X_OK)), None)


def _known(given: argparse.Namespace) -> list[str]:
    """What was understood and is passed on as it is."""
    options = ["--become"] * given.become + ["--diff"] * given.diff + ["-v"] * given.verbose
    for name, value in (("--user", given.user), ("--private-key", given.private_key)):
        options += [name, value] if value is not None else []
    for name in ("extra_vars", "connection", "timeout", "tags", "module_path", "vault_password_file"):
        # In one word: a value may begin with a dash.
        options += [f"--{name.replace('_', '-')}={value}" for value in getattr(given, name)]
    return options


def _asked(given: argparse.Namespace, directory: Path, ask: Ask) -> list[str]:
    def keep(name: str, prompt: str, otherwise: str = "") -> tuple[str, str]:
        password = ask(prompt) or otherwise
        if not password:
            raise UsageProblem(f"the password for `{name}` is empty", "leave the option out where none is needed")
        path = directory / f"password-{len(list(directory.iterdir()))}"
        path.touch(0o600)
        path.write_text(password)
        return str(path), password

    options, login = [], ""
    if given.ask_pass:
        path, login = keep("--ask-pass", "SSH password")
        options += ["--connection-password-file", path]
    if given.ask_become_pass:
        prompt = "BECOME password (default: SSH password)" if login else "BECOME password"
        options += ["--become-password-file", keep("--ask-become-pass", prompt, login)[0]]
    if given.ask_vault_password:
        options += ["--vault-password-file", keep("--ask-vault-password", "Vault password")[0]]
    for value in given.vault_id:
        label, at, source = value.rpartition("@")
        if source == "prompt":
            prompt = f"Vault password ({label})" if label else "Vault password"
            source = keep("--vault-id", prompt)[0]
        options += ["--vault-id", f"{label}{at}{source}"]
    return options
