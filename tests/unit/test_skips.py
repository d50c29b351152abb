"""A skip whose reason is not in the list fails the run: with a real pytest, in one and in two processes."""

from __future__ import annotations

import ast
import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import skips

pytestmark = pytest.mark.any_python
TESTS = Path(__file__).parents[1]
MODULE = """
import pytest

@pytest.mark.skip(reason="it compresses: the tensor's bytes cannot be found")
def test_allowed(): ...

def test_in_the_test():
    pytest.skip("no time today")

@pytest.mark.skipif(True, reason="by a mark")
def test_by_a_mark(): ...

@pytest.fixture
def machine():
    pytest.skip("in a fixture")

def test_in_a_fixture(machine): ...

@pytest.mark.xfail(reason="known", strict=True)
def test_expected_to_fail():
    assert False

def test_passes(): ...
"""


def pytest_on(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text("[pytest]\naddopts = -p no:cacheprovider\n")
    (folder / "conftest.py").write_text((TESTS.parent / "conftest.py").read_text())
    # These skips are not of real tests: a list that is being written must not have them.
    inherited = {name: value for name, value in os.environ.items() if name != skips.SKIPPED_LIST}
    environment = {**inherited, "PYTHONPATH": str(TESTS), **variables}
    command = [sys.executable, "-m", "pytest", "-q", *arguments, str(folder)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("processes", ["0", "2"])
def test_any_other_reason_fails_the_run_by_name(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_some.py").write_text(MODULE)
    done = pytest_on(tmp_path, "-n", processes)
    assert done.returncode == 1, done.stdout
    outcomes = dict(
        re.findall(r"`test_some.py::(\w+)` was skipped, and its reason is none of tests/skips.py: (.*)", done.stdout)
    )
    assert outcomes == {
        "test_in_the_test": "no time today",
        "test_by_a_mark": "by a mark",
        "test_in_a_fixture": "in a fixture",
    }
    assert "1 passed, 1 skipped, 1 xfailed" in done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_a_whole_module_left_out_fails_the_run(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_whole.py").write_text(
        'import pytest\npytest.importorskip("no_such_module")\ndef test_one(): ...\n'
    )
    (tmp_path / "test_other.py").write_text("def test_one(): ...\n")
    done = pytest_on(tmp_path, "-n", processes)
    assert done.returncode not in (0, 5), done.stdout
    assert "`test_whole.py` was skipped, and its reason is none of tests/skips.py: could not import" in done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_skips_for_reasons_of_the_list_pass(tmp_path: Path, processes: str) -> None:
    (tmp_path / "test_some.py").write_text(MODULE.replace('"no time today"', '"it compresses: the tensor\'s bytes"'))
    done = pytest_on(tmp_path, "-n", processes, "-k", "allowed or in_the_test or passes")
    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 skipped" in done.stdout


@pytest.mark.parametrize("processes", ["0", "2"])
def test_skipped_tests_are_listed_for_another_machine(tmp_path: Path, processes: str) -> None:
    reason = "it compresses: the tensor's bytes"
    (tmp_path / "test_whole.py").write_text(
        f'import pytest\npytest.skip("{reason}", allow_module_level=True)\ndef test_one(): ...\n'
    )
    (tmp_path / "test_some.py").write_text(MODULE)
    pytest_on(tmp_path, "-n", processes, **{skips.SKIPPED_LIST: str(tmp_path / "skipped")})
    listed = (tmp_path / "skipped").read_text().splitlines()
    assert set(listed) == {"test_some.py::test_allowed", "test_whole.py"}


def test_a_reason_counts_only_where_it_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(skips.BARE_PYTHON, raising=False)
    monkeypatch.setattr(skips, "LEFT_OUT", tmp_path / "left-out")
    monkeypatch.setattr(skips, "DEEPSPEED", tmp_path / "installed")
    (tmp_path / "installed").touch()
    for reason in ("Ansible's control side needs Python 3.11", "DeepSpeed is not installed"):
        assert not skips.allowed(reason)
    monkeypatch.setenv(skips.BARE_PYTHON, "1")
    assert skips.allowed("Ansible's control side needs Python 3.11")
    assert not skips.allowed("DeepSpeed is not installed")
    (tmp_path / "left-out").touch()
    assert skips.allowed("DeepSpeed is not installed")


def test_every_reason_says_why() -> None:
    assert all(row.why and re.compile(row.pattern) for row in skips.ALLOWED)


def reasons(path: Path) -> list[tuple[int, str]]:
    """The reasons of skips in a module of tests, by line, without those that depend on the machine."""
    texts = []
    # Hypothesis hooks into the collector, and CPython 3.11 refuses a tree during which a hook ran at the wrong depth.
    gc.disable()
    try:
        tree = ast.parse(path.read_text())
    finally:
        gc.enable()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = ast.unparse(call.func)
        if name.endswith(("pytest.skip", "skipif", "mark.skip", "importorskip")):
            given = [word.value for word in call.keywords if word.arg == "reason"]
            if name.endswith("pytest.skip") and call.args:
                given = call.args[:1]
            elif name.endswith("importorskip") and not given:
                given = [ast.Constant(f"could not import {call.args[0].value!r}")]  # type: ignore[attr-defined]
            for argument in given:
                if isinstance(argument, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "..." for part in argument.values]
                    if set("".join(map(str, parts))) > set(".; "):
                        texts.append((call.lineno, "".join(map(str, parts))))
                elif isinstance(argument, ast.Constant):
                    texts.append((call.lineno, str(argument.value)))
    return texts


def test_every_reason_that_a_test_gives_is_in_the_list() -> None:
    modules = [path for path in TESTS.rglob("*.py") if path not in (Path(__file__), Path(skips.__file__))]
    given = {(path.name, *reason) for path in modules for reason in reasons(path)}
    assert len(given) > 50
    assert {reason for reason in given if not any(re.search(row.pattern, reason[2]) for row in skips.ALLOWED)} == set()
