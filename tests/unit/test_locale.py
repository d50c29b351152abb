"""A user of another language: what is read of a program's output is in the C locale, whatever the user's is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tunetool.launch.slurm import call
from tunetool.measure.fio import find_fio
from tunetool.node.common.commands import captured, run
from tunetool.node.common.files import read_text
from tunetool.node.machine.recording import FILES
from tunetool.node.play.host_summary import said

GERMAN = {"LC_ALL": "de_DE.UTF-8", "LANG": "de_DE.UTF-8", "LANGUAGE": "de", "LC_NUMERIC": "de_DE.UTF-8"}


@pytest.fixture(autouse=True)
def german(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GERMAN.items():
        monkeypatch.setenv(name, value)


SHOW = ["sh", "-c", "echo $LC_ALL"]


def test_programs_that_are_read_run_in_the_c_locale() -> None:
    assert run(SHOW).stdout == "C\n"
    assert captured(SHOW, 10).stdout == "C\n"
    assert captured(SHOW, 10, env={**os.environ, "A": "1"}).stdout == "C\n"


def test_a_job_of_slurm_keeps_the_users_locale() -> None:
    assert call(SHOW).stdout == "de_DE.UTF-8\n"


def test_fio_is_asked_for_its_version_in_the_c_locale(tmp_path: Path) -> None:
    fio = tmp_path / "fio"
    fio.write_text('#!/bin/sh\n[ "$LC_ALL" = C ] && echo fio-3.33 || echo "fio-3,33"\n')
    fio.chmod(0o755)
    assert find_fio({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}).version == "3.33"


def test_a_full_disk_is_named_in_any_language() -> None:
    error = "OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr verfügbar"
    result = {"msg": "MODULE FAILURE", "module_stderr": f"Traceback:\n{error}\n"}
    assert "a disk of the node is full" in said(result)


def test_the_kernels_files_are_read_as_a_plain_read_gives_them() -> None:
    """/proc/sys answers a question of many MiB with an error, and one at another offset with nothing."""
    stable = ("/proc/sys/", "/sys/devices/system/", "/sys/kernel/mm/", "/sys/module/", "/etc/os-release")
    paths = [path for pattern in FILES if pattern.startswith(stable) for path in Path("/").glob(pattern[1:])]
    assert any(str(path).startswith("/proc/sys/") for path in paths)
    for path in paths:
        try:
            plain = path.read_text().strip()
        except OSError:
            continue
        assert read_text(str(path)) == plain, path
