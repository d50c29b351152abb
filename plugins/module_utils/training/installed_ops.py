"""Registers compiled ops as DeepSpeed's installed ones: its loader then compiles and writes nothing, for any user.

Otherwise DeepSpeed calls ninja on every load, in a directory to which an ordinary user may not write.
"""

from __future__ import annotations

import contextlib
import glob
import os
import re
from typing import Any, Mapping, Optional

from ..common.files import content, replace_file

FOLDERS = {"async_io": "aio", "gds": "gds", "pin_memory": "pin_memory", "utils": "", "cpu_adam": "adam"}
"""The folders below deepspeed/ops to which DeepSpeed's installer writes compiled ops."""
BEGIN, END = "# tunetool: ops compiled for this machine\n", "# tunetool: end\n"
SHIM = """\
# Written by tunetool: this op was compiled for this machine, outside the package.
import importlib.machinery
import importlib.util
import sys

loader = importlib.machinery.ExtensionFileLoader({name!r}, {path!r})
spec = importlib.util.spec_from_file_location({name!r}, {path!r}, loader=loader)
module = importlib.util.module_from_spec(spec)
loader.exec_module(module)
sys.modules[__name__] = module
"""


def package(environment: str) -> Optional[str]:
    """The directory of DeepSpeed in a venv."""
    packages = glob.glob(os.path.join(environment, "lib/python3*/site-packages/deepspeed"))
    return packages[0] if packages and os.path.exists(_versions(packages[0])) else None


def register(environment: str, ops_directory: str, versions: Mapping[str, Any], accelerator: str) -> None:
    """Let DeepSpeed in that venv load every op of ``ops_directory`` as an installed one."""
    deepspeed = package(environment)
    if deepspeed is None:
        return
    names = [name for name in FOLDERS if os.path.exists(os.path.join(ops_directory, name, name + ".so"))]
    for name in FOLDERS:
        shim = _shim(deepspeed, name)
        if name in names:
            text = SHIM.format(name=name, path=os.path.join(ops_directory, name, name + ".so"))
            os.makedirs(os.path.dirname(shim), exist_ok=True)
            if content(shim) != text:
                replace_file(shim, text)
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(shim)
    torch = str(versions["versions"].get("torch", "")).partition("+")[0].split(".")[:2]
    facts = {"version": ".".join(torch), "cuda_version": versions.get("cuda") or "0.0"}
    lines = "installed_ops = {**installed_ops, **%r}\naccelerator_name = %r\ntorch_info = {**torch_info, **%r}\n" % (
        dict.fromkeys(names, True),
        accelerator,
        facts,
    )
    _write(deepspeed, BEGIN + lines + END)


def forget(environment: str) -> None:
    """Undo ``register``: otherwise DeepSpeed's builder would take an op that is about to be compiled for installed."""
    deepspeed = package(environment)
    if deepspeed is None:
        return
    _write(deepspeed, "")
    for name in FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_shim(deepspeed, name))


def _shim(deepspeed: str, name: str) -> str:
    return os.path.join(deepspeed, "ops", FOLDERS[name], name + "_op.py")


def _versions(deepspeed: str) -> str:
    return os.path.join(deepspeed, "git_version_info_installed.py")


def _write(deepspeed: str, block: str) -> None:
    path = _versions(deepspeed)
    before = content(path)
    plain = re.sub(re.escape(BEGIN) + ".*?" + re.escape(END), "", before, flags=re.DOTALL)
    after = plain + ("" if plain.endswith("\n") or not plain else "\n") + block
    if after != before:
        replace_file(path, after)
