"""Values and directories that no node can be built with: all of them are named before the first write."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.audit.values import LETTERS, SHORT, distance, misspelt, unknown_variables, value_problems

WRONG: list[tuple[str, str, Any, str]] = [
    ("scratch_filesystem", "label", "thirteenchars", "label `thirteenchars` is longer than 12"),
    ("scratch_filesystem", "label", "zwölfzeichen", "label `zwölfzeichen` is longer than 12"),
    ("scratch_filesystem", "mount_point", "/", "mount point `/` is not usable"),
    ("scratch_filesystem", "mount_point", "//usr/", "mount point `//usr/` is not usable"),
    ("scratch_filesystem", "mount_point", "mnt/x", "mount point `mnt/x` is not usable"),
    ("scratch_filesystem", "offload_dir", "/srv/x", "offload directory `/srv/x` is not under `/mnt/nvme_raid0`"),
    ("scratch_filesystem", "offload_dir", "/mnt/nvme_raid0/../x", "is not under"),
    ("scratch_filesystem", "mount_options", ["nobarrier"], "no mount option `nobarrier`"),
    ("scratch_filesystem", "mount_options", ["noatime,ro"], "`noatime,ro` is not one mount option"),
    ("scratch_filesystem", "mount_options", ["logbsize=300k"], "does not mount with a log stripe unit of 262144"),
    ("scratch_filesystem", "device_timeout", "soon", "time-out `soon` is no time span"),
    ("scratch_filesystem", "offload_mode", "rwx", "mode `rwx` is not three or four octal digits"),
    ("scratch_filesystem", "offload_mode", "888", "mode `888` is not three or four octal digits"),
    ("scratch_filesystem", "offload_mode", "0555", "mode `0555` lets no job write there"),
    ("scratch_filesystem", "offload_mode", "622", "mode `622` lets no job write there"),
    ("scratch_filesystem", "services", ["slurmd"], "`slurmd` is not the name of a systemd unit"),
    ("raid_array", "chunk", "banana", "raid_array_chunk: `banana` is not a quantity"),
    ("raid_array", "chunk", "3KiB", "chunk `3KiB` is not a power of two"),
    ("raid_array", "name", "md0", "`md0` cannot name an array"),
    ("raid_array", "name", "a\n", "cannot name an array"),
    ("nvme_drives", "count", 0, "`nvme_drives_count` is 0"),
    ("nvme_drives", "size", "big", "nvme_drives_size: `big` is not a quantity"),
    ("nvme_drives", "serials", ["A", "A"], "`nvme_drives_serials` names 1 of 8 drives"),
    ("host_memory", "shm_size", "900%", "`900%` is not a share of the RAM"),
    ("host_memory", "shm_size", "0%", "`0%` is not a share of the RAM"),
    ("host_memory", "shm_size", "1kB", "`/dev/shm` cannot have 1000 bytes"),
    ("host_memory", "memlock", "lots", "`host_memory_memlock`: `lots` is not a quantity"),
    ("host_memory", "hugepages", [{"size": "2MiB", "count": -5}], "huge pages {size: 2MiB, count: -5}: a count below"),
    ("host_memory", "hugepages", [{"size": "2", "count": 5}], "`2` is not a size"),
    ("host_memory", "hugepages", [{"size": "512B", "count": 5}], "pages of 512 B do not exist"),
    ("host_memory", "hugepages", [{"size": None, "count": 5, "numa_node": -1}], "NUMA node -1 does not exist"),
    ("host_memory", "hugepages_max_share", 101, "`host_memory_hugepages_max_share` is 101"),
    ("io_tuning", "nr_requests", "3", "`io_tuning_nr_requests` is `3`"),
    ("io_tuning", "read_ahead", "5kB", "whole pages of 4 KiB"),
    ("ephemeral", "wait_seconds", -1, "`ephemeral_wait_seconds` is below zero"),
    ("tunetool", "expect_read", "50Gbps", "tunetool_expect_read: `50Gbps` is in bits"),
    ("gpudirect_storage", "repository_url", "https://x", "`gpudirect_storage_repository_url` has no key"),
    ("gpudirect_storage", "cufile", {"max_direct_io_size_kb": 16}, "`max_direct_io_size_kb` is in the wrong place"),
    ("gpudirect_storage", "cufile", {"properties": {"allow_compat_mod": True}}, "did you mean `properties.allow_comp"),
    ("gpudirect_storage", "cufile", {"properties": {"allow_compat_mode": "yes"}}, "write true or false"),
    ("node_health", "period", 59, "`node_health_period` is 59"),
    ("node_health", "measure_every", -1, "`node_health_measure_every` is -1"),
    ("node_health", "socket", "run/x", "`node_health_socket` is `run/x`"),
    ("node_health", "textfile_directory", "metrics", "`node_health_textfile_directory` is `metrics`"),
    (
        "node_health",
        "ignored_checks",
        ["drives.ware"],
        "`drives.ware`, which is no check. hint: did you mean `drives.wear`?",
    ),
    ("node_health", "ignored_checks", ["io_tuning.*", "wear*"], "has `wear*`, which is no check. hint: "),
    ("job_scratch", "directory", "/home/jobs", "`job_scratch_directory` is `/home/jobs`"),
    ("job_scratch", "directory", "/mnt/nvme_raid0/a b", "`job_scratch_directory` is `/mnt/nvme_raid0/a b`"),
    ("job_scratch", "limit", "101%", "`job_scratch_limit`: `101%` is not a quantity"),
    ("job_scratch", "limit", "5", "`job_scratch_limit`: `5` is not a size"),
    ("job_scratch", "limit", "1kB", "`job_scratch_limit`: `1kB` is below 1 MiB"),
    ("job_scratch", "textfile_directory", "x", "`job_scratch_textfile_directory` is `x`"),
    ("node_reboot", "timeout", 0, "`node_reboot_timeout` is 0"),
]
GOOD: dict[str, dict[str, Any]] = {
    "nvme_drives": {"count": 8, "size": "3.84TB", "serials": []},
    "raid_array": {"name": "nvme_raid0", "chunk": "1MiB"},
    "scratch_filesystem": {
        "mount_point": "/mnt/nvme_raid0",
        "mount_options": ["noatime", "logbufs=8", "logbsize=256k"],
        "device_timeout": "1min 30s",
        "label": "nvme_raid0",
        "offload_dir": "/mnt/nvme_raid0/deepspeed_offload",
        "offload_mode": "1777",
        "services": ["slurmd.service"],
    },
    "host_memory": {
        "hugepages": [{"size": "2MiB", "count": 0}, {"size": "1GiB", "count": 16, "numa_node": 0}],
        "hugepages_max_share": 50,
        "shm_size": "50%",
        "memlock": "unlimited",
    },
    "io_tuning": {"fstrim_timer": "enabled"},
    "ephemeral": {"enabled": True, "wait_seconds": 30},
    "tunetool": {"install": True, "expect_read": "50GBps", "volume": ""},
    "node_health": {"enabled": True, "period": 900, "measure_every": 0, "textfile_directory": "", "socket": ""},
    "job_scratch": {
        "enabled": True,
        "limit": "25%",
        "by_request": False,
        "textfile_directory": "",
    },
    "node_reboot": {"timeout": 1800},
}


def changed(*wrong: tuple[str, str, Any]) -> dict[str, dict[str, Any]]:
    roles = {role: dict(values) for role, values in GOOD.items()}
    for role, name, value in wrong:
        roles.setdefault(role, {})[name] = value
    return roles


def test_what_a_node_can_be_built_with_has_no_problem() -> None:
    assert value_problems(GOOD) == []
    assert value_problems({}) == []
    for timeout in ("30s", "infinity", "90", "1h30min", "2 min"):
        assert value_problems(changed(("scratch_filesystem", "device_timeout", timeout))) == [], timeout


@pytest.mark.parametrize(
    ("level", "count", "words"),
    [
        ("10", 7, "`nvme_drives_count` is 7. hint: RAID10 needs an even number"),
        ("raid10", 2, "`nvme_drives_count` is 2. hint: RAID10 needs at least 4"),
        ("1", 1, "`nvme_drives_count` is 1. hint: RAID1 needs at least 2"),
    ],
)
def test_a_level_says_how_many_drives_it_needs(level: str, count: int, words: str) -> None:
    asked = changed(("raid_array", "level", level), ("nvme_drives", "count", count), ("nvme_drives", "serials", []))
    assert value_problems(asked) == [words]
    fits = changed(("raid_array", "level", level), ("nvme_drives", "count", 8), ("nvme_drives", "serials", []))
    assert value_problems(fits) == []


@pytest.mark.parametrize(("role", "name", "value", "words"), WRONG)
def test_each_value_that_no_node_can_have_is_named_with_its_cure(role: str, name: str, value: Any, words: str) -> None:
    (problem,) = value_problems(changed((role, name, value)))
    assert words in problem
    assert ". hint: " in problem
    assert "\n" not in problem.replace("`a\n`", "")


@given(st.sets(st.sampled_from(range(len(WRONG))), min_size=1))
def test_all_of_them_are_named_together(numbers: set[int]) -> None:
    picked = {WRONG[number][:2]: WRONG[number] for number in sorted(numbers)}
    problems = value_problems(changed(*((role, name, value) for role, name, value, _ in picked.values())))
    # Another count or mount point changes what else is wrong, and that is about other values.
    for role, name, _, words in picked.values():
        if (role, name) not in {
            ("scratch_filesystem", "offload_dir"),
            ("nvme_drives", "serials"),
            ("job_scratch", "directory"),
        }:
            assert [words in problem for problem in problems].count(True) == 1, (role, name, problems)


def test_settings_that_only_contradict_each_other_are_named() -> None:
    (problem,) = value_problems({"io_tuning": {"dirty": "1GiB", "dirty_background": "2GiB"}})
    assert problem.startswith("`io_tuning_dirty_background` is not below")
    ephemeral = {"enabled": True, "wait_seconds": 30}
    (problem,) = value_problems({"ephemeral": ephemeral, "tunetool": {"install": False}})
    assert "needs the program" in problem
    (problem,) = value_problems({"ephemeral": ephemeral, "tunetool": {"volume": "/data"}})
    assert "its owner's" in problem
    (problem,) = value_problems({"node_health": {"enabled": True}, "tunetool": {"install": False}})
    assert "`node_health_enabled` needs the program" in problem
    jobs = {"enabled": True, "limit": "", "by_request": True}
    (problem,) = value_problems({"job_scratch": jobs})
    assert "`job_scratch_by_request` needs a limit" in problem
    (problem,) = value_problems({"job_scratch": {"enabled": True}, "tunetool": {"install": False}})
    assert "`job_scratch_enabled` needs the program" in problem
    on_theirs = {"enabled": True, "directory": "/data/jobs"}
    assert value_problems({"job_scratch": on_theirs, "tunetool": {"volume": "/data"}}) == []


def test_a_key_that_is_no_public_key_is_named() -> None:
    wrong = {"repository_url": "https://x", "repository_key": "xsFNBF"}
    (problem,) = value_problems({"gpudirect_storage": wrong})
    assert "is not an ASCII-armoured public key. hint: " in problem
    for key in ("-----BEGIN PGP PUBLIC KEY BLOCK-----\nx", "/etc/key.asc", "~/key.asc", "./key", "https://x/key"):
        assert value_problems({"gpudirect_storage": {**wrong, "repository_key": key}}) == []


def test_an_owner_s_volume_leaves_out_what_no_role_uses_then() -> None:
    roles = changed(("nvme_drives", "count", 0), ("raid_array", "chunk", "banana"), ("ephemeral", "enabled", False))
    roles["tunetool"]["volume"] = "/data"
    assert value_problems(roles) == []
    roles["tunetool"]["volume"] = "data"
    assert "`tunetool_volume` is `data`" in value_problems(roles)[0]


KNOWN = ("apply_plan", "nvme_drives_count", "raid_array_chunk", "raid_array_name", "host_memory_shm_size", "plan_file")
PREFIXES = ("nvme_drives_", "raid_array_", "host_memory_")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("raid_arry_name", "raid_array_name"),
        ("raidarray_name", "raid_array_name"),
        ("hots_memory_shm_size", "host_memory_shm_size"),
        ("nvme_drive_count", "nvme_drives_count"),
        ("nvm_drive_count", "nvme_drives_count"),
        ("nvme_drives_cuont", "nvme_drives_count"),
        ("aply_plan", "apply_plan"),
    ],
)
def test_a_name_that_is_almost_ours_names_the_right_one(name: str, meant: str) -> None:
    assert unknown_variables([*KNOWN, name], KNOWN, PREFIXES) == [
        f"`{name}` is not a variable of this collection; did you mean `{meant}`?"
    ]


@pytest.mark.parametrize(
    "name",
    ["array_name", "drives_count", "shm_size", "ansible_plan_file", "plans_files", "_raid_array_name", "aply_plans"],
)
def test_a_name_of_the_owner_s_stays(name: str) -> None:
    assert unknown_variables([name], KNOWN, PREFIXES) == []


def test_a_name_that_begins_like_a_role_is_refused() -> None:
    assert unknown_variables(["raid_array_zzzzzzzzzzzzz"], KNOWN, PREFIXES) == [
        "`raid_array_zzzzzzzzzzzzz` is not a variable of this collection"
    ]


@given(st.sampled_from([name for name in KNOWN if len(name) >= SHORT + 2]), st.data())
def test_any_one_slip_of_the_fingers_is_noticed(name: str, data: st.DataObject) -> None:
    at = data.draw(st.integers(1, len(name) - 2))
    letter = data.draw(st.sampled_from("abcxyz_"))
    slip = data.draw(st.sampled_from(["added", "lost", "changed", "swapped"]))
    wrong = {
        "added": name[:at] + letter + name[at:],
        "lost": name[:at] + name[at + 1 :],
        "changed": name[:at] + letter + name[at + 1 :],
        "swapped": name[:at] + name[at + 1] + name[at] + name[at + 2 :],
    }[slip]
    assert distance(wrong, name, LETTERS) <= 1
    assert distance(name, wrong, LETTERS) <= 1
    assert misspelt(wrong, [name]) == [name]
