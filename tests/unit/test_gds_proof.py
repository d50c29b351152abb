"""The verdict on GPUDirect Storage: cuFile's counters, its settings, and every case that cannot be judged.

The recorded answers of libcufile are from a machine with an H200 (tests/data/gds). Nothing here needs a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from builders import record
from shown_records import on_screen
from tunetool.measure import Direction
from tunetool.measure.fio import Fio
from tunetool.measure.gds import config, counters
from tunetool.measure.gds.counters import Counts, Moved, parse, proven, version_of, way_of
from tunetool.measure.gds.driver import start
from tunetool.measure.gds.spec import SMALLEST, TASK, Mode, io_bytes
from tunetool.measure.ladder import gpudirect
from tunetool.measure.ladder.rung import Context
from tunetool.measure.ladder.sampler import Sampler
from tunetool.measure.sequential import Plan
from tunetool.measure.worker import Failed
from tunetool.node.gds.cufile_check import read_config
from tunetool.node.gds.facts import GdsFacts
from tunetool.node.gds.path_choice import current
from tunetool.node.machine.block_stack import BlockStack, read_stack
from tunetool.record import Measurement, Verdict
from tunetool.record_v1 import upgraded
from tunetool.report.progress import PlainProgress

DATA = Path(__file__).parents[1] / "data/gds"
SETTINGS: dict[str, Any] = json.loads((DATA / "settings-1.15.json").read_text())["files"]
RECORDED: dict[str, Any] = json.loads((DATA / "counters-compat-1.15.json").read_text())
GB = 10**9


def recorded(index: int) -> bytes:
    return bytes.fromhex(RECORDED["answers"][index]["stats"])


def counts(size: int = GB, **requests: int) -> Counts:
    return Counts(bytes=size, requests=sum(requests.values()), **requests)


# --- counters


def test_counters_as_libcufile_wrote_them_down() -> None:
    size = RECORDED["file_bytes"]
    before, layout, written, _, read = (parse(recorded(index), (1, 15), "write") for index in range(5))
    assert before == Counts()
    assert layout == Counts(bytes=size, requests=44, posix=44)
    assert (written.bytes, read.bytes) == (34 * size, 34 * size)
    reads = parse(recorded(4), (1, 15), "read").since(parse(recorded(3), (1, 15), "read"))
    assert (reads.bytes, reads.posix, reads.direct) == (22 * size, 968, 0)
    assert reads.bounced_bytes == reads.bytes


def test_libcufile_1_19_counts_from_another_place() -> None:
    # cufile.h: twelve counters of vector I/O, 112 bytes, follow those of level 1.
    moved = recorded(4)[:512] + bytes(112) + recorded(4)[512:]
    for direction in ("read", "write"):
        assert parse(moved, (1, 19), direction) == parse(recorded(4), (1, 18), direction)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="layout is another one"):
        parse(b"\xff" * 4096, (1, 15), "read")


def test_the_version_as_the_library_says_it() -> None:
    assert [version_of(each["version"]) for each in RECORDED["answers"]] == [(1, 15)] * 5
    assert version_of(1200) == (1, 20)


# --- the verdict


@pytest.mark.parametrize(
    ("moved", "status", "said"),
    [
        (Moved(GB, counts(nvidia_fs=60)), "pass", "60 requests by nvidia-fs"),
        (Moved(GB, counts(p2pdma=60)), "pass", "60 by P2PDMA"),
        (Moved(GB, counts(posix=60)), "fail", "1 GB of it through bounce buffers"),
        (Moved(GB, counts(nvidia_fs=45, posix=15)), "fail", "250 MB of it through bounce buffers"),
        (Moved(GB, counts(size=GB // 2, nvidia_fs=30)), "unknown", "of which cuFile counted 500 MB"),
        (Moved(GB, Counts()), "unknown", "of which cuFile counted 0 B"),
        (Moved(GB, Counts(bytes=GB, requests=60, nvidia_fs=60, errors=2)), "unknown", "2 requests failed"),
        (Moved(GB, Counts(bytes=GB, requests=60, nvidia_fs=59)), "unknown", "59 requests by nvidia-fs"),
    ],
)
def test_what_the_counters_prove(moved: Moved, status: str, said: str) -> None:
    proof = proven("require", {"read": moved}, None)
    assert proof.status == status
    assert said in proof.found
    # In mode auto nobody requested it: only a proof counts.
    assert proven("auto", {"read": moved}, None).status == ("pass" if status == "pass" else "skip")


def test_one_bounced_direction_fails_both() -> None:
    moved: dict[Direction, Moved] = {
        "read": Moved(GB, counts(nvidia_fs=60)),
        "write": Moved(GB, counts(posix=1, nvidia_fs=59)),
    }
    assert proven("require", moved, None).status == "fail"
    assert way_of(moved) == "compat"
    assert way_of({"read": moved["read"]}) == "direct"


def test_nothing_moved_proves_nothing() -> None:
    assert proven("require", {}, None).status == "unknown"
    assert way_of({}) == "compat"


def test_a_failed_proof_names_what_stands_in_the_way() -> None:
    decision = current(GdsFacts(gpus=("0000:01:00.0",), driver="580", driver_open=True, udev=False))
    remedy = proven("require", {"read": Moved(GB, counts(posix=1))}, decision).remedy
    assert "(`udev`)" in remedy
    assert "(`nvidia_fs.installed`)" in remedy
    assert "p2pdma by " in remedy
    assert counters.refused("require", "HANDLE_NOT_REGISTERED (5027)", decision).remedy == remedy


def test_figures_are_called_what_they_are() -> None:
    """The recorded figures of a machine whose cuFile moved everything through the host's memory."""
    read = upgraded({"measurements": json.loads((DATA / "figures-compat.json").read_text())})
    figures = [Measurement.model_validate(each) for each in read["measurements"]]
    check = counters.answer("auto", "fail", "read 8.12 GB by bounce buffers", "load nvidia-fs")
    made = record(*figures, checks=[check], verdict=Verdict(status="pass", reasons=[]))
    shown = on_screen(made)
    assert re.search(r"^read, GDS compat +2\.24 .* 141% of fio", shown, re.MULTILINE)
    assert "kvikio 26.10.0 through cuFile's" in " ".join(shown.split())
    assert "gds: not proven, read 8.12 GB by bounce buffers; load nvidia-fs" in " ".join(shown.split())


# --- cufile.json against what libcufile holds


@pytest.mark.parametrize("name", ["right place", "every parameter", "default"])
def test_what_stands_in_its_place_was_taken(name: str, tmp_path: Path) -> None:
    path = tmp_path / "cufile.json"
    path.write_text(SETTINGS[name]["text"])
    checked = config.check(path, "1.15", SETTINGS[name]["values"])
    assert checked.status == "pass"
    given = len(config.flatten(read_config(SETTINGS[name]["text"])))
    assert f"{given} settings, each in its place; {given} read back" in checked.found


@pytest.mark.parametrize("name", ["misplaced", "unknown"])
def test_what_stands_elsewhere_was_ignored_and_is_named(name: str, tmp_path: Path) -> None:
    # libcufile's answers are those for an empty file.
    assert SETTINGS[name]["values"] == SETTINGS["default"]["values"]
    path = tmp_path / "cufile.json"
    path.write_text(SETTINGS[name]["text"])
    checked = config.check(path, "1.15", SETTINGS[name]["values"])
    assert checked.status == "fail"
    assert "properties.use_pci_p2pdma" in checked.remedy


def test_a_setting_that_libcufile_holds_otherwise_is_named(tmp_path: Path) -> None:
    path = tmp_path / "cufile.json"
    path.write_text(SETTINGS["right place"]["text"])
    checked = config.check(path, "1.15", SETTINGS["default"]["values"])
    assert checked.status == "fail"
    assert "`properties.io_batchsize` is 64 in the file, libcufile holds 128" in checked.found
    assert "CUFILE_" in checked.remedy


def test_a_config_that_is_not_there_or_cannot_be_read(tmp_path: Path) -> None:
    assert config.check(tmp_path / "none.json", None, None).status == "skip"
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    assert config.check(tmp_path / "binary.json", None, None).status == "unknown"


def test_the_file_is_the_one_that_libcufile_would_take() -> None:
    assert config.config_path({}) == Path("/etc/cufile.json")
    assert config.config_path({"CUFILE_ENV_PATH_JSON": "/a/b.json"}) == Path("/a/b.json")


# --- where it cannot be judged


@pytest.fixture
def stack(tmp_path: Path) -> BlockStack:
    return read_stack(str(tmp_path))


def measured(mode: Mode, stack: BlockStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, facts: GdsFacts) -> Any:
    monkeypatch.setattr(gpudirect, "read_gds_facts", lambda root, mount_point=None: facts)
    environment = {"PATH": "/usr/bin"}
    sampler = Sampler(stack, Fio("fio", "3.33"), tmp_path, environment, PlainProgress())
    shape = Plan(str(tmp_path), stack.medium, 1, 2**26, 1.0, None)
    context = Context(shape, stack, tmp_path, sampler, environment)
    return gpudirect.GpuDirect(mode, Path(sys.executable)).run(context)


def test_without_a_gpu(stack: BlockStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = measured("require", stack, tmp_path, monkeypatch, GdsFacts())
    assert [(each.id, each.status) for each in outcome.checks if each.id == counters.CHECK_ID] == [
        ("gds.path", "unknown")
    ]
    assert "no NVIDIA GPU" in outcome.checks[-1].found
    assert measured("auto", stack, tmp_path, monkeypatch, GdsFacts()).checks[-1].status == "skip"


def test_with_a_gpu_and_no_kvikio(stack: BlockStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("kvikio"):
        pytest.skip("kvikio is installed here")
    outcome = measured("require", stack, tmp_path, monkeypatch, GdsFacts(gpus=("0000:01:00.0",)))
    assert outcome.checks[-1].status == "unknown"
    assert "has no" in outcome.checks[-1].found
    assert "[gds]'`" in outcome.checks[-1].remedy
    assert outcome.measurements == []


def test_a_config_that_libcufile_refuses_ends_in_a_refusal(tmp_path: Path) -> None:
    """The real libcufile, which reports it before it looks for CUDA; the bindings answer as if it had started."""
    # It is not imported here: only the child process may hold CUDA.
    if not list(importlib.metadata.distributions(name="cuda-bindings")):
        pytest.skip("cuda-bindings is not installed: there is no wheel for this machine")
    (tmp_path / "cufile.json").write_text('{"properties": {"use_pci_p2pdma": "true"}}')
    environment = {"CUFILE_ENV_PATH_JSON": str(tmp_path / "cufile.json"), "PATH": "/usr/bin"}
    with start(Path(sys.executable), environment) as child:
        assert "json type mismatch" in gpudirect.opened(child, tmp_path)["refused"]["message"]
        with pytest.raises(Failed, match="nothing is open"):
            child.ask({"do": "clear"}, 60)


@pytest.mark.parametrize(
    ("mode", "wanted"), [("nvidia-fs", "require"), ("p2pdma", "require"), ("compat", "off"), ("off", "off")]
)
def test_the_manifest_says_whether_it_must_be_proven(mode: str, wanted: str) -> None:
    assert config.default_mode({"gds": {"mode": mode, "reasons": []}}) == wanted
    assert config.default_mode(None) == "off"


def test_sizes_are_whole_requests() -> None:
    assert io_bytes(10**15, 0) == 2**30
    assert io_bytes(10**15, 1e6) == SMALLEST
    assert io_bytes(10**15, 1.7e9) % TASK == 0
    assert io_bytes(TASK, 0) == 0
