"""Problems of a cufile.json, compared with what libcufile does: each has a name and a remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunetool.node.gds.cufile_check import (
    ABORTS,
    IGNORED,
    REFUSED,
    TAKEN,
    ConfigError,
    check_config,
    flatten,
    read_config,
)
from tunetool.node.gds.cufile_keys import BY_PATH, KEYS, NEWEST, OLDEST, TABLE

LIKE_SHIPPED = """{
    // NOTE : an application can take another file: export CUFILE_ENV_PATH_JSON="/home/x/cufile.json"
    "logging": {
        //"dir": "/home/x",  // commented out
        "level": "ERROR"
    },
    "profile": { "cufile_stats": 0 },
    "properties": {
        /* bounce buffers,
           in two lines */
        "max_direct_io_size_kb" : 16384,
        "max_device_cache_size_kb" : 131072,
        "allow_compat_mode": true,
        "rdma_dev_addr_list": [ ]
    },
    "fs": { "generic": { "posix_unaligned_writes" : false }, "lustre": { "posix_gds_min_kb" : 0 }, "nfs": { } },
    "denylist": { "drivers":  [ ], "mounts": [ "/mnt//a" ] }
}
"""


def nested(path: str, value: Any) -> str:
    for part in reversed(path.split(".")):
        value = {part: value}
    return json.dumps(value)


def test_a_file_like_the_shipped_one_has_no_problem() -> None:
    assert check_config(LIKE_SHIPPED) == []
    values = flatten(read_config(LIKE_SHIPPED))
    assert values["properties.max_device_cache_size_kb"] == 131072
    assert values["denylist.mounts"] == ["/mnt//a"]  # two slashes in a string do not begin a comment
    assert "logging.dir" not in values


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("use_pci_p2pdma", "`properties.use_pci_p2pdma`"),
        ("raid.use_pci_p2pdma", "`block.raid.use_pci_p2pdma`"),
        ("fs.block.raid.use_pci_p2pdma", "`block.raid.use_pci_p2pdma`"),
        ("properties.block.nvme.use_pci_p2pdma", "`block.nvme.use_pci_p2pdma`"),
        ("profile.io_batchsize", "`properties.io_batchsize`"),
        ("execution.max_direct_io_size_kb", "`properties.max_direct_io_size_kb`"),
        ("fs.generic.posix_gds_min_kb", "`fs.lustre.posix_gds_min_kb`"),
    ],
)
def test_a_misplaced_key_is_named_with_its_place(wrong: str, right: str) -> None:
    [problem] = check_config(nested(wrong, True))
    assert problem.key == wrong
    assert f"`{wrong}` is in the wrong place" in problem.message
    assert right in problem.remedy
    assert problem.effect == IGNORED


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("properties.alow_compat_mode", "properties.allow_compat_mode"),
        ("block.nvme.use_p2pdma", "block.nvme.use_pci_p2pdma"),
        ("propertys", "properties"),
        ("properties.use_compat_mode", "properties.allow_compat_mode"),
        ("properties.max_batch_io_size", "properties.io_batchsize"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest(wrong: str, meant: str) -> None:
    [problem] = check_config(nested(wrong, 1))
    assert problem.key == wrong
    assert f"`{meant}`" in problem.remedy


def test_a_key_like_no_other_is_named_with_all_it_holds() -> None:
    [problem] = check_config('{"vendor": {"alpha": 1, "beta": {"gamma": 2}}}')
    assert (problem.key, problem.remedy) == ("vendor", "leave it out")


@pytest.mark.parametrize(
    ("text", "line", "remedy", "effect"),
    [
        ("", 1, "correct line 1", REFUSED),
        ('{\n# no comment\n"logging": {}}', 2, "`#` does not begin a comment", REFUSED),
        ('{"properties": {"io_batchsize": 64,\n}}', 2, "leave out the comma before `}`", REFUSED),
        ('{"properties": {"io_batchsize": NaN}}', 0, "write a number", REFUSED),
        ("[]", 1, "begin it with `{`", ABORTS),
        ('{"logging": {},\n"properties": []}', 2, "write an object", ABORTS),
    ],
)
def test_what_is_no_config(text: str, line: int, remedy: str, effect: str) -> None:
    [problem] = check_config(text)
    assert problem.line == line
    assert remedy in problem.remedy
    assert problem.effect == effect


def test_unreadable_text_cannot_be_read_as_values() -> None:
    with pytest.raises(ConfigError, match="line 1"):
        read_config("{")


@pytest.mark.parametrize(
    ("path", "value", "effect"),
    [
        ("properties.use_pci_p2pdma", "true", REFUSED),
        ("properties.use_pci_p2pdma", 1, REFUSED),
        ("properties.io_batchsize", "64", REFUSED),
        ("properties.io_batchsize", 64.5, TAKEN),
        ("properties.io_batchsize", 257, REFUSED),
        ("properties.max_direct_io_size_kb", 100, REFUSED),
        ("profile.cufile_stats", 9, TAKEN),
        ("logging.level", "LOUD", TAKEN),
        ("denylist.drivers", "nvme", REFUSED),
        ("denylist.drivers", [1], REFUSED),
        ("properties.rdma_access_mask", "31", REFUSED),
    ],
)
def test_wrong_values(path: str, value: Any, effect: str) -> None:
    [problem] = check_config(nested(path, value))
    assert problem.key == path
    assert problem.effect == effect
    assert problem.remedy.startswith("write ")


def test_a_key_newer_than_the_library() -> None:
    text = nested("block.raid.use_pci_p2pdma", True)
    [problem] = check_config(text, "1.15.1.6")
    assert "needs libcufile 1.16" in problem.message
    assert check_config(text, "1.16.0") == check_config(text) == []


def test_a_key_that_newer_libraries_dropped() -> None:
    text = nested("profile.nvtx", False)
    assert check_config(text, "1.15") == []
    [problem] = check_config(text, "1.16")
    assert "no libcufile after 1.15" in problem.message


def test_lines_are_those_of_the_file() -> None:
    text = '{\n// a\n/* b\n c */ "properties": {\n  "io_batchsize": 64,\n  "io_batch": 1\n }\n}'
    assert [(each.line, each.key) for each in check_config(text)] == [(6, "properties.io_batch")]


def test_a_section_given_twice_hides_the_first() -> None:
    text = '{"properties": {"use_pci_p2pdma": true},\n"properties": {"io_batchsize": 64}}'
    [problem] = check_config(text)
    assert (problem.key, problem.line) == ("properties", 2)
    assert "uses only the last" in problem.remedy


def test_a_dotted_name_is_no_section() -> None:
    [problem] = check_config('{"properties.use_pci_p2pdma": true}')
    assert "nest it" in problem.remedy


def test_slabs() -> None:
    slabs = {"slab_size_kb": [1024, 8192], "slab_count": [4]}
    text = json.dumps({"properties": {"gpu_bounce_buffer_slab_config": slabs, "max_direct_io_size_kb": 4096}})
    assert {each.key for each in check_config(text)} == {
        "properties.gpu_bounce_buffer_slab_config.slab_count",
        "properties.max_direct_io_size_kb",
    }


def test_mount_tables_hold_names_of_ones_own() -> None:
    table = {"/mnt/a.b": {"rdma_dev_addr_list": ["10.0.0.1"]}, "/mnt/c": {"rdma_dev_addr_list": []}}
    assert check_config(nested("fs.lustre.mount_table", table)) == []


def test_each_key_has_one_entry_and_a_known_version() -> None:
    assert len(BY_PATH) == len(KEYS)
    assert all(OLDEST <= key.since <= NEWEST and (key.until or NEWEST) >= key.since for key in KEYS)


_VALUES: dict[str, st.SearchStrategy[Any]] = {"true or false": st.booleans(), "an object": st.just({})}


@given(st.data(), st.sets(st.sampled_from(sorted(BY_PATH)), min_size=1, max_size=6))
def test_moving_one_key_away_names_that_key_alone(data: st.DataObject, paths: set[str]) -> None:
    """Whatever else the file has: there is no problem before, and afterwards exactly that of the moved key."""
    chosen = sorted(path for path in paths if BY_PATH[path].kind in _VALUES)
    config: dict[str, Any] = {}
    for path in chosen:
        section = config
        *above, name = path.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[name] = data.draw(_VALUES[BY_PATH[path].kind])
    assert check_config(json.dumps(config, indent=1)) == []
    for path in chosen:
        if BY_PATH[path].kind == TABLE:
            continue
        moved = json.loads(json.dumps(config))
        section = moved
        *above, name = path.split(".")
        for part in above:
            section = section[part]
        moved.setdefault("elsewhere", {})[".".join(above).replace(".", "_")] = {name: section.pop(name)}
        [problem] = check_config(json.dumps(moved, indent=1))
        assert problem.key.startswith("elsewhere.")
        assert problem.effect == IGNORED
        same_name = [key for key in KEYS if key.name == name]
        if len(same_name) == 1:
            assert problem.remedy == f"its place is `{path}`"


@pytest.mark.parametrize(("text", "line"), [("{\n", 2), ('{"a": "\u2028\x85",\n\n x', 3), ('{"a": 1,\n#\v no\n}', 2)])
def test_the_line_of_a_fault_is_counted_as_json_counts(text: str, line: int) -> None:
    (problem,) = check_config(text)
    assert (problem.line, problem.effect) == (line, REFUSED)


@given(st.text(alphabet='{}[]",:#/* \n\r\f\v\u2028a1', max_size=30))
def test_no_text_ends_the_check_of_a_config(text: str) -> None:
    assert isinstance(check_config(text), list)


@pytest.mark.parametrize(
    ("config", "place"),
    [
        ({"fs": {"mounts": [{"mountpoint": "/mnt/nfs", "type": "nfs"}]}}, "`fs.nfs.mount_table`"),
        ({"fs": {"lustre": {"mounts": ["/mnt/lustre"]}}}, "`fs.lustre.mount_table`"),
    ],
)
def test_mounts_are_not_sent_to_the_list_of_what_is_denied(config: dict[str, Any], place: str) -> None:
    (problem,) = check_config(json.dumps(config))
    assert "is not a key" in str(problem)
    assert place in str(problem)
    assert "denylist" not in str(problem)


@pytest.mark.parametrize("path", ["properties.devices", "drivers", "fs.generic.filesystems"])
def test_no_other_key_is_either(path: str) -> None:
    *sections, name = path.split(".")
    config: dict[str, Any] = {name: ["nvme"]}
    for section in reversed(sections):
        config = {section: config}
    assert not any("denylist" in str(problem) for problem in check_config(json.dumps(config)))
