"""DeepSpeed's compiled ops: whether they exist for this torch, and whether a build's lock blocks them. Compiles
nothing.

torch's loader takes a file named ``lock`` in an op's folder for a running build and waits for ever until it is gone. A
killed build leaves it behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tunetool.measure.aio.spec import script
from tunetool.measure.worker import Failed, Missing, Worker, child_command
from tunetool.node.common.files import read_text
from tunetool.origin import install_hint
from tunetool.system_packages import find, install_line

LIBAIO = "/usr/include/libaio.h"
"""What DeepSpeed's I/O ops are compiled with."""
LOCK = "lock"
STAMP = "tunetool.json"
"""Beside an op that `tunetool build-ops` built: for which torch and DeepSpeed. Paths may differ, versions may not."""
PROBE_SECONDS = 120.0
"""A torch with CUDA is imported in it, from a cold disk perhaps."""
DEPENDENCIES: Mapping[str, Sequence[str]] = {"async_io": ("pin_memory",), "gds": ("pin_memory",)}


@dataclass(frozen=True)
class Probe:
    """The libraries and ops of an interpreter."""

    python: str
    python_version: str
    torch: str | None = None
    torch_path: str | None = None
    deepspeed: str | None = None
    deepspeed_path: str | None = None
    root: str | None = None
    """Where torch keeps the extensions that it compiles for this interpreter."""
    cuda: bool = False
    needs_pin_memory: bool = False
    """Newer DeepSpeeds keep the locked memory in an op of its own."""
    installed: Mapping[str, str | None] = field(default_factory=dict)
    """Ops compiled when DeepSpeed was installed, by name."""

    def folder(self, op: str) -> Path:
        """Where torch builds ``op``."""
        return Path(self.root or "") / op

    def parts(self, op: str) -> list[str]:
        """``op`` and what must be loaded before it, in that order."""
        before = DEPENDENCIES.get(op, ()) if self.needs_pin_memory else ()
        return [*before, op]

    def find(self, op: str) -> Path | None:
        """The compiled file of ``op``; None where there is none, or one for another torch or DeepSpeed."""
        ready = self.installed.get(op)
        if ready:
            return Path(ready)
        library = self.folder(op) / f"{op}.so"
        return library if library.exists() and _fits(self, library) else None

    def has(self, op: str) -> bool:
        """Whether ``op`` could be loaded without compiling anything."""
        return all(self.find(part) for part in self.parts(op))

    def stamp(self) -> dict[str, str | None]:
        """What an op was built for."""
        return {"python": self.python_version, "torch": self.torch, "deepspeed": self.deepspeed}


def probe(python: Path, environment: Mapping[str, str]) -> Probe:
    """Ask ``python`` for its libraries and ops. Raises ``Missing`` if it cannot answer."""
    what = f"`{python}`"
    with Worker(child_command(python, script("child.py")), what, environment) as child:
        try:
            answer = child.ask({"do": "probe"}, PROBE_SECONDS)
        except Failed as error:
            raise Missing(error.message, "name a working Python with `--python`") from None
    known = {name: value for name, value in answer.items() if name in Probe.__dataclass_fields__}
    return Probe(**known)


def need_deepspeed(installed: Probe) -> None:
    """Raises ``Missing`` without torch or DeepSpeed."""
    for name, version in (("torch", installed.torch), ("deepspeed", installed.deepspeed)):
        if version is None:
            raise Missing(
                f"{name} is not installed in `{installed.python}`",
                f"{install_hint('deepspeed', installed.python)}, or name the Python that has it with `--python`",
            )


def need(installed: Probe, op: str) -> None:
    """Raises ``Missing`` unless ``op`` can be loaded as it is."""
    need_deepspeed(installed)
    if installed.has(op):
        return
    python_option = "" if Path(installed.python) == Path(sys.executable) else f" --python {installed.python}"
    hint = f"run `tunetool build-ops{python_option}" + ("`" if op == "async_io" else f" --op {op}`")
    if find(LIBAIO) is None:
        hint = f"{install_line(LIBAIO)}, then {hint}"
    for part in installed.parts(op):
        lock = installed.folder(part) / LOCK
        if lock.exists():
            busy = builders(lock)
            who = f"process {busy[0]} builds it" if busy else "a build that died left it, and DeepSpeed waits for ever"
            raise Missing(
                f"DeepSpeed's op `{op}` is locked by `{lock}`: {who}", "wait until it is built" if busy else hint
            )
    raise Missing(
        f"DeepSpeed's op `{op}` is not built for torch {installed.torch} and deepspeed {installed.deepspeed}", hint
    )


def _fits(installed: Probe, library: Path) -> bool:
    if (library.parent / LOCK).exists():
        return False
    try:
        stamp: dict[str, Any] = json.loads((library.parent / STAMP).read_text())
    except (OSError, ValueError):
        return _built_here(installed, library)
    return stamp == installed.stamp()


def _built_here(installed: Probe, library: Path) -> bool:
    """Whether DeepSpeed's own loader built it from this torch and DeepSpeed, after both were installed."""
    recipe = read_text(str(library.parent / "build.ninja")) or ""
    roots = [path for path in (installed.torch_path, installed.deepspeed_path) if path]
    if len(roots) < 2 or not all(re.search(re.escape(root) + r"/", recipe) for root in roots):
        return False
    versions = [Path(roots[0]) / "version.py", Path(roots[1]) / "git_version_info_installed.py"]
    with contextlib.suppress(OSError):
        return all(library.stat().st_mtime > path.stat().st_ctime for path in versions if path.exists())
    return False


def write_stamp(installed: Probe, op: str) -> None:
    """Write beside the op which torch and DeepSpeed it was built for."""
    for part in installed.parts(op):
        folder = installed.folder(part)
        if (folder / f"{part}.so").exists():
            (folder / STAMP).write_text(json.dumps(installed.stamp()) + "\n")


def builders(lock: Path, proc: str = "/proc") -> list[int]:
    """Processes that build in the folder of ``lock``: they hold the lock open, or work in the folder.

    torch's loader keeps the lock open while it builds; a compiler that outlived it still works in the folder.
    """
    folder = str(lock.parent.resolve())
    pids = []
    for entry in sorted(Path(proc).iterdir(), key=lambda path: path.name):
        if entry.name.isdigit() and any(_below(link, folder) for link in _links(entry)):
            pids.append(int(entry.name))
    return pids


def _links(entry: Path) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        links.append(str((entry / "cwd").readlink()))
    with contextlib.suppress(OSError):
        for descriptor in (entry / "fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(descriptor.readlink()))
    return links


def _below(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder + os.sep)
