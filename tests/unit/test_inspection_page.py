"""The page of one inspected node: findings first, what binds, drives and GPUs with their PCIe paths."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import builders
from parsed_page import Parsed, limits_of, pictures
from shown_records import spoiled
from tunetool.cli.main import cli
from tunetool.inspect.model import Inspection
from tunetool.report import inspection_page

MACHINES = Path(__file__).parents[2] / "docs/machines"


@pytest.fixture(scope="module")
def inspections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, Inspection]]:
    """By machine, the page that the command writes, and what it is of."""
    folder = tmp_path_factory.mktemp("inspections")
    out, shown = folder / "page.html", folder / "shown.json"
    made = {}
    for machine in ("h100-made", "h200-cloud-made"):
        arguments = ["inspect", "--root", str(MACHINES / f"{machine}.json"), "--page", str(out), "--json", str(shown)]
        done = CliRunner().invoke(cli, arguments, standalone_mode=False)
        assert done.exception is None, done.exception
        made[machine] = (out.read_text(), Inspection.model_validate(json.loads(shown.read_text())))
    return made


@pytest.mark.parametrize("machine", ["h100-made", "h200-cloud-made"])
def test_an_inspection_is_a_page_with_its_findings_first(
    machine: str, inspections: dict[str, tuple[str, Inspection]]
) -> None:
    text, shown = inspections[machine]
    titles = re.findall("<h2>(.*?)</h2>", text)
    assert titles[:4] == ["Findings", "What limits", "Drives", "GPUs"]
    assert titles[-3:] == ["Evidence", "How to repeat", "Provenance"]
    parsed = Parsed(text)
    assert len(text.encode()) < 300_000
    assert not any(name in given for _, given in parsed.tags for name in ("src", "href", "style", "srcset"))
    assert f"{len(shown.findings) or 'no'} finding" in text
    for finding in shown.findings:
        # What stands in backticks is an element of its own.
        texts = [part for text in (finding.id, finding.found, finding.remedy) for part in text.split("`")]
        assert any(all(part.strip() in row for part in texts) for row in parsed.rows)
    for drive in shown.drives:
        row = next(row for row in parsed.rows if row.split()[0] == drive.name and drive.model in row)
        assert str(drive.pci_address) in row
    gpus = [row.split() for row in parsed.rows if "NVIDIA H" in row]
    assert [row[0] for row in gpus] == [str(gpu.index) for gpu in shown.gpus]
    assert all("switch" in row and gpu.address in row for row, gpu in zip(gpus, shown.gpus, strict=True))


def test_what_binds_is_marked_or_unknown(inspections: dict[str, tuple[str, Inspection]]) -> None:
    text, _ = inspections["h100-made"]
    assert "drives: 126.0 GB/s, 8 drives of Gen5 x4" in limits_of(text)
    assert "drives: binds 126.0" in pictures(text)[0].attrib["aria-label"]
    text, _ = inspections["h200-cloud-made"]
    assert "not known: drives (8 drives, of which 8 show no link)" in limits_of(text)


@pytest.mark.parametrize(
    "text", ["<script>alert(1)</script>", "\"'><img src=x onerror=alert(1)>", "</pre><svg onload=x>"]
)
def test_no_text_of_a_machine_becomes_markup(text: str, inspections: dict[str, tuple[str, Inspection]]) -> None:
    _, shown = inspections["h200-cloud-made"]
    keys = {
        *("name", "kernel", "distribution", "machine", "cpu", "serial", "model", "firmware", "use", "label"),
        *("mount_point", "device", "medium", "options", "state", "found", "remedy", "reasons", "notes", "note", "of"),
    }

    def page(added: str) -> Parsed:
        document: dict[str, Any] = spoiled(shown.model_dump(by_alias=True, mode="json"), added, keys)
        made = Inspection.model_validate(document)
        return Parsed(inspection_page.page(made, ["tunetool", added], builders.NOW))

    spoilt = page(text)
    assert spoilt.shape() == page(" x").shape()
    assert text in spoilt.words


def test_a_drive_that_runs_slower_or_is_ill_is_marked(inspections: dict[str, tuple[str, Inspection]]) -> None:
    _, shown = inspections["h100-made"]
    document = shown.model_dump(by_alias=True, mode="json")
    document["drives"][3]["link"]["width"] = 2
    document["drives"][4]["health"]["status"] = "failing"
    text = inspection_page.page(Inspection.model_validate(document), [], builders.NOW)
    assert re.findall(r'<tr class="lost"><td>(.*?)</td>', text) == ["nvme3n1", "nvme4n1"]
    assert "Gen5 x2 of Gen5 x4" in text


def test_a_page_that_cannot_be_written_is_refused_first(tmp_path: Path) -> None:
    for arguments in (["--page", tmp_path], ["--page", tmp_path / "no/x.html"], ["--capture", "x", "--page", "y"]):
        done = CliRunner().invoke(cli, ["inspect", *map(str, arguments)], standalone_mode=False)
        assert getattr(done.exception, "exit_code", None) == 2, arguments
