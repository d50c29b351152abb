"""Builds of DeepSpeed's ops that are interrupted or run at the same time: real processes, and a compiler that hangs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import TUNETOOL, call
from tunetool.measure.marked_processes import marked
from waiting import PATIENCE, until

pytest.importorskip("deepspeed", reason="DeepSpeed is an extra of the package: `tools/dev/setup.sh --deepspeed`")

_COMPILER = """#!/bin/sh
case "$*" in
*--version*|*-dumpfullversion*|*-print*|*-v) exec g++ "$@";;
esac
echo $$ >> "$COMPILERS"
exec sleep 6000
"""
_MARK = "TUNETOOL_TEST_OF_BUILDS"
_COMMAND = "build-ops"


@pytest.fixture
def build(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A build of an op whose compilers are running."""
    compiler, compilers = tmp_path / "c++", tmp_path / "compilers"
    compiler.write_text(_COMPILER)
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "COMPILERS": str(compilers),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
        "MAX_JOBS": "2",
        _MARK: str(tmp_path),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "tunetool", _COMMAND, "--op", "cpu_adam"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            until(compilers.exists, "a compiler to run", process)
            yield process
        finally:
            for pid in (process.pid, *marked(_MARK, str(tmp_path))):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("how", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_build_leaves_no_compiler_and_no_lock(
    build: subprocess.Popen[str], tmp_path: Path, how: signal.Signals
) -> None:
    assert len(marked(_MARK, str(tmp_path))) > 1
    build.send_signal(how)
    code = build.wait(PATIENCE)
    assert code == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    if how == signal.SIGKILL:
        until(lambda: not marked(_MARK, str(tmp_path)), "the end of its compilers")
    else:
        assert marked(_MARK, str(tmp_path)) == []
        assert not list((tmp_path / "ops").glob("*/lock"))


def test_a_dry_run_says_what_would_be_built_and_makes_nothing(tmp_path: Path) -> None:
    done = call(
        *TUNETOOL,
        _COMMAND,
        "--op",
        "utils",
        "--op",
        "cpu_adam",
        "--dry-run",
        env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops")},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == [
        f"{op:9} would be built: {tmp_path}/ops/{op}" for op in ("utils", "cpu_adam")
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow  # one real build
def test_of_two_side_by_side_one_builds_for_both(tmp_path: Path) -> None:
    compiler, compiled = tmp_path / "c++", tmp_path / "compiled"
    compiler.write_text(
        '#!/bin/sh\nfor word; do case $word in *.cpp) echo "$word" >> "$COMPILED";; esac; done\nexec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    environment = {
        **os.environ,
        "CXX": str(compiler),
        "COMPILED": str(compiled),
        "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"),
    }
    argv = [sys.executable, "-m", "tunetool", _COMMAND, "--op", "utils"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    builds = [subprocess.Popen(argv, env=environment, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    ended = [(*build.communicate(timeout=3 * PATIENCE), build.returncode) for build in builds]
    assert [code for _, _, code in ended] == [0, 0], ended
    shown = sorted(
        stdout.splitlines()[-1].split(":")[0].split(" in ")[0].split(maxsplit=1)[1] for stdout, _, _ in ended
    )
    assert shown == ["already built", "built"]
    assert sum("waiting until it is done" in stderr for _, stderr, _ in ended) == 1
    sources = compiled.read_text().splitlines()
    assert len(sources) == len(set(sources)) > 0  # each once


@pytest.mark.slow  # two real builds
def test_a_cpp_runtime_of_its_own_is_named_with_what_mends_it(tmp_path: Path) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\nexec g++ "$@" -static-libstdc++ -static-libgcc\n')
    compiler.chmod(0o755)

    def build(by: str) -> subprocess.CompletedProcess[str]:
        return call(
            *TUNETOOL,
            _COMMAND,
            "--op",
            "utils",
            "--rebuild",
            env={**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path / "ops"), "CXX": by},
            timeout=3 * PATIENCE,
        )

    own = build(str(compiler))
    assert own.returncode == 0, own.stderr
    assert f"`{tmp_path}/ops/utils/utils.so`: the compiler linked a C++ runtime of its own" in own.stderr
    assert "hint: compile it by a compiler that links libstdc++.so.6: `CXX=c++ tunetool build-ops" in own.stderr
    mended = build("c++")
    assert mended.returncode == 0, mended.stderr
    assert "built in" in mended.stdout
    assert "C++ runtime" not in mended.stderr
