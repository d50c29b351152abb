"""``tunetool doctor``: what a machine lacks for which command, and the line that installs it; it reads alone."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from calls import imported_by
from tunetool import doctor, origin, system_packages
from tunetool.bench.registry import BENCHMARKS, Benchmark
from tunetool.cli.main import HIDDEN, cli
from tunetool.doctor import WITH_INVENTORY, Answer, Status, code, concerns, examine, lacks, needs
from tunetool.errors import CannotJudge, ExitCode, TunetoolError, UsageProblem
from tunetool.origin import Origin, lacking
from tunetool.report.doctor import print_doctor
from tunetool.report.page import table_console

NOTHING = {
    "advise checkpoint",
    "advise expect",
    "advise io",
    "advise model",
    "advise network",
    "doctor",
    "inspect",
    "report list",
    "report show",
    "report compare",
    "report fleet",
    "report judge",
    "report mlpstorage",
    "report page",
    "report trend",
}
"""Commands that need no more than the package itself."""
FAMILIES = {"apt-get": "apt-get install --no-install-recommends", "dnf": "dnf install", "brew": "brew install"}


def leaves(command: click.Command, path: tuple[str, ...] = ()) -> Iterator[str]:
    if isinstance(command, click.Group):
        for name in set(command.list_commands(click.Context(command))) - set(HIDDEN):
            child = command.get_command(click.Context(command), name)
            assert child is not None
            yield from leaves(child, (*path, name))
    else:
        yield " ".join(path)


def called(*arguments: str) -> int:
    ended = cli.main(["doctor", *arguments], prog_name="tunetool", standalone_mode=False)
    assert isinstance(ended, int)
    return ended


@pytest.fixture
def empty_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No program on PATH but what is put into the directory."""
    programs = tmp_path / "bin"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(os, "defpath", str(programs))
    monkeypatch.setattr(system_packages, "_SBIN", ())
    return programs


def put(directory: Path, name: str) -> None:
    (directory / name).write_text("#!/bin/sh\n")
    (directory / name).chmod(0o755)


def test_every_command_says_what_it_needs() -> None:
    commands = set(leaves(cli))
    named = {name for each in needs(Path("/")) for name in (*each.needed_by, *each.used_by)} - {WITH_INVENTORY}
    groups = {" ".join(name.split()[:count]) for name in commands for count in (1, 2)}
    assert named <= groups
    without = {name for name in commands if not any(f"{name} ".startswith(f"{each} ") for each in named)}
    assert without == NOTHING - {"inspect"}
    assert not any(concerns(each.needed_by, [name]) for each in needs() for name in NOTHING)


@pytest.mark.parametrize("benchmark", BENCHMARKS, ids=lambda each: each.name)
def test_a_benchmark_names_doctors_things_and_fio(benchmark: Benchmark) -> None:
    asked = benchmark.module("request")
    named = (*getattr(asked, "PREREQUISITES", ()), *getattr(asked, "USED_IN_PART", ()))
    assert set(named) <= {each.name for each in needs()}, "a word that `doctor` does not know is never shown"
    folder = Path(str(asked.__file__)).parent
    starts_fio = any("find_fio(" in each.read_text() for each in folder.glob("*.py"))
    assert ("fio" in named) or not starts_fio


def test_it_is_quick_to_import_reads_alone_and_answers_as_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "TMPDIR"):
        (tmp_path / name).mkdir()
        monkeypatch.setenv(name, str(tmp_path / name))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))}
    done, modules = imported_by("doctor", "--json", "-", "--target", str(tmp_path))
    assert {path: path.stat().st_mtime_ns for path in (tmp_path, *tmp_path.rglob("*"))} == before
    document = json.loads(done.stdout)
    assert document["schema"] == "tunetool.doctor/1"
    answers = {each["name"]: each for each in document["needs"]}
    assert set(answers) == {each.name for each in needs(tmp_path)}
    assert all("remedy" in each for each in answers.values() if each["status"] == "missing")
    missing = [each for each in answers.values() if each["needed_by"] and each["status"] == "missing"]
    assert done.returncode == (1 if missing else 0)
    # A directory without a file: whether it takes O_DIRECT shows only a write.
    assert (answers["target"]["status"], answers["O_DIRECT"]["status"]) == ("there", "unknown")
    assert not {"torch", "deepspeed", "transformers", "numpy"} & modules


@pytest.mark.parametrize("manager", FAMILIES)
@pytest.mark.parametrize("user", [0, 1000])
def test_a_missing_program_comes_with_the_line_that_installs_it(
    manager: str, user: int, empty_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put(empty_machine, manager)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    sudo = "sudo " if user and manager != "brew" else ""
    assert called("build-ops") == ExitCode.FALLS_SHORT
    printed = " ".join(capsys.readouterr().out.split())
    compiler = {"apt-get": "g++", "dnf": "gcc-c++", "brew": "gcc"}[manager]
    assert f"hint: `{sudo}{FAMILIES[manager]} {compiler}`" in printed
    assert "build-ops lacks " in printed
    assert system_packages.install_line("fio", "rclone") == f"`{sudo}{FAMILIES[manager]} fio rclone`"
    several = system_packages.install_line("qemu-img", "mmdebstrap")
    assert ("no package of `mmdebstrap`" in several) == (manager != "apt-get")
    assert all(len(packages) == len(FAMILIES) for packages in system_packages._PACKAGES.values())


def test_a_machine_without_a_package_manager(empty_machine: Path) -> None:
    assert system_packages.install_line("fio") == "this machine's package manager brings `fio`"
    with pytest.raises(CannotJudge, match="`fio` is not installed: for a test"):
        system_packages.need("fio", "for a test")
    put(empty_machine, "fio")
    assert system_packages.need("fio", "for a test") == str(empty_machine / "fio")


def test_a_command_is_judged_by_what_it_needs_alone(
    empty_machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_records", lambda: "here")
    # Neither rclone, which `stage` uses for some sources, nor ssh, which it uses with `-i`.
    assert called("stage") == called("stage", "copy") == ExitCode.OK
    assert called("inspect") == called("report", "list") == ExitCode.OK
    assert called("lab") == called("lab", "up") == ExitCode.FALLS_SHORT
    capsys.readouterr()
    assert called("verify", "--json", "-") == ExitCode.FALLS_SHORT
    document = json.loads(capsys.readouterr().out)
    assert document["commands"] == {"verify": {"lacks": ["fio"]}}
    used = {each["name"]: each["used_by"] for each in document["needs"]}
    assert used["ssh"] == [WITH_INVENTORY]
    assert "rclone" not in used


def test_the_exit_code_counts_what_is_needed() -> None:
    states: tuple[Status, ...] = ("there", "missing", "unknown")

    def answer(status: Status, needed: bool) -> Answer:
        return Answer("x", "program", status, "", ("verify",) if needed else (), () if needed else ("verify",))

    for first, second, other in itertools.product(states, repeat=3):
        needed = {first, second}
        wanted = (
            ExitCode.FALLS_SHORT if "missing" in needed else ExitCode.NOT_JUDGED if "unknown" in needed else ExitCode.OK
        )
        answers = [answer(first, True), answer(second, True), answer(other, False)]
        assert code(answers) == wanted
        assert lacks(answers) == {"verify": ["x" for each in (first, second) if each != "there"]}
    assert code([]) == ExitCode.OK


def test_what_a_group_lacks_is_lacking_to_each_of_its_commands() -> None:
    answers = [
        Answer("records", "right", "missing", "", ("bench", "stage"), ()),
        Answer("torch", "python", "there", "", ("bench checkpoint",), ()),
    ]
    assert lacks(answers) == {"bench checkpoint": ["records"], "stage": ["records"]}
    assert concerns(("bench",), ["bench loading"]) == ("bench loading",)
    assert concerns(("bench loading", "stage"), ["bench"]) == ("bench loading",)
    assert concerns(("stage",), ["bench"]) == ()


def test_o_direct_is_asked_of_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to("nothing")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "data").write_bytes(b"x")
    opened = os.open

    def refused(path: str, flags: int, *more: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return opened(path, flags, *more)

    def answer() -> Answer:
        return next(each for each in examine(["verify"], tmp_path) if each.name == "O_DIRECT")

    assert answer().status == "there"
    monkeypatch.setattr(os, "open", refused)
    assert (answer().status, answer().needed_by) == ("missing", ())
    monkeypatch.undo()
    with pytest.raises(TunetoolError, match="does not exist"):
        doctor._target(tmp_path / "none")


def test_an_extra_s_packages_are_looked_up_without_an_import(tmp_path: Path) -> None:
    newer = f"{sys.version_info.major}.{sys.version_info.minor + 1}"
    source = Origin(
        requires=(
            "click>=8.1; extra == 'one'",
            "no-such-package-anywhere>=2; extra == 'one'",
            f"ansible-core>=2; python_version >= '{newer}' and extra == 'one'",
            f"ansible-core>=2; python_version < '{newer}' and extra == 'one'",
            "click; extra == 'two'",
        )
    )
    assert lacking("one", source) == [
        "no-such-package-anywhere>=2",
        f"ansible-core>=2, which needs Python {newer}",
    ]
    assert lacking("two", source) == []
    assert lacking("three", source) is None


def test_metadata_without_extras_decide_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origin, "origin", Origin)
    answers = {each.name: each.status for each in examine(["bench"]) if each.name.startswith("extra")}
    assert set(answers.values()) == {"unknown"}


def test_what_stops_a_command_is_printed_first(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [
        Answer("rclone", "program", "missing", "no rclone", (), ("stage",), "get rclone"),
        Answer("fio", "program", "missing", "no fio", ("verify",), (), "get fio"),
        Answer("records", "right", "there", "/runs", ("stage", "verify"), ()),
    ]
    print_doctor(answers, table_console())
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[-6:] == [
        "fio: no fio",
        "  hint: get fio",
        "rclone: no rclone",
        "  hint: get rclone",
        "verify lacks fio",
        "lack nothing: stage",
    ]
    assert max(map(len, lines)) <= 100
    # No word of a state or a kind is broken.
    assert [line.split()[:3] for line in lines[2:5]] == [
        ["rclone", "program", "missing"],
        ["fio", "program", "MISSING"],
        ["records", "right", "there"],
    ]


@pytest.mark.parametrize(("has", "code"), [(("torch", "deepspeed"), 0), (("torch",), 1)])
def test_the_python_that_a_call_would_name_is_looked_into(
    has: tuple[str, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # An environment of its own, without tunetool: `tune` asks for no more.
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "trains"], check=True)
    python = tmp_path / "trains/bin/python"
    (site,) = (tmp_path / "trains/lib").glob("python*/site-packages")
    for name in has:
        (site / name).mkdir()
        (site / name / "__init__.py").touch()
    for check in ("_fio", "_records"):
        monkeypatch.setattr(doctor, check, lambda: "here")
    assert called("tune", "--python", str(python)) == code
    printed = " ".join(capsys.readouterr().out.split())
    assert ("deepspeed is not installed in" in printed) is (code == 1)
    with pytest.raises(UsageProblem):
        called("tune", "--python", str(tmp_path / "nothing"))
