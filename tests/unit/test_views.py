"""Records of every kind, as schema 1 wrote them: what their names said, and what is shown of them, is as recorded.

``pytest tests/unit/test_views.py --update-views`` writes what is shown now into tests/data/views; read the difference.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from shown_records import on_screen
from tunetool import record as records
from tunetool.record import Record
from tunetool.report.flat import record_csv
from tunetool.report.kinds import VIEWS, markdown_of, page_text

DATA = Path(__file__).parents[1] / "data"
RECORDS = sorted((DATA / "records").glob("*.json"))
KINDS = [path.stem for path in RECORDS]


def read(kind: str) -> Record:
    return records.read(DATA / "records" / f"{kind}.json")


def terminal(width: int) -> Callable[[Record], str]:
    def shown(record: Record) -> str:
        return "".join(f"{line.rstrip()}\n" for line in on_screen(record, None, width).splitlines())

    return shown


def page(record: Record) -> str:
    """The body: what surrounds it is the same on all pages."""
    text = page_text(record, None)
    return text[text.index("<main>") : text.index("</main>")] + "\n"


FORMS: Mapping[str, Callable[[Record], str]] = {
    "txt": terminal(100),
    "html": page,
    "md": lambda record: markdown_of(record, None),
    "csv": record_csv,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if read(kind).kind in VIEWS])
def test_what_is_shown_is_as_recorded(kind: str, form: str, pytestconfig: pytest.Config) -> None:
    golden = DATA / "views" / f"{kind}.{form}"
    now = FORMS[form](read(kind))
    if pytestconfig.getoption("--update-views"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_bytes(now.encode())
    assert now.encode() == golden.read_bytes(), "if this is meant: `pytest tests/unit/test_views.py --update-views`"


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if read(kind).kind in VIEWS])
def test_no_line_is_wider_than_the_terminal(kind: str, width: int) -> None:
    lines = terminal(width)(read(kind)).splitlines()
    # Words that cannot be broken, such as paths, may stand out.
    wide = [line for line in lines if len(line) > width and " " in line.strip()[:width]]
    assert not wide


# Kinds that came later have records of schema 2 alone.
OLD = [kind for kind in KINDS if json.loads((DATA / "records" / f"{kind}.json").read_text())["schema"].endswith("/1")]


def test_every_kind_that_schema_1_had_is_there() -> None:
    assert len(OLD) == 17


@pytest.mark.parametrize("kind", OLD)
def test_a_record_of_schema_1_has_labels_and_keeps_all_else(kind: str) -> None:
    text = (DATA / "records" / f"{kind}.json").read_text()
    document = json.loads(text)
    record = records.parse(text, kind)
    assert [each.name for each in record.measurements] == [each["name"] for each in document.get("measurements", [])]
    for each in record.measurements:
        assert each.figure
        # Each part of a name is the subject, the figure, or a label's value.
        for part in re.split(r"[.]", each.name):
            assert any(
                part in (value, f"z{value}", f"cached-{value}") for value in (each.figure, *each.labels.values())
            ) or (
                part in _FIXED
                or part.removesuffix("_time") in each.labels.values()
                or part.endswith(("-gpus", "_durable"))
            ), (each.name, each.figure, each.labels)
    again = records.parse(records.dumps(record), kind)
    assert again.measurements == record.measurements
    assert again.checks == record.checks


_FIXED = {"link", "training", "gain"}
"""Parts that are the same in all names of a form."""
