"""The Python that trains: the order of the choice, the manifest's part, and its effect in every command."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import pytest

from calls import benchmark, call
from machines import RECORDED, lay_out
from pythons import bare_python, python_that
from tunetool.errors import CannotJudge, ExitCode, UsageProblem
from tunetool.measure.aio import driver
from tunetool.measure.fio import Fio
from tunetool.measure.ladder.deepspeed_handles import prepare
from tunetool.measure.ladder.rung import Context
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.sequential import Plan
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common.manifest import ManifestError, load, write
from tunetool.node.common.training_part import NoTraining, check_training, python_of_ranks
from tunetool.node.machine.block_stack import read_stack
from tunetool.node.machine.capacity import read_capacity
from tunetool.report.progress import PlainProgress
from tunetool.training_python import choose

pytest_plugins = ["disks"]

BUILT: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())


def environment_in(folder: Path, name: str = "env-1", before: str = "") -> Path:
    """A training environment: its directory, with ``current`` beside it, and a script as its Python."""
    program = folder / name / "bin"
    program.mkdir(parents=True)
    python_that(program, before)
    current = folder / "current"
    current.unlink(missing_ok=True)
    current.symlink_to(name)
    (folder / "ops").mkdir(exist_ok=True)
    (folder / name / "environment.json").write_text("{}")
    return folder


def manifest_for(folder: Path, **changes: object) -> Path:
    """A manifest that names the environment in ``folder``."""
    part = {
        "python": str(folder / "current/bin/python"),
        "source": "built",
        "directory": str(folder),
        "lock_sha256": "0" * 64,
        "packages": {"torch": "2.13.0", "deepspeed": "0.19.8", "tunetool": "0.1.0"},
        "accelerator": "cpu",
        "ops": {"async_io": "ready", "utils": "ready", "gds": "missing: no GPU"},
        "ops_directory": str(folder / "ops"),
        "environment": {"TORCH_EXTENSIONS_DIR": str(folder / "ops")},
        "trainers": ["deepspeed"],
        **changes,
    }
    path = folder / "node.json"
    write({**BUILT, "training": part}, str(path))
    return path


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return manifest_for(environment_in(tmp_path / "training"))


# --- the order ----------------------------------------------------------------------------------------------------


def test_a_named_python_is_taken_as_it_is(manifest: Path, tmp_path: Path) -> None:
    other = bare_python(tmp_path)
    chosen = choose(str(other), manifest)
    assert (chosen.path, chosen.named_by, chosen.problem) == (other, "--python", None)
    assert chosen.environment({"A": "b"}) == {"A": "b"}


def test_the_manifests_python_comes_before_tunetools_own(manifest: Path) -> None:
    chosen = choose(None, manifest).need()
    assert chosen.named_by == "manifest"
    assert chosen.path == manifest.parent / "env-1/bin/python"
    assert chosen.environment({"A": "b"}) == {"A": "b", "TORCH_EXTENSIONS_DIR": str(manifest.parent / "ops")}


def test_the_manifests_python_has_its_variables_when_named_too(manifest: Path) -> None:
    chosen = choose(str(manifest.parent / "current/bin/python"), manifest)
    assert chosen.environment({}) == {"TORCH_EXTENSIONS_DIR": str(manifest.parent / "ops")}


def test_an_environment_that_is_swapped_does_not_change_a_run(manifest: Path) -> None:
    chosen = choose(None, manifest)
    environment_in(manifest.parent, "env-2")
    assert chosen.path.parts[-3] == "env-1"
    assert choose(None, manifest).path.parts[-3] == "env-2"


def test_tunetools_own_python_is_taken_where_it_can_train(tmp_path: Path) -> None:
    chosen = choose(None, tmp_path / "no-manifest", needs=("json", "pydantic"))
    assert (chosen.path, chosen.named_by, chosen.problem) == (Path(sys.executable), "tunetool", None)


def test_the_reason_why_there_is_none_names_what_is_lacking(tmp_path: Path) -> None:
    chosen = choose(None, tmp_path / "no-manifest", needs=("json", "nonexistent_torch"))
    with pytest.raises(CannotJudge, match=r"nonexistent_torch is not installed in .*no training environment") as caught:
        chosen.need()
    assert "training_environment" in str(caught.value.hint)
    assert "--python" in str(caught.value.hint)


def test_a_python_that_is_no_program_is_a_wrong_call(manifest: Path) -> None:
    with pytest.raises(UsageProblem, match="`/nonexistent/python` is not a program"):
        choose("/nonexistent/python", manifest)


@pytest.mark.parametrize("how", ["removed", "dangling", "not executable", "a directory"])
def test_a_python_that_went_away_is_one_line_with_a_hint(manifest: Path, how: str) -> None:
    python = manifest.parent / "env-1/bin/python"
    python.unlink()
    if how == "dangling":
        python.symlink_to("/usr/bin/python3.99")
    elif how == "not executable":
        python.write_text("#!/bin/sh\n")
    elif how == "a directory":
        python.mkdir()
    with pytest.raises(CannotJudge) as caught:
        choose(None, manifest).need()
    assert caught.value.exit_code == ExitCode.NOT_JUDGED
    assert str(manifest.parent / "current/bin/python") in caught.value.message
    assert "\n" not in caught.value.line
    assert "`tunetool provision`" in str(caught.value.hint)
    with pytest.raises(NoTraining):
        python_of_ranks("", "/opt/tunetool/bin/python", str(manifest))


def test_a_damaged_manifest_is_the_reason(tmp_path: Path) -> None:
    damaged = tmp_path / "node.json"
    damaged.write_text("{")
    with pytest.raises(CannotJudge, match="is not JSON"):
        choose(None, damaged, needs=("nonexistent_torch",)).need()
    # tunetool's own packages do not depend on it.
    assert choose(None, damaged, needs=("json",)).problem is None


def test_ranks_on_a_node_ask_its_manifest(manifest: Path, tmp_path: Path) -> None:
    variables = {"TORCH_EXTENSIONS_DIR": str(manifest.parent / "ops")}
    stable, named = str(manifest.parent / "env-1/bin/python"), str(manifest.parent / "current/bin/python")
    assert python_of_ranks("", "/own/python", str(manifest)) == (stable, variables)
    assert python_of_ranks(named, "/own/python", str(manifest)) == (named, variables)
    assert python_of_ranks("/other/python", "/own/python", str(manifest)) == ("/other/python", {})
    assert python_of_ranks("", "/own/python", str(tmp_path / "none")) == ("/own/python", {})


# --- the manifest -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"packages": {"torch": 2}},
        {"accelerator": "tpu"},
        {"environment": []},
        {"python": None},
        {"wheels": "x"},
        {"trainers": ["axolotl"]},
    ],
)
def test_a_manifest_with_another_part_is_refused(tmp_path: Path, changes: Mapping[str, object]) -> None:
    folder = environment_in(tmp_path / "training")
    with pytest.raises(ManifestError, match=r"manifest\.training"):
        manifest_for(folder, **changes)


def test_the_check_names_what_is_there_and_what_is_gone(manifest: Path, tmp_path: Path) -> None:
    document = load(str(manifest))
    check = check_training(document)
    assert (check.id, check.status) == ("training.environment", "pass")
    assert "torch 2.13.0, deepspeed 0.19.8" in check.found
    (manifest.parent / "ops").rmdir()
    check = check_training(document)
    assert (check.status, check.found) == ("fail", f"its compiled ops are gone: `{manifest.parent / 'ops'}`")
    assert "`tunetool provision`" in check.remedy
    (manifest.parent / "env-1/environment.json").unlink()
    check = check_training(document)
    assert (check.status, check.found) == ("fail", f"`{manifest.parent / 'env-1/environment.json'}` is gone or damaged")
    (manifest.parent / "env-1/bin/python").unlink()
    check = check_training(document)
    assert check.status == "fail"
    assert f"`{manifest.parent / 'current/bin/python'}`" in check.found


def test_an_owners_environment_is_judged_by_its_python(tmp_path: Path) -> None:
    folder = environment_in(tmp_path / "training")
    document = load(str(manifest_for(folder, source="named")))
    (folder / "env-1/environment.json").unlink()
    assert check_training(document).status == "pass"


def test_a_node_whose_python_is_gone_has_none_to_train_with(manifest: Path) -> None:
    found = read_capacity(str(manifest.parent), "/dev/shm", str(manifest))
    assert (found.python, found.python_problem) == (str(manifest.parent / "current/bin/python"), "")
    (manifest.parent / "env-1/bin/python").unlink()
    found = read_capacity(str(manifest.parent), "/dev/shm", str(manifest))
    assert found.python == ""
    assert str(manifest.parent / "current/bin/python") in found.python_problem
    assert "run `tunetool provision`" in found.python_problem


def test_a_role_that_is_off_is_a_named_check(tmp_path: Path) -> None:
    root = lay_out("built", tmp_path)
    named = {check.id: check for check in run_checks(BUILT, str(root))}["training.environment"]
    assert named.status == "skip"
    assert "training_environment" in named.found
    assert "--python" in named.remedy


# --- the rung of verify ---------------------------------------------------------------------------------------------

_ILLEGAL_OP = """
import json, os, signal, sys
for line in sys.stdin:
    if json.loads(line)["do"] == "probe":
        found = {"python": sys.argv[0], "python_version": "3.11", "torch": "2.13.0", "deepspeed": "0.19.8"}
        print(json.dumps({**found, "installed": {"async_io": sys.argv[0]}}), flush=True)
    else:
        os.kill(os.getpid(), signal.SIGILL)
"""


def test_an_op_for_another_processor_is_one_line_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, manifest: Path, tmp_path: Path
) -> None:
    # A container may lock less memory than a transfer needs, which would be reported first.
    monkeypatch.setattr(driver, "memlock", lambda: None)
    program = manifest.parent / "env-1/bin/python"
    program.write_text(f"#!{sys.executable}\n{_ILLEGAL_OP}")
    chosen = choose(None, manifest)
    rung = prepare(chosen.path, 1.0, (), dict(os.environ), chosen)
    target = tmp_path / "target"
    target.mkdir()
    stack, environment = read_stack(str(target)), dict(os.environ)
    sampler = Sampler(stack, Fio("fio", "3.33"), target, environment, PlainProgress())
    shape = Plan(str(target), stack.medium, 1, 2**26, 1.0, None)
    (check,) = rung.run(Context(shape, stack, target, sampler, environment)).checks
    # The manifest promised it: without a judgement there is no pass.
    assert check.status == "unknown"
    assert "SIGILL" in check.found
    assert "\n" not in check.found
    assert "build-ops --rebuild" in check.remedy


def test_what_the_manifest_promises_is_required(manifest: Path) -> None:
    (manifest.parent / "env-1/bin/python").unlink()
    chosen = choose(None, manifest)
    rung = prepare(chosen.path, 1.0, (), dict(os.environ), chosen)
    assert (rung.required, rung.installed) == (True, None)
    assert "is gone" in rung.missing
    assert "`tunetool provision`" in rung.remedy


def test_an_op_that_was_never_there_is_left_out_with_its_reason(tmp_path: Path) -> None:
    folder = environment_in(tmp_path / "training")
    bare_python(folder / "env-1/bin").rename(folder / "env-1/bin/python")
    chosen = choose(None, manifest_for(folder, ops={"async_io": "missing: no libaio"}))
    rung = prepare(chosen.path, 1.0, (), dict(os.environ), chosen)
    assert (rung.required, rung.installed) == (False, None)
    assert "missing: no libaio" in rung.missing


# --- the commands ---------------------------------------------------------------------------------------------------

_COMMANDS = ("verify", "tune", "ds_config", "build_ops")
_BENCHMARKS = ("ds-io", "checkpoint", "finetune", "staging", "strategies", "reference")


def test_every_command_spells_the_option_alike() -> None:
    """There are two texts: that of commands with -i speaks of hosts, and the other one does not."""
    texts: dict[bool, set[str | None]] = {True: set(), False: set()}
    commands = [importlib.import_module(f"tunetool.cli.{module}").command for module in _COMMANDS]
    commands += map(benchmark, _BENCHMARKS)
    for command in commands:
        (option,) = [each for each in command.params if each.name == "python"]
        assert isinstance(option, click.Option)
        texts["inventory" in {each.name for each in command.params}].add(option.help)
    ((with_hosts,), (here,)) = (texts[True], texts[False])
    assert "with -i a path on every host" in str(with_hosts)
    assert "-i" not in str(here)
    assert "/etc/tunetool/node.json" in str(with_hosts)
    assert "/etc/tunetool/node.json" in str(here)


def tunetool(manifest: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program on a node with that manifest."""
    code = (
        "import sys; from tunetool import training_python; "
        f"training_python.MANIFEST_PATH = {str(manifest)!r}; from tunetool.cli.main import main; main()"
    )
    return call(sys.executable, "-c", code, *map(str, arguments), env={**os.environ, **environment})


_TELLS = """
case "$1" in
-c) echo '[{"torch": true, "deepspeed": true, "tunetool": true}, "VERSION"]'; exit 0;;
*) printf '%s\\n' "$TORCH_EXTENSIONS_DIR" "$@" > "$TOLD"; exit 3;;
esac
"""
_BENCHES = {
    "checkpoint": ["--model", "tiny"],
    "finetune": ["--model", "tiny"],
    "staging": ["--model", "tiny"],
    "strategies": ["--model", "tiny"],
    "reference": [],
}


def telling(version: str) -> str:
    return _TELLS.replace("VERSION", version)


@pytest.mark.parametrize("bench", _BENCHES)
def test_a_benchmark_runs_under_the_manifests_python(bench: str, tmp_path: Path) -> None:
    from tunetool import __version__

    folder = environment_in(tmp_path / "training", before=telling(__version__))
    arguments = ["bench", bench, "--target", str(tmp_path), *_BENCHES[bench]]
    done = tunetool(manifest_for(folder), *arguments, TOLD=str(tmp_path / "told"))
    assert done.returncode == 3, done.stderr
    assert (tmp_path / "told").read_text().split("\n")[:-1] == [str(folder / "ops"), "-m", "tunetool", *arguments]


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (telling("9.9"), "has tunetool 9.9"),
        (
            """echo '[{"torch": true, "deepspeed": false, "tunetool": true}, "0.1.0"]'; exit 0""",
            "deepspeed is not inst",
        ),
        ("echo broken >&2; exit 1", "does not start: broken"),
        ("kill -ILL $$", "does not start"),
        ("exec true", "is not a Python interpreter"),
    ],
)
def test_an_environment_that_cannot_train_is_one_line(before: str, message: str, tmp_path: Path) -> None:
    folder = environment_in(tmp_path / "training", before=before)
    done = tunetool(manifest_for(folder), "bench", "finetune", "--model", "tiny", "--target", tmp_path)
    assert done.returncode == 3
    error, hint = done.stderr.strip().splitlines()
    assert error.startswith("error: ")
    assert message in error
    assert hint.startswith("hint: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ["tune", "--target", "."],
        ["bench", "ds-io", "--target", ".", "--io_size", "1M"],
        ["build-ops", "--dry-run"],
        ["bench", "checkpoint", "--target", ".", "--model", "tiny"],
        ["bench", "staging", "--target", ".", "--model", "tiny"],
    ],
)
def test_a_lost_python_ends_every_command_alike(arguments: list[str], manifest: Path) -> None:
    (manifest.parent / "env-1/bin/python").unlink()
    done = tunetool(manifest, *arguments)
    assert done.returncode == 3
    error, hint = done.stderr.strip().splitlines()
    assert "is gone, the Python of this node's training environment" in error
    assert hint.startswith("hint: run `tunetool provision`")


def test_a_benchmark_that_needs_no_python_takes_tunetools(manifest: Path, tmp_path: Path) -> None:
    (manifest.parent / "env-1/bin/python").unlink()
    done = tunetool(manifest, "bench", "dataset", "--target", tmp_path, "--dry-run")
    assert done.returncode == 0, done.stderr


def test_workers_get_the_manifests_python_and_variables(tmp_path: Path) -> None:
    folder = environment_in(tmp_path / "training", before='echo "$0 $TORCH_EXTENSIONS_DIR" > "$TOLD"; exit 9')
    done = tunetool(manifest_for(folder), "build-ops", TOLD=str(tmp_path / "told"))
    assert done.returncode == 3
    assert (tmp_path / "told").read_text().split() == [str(folder / "env-1/bin/python"), str(folder / "ops")]


def test_fio_needs_no_python(manifest: Path, disk: Path) -> None:
    (manifest.parent / "env-1/bin/python").unlink()
    done = tunetool(manifest, "tune", "--driver", "fio", "--dry-run", "--target", disk)
    assert done.returncode == 0, done.stderr
