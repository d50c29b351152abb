"""The kernel's log held against a node: whose fault a line tells of, how often within a day, and for how long it counts.

The node is the recorded one with eight drives; what its kernel prints is put into its /dev/kmsg.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from machines import RECORDED, lay_out, lay_out_drives
from tunetool.health.repaired import main as say_repaired
from tunetool.health.results import Files
from tunetool.node.common.check_result import Check
from tunetool.node.health import kernel_check
from tunetool.node.health.kernel_check import DAY, State, advance, check_log, ours, repaired
from tunetool.node.health.kernel_faults import CHECKS
from tunetool.node.health.kernel_log import Line, Log

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
NOW = 1.8e9
TIMEOUT = "nvme nvme4: I/O 775 QID 2 timeout, aborting"
RESET = "nvme nvme4: I/O 775 QID 2 timeout, reset controller"
ERROR = "I/O error, dev nvme4n1, sector 2623470496 op 0x1:(WRITE) flags 0x0 phys_seg 1 prio class 2"
SHUTDOWN = "XFS (md0): log I/O error -5"


@pytest.fixture
def built(tmp_path: Path) -> Path:
    root = lay_out("built", tmp_path)
    path = root / "proc/sys/kernel/random/boot_id"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("b\n")
    return root


def line(text: str, at: float = NOW, boot: str = "b", number: int = 0) -> Line:
    return Line(boot, int((at - NOW) * 1e6) + 10**12, at, text, number=number)


def found(root: Path, lines: list[Line], now: float = NOW, before: dict[str, Any] | None = None) -> dict[str, Check]:
    """What the checks say after these lines."""
    state = kernel_check._restored(before or {})
    after = advance(state, lines, ours(MANIFEST, str(root)), "b", now)
    return {check.id: check for check in kernel_check.judge(after.incidents)}


def test_a_log_without_a_fault_passes(built: Path) -> None:
    checks = found(built, [line("nvme nvme4: 8/0/0 default/read/poll queues")])
    assert tuple(checks) == CHECKS
    assert {(check.status, check.found) for check in checks.values()} == {("pass", "none")}


@pytest.mark.parametrize(
    ("text", "identity", "words"),
    [
        (ERROR, "kernel.drives", "`LAB1NV4`: it answered with an error; the kernel: `I/O error, dev nvme4n1"),
        ("critical medium error, dev nvme4n1, sector 0 op 0x0:(READ)", "kernel.drives", "`LAB1NV4`: it lost data"),
        ("nvme nvme4: Removing after probe failure status: -19", "kernel.drives", "`LAB1NV4`: it did not come back"),
        (
            "pcieport 0000:00:08.0: pciehp: Slot(4): Link Down",
            "kernel.drives",
            "port 0000:00:08.0 above `LAB1NV4`: its PCIe link went down",
        ),
        (
            "md/raid0md127: Disk failure on nvme4n1 detected, failing array.",
            "kernel.drives",
            "`LAB1NV4`: md calls it failed",
        ),
        ("XFS (md127): log I/O error -5", "kernel.filesystem", "`md127`: XFS could not write or read"),
    ],
)
def test_a_fault_fails_at_once_and_names_what_is_ours(built: Path, text: str, identity: str, words: str) -> None:
    device = ours(MANIFEST, str(built)).volumes[0]
    checks = found(built, [line(text.replace("md127", device))])
    assert checks[identity].status == "fail"
    assert checks[identity].found.startswith(words.replace("md127", device))
    assert checks[identity].remedy.endswith("then `tunetool-health repaired` on the node")
    assert {check.status for check in checks.values() if check.id != identity} == {"pass"}


@pytest.mark.parametrize(
    "text",
    [
        "I/O error, dev nvme0n1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "I/O error, dev nvme44n1, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "I/O error, dev sda, sector 8 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2",
        "nvme nvme0: Removing after probe failure status: -19",
        "pcieport 0000:ff:08.0: AER: device recovery failed",
        "md/raid1:md9: Disk failure on sda1, disabling device.",
        "XFS (dm-4): Corruption detected. Unmount and run xfs_repair",
    ],
)
def test_a_fault_of_another_s_device_is_none_of_ours(built: Path, text: str) -> None:
    assert {check.status for check in found(built, [line(text)]).values()} == {"pass"}


def test_what_heals_warns_and_fails_the_third_time_in_a_day(built: Path) -> None:
    times = [NOW - 3000, NOW - 2000, NOW - 1000]
    for count, status in ((1, "pass"), (2, "pass"), (3, "fail")):
        # A reset prints many lines within a minute: that is once.
        lines = [line(RESET, at + more) for at in times[:count] for more in (0, 1, 30)]
        check = found(built, lines)["kernel.drives"]
        assert check.status == status
        assert check.found.startswith("`LAB1NV4`: its controller did not answer and was reset")
    assert "(3 times within a day)" in check.found
    assert found(built, lines, times[1] + DAY)["kernel.drives"].status == "pass", "a day later"


def test_two_drives_that_heal_twice_each_are_no_failure(built: Path) -> None:
    lines = [line(text, NOW - later) for later in (5000, 3000) for text in (TIMEOUT, TIMEOUT.replace("nvme4", "nvme5"))]
    assert found(built, lines)["kernel.drives"].status == "pass"


def test_errors_that_a_link_corrects_are_counted_alone(built: Path) -> None:
    text = "nvme 0000:05:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)"
    check = found(built, [line(text, NOW - 100 * step) for step in range(9, 0, -1)])["kernel.drives"]
    assert (check.status, check.found) == (
        "pass",
        "`LAB1NV4`: its PCIe link corrected an error (9 times within a day)",
    )


def kmsg(root: Path, *texts: str, first: int = 0) -> None:
    (root / "dev/kmsg").write_text(
        "".join(f"3,{first + number},{10**6 + number},-;{text}\n" for number, text in enumerate(texts))
    )


@pytest.fixture
def asked(built: Path) -> Callable[..., tuple[dict[str, Any], dict[str, Check]]]:
    """One check after another, as a file keeps what lies between them."""
    kept: dict[str, Any] = {}

    def ask(now: float = NOW, manifest: dict[str, Any] = MANIFEST) -> tuple[dict[str, Any], dict[str, Check]]:
        nonlocal kept
        kept, checks, _ = check_log(json.loads(json.dumps(kept)), manifest, now, Log(str(built)))
        return kept, {check.id: check for check in checks}

    return ask


@pytest.fixture
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock by which lines of /dev/kmsg are dated."""
    monkeypatch.setattr("tunetool.node.health.kernel_log.time.time", lambda: NOW)
    monkeypatch.setattr("tunetool.node.health.kernel_log.time.monotonic", lambda: 1000.0)


Asked = Callable[..., tuple[dict[str, Any], dict[str, Check]]]


@pytest.mark.usefixtures("today")
def test_a_fault_counts_for_a_day_and_is_counted_once(built: Path, asked: Asked) -> None:
    kmsg(built, ERROR)
    for later in (0, 900, 80_000):
        kept, checks = asked(NOW + later)
        assert checks["kernel.drives"].status == "fail"
        assert [(each["fault"], each["lines"]) for each in kept["incidents"]] == [("io_error", 1)]
    kept, checks = asked(NOW + DAY + 1)
    assert (checks["kernel.drives"].status, list(kept["incidents"])) == ("pass", [])


@pytest.mark.usefixtures("today")
def test_a_fault_of_before_a_reboot_still_counts(built: Path, asked: Asked) -> None:
    kmsg(built, ERROR)
    asked()
    (built / "proc/sys/kernel/random/boot_id").write_text("c\n")
    kmsg(built, "a new boot")
    kept, checks = asked(NOW + 900)
    assert checks["kernel.drives"].status == "fail"
    assert kept["position"]["boot"] == "c"


@pytest.mark.usefixtures("today")
def test_a_drive_that_was_pulled_is_still_known(built: Path, asked: Asked) -> None:
    asked()
    (built / "sys/block/nvme4n1").unlink()
    kmsg(built, "nvme nvme4: Removing after probe failure status: -19", ERROR)
    _, checks = asked()
    assert checks["kernel.drives"].found.count("`LAB1NV4`") == 2


@pytest.mark.usefixtures("today")
def test_another_drive_under_an_old_name_is_not_ours(built: Path, asked: Asked) -> None:
    asked()
    (built / "sys/block/nvme4n1").unlink()
    kmsg(built, "nvme nvme4: pci function 0000:65:00.0", ERROR)
    assert asked()[1]["kernel.drives"].status == "pass"
    kmsg(built, "", "", RESET.replace("reset controller", "aborting"), ERROR)
    assert asked()[1]["kernel.drives"].status == "pass", "nor by the next check"


@pytest.mark.usefixtures("today")
def test_faults_of_a_drive_that_was_replaced_are_gone(built: Path, asked: Asked) -> None:
    kmsg(built, ERROR, "pcieport 0000:00:08.0: pciehp: Slot(4): Link Down")
    assert asked()[1]["kernel.drives"].status == "fail"
    manifest = json.loads(json.dumps(MANIFEST).replace("LAB1NV4", "NEW"))
    assert asked(manifest=manifest)[1]["kernel.drives"].status == "pass"


@pytest.mark.usefixtures("today")
def test_what_was_before_a_drive_was_built_in_is_none_of_it(built: Path) -> None:
    kmsg(built, ERROR, "pcieport 0000:00:08.0: pciehp: Slot(4): Link Down")
    before = NOW - 1000 + 1
    for at, status in ((before - 60, "fail"), (before + 60, "pass")):
        kept, checks, _ = check_log({}, MANIFEST, NOW, Log(str(built)), built=at)
        assert checks[0].status == status
    # A drive that was known has what it did before the manifest was written for something else.
    kmsg(built, "", "", ERROR)
    assert check_log(kept, MANIFEST, NOW, Log(str(built)), built=NOW)[1][0].status == "fail"


@pytest.mark.usefixtures("today")
def test_what_was_repaired_counts_no_more(built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = Files(tmp_path / "state")
    kmsg(built, ERROR)
    kept, checks, _ = check_log({}, MANIFEST, NOW, Log(str(built)))
    assert checks[0].status == "fail"
    files.kept.parent.mkdir(parents=True)
    files.kept.write_text(json.dumps({"kernel": kept, "written": [[NOW, 16]]}))
    assert say_repaired(files) == 0
    assert "counts no more" in capsys.readouterr().out
    after = json.loads(files.kept.read_text())
    assert after["written"] == [[NOW, 16]]
    kept, checks, _ = check_log(after["kernel"], MANIFEST, NOW + 1, Log(str(built)))
    assert checks[0].status == "pass"
    # Read again from the beginning, as after a deleted journal.
    lines = [line(ERROR, NOW - 1), line(ERROR, NOW + 600)]
    state = kernel_check._restored(repaired({}, NOW))
    (incident,) = advance(state, lines, ours(MANIFEST, str(built)), "b", NOW + 700).incidents
    assert incident.lines == 1


HUNG = ["INFO: task python3:42 blocked for more than 120 seconds.", " xfs_file_fsync+0x199/0x1c0 [xfs]", " </TASK>"]


def test_a_hung_task_is_judged_when_its_stack_is_there(built: Path) -> None:
    here = ours(MANIFEST, str(built))
    assert here.only_xfs
    lines = [line(text, NOW - 5) for text in HUNG]
    state = State()
    for count, incidents in ((1, 0), (2, 0), (3, 1)):
        # What was not judged is read again.
        state = advance(State(), lines[:count], here, "b", NOW)
        assert len(state.incidents) == incidents
    assert state.incidents[0].fault == "hung_task"
    assert len(advance(State(), lines[:2], here, "b", NOW + 120).incidents) == 1, "a stack without an end"
    assert not advance(State(), lines, replace(here, only_xfs=False), "b", NOW).incidents


def test_a_fault_names_the_drive_and_its_volume(tmp_path: Path) -> None:
    manifest = lay_out_drives(tmp_path)
    here = ours(manifest, str(tmp_path))
    assert here.volumes == [f"nvme{number}n1" for number in range(1, 9)]
    lines = [line(text) for text in (ERROR, "XFS (nvme2n1): log I/O error -5")]
    after = advance(State(), lines, here, "b", NOW)
    assert [each.about for each in after.incidents] == ["`LAB1NV4` of volume drive3", "`LAB1NV2` of volume drive1"]
    hung = [line(text, NOW - 5) for text in HUNG]
    (incident,) = advance(State(), hung, here, "b", NOW).incidents
    assert incident.about.startswith("`LAB1NV1` of volume drive0 or `LAB1NV2` of volume drive1 or ")
    named = [hung[0], line(" xfsaild/nvme5n1+0x1/0x2", NOW - 5), *hung[1:]]
    (incident,) = advance(State(), named, here, "b", NOW).incidents
    assert incident.about == "`LAB1NV5` of volume drive4"


def test_an_owner_s_volume_has_the_kernel_s_name(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "sys/dev/block").mkdir(parents=True)
    manifest = {**MANIFEST, "array": None, "filesystem": {**MANIFEST["filesystem"], "mount_point": "/srv"}}
    for source, link, name in (
        ("/dev/mapper/vg-lv", "../../devices/virtual/block/dm-3", "dm-3"),
        ("/dev/sda1", None, "sda1"),
        ("server:/export", None, ""),
    ):
        (tmp_path / "proc/self/mountinfo").write_text(f"25 1 253:3 / /srv rw - xfs {source} rw\n")
        if link:
            (tmp_path / "sys/dev/block/253:3").symlink_to(link)
        assert ours(manifest, str(tmp_path)).volumes == ([name] if name else [])
        (tmp_path / "sys/dev/block/253:3").unlink(missing_ok=True)


def test_a_log_that_cannot_be_read_is_unknown(built: Path) -> None:
    (built / "dev/kmsg").unlink(missing_ok=True)
    _, checks, _ = check_log({}, MANIFEST, NOW, Log(str(built)))
    assert {check.status for check in checks} == {"unknown"}
    assert "kmsg` cannot be read" in checks[0].found


def test_a_log_that_is_not_wanted_is_not_read(built: Path) -> None:
    kmsg(built, ERROR)
    kept, checks, incidents = check_log({"a": 1}, MANIFEST, NOW, Log(str(built)), wanted=False)
    assert (kept, incidents) == ({"a": 1}, [])
    assert {(check.status, check.found) for check in checks} == {("skip", "`node_health_kernel_log` is false")}


@pytest.mark.parametrize(
    "kept", [{"position": 1}, {"position": {}, "boot": "b", "names": {}, "incidents": [{}], "repaired": 0}]
)
def test_a_state_that_somebody_edited_is_none(built: Path, kept: dict[str, Any]) -> None:
    kmsg(built, "well")
    assert {check.status for check in check_log(kept, MANIFEST, NOW, Log(str(built)))[1]} == {"pass"}


@given(st.lists(st.lists(st.integers(0, 200), max_size=4), max_size=12))
def test_every_line_is_counted_once_however_checks_fall(batches: list[list[int]]) -> None:
    """Incidents depend on the lines alone, and not on which check read them."""
    here = kernel_check.Ours({"nvme4n1": "`S`"}, ["S"])
    steps, at = [], NOW
    for batch in batches:
        for gap in batch:
            at += gap
            steps.append(line(ERROR, at))
        steps.append(None)
    state, whole = State(), State()
    batch_lines: list[Line] = []
    for step in steps:
        if step is not None:
            batch_lines.append(step)
            continue
        state = advance(state, batch_lines, here, "b", at)
        batch_lines = []
    whole = advance(whole, [step for step in steps if step is not None], here, "b", at)
    assert state.incidents == whole.incidents
    assert sum(each.lines for each in state.incidents) == sum(step is not None for step in steps)


def test_a_wrong_act_names_repaired() -> None:
    done = subprocess.run([sys.executable, "-m", "tunetool.health"], capture_output=True, text=True, check=False)
    assert "|repaired" in done.stderr
