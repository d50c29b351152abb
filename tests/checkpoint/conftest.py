"""Processes that import torch once for all tests of this folder, since the import takes seconds."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from programs import need_program
from waiting import PATIENCE

HERE = Path(__file__).parent
Ask = Callable[..., Any]


@contextlib.contextmanager
def _serving(*command: str, env: dict[str, str] | None = None) -> Iterator[Ask]:
    with subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE, env=env
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(**order: Any) -> Any:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            assert line, f"{command[-1]} ended with {process.wait()}"
            return json.loads(line)

        yield ask
        process.stdin.close()
        process.wait(timeout=PATIENCE)


@pytest.fixture(scope="session")
def only_torch() -> Iterator[Ask]:
    """torch's own writer and reader, in a process that cannot import tunetool. See ``only_torch.py``."""
    without = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with _serving("-S", str(HERE / "only_torch.py"), sysconfig.get_paths()["purelib"], env=without) as ask:
        yield ask


@pytest.fixture(scope="session")
def forks() -> Iterator[Ask]:
    """Ranks that start in less than a second. See ``forks.py``."""
    with _serving(str(HERE / "forks.py")) as ask:
        yield ask


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Ask:
    """``tunetool checkpoint`` in this process: its exit code, and what it prints on standard output."""
    from tunetool.cli.main import cli

    def call(*words: object) -> tuple[int, str]:
        code = cli.main(["checkpoint", *map(str, words)], standalone_mode=False)
        return int(code), capsys.readouterr().out

    return call


@pytest.fixture(scope="session")
def compiled_read_loop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled code, which no checkout has."""
    from tunetool.checkpoint import build_read_loop

    made = tmp_path_factory.mktemp("compiled") / "read_loop.so"
    need_program("cc")
    build_read_loop.build(made)
    return made


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The config.json of a small Llama: 6 MB of state, and an embedding with an odd number of rows."""
    path = tmp_path_factory.mktemp("model") / "config.json"
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "intermediate_size": 256, "vocab_size": 501}
    path.write_text(json.dumps({"model_type": "llama", "num_attention_heads": 4, **sizes}))
    return str(path)


@pytest.fixture
def drains() -> Iterator[Callable[..., Any]]:
    """Starts drains, and ends those that still run after the test."""
    from tunetool.checkpoint import drain

    begun = []

    def begin(*arguments: Any, **options: Any) -> Any:
        begun.append(drain(*arguments, **{"patience": PATIENCE, **options}))
        return begun[-1]

    yield begin
    for each in begun:
        each.stop()


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of this process alone."""
    import torch.distributed as dist
    from torch.distributed.checkpoint.planner import SavePlanner

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    # torch caches plans by name in the process; the next test must not get those of another writer.
    for name, cached in vars(SavePlanner).items():
        if name.startswith("_cached_"):
            cached.clear()
