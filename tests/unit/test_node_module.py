"""A module's output: UTF-8 whatever the node's files contain, since ansible-core accepts nothing else."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

from ansible.module_utils.testing import patch_module_args

from tunetool.node.common.commands import run
from tunetool.node.common.drift import Difference, Drifted, Ledger
from tunetool.node.common.files import content, replace_file
from tunetool.node.common.manifest import ManifestError
from tunetool.node.common.refusal import Expected, Refusal
from tunetool.node.machine.fstab import with_entry
from tunetool.node.play.convergence import READING, AnsibleModule, Words, in_one_line
from tunetool.node.units import UnitError

ROOT = Path(__file__).parents[2]
FSTAB = b"# fr\xfc\n/dev/sdb1 /srv/\xe9 ext4 defaults 0 2\n"


def said(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The result, after the check that ansible-core makes of every text in it."""
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    json.dumps(result, ensure_ascii=False).encode("utf-8")
    return result


@pytest.fixture
def module() -> Iterator[AnsibleModule]:
    with patch_module_args({}):
        yield AnsibleModule(argument_spec={}, supports_check_mode=True)


def test_a_difference_of_a_file_in_latin_1_is_printable(
    module: AnsibleModule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "fstab"
    path.write_bytes(FSTAB)
    ledger = Ledger({"built": True}, acting=False)
    before = content(str(path))
    ledger.file_differs("fstab", "/etc/fstab", before, with_entry(before, "UUID=2", "/m", "xfs", "nofail"))
    module.warn("the mount hides `\udcfc`")
    with pytest.raises(SystemExit) as ended:
        module.exit_json(changed=True, diff=ledger.diff, found=[difference.found for difference in ledger.differences])
    assert ended.value.code == 0
    result = said(capsys)
    assert result["diff"][0]["before"] == "# fr\\xfc\n/dev/sdb1 /srv/\\xe9 ext4 defaults 0 2\n"
    assert result["diff"][0]["after"].endswith("UUID=2 /m xfs nofail 0 0\n")
    assert "the mount hides `\\xfc`" in json.dumps(result["warnings"]).replace("\\\\", "\\")


def test_an_error_that_quotes_a_name_is_printable(module: AnsibleModule, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module.fail_json(msg="`/mnt/\udcfc` is in use", differences=[{"found": "\udce9"}], changed=False)
    assert ended.value.code == 1
    result = said(capsys)
    assert (result["msg"], result["differences"]) == ("`/mnt/\\xfc` is in use", [{"found": "\\xe9"}])
    assert (result["failed"], result["changed"]) == (True, False)


@pytest.mark.parametrize(
    ("error", "words", "line"),
    [
        (Refusal("no. hint: x"), {}, "no. hint: x"),
        (ManifestError("`m` is damaged", "repair it"), {}, "`m` is damaged. hint: repair it"),
        (UnitError("`1` is not a size", "write `1B`"), {}, "`1` is not a size. hint: write `1B`"),
        (Refusal("no"), {Expected: lambda error: f"array: {error}"}, "array: no"),
        (Refusal("no"), {Refusal: str, Expected: lambda error: f"array: {error}"}, "no"),
        (KeyError("owner"), {KeyError: lambda error: f"no {error.args[0]}"}, "no owner"),
        (
            OSError(5, "Input/output error", "/x"),
            READING,
            "`/x`: Input/output error. hint: nothing was changed; see in",
        ),
    ],
)
def test_what_is_refused_or_fails_ends_the_module_in_one_line(
    module: AnsibleModule, capsys: pytest.CaptureFixture[str], error: Exception, words: Words, line: str
) -> None:
    with pytest.raises(SystemExit), in_one_line(module, words, step="s"):
        raise error
    result = said(capsys)
    assert result["msg"].startswith(line)
    assert (result["failed"], result["changed"], result["step"]) == (True, False, "s")


def test_drift_ends_the_module_with_each_difference(module: AnsibleModule, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), in_one_line(module):
        raise Drifted([Difference("array.chunk", "1MiB", "512KiB", mended=False)])
    assert [each["name"] for each in said(capsys)["differences"]] == ["array.chunk"]


def test_a_fault_of_the_program_keeps_its_traceback(module: AnsibleModule) -> None:
    with pytest.raises(KeyError), in_one_line(module):
        raise KeyError("x")


@pytest.fixture
def private() -> Iterator[None]:
    """Root's umask on a node whose owner wants it so."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.usefixtures("private")
@pytest.mark.parametrize(("keep", "modes"), [(False, (0o755, 0o755)), (True, (0o700, 0o700))])
def test_what_a_module_makes_on_a_node_is_for_every_user(tmp_path: Path, keep: bool, modes: tuple[int, int]) -> None:
    with patch_module_args({}):
        AnsibleModule(argument_spec={}, keep_umask=keep)
    replace_file(str(tmp_path / "etc/node.json"), "{}\n")
    run(["mkdir", str(tmp_path / "made")])
    assert (mode(tmp_path / "etc"), mode(tmp_path / "made")) == modes
    assert mode(tmp_path / "etc/node.json") == 0o644


@pytest.mark.usefixtures("private")
def test_a_program_that_was_installed_for_root_alone_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prefix = tmp_path / "tunetool"
    for name in ("bin", "venv-K/bin", "venv-K/lib"):
        (prefix / name).mkdir(parents=True)
    program, secret = prefix / "venv-K/bin/tunetool", tmp_path / "secret"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o700)
    (prefix / "venv-K/lib/module.py").write_text("")
    (prefix / "bin/tunetool").symlink_to("../venv-K/bin/tunetool")
    secret.write_text("")
    (prefix / "venv-K/lib/link").symlink_to(secret)
    monkeypatch.setattr(sys, "path", [str(ROOT / ".ansible/collections"), *sys.path])
    tool_install = importlib.import_module("ansible_collections.tunetool.node.plugins.modules.tool_install")
    frame = importlib.import_module("ansible_collections.tunetool.node.plugins.module_utils.play.convergence")
    monkeypatch.setattr(frame, "only_one", contextlib.nullcontext)
    arguments = {"archive": "/none", "key": "K", "prefix": str(prefix), "link": ""}

    def installed(**more: Any) -> dict[str, Any]:
        with patch_module_args({**arguments, **more}), pytest.raises(SystemExit):
            tool_install.main()
        return said(capsys)

    assert installed(_ansible_check_mode=True)["opened"]
    assert mode(prefix) == 0o700
    assert installed()["changed"]
    assert {mode(each) for each in (prefix, prefix / "bin", prefix / "venv-K/lib", program)} == {0o755}
    assert (mode(prefix / "venv-K/lib/module.py"), mode(secret)) == (0o644, 0o600)
    again = installed()
    assert (again["changed"], again["opened"]) == (False, [])
