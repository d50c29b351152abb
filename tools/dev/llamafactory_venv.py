"""LLaMA-Factory in a virtual environment of its own, made once for its list (tests/llamafactory.txt).

    llamafactory_venv.py          make it if it is missing, and print where it is

It wants older versions of what .venv has, transformers above all. On CPUs it needs DeepSpeed's op `deepspeed_shm_comm`,
which takes minutes to compile: that lies beside it, where no test compiles it. .venv's own ops are not touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import container
import frameworks

LIST = frameworks.ROOT / "tests/llamafactory.txt"
NAME = "llamafactory"
COMPLETE = "complete"
"""Made last: programs of an environment, and the recipe of an op, hold their paths, so that it cannot be moved."""
RARELY = r"/(tests?|testing|networkx|transformers/models)/"
"""Modules of which hardly one is ever imported."""
BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"


@contextlib.contextmanager
def environment() -> Iterator[Path]:
    """Its directory, made first if it is missing; another checkout, whose list may differ, cannot remove it meanwhile.

    Raises ``CalledProcessError``.
    """
    cache = container.cache_directory() / NAME
    with container.only_builder(cache):
        directory = frameworks.kept(cache, LIST.read_bytes() + Path(__file__).read_bytes() + sys.version.encode())
        if not (directory / COMPLETE).exists():
            shutil.rmtree(directory, ignore_errors=True)
            make(directory)
            (directory / COMPLETE).touch()
        yield directory


def ops(directory: Path) -> Path:
    """What TORCH_EXTENSIONS_DIR must name."""
    return directory / "ops"


def make(directory: Path) -> None:
    """The environment, its modules and the op, in its final place."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin/python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python)]
    install = [*pip, "install", "--quiet", "--no-compile"]
    wanted = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    own = [line for line in wanted if line.partition("==")[0] == NAME]
    subprocess.run([*install, *(line for line in wanted if line not in own)], check=True)
    # What it asks for beside the list is for its web pages and its API.
    subprocess.run([*install, "--no-deps", *own], check=True)
    packages = next(directory.glob("lib/python*/site-packages"))
    leave_out_cuda(python, packages)
    # A package may carry files that this Python cannot compile.
    compile_all = [str(python), "-m", "compileall", "-q", "-j", "0", "-x", RARELY, str(packages)]
    subprocess.run(compile_all, stdout=subprocess.DEVNULL, check=False)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", os.defpath)]),
        "TORCH_EXTENSIONS_DIR": str(ops(directory)),
    }
    subprocess.run([str(python), "-c", BUILD], env=environment, stdout=subprocess.DEVNULL, check=True)


def leave_out_cuda(python: Path, packages: Path) -> None:
    """Make torchvision and torchaudio do without their compiled parts where these cannot be loaded.

    The package index has them for a torch with CUDA alone. What LLaMA-Factory has them do is Python: to scale pictures.
    """

    def imported(names: str) -> bool:
        done = subprocess.run([str(python), "-c", f"import {names}"], capture_output=True, check=False)
        return done.returncode == 0

    if not imported("torchaudio"):
        for path in packages.glob("torchaudio/lib/_torchaudio*"):
            path.unlink()
    if not imported("torchvision"):
        # It describes operators of the part that is not there, and nothing else.
        (packages / "torchvision/_meta_registrations.py").write_text("")
    subprocess.run([str(python), "-c", "import torchaudio, torchvision"], check=True)


if __name__ == "__main__":
    with environment() as made:
        print(made)
