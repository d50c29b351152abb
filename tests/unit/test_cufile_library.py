"""The table of cufile.json's keys against libcufile itself, which reads its settings on a machine without a GPU too.

libcufile refuses a file with a wrong type at a place that it reads, and says nothing about any other place: so a wrong
type at each place of the table tells whether the place is real. NVIDIA's wheel `nvidia-cufile` brings the library.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tunetool.node.gds.cufile_check import ABORTS, IGNORED, REFUSED, TAKEN, check_config, parse_version
from tunetool.node.gds.cufile_keys import BOOL, COUNT, COUNTS, HEX, INTEGER, KEYS, TABLE, TEXT, TEXTS, Key
from waiting import PATIENCE

WRONG: dict[str, Any] = {BOOL: "x", COUNT: "x", INTEGER: "x", TEXT: 5, HEX: 5, TEXTS: "x", COUNTS: "x", TABLE: "x"}
RIGHT: dict[str, Any] = {BOOL: True, COUNT: 8, INTEGER: 8, TEXT: "x", HEX: "0x1f", TEXTS: [], COUNTS: [], TABLE: {}}
# These two open cuFile's compatible mode, which needs CUDA.
OPENS = ("properties.allow_compat_mode", "properties.force_compat_mode")
# Keys for which the library checks neither type nor range.
UNTYPED = ("denylist.fsids", "properties.gpu_bounce_buffer_slab_config.")

# A process for each file, since libcufile reads its settings once; forked, since Python takes longer to start than that.
PROGRAM = """
import ctypes, os, sys
class Error(ctypes.Structure):
    _fields_ = [("status", ctypes.c_int), ("cuda", ctypes.c_int)]
for place in sys.argv[2:]:
    if os.fork() == 0:
        os.chdir(place)
        said = os.open("said", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 1)
        os.dup2(said, 2)
        os.environ["CUFILE_ENV_PATH_JSON"] = os.path.join(place, "cufile.json")
        library = ctypes.CDLL(sys.argv[1])
        library.cuFileDriverOpen.restype = Error
        library.cuFileDriverOpen()
        print("came back", flush=True)
        os._exit(0)
    os.wait()
"""


def installed() -> tuple[str, tuple[int, int]]:
    try:
        files = importlib.metadata.files("nvidia-cufile") or []
        version = parse_version(importlib.metadata.version("nvidia-cufile"))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("nvidia-cufile is not installed: there is no wheel for this machine")
    [library] = [str(each.locate()) for each in files if each.name == "libcufile.so.0"]
    assert version is not None
    return library, version


@pytest.fixture(scope="module")
def library() -> tuple[str, tuple[int, int]]:
    return installed()


def text(*settings: tuple[str, Any]) -> str:
    """A file with compatible mode off: with it on, libcufile looks for CUDA for ever."""
    config: dict[str, Any] = {}
    for path, value in (("properties.allow_compat_mode", False), *settings):
        section = config
        *above, name = path.split(".")
        for part in above:
            section = section.setdefault(part, {})
        section[name] = value
    return json.dumps(config)


def all_effects(library: str, texts: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """The effect of each file on libcufile: taken, refused, or the end of the process."""
    directories = {name: tmp_path / str(number) for number, name in enumerate(texts)}
    for name, directory in directories.items():
        directory.mkdir()
        (directory / "cufile.json").write_text(texts[name])
    subprocess.run(
        [sys.executable, "-c", PROGRAM, library, *map(str, directories.values())], timeout=PATIENCE, check=True
    )
    return {name: _effect((directory / "said").read_text()) for name, directory in directories.items()}


def _effect(said: str) -> str:
    if "came back" not in said:
        return ABORTS
    return REFUSED if "configuration load error" in said else TAKEN


def reads(key: Key, version: tuple[int, int]) -> bool:
    return key.since <= version and (key.until is None or version <= key.until)


def test_every_place_is_read_by_exactly_the_versions_it_names(
    library: tuple[str, tuple[int, int]], tmp_path: Path
) -> None:
    path, version = library
    keys = [key for key in KEYS if not key.path.startswith(UNTYPED)]
    effects = all_effects(path, {key.path: text((key.path, WRONG[key.kind])) for key in keys}, tmp_path)
    assert effects == {key.path: REFUSED if reads(key, version) else TAKEN for key in keys}


def test_the_right_type_is_taken(library: tuple[str, tuple[int, int]], tmp_path: Path) -> None:
    path, _ = library
    sized = {COUNT, INTEGER, COUNTS}
    # The directory must exist; the names of transports are not documented.
    out = (*OPENS, "logging.dir", "properties.rdma_transport_type")
    right = {key.path: (*key.choices, RIGHT[key.kind])[0] for key in KEYS if key.kind not in sized}
    right["properties.rdma_dynamic_routing_order"] = ["P2P"]
    effects = all_effects(path, {name: text((name, right[name])) for name in right if name not in out}, tmp_path)
    assert set(effects.values()) == {TAKEN}


@pytest.mark.parametrize("edge", ["low", "high", "multiple"])
def test_ranges(edge: str, library: tuple[str, tuple[int, int]], tmp_path: Path) -> None:
    path, version = library
    beyond: dict[str, Any] = {}
    for key in KEYS:
        if not reads(key, version) or key.path.startswith(UNTYPED) or key.lenient or key.kind == COUNTS:
            continue
        if edge == "low" and key.low:
            beyond[key.path] = key.low - 1
        elif edge == "high" and key.high is not None and key.high < 2**32 - 1:
            beyond[key.path] = key.high + 1
        elif edge == "multiple" and key.multiple > 1:
            beyond[key.path] = (key.low or 0) + 1
    texts = {name: text((name, value)) for name, value in beyond.items()}
    assert texts
    assert set(all_effects(path, texts, tmp_path).values()) == {REFUSED}
    for name, content in texts.items():
        assert [(each.key, each.effect) for each in check_config(content)] == [(name, REFUSED)]


def test_what_the_checker_says_of_a_file_is_what_libcufile_does(
    library: tuple[str, tuple[int, int]], tmp_path: Path
) -> None:
    path, _ = library
    good = text(("properties.io_batchsize", 64))
    files = {
        good: TAKEN,
        good.replace("{", "{// a comment\n", 1): TAKEN,
        good.replace("{", "{/* a comment */", 1): TAKEN,
        good.replace("{", "{# none\n", 1): REFUSED,
        good.replace("64", "64,"): REFUSED,
        good.replace("64", '"64"'): REFUSED,
        "": REFUSED,
        text(("use_pci_p2pdma", "neither true nor false")): IGNORED,
        text(("fs.block.raid.use_pci_p2pdma", "neither true nor false")): IGNORED,
        text(("properties.max_batch_io_size", "no number")): IGNORED,
        text(("fs.generic", [])): ABORTS,
    }
    effects = all_effects(path, {content: content for content in files}, tmp_path)
    for content, expected in files.items():
        said = {each.effect for each in check_config(content)} or {TAKEN}
        assert said == {expected}, content
        # libcufile ignores keys silently.
        assert effects[content] == (TAKEN if expected == IGNORED else expected), content
