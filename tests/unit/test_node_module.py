"""A module's output: UTF-8 whatever the node's files contain, since ansible-core accepts nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ansible", reason="ansible-core is for control machines, with Python 3.11 and newer")

from ansible.module_utils.testing import patch_module_args

from tunetool.node.common.drift import Ledger
from tunetool.node.common.files import content
from tunetool.node.machine.fstab import with_entry
from tunetool.node.play.ansible_module import AnsibleModule

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
