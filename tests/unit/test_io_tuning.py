"""I/O settings: requested, refused, rendered, set and restored values, other files that override them, and checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from machines import RECORDED, lay_out
from tunetool.node.audit.manifest_checks import run_checks
from tunetool.node.common import manifest as manifests
from tunetool.node.common.commands import Result
from tunetool.node.common.drift import Ledger, settle
from tunetool.node.common.io_settings import ARGUMENTS, DRIVE, MACHINE, ROWS, SETTINGS, Setting, Whole
from tunetool.node.common.refusal import Refusal
from tunetool.node.tuning import apply as tuning_apply
from tunetool.node.tuning.apply import TuningJob, follow_members, fstrim_state
from tunetool.node.tuning.checks import tuning_checks
from tunetool.node.tuning.conflicts import rivals
from tunetool.node.tuning.persistent_files import (
    STATE_PATH,
    SYSCTL_PATH,
    TMPFILES_PATH,
    UDEV_PATH,
    sysctl,
    tmpfiles,
    tuned_profile,
    udev_rules,
)
from tunetool.node.tuning.settings import DRIVE_SETTINGS, FSTRIM, Machine, normal_form

MANIFEST: dict[str, Any] = json.loads((RECORDED / "built-manifest.json").read_text())
SERIALS = [member["serial"] for member in MANIFEST["array"]["members"]]
UUID = MANIFEST["array"]["uuid"]
THP = "sys/kernel/mm/transparent_hugepage/enabled"
ALL = {
    "scheduler": "mq-deadline",
    "nr_requests": "128",
    "nomerges": "2",
    "read_ahead": "4MiB",
    "transparent_hugepages": "madvise",
    "dirty_background": "64MiB",
    "dirty": "25%",
}


def asked(**values: str) -> dict[str, str]:
    return {**dict.fromkeys(ARGUMENTS, ""), **values}


class Node:
    """The recorded node with the files of the settings, and the kernel's behaviour that plain files lack."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ran: list[list[str]] = []
        for number in range(9):
            self.put(f"sys/block/nvme{number}n1/queue/scheduler", "[none] mq-deadline \n")
            self.put(f"sys/block/nvme{number}n1/queue/nr_requests", "1023\n")
            self.put(f"sys/block/nvme{number}n1/queue/nomerges", "0\n")
            self.put(f"sys/block/nvme{number}n1/mq/0/nr_tags", "1023\n")
        self.put("sys/block/md127/queue/read_ahead_kb", "16384\n")
        self.put(THP, "[always] madvise never\n")
        for name, text in (("dirty", "20\n"), ("dirty_background", "10\n")):
            self.put(f"proc/sys/vm/{name}_ratio", text)
            self.put(f"proc/sys/vm/{name}_bytes", "0\n")
        self.put("usr/lib/systemd/system/fstrim.timer", "[Timer]\n")
        self.put("etc/tunetool/node.json", json.dumps(MANIFEST))

    def put(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def get(self, path: str) -> str:
        return (self.root / path.lstrip("/")).read_text().strip()

    def active(self, path: str) -> str:
        return self.get(path).partition("]")[0].lstrip("[")

    def written(self, machine: Machine, setting: str, file: str, value: str) -> None:
        """Write like the kernel: one of a pair of limits becomes 0, and another scheduler has its own nr_requests."""
        path = machine.file(setting, file) or ""
        if setting.startswith("dirty"):
            share = value.endswith("%")
            names = (path.replace("_bytes", "_ratio"), path)
            self.put(names[0] if share else names[1], value.rstrip("%"))
            self.put(names[1] if share else names[0], "0")
            return
        words = [word for word in self.get(path).replace("[", "").replace("]", "").split() if word != value]
        self.put(path, " ".join([f"[{value}]", *words]) if setting in ("scheduler", "transparent_hugepages") else value)
        if setting == "scheduler":
            self.put(path.replace("scheduler", "nr_requests"), "1023" if value == "none" else "256")

    def run(self, argv: list[str], **_: object) -> Result:
        self.ran.append(argv)
        link = self.root / "etc/systemd/system/timers.target.wants/fstrim.timer"
        if argv[:2] == ["systemctl", "enable"]:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to("/usr/lib/systemd/system/fstrim.timer")
        if argv[:2] == ["systemctl", "disable"]:
            link.unlink()
        return Result(0, "", "")

    def job(self, check_mode: bool = False, **values: str) -> tuple[dict[str, Any], Ledger]:
        request = {**asked(**values), "serials": SERIALS, "array_uuid": UUID}
        return settle(lambda ledger: TuningJob(request, ledger, str(self.root)).all(), MANIFEST, check_mode)

    def tree(self) -> dict[str, str]:
        """Every setting and every file under /etc, in plain words."""
        files = {}
        for pattern in ("sys/block/*/queue/*", "sys/kernel/mm/transparent_hugepage/*", "proc/sys/vm/*", "etc/**/*"):
            for path in self.root.glob(pattern):
                if path.is_file() or path.is_symlink():
                    text = path.read_text() if path.is_file() else str(path.readlink())
                    word = text[text.find("[") + 1 : text.find("]")] if "[" in text and "sys/" in str(path) else text
                    files[str(path.relative_to(self.root))] = word.strip()
        return files


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    made = Node(lay_out("built", tmp_path))

    def write(machine: Machine, setting: str, file: str, value: str) -> None:
        made.written(machine, setting, file, value)

    monkeypatch.setattr(Machine, "write", write)
    monkeypatch.setattr(tuning_apply, "run", made.run)
    return made


def test_what_is_asked_for_has_one_form() -> None:
    assert normal_form(asked()) == {}
    assert normal_form(asked(**ALL, fstrim_timer="enabled", cpu_latency_us="10", cpu_governor="performance")) == {
        "scheduler": "mq-deadline",
        "nr_requests": 128,
        "nomerges": 2,
        "read_ahead_bytes": 4 * 2**20,
        "transparent_hugepages": "madvise",
        "cpu_governor": "performance",
        "cpu_latency_us": 10,
        "dirty_background_bytes": 64 * 2**20,
        "dirty_percent": 25,
        "fstrim_timer": "enabled",
    }


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"nr_requests": "3"}, "`io_tuning_nr_requests` is `3`. hint: a whole number from 4"),
        ({"nr_requests": "many"}, "hint: a whole number"),
        ({"nomerges": "3"}, "hint: a whole number from 0 to 2"),
        ({"read_ahead": "4096"}, "`io_tuning_read_ahead`: `4096` is not a size"),
        ({"read_ahead": "5kB"}, "is 5000 bytes. hint: whole pages"),
        ({"scheduler": "none; reboot"}, "hint: one word"),
        ({"dirty": "4096B"}, "the kernel ignores less than two pages"),
        ({"dirty": "0%"}, "hint: a whole number from 1 to 100"),
        ({"dirty": "10%", "dirty_background": "10%"}, "`io_tuning_dirty_background` is not below `io_tuning_dirty`"),
        ({"fstrim_timer": "weekly"}, "hint: `enabled` or `disabled`"),
    ],
)
def test_what_no_machine_could_do_is_refused_by_name(values: dict[str, str], message: str) -> None:
    with pytest.raises(Refusal) as caught:
        normal_form(asked(**values))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"scheduler": "bfq"},
            "scheduler `bfq` is not offered for drive `LAB1NV1`. hint: the kernel offers `none`, `mq-deadline`",
        ),
        (
            {"nr_requests": "1024"},
            "nr_requests 1024 is more than drive `LAB1NV1` takes with scheduler `none`. hint: at most 1023",
        ),
        ({"nr_requests": "2049", "scheduler": "mq-deadline"}, "with scheduler `mq-deadline`. hint: at most 2048"),
        ({"transparent_hugepages": "sometimes"}, "hint: the kernel offers `always`, `madvise`, `never`"),
        (
            {"cpu_governor": "fast"},
            "CPU governor `fast` is not offered. hint: the kernel offers `performance`, `powersave`",
        ),
    ],
)
def test_what_this_machine_cannot_do_names_what_it_can(node: Node, values: dict[str, str], message: str) -> None:
    node.put("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "powersave\n")
    node.put("sys/devices/system/cpu/cpu0/cpufreq/scaling_available_governors", "performance powersave\n")
    before = node.tree()
    with pytest.raises(Refusal) as caught:
        node.job(**values)
    assert message in str(caught.value)
    assert node.tree() == before


def test_a_scheduler_that_is_a_module_may_be_asked_for(node: Node) -> None:
    release = node.get("proc/sys/kernel/osrelease")
    node.put(f"lib/modules/{release}/modules.alias", "alias bfq-iosched bfq\n")
    node.put(f"lib/modules/{release}/modules.dep", "kernel/block/kyber-iosched.ko.xz:\n")
    for scheduler in ("bfq", "kyber"):
        node.job(scheduler=scheduler)
        assert node.active("sys/block/nvme3n1/queue/scheduler") == scheduler


def test_rules_name_drives_by_serial_and_the_array_by_uuid() -> None:
    tuning = normal_form(asked(scheduler="none", nr_requests="512", read_ahead="4MiB"))
    assert udev_rules(tuning, ["S6 A*1"], [UUID]).splitlines()[1:] == [
        'ACTION=="add|change", SUBSYSTEM=="block", ENV{DEVTYPE}=="disk", KERNEL=="nvme*", ATTRS{serial}=="S6 A?1", '
        'ATTR{queue/scheduler}="none", ATTR{queue/nr_requests}="512"',
        f'ACTION=="add|change", SUBSYSTEM=="block", ENV{{DEVTYPE}}=="disk", KERNEL=="md*", ENV{{MD_UUID}}=="{UUID}", '
        'ATTR{queue/read_ahead_kb}="4096"',
    ]
    assert udev_rules(normal_form(asked(dirty="10%")), ["S"], [UUID]) == ""


def test_names_that_moved_to_other_drives_leave_the_rules() -> None:
    tuning = normal_form(asked(scheduler="none", read_ahead="4MiB"))
    assert udev_rules(tuning, ["S1", "S2", "S3"], [UUID]) == udev_rules(tuning, ["S3", "S1", "S2"], [UUID])


def test_a_run_of_this_part_keeps_to_the_manifests_members(node: Node) -> None:
    values = {"scheduler": "none", "read_ahead": "4MiB"}
    node.job(**values)
    before = node.tree()
    request = {**asked(**values), "serials": [], "array_uuid": ""}
    _, ledger = settle(lambda ledger: TuningJob(request, ledger, str(node.root)).all(), MANIFEST, False)
    assert (ledger.diff, node.tree()) == ([], before)


def test_limits_are_written_as_bytes_or_as_a_share_never_both() -> None:
    assert sysctl(normal_form(asked(dirty="4GiB", dirty_background="5%"))).splitlines()[1:] == [
        "vm.dirty_background_ratio = 5",
        "vm.dirty_bytes = 4294967296",
    ]
    assert sysctl({}) == ""


def test_cpus_go_to_tuned_where_it_runs_and_else_to_tmpfiles() -> None:
    tuning = normal_form(asked(cpu_governor="performance", cpu_latency_us="10", transparent_hugepages="never"))
    assert tmpfiles(tuning, tuned=True) == ""
    assert tmpfiles(tuning, tuned=False).splitlines()[1:] == [
        f"w /{THP} - - - - never",
        "w /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor - - - - performance",
        "w /sys/devices/system/cpu/cpu*/power/pm_qos_resume_latency_us - - - - 10",
    ]
    profile = tuned_profile(tuning, "throughput-performance")
    assert "include=throughput-performance\n" in profile
    assert "[cpu]\ngovernor=performance\npm_qos_resume_latency_us=10\n" in profile
    assert "[vm]\ntransparent_hugepages=never\n" in profile
    assert tuned_profile(normal_form(asked(scheduler="none")), "x") == ""


def test_it_sets_everything_once_and_keeps_the_way_back(node: Node) -> None:
    tuning, done = node.job(**ALL)
    assert tuning == normal_form(asked(**ALL))
    assert {difference.name for difference in done.differences} >= {f"io_tuning.{name}" for name in ALL}
    assert all(difference.mended for difference in done.differences)
    for number in range(1, 9):
        values = [node.active(f"sys/block/nvme{number}n1/queue/{name}") for name in DRIVE_SETTINGS]
        assert values == ["mq-deadline", "128", "2"]
    # A drive that is not a member is left alone.
    assert node.get("sys/block/nvme0n1/queue/nr_requests") == "1023"
    assert node.get("sys/block/md127/queue/read_ahead_kb") == "4096"
    assert (node.get("proc/sys/vm/dirty_background_bytes"), node.get("proc/sys/vm/dirty_ratio")) == ("67108864", "25")
    changes = json.loads(node.get(STATE_PATH))["changes"]
    assert changes["scheduler[LAB1NV3]"] == {"before": "none", "set": "mq-deadline"}
    assert changes[f"read_ahead[{UUID}]"] == {"before": "16384", "set": "4096"}
    assert "dirty_ratio" in node.get(SYSCTL_PATH)
    after = node.tree()
    _, again = node.job(**ALL)
    assert (again.diff, again.differences) == ([], [])
    assert node.tree() == after


def test_check_mode_tells_all_and_changes_nothing(node: Node) -> None:
    before = node.tree()
    _, result = node.job(check_mode=True, **ALL, fstrim_timer="enabled")
    assert node.tree() == before
    assert node.ran == []
    text = json.dumps(result.diff)
    for word in ("LAB1NV8 mq-deadline", "LAB1NV8 128", "4096", "vm.dirty_background_bytes", "fstrim", UDEV_PATH):
        assert word in text


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(first=st.sets(st.sampled_from(sorted(ALL))), second=st.sets(st.sampled_from(sorted(ALL))))
def test_given_back_is_as_before_whatever_was_asked_between(node: Node, first: set[str], second: set[str]) -> None:
    before = node.tree()
    for names in (first, second):
        node.job(**{name: ALL[name] for name in names})
    node.job()
    assert node.tree() == before
    assert node.job()[1].diff == []


def test_a_value_that_somebody_else_changed_is_not_given_back(node: Node) -> None:
    node.job(scheduler="mq-deadline", transparent_hugepages="madvise")
    node.put(THP, "always madvise [never]\n")
    node.put("sys/block/nvme3n1/queue/scheduler", "none [bfq] mq-deadline\n")
    node.job()
    assert node.get(THP) == "always madvise [never]"
    assert node.get("sys/block/nvme3n1/queue/scheduler") == "none [bfq] mq-deadline"
    assert node.active("sys/block/nvme4n1/queue/scheduler") == "none"
    for path in (STATE_PATH, UDEV_PATH, TMPFILES_PATH):
        assert not (node.root / path.lstrip("/")).exists()


def test_a_new_wish_keeps_the_oldest_value_as_the_way_back(node: Node) -> None:
    node.job(read_ahead="4MiB")
    node.job(read_ahead="8MiB")
    node.job()
    assert node.get("sys/block/md127/queue/read_ahead_kb") == "16384"


def test_a_run_that_is_cut_leaves_its_way_back(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    before = node.tree()
    whole = Machine.write

    def cut(machine: Machine, setting: str, file: str, value: str) -> None:
        if file == "LAB1NV5":
            raise KeyboardInterrupt
        whole(machine, setting, file, value)

    monkeypatch.setattr(Machine, "write", cut)
    with pytest.raises(KeyboardInterrupt):
        node.job(scheduler="mq-deadline")
    assert node.active("sys/block/nvme1n1/queue/scheduler") == "mq-deadline"
    monkeypatch.setattr(Machine, "write", whole)
    node.job()
    assert node.tree() == before


def test_what_the_kernel_does_not_take_is_named(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "write", lambda *_: None)
    with pytest.raises(
        Refusal, match=r"`/sys/block/md127/queue/read_ahead_kb` was set to `4096` and reads back as `16384`"
    ):
        node.job(read_ahead="4MiB")


def test_files_of_others_and_a_damaged_memory_are_refused(node: Node) -> None:
    node.put(SYSCTL_PATH.lstrip("/"), "vm.dirty_ratio = 5\n")
    with pytest.raises(Refusal, match="is not tunetool's"):
        node.job(dirty="25%")
    (node.root / SYSCTL_PATH.lstrip("/")).unlink()
    node.put(STATE_PATH.lstrip("/"), '{"schema": "tunetool.io-tuning/1", "changes": 3}')
    with pytest.raises(Refusal, match="what was set before is not known"):
        node.job(dirty="25%")


def test_what_is_not_here_is_skipped_and_told(node: Node) -> None:
    tuning, done = node.job(cpu_governor="performance", cpu_latency_us="10", dirty="25%")
    assert tuning == {"dirty_percent": 25}
    assert [word for word in ("cpufreq", "cpuidle") if any(word in line for line in done.warnings)] == [
        "cpufreq",
        "cpuidle",
    ]
    assert not (node.root / TMPFILES_PATH.lstrip("/")).exists()


def test_cpus_are_set_and_given_back(node: Node) -> None:
    for number in range(2):
        base = f"sys/devices/system/cpu/cpu{number}"
        node.put(f"{base}/cpufreq/scaling_governor", "powersave\n")
        node.put(f"{base}/cpufreq/scaling_available_governors", "performance powersave\n")
        node.put(f"{base}/power/pm_qos_resume_latency_us", "0\n")
    node.put("sys/devices/system/cpu/cpuidle/current_driver", "intel_idle\n")
    assert node.job(cpu_governor="performance", cpu_latency_us="10")[0] == {
        "cpu_governor": "performance",
        "cpu_latency_us": 10,
    }
    assert node.get("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor") == "performance"
    assert node.get("sys/devices/system/cpu/cpu1/power/pm_qos_resume_latency_us") == "10"
    node.job()
    assert node.get("sys/devices/system/cpu/cpu1/cpufreq/scaling_governor") == "powersave"
    assert node.get("sys/devices/system/cpu/cpu1/power/pm_qos_resume_latency_us") == "0"


def test_where_tuned_runs_a_profile_lies_on_top_of_the_owners(node: Node) -> None:
    node.put("run/tuned/tuned.pid", "1\n")
    node.put("etc/tuned/active_profile", "throughput-performance\n")
    node.job(transparent_hugepages="never")
    assert node.ran == [["tuned-adm", "profile", "tunetool-io"]]
    assert "include=throughput-performance\n" in node.get("etc/tuned/tunetool-io/tuned.conf")
    assert not (node.root / TMPFILES_PATH.lstrip("/")).exists()
    node.put("etc/tuned/active_profile", "tunetool-io\n")
    assert node.job(transparent_hugepages="never")[1].diff == []
    node.job()
    assert node.ran[1:] == [["tuned-adm", "profile", "throughput-performance"]]
    assert not (node.root / "etc/tuned/tunetool-io").exists()


def test_the_weekly_trim_is_switched_on_and_given_back(node: Node) -> None:
    assert node.job(fstrim_timer="enabled")[0] == {FSTRIM: "enabled"}
    assert fstrim_state(str(node.root)) == "enabled"
    assert node.job(fstrim_timer="enabled")[1].diff == []
    node.job()
    assert fstrim_state(str(node.root)) == "disabled"
    assert [argv[1] for argv in node.ran] == ["enable", "disable"]
    assert not (node.root / STATE_PATH.lstrip("/")).exists()


def test_a_masked_timer_is_its_owners_decision(node: Node) -> None:
    (node.root / "etc/systemd/system").mkdir(parents=True)
    (node.root / "etc/systemd/system/fstrim.timer").symlink_to("/dev/null")
    tuning, done = node.job(fstrim_timer="enabled")
    assert (tuning, done.diff, node.ran) == ({}, [], [])
    assert "masked" in done.warnings[0]
    assert node.job(fstrim_timer="disabled")[1].diff == []


DEVICES = ["nvme1n1", "nvme2n1", "md127"]


@pytest.mark.parametrize(
    ("path", "line", "setting", "wins"),
    [
        ("etc/udev/rules.d/99-site.rules", 'KERNEL=="nvme*", ATTR{queue/scheduler}="kyber"', "scheduler", True),
        ("usr/lib/udev/rules.d/60-io.rules", 'ATTR{queue/scheduler}="kyber"', "scheduler", False),
        ("etc/udev/rules.d/99-site.rules", 'KERNEL=="md*", ATTR{queue/read_ahead_kb}="64"', "read_ahead", True),
        ("etc/sysctl.d/99-site.conf", "vm.dirty_bytes = 1000000", "dirty", True),
        ("usr/lib/sysctl.d/50-site.conf", "-vm/dirty_ratio=40", "dirty", False),
        ("etc/sysctl.conf", "vm.dirty_background_ratio=1", "dirty_background", True),
        ("etc/tmpfiles.d/10-thp.conf", f"w /{THP} - - - - never", "transparent_hugepages", True),
        ("etc/tmpfiles.d/90-thp.conf", f"w /{THP} - - - - never", "transparent_hugepages", False),
        (
            "etc/systemd/system/disable-thp.service",
            f"ExecStart=sh -c 'echo never > /{THP}'",
            "transparent_hugepages",
            True,
        ),
        ("etc/rc.local", "echo 2 > /sys/block/nvme1n1/queue/nomerges", "nomerges", True),
        ("etc/sysfs.d/io.conf", "block/nvme1n1/queue/nr_requests = 64", "nr_requests", True),
    ],
)
def test_others_who_set_the_same_are_found_with_who_wins(
    tmp_path: Path, path: str, line: str, setting: str, wins: bool
) -> None:
    target = tmp_path / path
    target.parent.mkdir(parents=True)
    target.write_text(f"# a word\n{line}\n")
    (rival,) = rivals(normal_form(asked(**ALL)), DEVICES, str(tmp_path))
    assert (rival.setting, rival.location, rival.wins) == (setting, f"`/{path}` line 2", wins)


@pytest.mark.parametrize(
    "line",
    [
        'KERNEL=="sd*|mmcblk*", ATTR{queue/scheduler}="bfq"',
        'KERNEL!="sd*", KERNEL=="dm-*", ATTR{queue/scheduler}="bfq"',
        'ATTR{queue/scheduler}=="bfq", ENV{X}="1"',
        '# ATTR{queue/scheduler}="bfq"',
        'KERNEL=="nvme*", ATTR{queue/wbt_lat_usec}="0"',
    ],
)
def test_a_rule_that_cannot_reach_our_drives_is_none_of_ours(tmp_path: Path, line: str) -> None:
    (tmp_path / "etc/udev/rules.d").mkdir(parents=True)
    (tmp_path / "etc/udev/rules.d/99-site.rules").write_text(line + "\n")
    assert rivals(normal_form(asked(**ALL)), DEVICES, str(tmp_path)) == []


def test_a_file_in_etc_hides_its_namesake_and_ours_is_no_rival(tmp_path: Path) -> None:
    for folder, line in (("usr/lib", 'ATTR{queue/scheduler}="bfq"'), ("etc", "")):
        (tmp_path / folder / "udev/rules.d").mkdir(parents=True)
        (tmp_path / folder / "udev/rules.d/99-site.rules").write_text(line + "\n")
    tuning = normal_form(asked(**ALL))
    (tmp_path / UDEV_PATH.lstrip("/")).write_text(udev_rules(tuning, SERIALS, [UUID]))
    assert rivals(tuning, DEVICES, str(tmp_path)) == []


def test_a_tuned_profile_is_searched_with_what_it_includes(tmp_path: Path) -> None:
    for path, text in (
        ("run/tuned/tuned.pid", "1"),
        ("etc/tuned/active_profile", "site\n"),
        ("etc/tuned/site/tuned.conf", "[main]\ninclude=throughput-performance\n"),
        (
            "usr/lib/tuned/throughput-performance/tuned.conf",
            "[disk]\nreadahead=>4096\n[sysctl]\nvm.dirty_ratio = 40\n[x]\nelevator=bfq\n",
        ),
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    lines = {
        (rival.setting, rival.line, rival.wins) for rival in rivals(normal_form(asked(**ALL)), DEVICES, str(tmp_path))
    }
    assert lines == {("read_ahead", "readahead=>4096", True), ("dirty", "vm.dirty_ratio = 40", False)}


def test_a_rival_that_wins_is_told_when_the_settings_are_made(node: Node) -> None:
    node.put("etc/sysctl.d/99-site.conf", "vm.dirty_ratio = 40\n")
    _, done = node.job(dirty="25%")
    assert done.warnings == [
        "`io_tuning_dirty` will not last: `/etc/sysctl.d/99-site.conf` line 1 has `vm.dirty_ratio = 40`"
    ]


def test_a_manifest_holds_the_settings_or_none(tmp_path: Path) -> None:
    tuned = {**MANIFEST, "tuning": normal_form(asked(**ALL, fstrim_timer="enabled"))}
    assert manifests.validate(MANIFEST) == []
    assert manifests.validate(tuned) == []
    assert manifests.validate({**MANIFEST, "tuning": {"elevator": "none"}}) == ["manifest.tuning.elevator is unknown"]
    assert tuning_checks(MANIFEST, str(tmp_path)) == []


def test_verify_says_which_setting_is_lost_and_to_whom(node: Node) -> None:
    node.job(**ALL, fstrim_timer="enabled")
    manifest = {**MANIFEST, "tuning": normal_form(asked(**ALL, fstrim_timer="enabled"))}
    checks = {check.id: check for check in run_checks(manifest, str(node.root)) if check.id.startswith("io_tuning.")}
    assert set(checks) == {f"io_tuning.{name}" for name in (*ALL, FSTRIM)}
    assert {check.status for check in checks.values()} == {"pass"}
    assert checks["io_tuning.scheduler"].found == "`mq-deadline` on 8 drives"
    node.put("sys/block/nvme3n1/queue/scheduler", "[none] mq-deadline\n")
    node.put("proc/sys/vm/dirty_ratio", "40\n")
    node.put("etc/sysctl.d/99-site.conf", "vm.dirty_ratio = 40\n")
    (node.root / "etc/systemd/system/timers.target.wants/fstrim.timer").unlink()
    failed = {check.id: check for check in tuning_checks(manifest, str(node.root)) if check.status != "pass"}
    assert set(failed) == {"io_tuning.scheduler", "io_tuning.dirty", "io_tuning.fstrim_timer"}
    assert failed["io_tuning.scheduler"].found == "`none` on `LAB1NV3`"
    assert "no known file" in failed["io_tuning.scheduler"].remedy
    assert failed["io_tuning.dirty"].expected == "`25%`"
    assert failed["io_tuning.dirty"].remedy.startswith("`/etc/sysctl.d/99-site.conf` line 1 has `vm.dirty_ratio = 40`")
    assert failed["io_tuning.fstrim_timer"].found == "disabled"


def test_settings_follow_drives_with_other_serials(node: Node) -> None:
    tuning, _ = node.job(**ALL)
    others = [serial.replace("NV", "NW") for serial in SERIALS]
    for serial, other in zip(SERIALS, others, strict=True):
        (path,) = (
            path for path in node.root.glob("sys/block/nvme*/device/serial") if path.read_text().strip() == serial
        )
        path.write_text(other + "\n")
        queue = f"sys/block/{path.parts[-3]}/queue"
        for name, text in (("scheduler", "[none] mq-deadline\n"), ("nr_requests", "1023\n"), ("nomerges", "0\n")):
            node.put(f"{queue}/{name}", text)
    members = [dict(member, serial=other) for member, other in zip(MANIFEST["array"]["members"], others, strict=True)]
    manifest = dict(MANIFEST, tuning=tuning, array=dict(MANIFEST["array"], members=members))
    assert {check.status for check in tuning_checks(manifest, str(node.root))} == {"fail", "pass"}

    follow_members(manifest, str(node.root))
    assert {check.status for check in tuning_checks(manifest, str(node.root))} == {"pass"}
    assert SERIALS[0] not in node.get(UDEV_PATH)
    # The next run of the role has nothing to do, and gives back the values of these drives.
    request = {**asked(**ALL), "serials": others, "array_uuid": UUID}
    _, ledger = settle(lambda ledger: TuningJob(request, ledger, str(node.root)).all(), manifest, False)
    assert ledger.diff == []
    request = {**asked(), "serials": others, "array_uuid": UUID}
    settle(lambda ledger: TuningJob(request, ledger, str(node.root)).all(), manifest, False)
    assert node.active("sys/block/nvme1n1/queue/scheduler") == "none"
    assert node.get("sys/block/nvme1n1/queue/nomerges") == "0"


@pytest.mark.parametrize(
    ("row", "file", "value", "kept"),
    [
        (
            Setting("swappiness", MACHINE, "proc/sys/vm/swappiness", Whole(0, 200)),
            "proc/sys/vm/swappiness",
            "10",
            (SYSCTL_PATH, "vm.swappiness = 10"),
        ),
        (
            Setting("ksm", MACHINE, "sys/kernel/mm/ksm/run", Whole(0, 2)),
            "sys/kernel/mm/ksm/run",
            "1",
            (TMPFILES_PATH, "w /sys/kernel/mm/ksm/run - - - - 1"),
        ),
        (
            Setting("rq_affinity", DRIVE, "sys/block/%s/queue/rq_affinity", Whole(0, 2)),
            "sys/block/nvme3n1/queue/rq_affinity",
            "2",
            (UDEV_PATH, 'ATTR{queue/rq_affinity}="2"'),
        ),
    ],
    ids=lambda value: value.name if isinstance(value, Setting) else "",
)
def test_a_row_is_all_that_a_setting_needs(
    node: Node, monkeypatch: pytest.MonkeyPatch, row: Setting, file: str, value: str, kept: tuple[str, str]
) -> None:
    monkeypatch.setitem(ROWS, row.name, row)  # type: ignore[arg-type]  # the code only reads it
    monkeypatch.setitem(ARGUMENTS, row.name, {"type": "str", "default": ""})
    monkeypatch.setattr(tuning_apply, "SETTINGS", (*SETTINGS, row.name))
    monkeypatch.setattr("tunetool.node.tuning.checks.SETTINGS", (*SETTINGS, row.name))
    for path in node.root.glob("sys/block/*/queue"):
        (path / "rq_affinity").write_text("1\n")
    for path in ("proc/sys/vm/swappiness", "sys/kernel/mm/ksm/run"):
        node.put(path, "0\n")
    before = node.tree()
    with pytest.raises(Refusal, match=f"`io_tuning_{row.name}` is `x`. hint: a whole number from 0 to"):
        node.job(**{row.name: "x"})
    tuning, _ = node.job(**{row.name: value})
    assert tuning == {row.name: int(value)}
    assert node.get(file) == value
    path, line = kept
    assert line in node.get(path)
    manifest = {**MANIFEST, "tuning": tuning}
    assert [(check.id, check.status) for check in tuning_checks(manifest, str(node.root))] == [
        (f"io_tuning.{row.name}", "pass")
    ]
    node.put("etc/rc.local", f"echo 0 > /{file}\n")
    said = [rival.location for rival in rivals(tuning, DEVICES, str(node.root))]
    assert said == ([] if row.target == MACHINE and row.sysctls else ["`/etc/rc.local` line 1"])
    (node.root / "etc/rc.local").unlink()
    node.job()
    assert node.tree() == before


def test_a_value_of_a_setting_that_is_no_longer_known_stays(node: Node) -> None:
    node.put(
        STATE_PATH.lstrip("/"),
        json.dumps({"schema": "tunetool.io-tuning/1", "changes": {"gone[LAB1NV1]": {"before": "1", "set": "2"}}}),
    )
    node.job()
    assert not (node.root / STATE_PATH.lstrip("/")).exists()


def test_without_the_role_nothing_follows(node: Node) -> None:
    before = node.tree()
    follow_members(dict(MANIFEST, tuning={}), str(node.root))
    assert node.tree() == before
