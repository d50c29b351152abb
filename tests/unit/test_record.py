"""The record: reading returns what was written, and detects damage."""

from __future__ import annotations

import errno
import functools
import json
import resource
import sys
from datetime import datetime, timezone
from pathlib import Path
from unittest import mock

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calls import ROOT, call
from tunetool import record as records
from tunetool.errors import CannotJudge, UsageProblem
from tunetool.node.common import documents
from tunetool.record import Confidence, Evidence, Measurement, Node, Record, Verdict
from tunetool.user_directories import default_runs_dir, prepare_runs_dir

SCHEMA = Path(__file__).parents[2] / "docs/reference/record.schema.json"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def make(value: float = 5.1e10, text: str = "md RAID0 (8 x nvme)") -> Record:
    return Record(
        kind="verify",
        id="ab" * 16,
        started=NOW,
        finished=NOW,
        node=Node(host="n1", kernel="6.8"),
        command=["tunetool", "verify", text],
        measurements=[
            Measurement(
                name="sequential.read",
                figure="bandwidth",
                labels={"subject": "sequential", "direction": "read"},
                layer="filesystem",
                engine="fio 3.33",
                medium=text,
                quantity="bandwidth",
                unit="B/s",
                better="higher",
                value=value,
                samples=[value, value / 3],
                confidence=Confidence(low=value / 3, high=value, method="range of 2 samples"),
                parameters={"direction": "read", "jobs": 16, "direct": True, "sample_seconds": 10.0},
                evidence=Evidence(kind="block", device="md0", claimed_bytes=10, counted_bytes=10, ratio=1.0),
            )
        ],
        verdict=Verdict(status="pass", reasons=[]),
    )


@given(st.floats(min_value=0, max_value=1e300), st.text())
def test_round_trip(value: float, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        return
    record = make(value, text)
    again = records.parse(records.dumps(record), "r")
    assert again.model_copy(update={"sha256": None}) == record


def test_written_and_read(tmp_path: Path) -> None:
    path = records.write(make(), tmp_path, {"fio-read-1.json": "{}", "hosts/n1.json": "{}"})
    assert path == tmp_path / "20260102T030405Z-verify-n1/record.json"
    assert records.read(path) == records.read(path.parent)
    assert (path.parent / "fio-read-1.json").read_text() == "{}"
    second = records.write(make(), tmp_path)
    assert second.parent.name == "20260102T030405Z-verify-n1-2"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [path.parent.name, second.parent.name]


def test_a_host_name_makes_no_path(tmp_path: Path) -> None:
    record = make().model_copy(update={"node": Node(host="../../etc")})
    assert records.write(record, tmp_path).parent.parent == tmp_path


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    path = records.write(make(), tmp_path)
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0x01
        path.write_bytes(damaged)
        with pytest.raises(UsageProblem):
            records.read(path)


@pytest.mark.parametrize("text", ["", "[]", "null", "{}", '{"schema": "tunetool.record/2"}', "{", "\x00"])
def test_what_is_no_record(tmp_path: Path, text: str) -> None:
    path = tmp_path / "record.json"
    path.write_text(text)
    with pytest.raises(UsageProblem) as caught:
        records.read(path)
    assert "`" in caught.value.message


def test_not_a_number_is_refused() -> None:
    text = records.dumps(make()).replace("51000000000.0", "NaN")
    with pytest.raises(UsageProblem, match="NaN"):
        records.parse(text, "r")


def test_another_versions_key_is_refused_despite_its_checksum() -> None:
    document = records.to_document(make())
    document["nodes"] = 3
    document["sha256"] = documents.checksum(document)
    with pytest.raises(UsageProblem, match="nodes"):
        records.parse(json.dumps(document), "r")


def test_what_does_not_apply_is_left_out() -> None:
    text = records.dumps(make())
    assert "null" not in text
    assert '"hosts"' not in text


def test_the_schema_in_the_documentation_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == records.json_schema(), "run `python -m tunetool.record` into it"


def test_a_record_holds_to_its_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(records.json_schema())
    jsonschema.validate(records.to_document(make()), records.json_schema())


def test_runs_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_runs_dir() == Path("/var/lib/tunetool/runs")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_runs_dir() == tmp_path / "tunetool/runs"
    (tmp_path / "file").touch()
    with pytest.raises(UsageProblem, match="cannot keep records"):
        prepare_runs_dir(tmp_path / "file/runs")


def test_a_runs_directory_without_room_is_named_twice(tmp_path: Path) -> None:
    def limited(code: str) -> str:
        """A limit of a file's size stands for a full file system: both refuse a write, not an open."""
        limit = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
        imports = "from pathlib import Path; from tunetool import record, user_directories"
        return call(sys.executable, "-c", f"{imports}; {code}", preexec_fn=limit).stderr

    assert f"`{tmp_path}` cannot keep records: File too large" in limited(
        f"user_directories.prepare_runs_dir(Path('{tmp_path}'))"
    )
    full = OSError(errno.ENOSPC, "No space left on device")
    with (
        mock.patch("tempfile.TemporaryFile", side_effect=full),
        pytest.raises(CannotJudge, match="cannot keep records"),
    ):
        prepare_runs_dir(tmp_path)  # the call is right: no exit code 2
    kept = ROOT / "tests/data/records/verify.json"
    written = limited(f"record.write(record.read(Path('{kept}')), Path('{tmp_path}'), {{'raw': 'x' * 99999}})")
    assert f"File too large: '{tmp_path}'" in written
    assert list(tmp_path.iterdir()) == []
