"""Environments beside .venv, made once for what they are made from, in the user's cache.

environments.py python INTERPRETER VERSION    run the unit tests on another Python
environments.py frameworks [ARGUMENTS]        run tests of Orbax with JAX, Megatron-core, TensorFlow and torchtitan
environments.py llamafactory                  make LLaMA-Factory's if it is missing, and print where it is
environments.py vllm                          the same for vLLM's
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import container
from groups import PARALLEL, VENV
from steps import ROOT

COMPLETE = "complete"
"""Made last: an environment cannot be made elsewhere and moved, since its programs hold their paths."""


@contextlib.contextmanager
def kept(name: str, made_from: bytes, make: Callable[[Path], None], version: str = "") -> Iterator[Path]:
    """The directory for what it is made from, made first if it is missing; older ones of ``version`` are removed.

    Another checkout, whose list may differ, can remove it only afterwards. Raises ``CalledProcessError``.
    """
    cache = container.cache_directory() / name
    with container.only_builder(cache):
        directory = cache / f"{version}{hashlib.sha256(made_from).hexdigest()[:12]}"
        for old in cache.glob(f"{version}????????????"):
            if old != directory:
                shutil.rmtree(old, ignore_errors=True)
        if not (directory / COMPLETE).exists():
            shutil.rmtree(directory, ignore_errors=True)
            make(directory)
            (directory / COMPLETE).touch()
        yield directory


def pip(python: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*command, "--quiet", *arguments], check=True)


def pytest(python: Path, arguments: Sequence[str], **variables: str) -> int:
    """pytest's exit status."""
    command = [str(python), "-m", "pytest", "-q", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, **variables}, check=False).returncode


NEEDS = ["click", "jinja2", "pydantic", "rich", "pytest", "pytest-timeout", "pytest-xdist"]
NEEDS += ["grpcio", "hypothesis", "jsonschema", "prometheus-client", "pyyaml", "xxhash"]
"""What the unit tests need on a node's Python."""


def other_python(interpreter: str, version: str) -> int:
    """Tests of the checkout's own tools show the same on every Python, so they are left out (`any_python`).

    Tests that drive Ansible need a control machine's Python (3.11) and skip themselves elsewhere (tests/skips.py).
    """

    def make(directory: Path) -> None:
        # With pip: tests of wheels and of the wheelhouse run it.
        subprocess.run([interpreter, "-m", "venv", str(directory)], check=True)
        pip(directory / "bin/python", "--constraint", str(ROOT / "constraints.txt"), *NEEDS)

    inputs = b"".join((ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    with kept("pythons", inputs + inspect.getsource(make).encode(), make, f"{version}-") as directory:
        marks = ["-m", "not slow and not any_python", "--hypothesis-profile=few"]
        variables = {"PYTHONDONTWRITEBYTECODE": "1", "TUNETOOL_TESTS_BARE_PYTHON": "1"}
        return pytest(
            directory / "bin/python", [*PARALLEL, "tests/unit", *marks], PYTHONPATH=str(ROOT / "tools"), **variables
        )


FRAMEWORKS = ROOT / "tests/frameworks.txt"
THEIR_TESTS = (
    "tests/checkpoint/test_engines.py",
    "tests/checkpoint/test_frameworks.py",
    "tests/checkpoint/test_recipes.py",
    "tests/measurement/test_bench_dataset.py",
)
NEEDING_THEM = "orbax or megatron or tensorflow or torchtitan"
"""Names of tests: those of an engine have the engine's name."""


def frameworks(arguments: Sequence[str]) -> int:
    """They are on the path of these tests alone, by .venv's Python: no other test may come to need them.

    torch and all that they share with it is .venv's.
    """
    python = VENV / "python"

    def make(directory: Path) -> None:
        pip(python, "--no-deps", "--only-binary", ":all:", "--target", str(directory), "--requirement", str(FRAMEWORKS))

    version = subprocess.run([python, "--version"], capture_output=True, check=True).stdout
    with kept("frameworks", FRAMEWORKS.read_bytes() + version, make) as directory:
        path = os.pathsep.join([str(directory), *filter(None, [os.environ.get("PYTHONPATH")])])
        # JAX looks for accelerators of every kind, and warns where a library of one is missing. None of these excuses a
        # skip here (tests/skips.py).
        chosen = ["--durations=5", *THEIR_TESTS, "-k", NEEDING_THEM, "-W", "ignore", *arguments]
        return pytest(python, chosen, PYTHONPATH=path, TUNETOOL_TESTS_FRAMEWORKS="1", JAX_PLATFORMS="cpu")


LLAMAFACTORY = ROOT / "tests/llamafactory.txt"
RARELY = r"/(tests?|testing|networkx|transformers/models)/"
"""Modules of which hardly one is ever imported."""
BUILD = "from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder; ShareMemCommBuilder().load()"


def llamafactory() -> contextlib.AbstractContextManager[Path]:
    """An environment of older versions of what .venv has, transformers above all.

    On CPUs it needs DeepSpeed's op `deepspeed_shm_comm`, which takes minutes to compile: that lies beside it, where no
    test compiles it. .venv's own ops are not touched.
    """
    how = "".join(inspect.getsource(each) for each in (make_llamafactory, leave_out_cuda, pip))
    made_from = LLAMAFACTORY.read_text() + how + RARELY + BUILD + sys.version
    return kept("llamafactory", made_from.encode(), make_llamafactory)


def ops(directory: Path) -> Path:
    """What TORCH_EXTENSIONS_DIR must name."""
    return directory / "ops"


def make_llamafactory(directory: Path) -> None:
    """The environment, its modules and the op, in its final place."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    python = directory / "bin/python"
    wanted = [line for line in LLAMAFACTORY.read_text().splitlines() if not line.startswith("#")]
    own = [line for line in wanted if line.partition("==")[0] == "llamafactory"]
    pip(python, "--no-compile", *(line for line in wanted if line not in own))
    # What it asks for beside the list is for its web pages and its API.
    pip(python, "--no-compile", "--no-deps", *own)
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


VLLM = ROOT / "tests/vllm.txt"


def vllm() -> contextlib.AbstractContextManager[Path]:
    """An environment of a vLLM that computes on CPUs, with all that it imports."""
    how = inspect.getsource(make_vllm) + inspect.getsource(pip)
    return kept("vllm", (VLLM.read_text() + how + sys.version).encode(), make_vllm)


def make_vllm(directory: Path) -> None:
    """Nothing beside the list: what depends on a GPU is left out there."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    pip(directory / "bin/python", "--no-compile", "--no-deps", "--requirement", str(VLLM))


def main() -> int:
    match sys.argv[1:]:
        case ["python", interpreter, version]:
            return other_python(interpreter, version)
        case ["frameworks", *arguments]:
            return frameworks(arguments)
        case ["llamafactory" | "vllm" as name]:
            with {"llamafactory": llamafactory, "vllm": vllm}[name]() as directory:
                print(directory)
            return 0
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
